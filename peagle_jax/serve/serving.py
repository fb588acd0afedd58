"""From a client's request to the engine's: the model served, its context, its template, its defaults."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from peagle_jax.config import MAX_STOP_IDS
from peagle_jax.serve.chat_parser import (
    ReasoningParser,
    ToolParser,
    needs_special_tokens,
    reasoning_form,
)
from peagle_jax.serve.chat_protocol import ChatRequest
from peagle_jax.serve.engine import EngineRequest
from peagle_jax.serve.errors import APIError, invalid
from peagle_jax.serve.grammar import GrammarSpec
from peagle_jax.serve.prompt import PromptError, encode, longest_token, render_chat
from peagle_jax.serve.protocol import CompletionRequest, GenerationRequest
from peagle_jax.serve.sampling_defaults import SamplingDefaults
from peagle_jax.serve.structured import grammar_of
from peagle_jax.serve.token_text import TokenText
from peagle_jax.serve.tokenize_protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from peagle_jax.serve.tools import answer_grammar, tool_format
from peagle_jax.speculative.sampling import MAX_LOGPROBS, SamplingParams


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as ids, with the text that an echo shows."""

    ids: tuple[int, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A checked request: for every prompt its ``n`` engine requests, in the order of the choices."""

    prompts: tuple[Prompt, ...]
    requests: tuple[EngineRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many answers it gets."""
        return sum(len(prompt.ids) for prompt in self.prompts)


@dataclasses.dataclass
class ServedModel:
    """What the endpoints serve. ``names[0]`` is the name in answers.

    Args:
        tokenizer: one thread at a time encodes with it, and the engine never uses it.
        tool_parser, reasoning_parser: how the model writes calls and reasoning, if it does.
        check_grammar: raises ValueError, in one line, for a grammar that cannot be compiled.
        chat_template: used instead of the tokenizer's own.
        trust_request_chat_template: whether requests may bring their own; a template is a program.
    """

    names: Sequence[str]
    tokenizer: Any
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults = SamplingDefaults()
    seed: int | None = None
    tool_parser: ToolParser | None = None
    reasoning_parser: ReasoningParser | None = None
    check_grammar: Callable[[GrammarSpec], object] | None = None
    max_logprobs: int = MAX_LOGPROBS
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    trust_request_chat_template: bool = False

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.seed)
        self.max_characters = self.max_model_len * longest_token(self.tokenizer)
        self.token_text = TokenText(self.tokenizer)

    def check_name(self, name: str) -> None:
        """Raises APIError (404) for a model that is not served here."""
        if name not in self.names:
            raise APIError(
                f"the model {name[:60]!a} does not exist; this server has {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def prepare(self, body: GenerationRequest, request_id: str) -> Prepared:
        """Checks a request against the model. Slow for a long prompt: it is tokenised here.

        Raises:
            APIError: another model, a prompt that cannot be read or does not fit, ids that do not exist,
                a grammar that cannot be compiled.
        """
        if body.model is not None:
            self.check_name(body.model)
        self._check_logprobs(body)
        if isinstance(body, ChatRequest):
            prompts, param = [self.chat_prompt(body)], "messages"
            structured = self._chat_grammar(body, prompts[0].text)
            keep_special = needs_special_tokens(self.tool_parser, self.reasoning_parser)
        elif isinstance(body, CompletionRequest):
            structured = self._grammar(*grammar_of(body))
            prompts, param = self._completion_prompts(body), "prompt"
            keep_special = False
        else:
            raise TypeError(f"no endpoint for {type(body).__name__}")
        prompts = [self._truncate(prompt, body) for prompt in prompts]
        for prompt in prompts:
            self._check_length(len(prompt.ids), param)
            self._check_ids(prompt.ids, param)  # the tokenizer's too: it may have been named by itself
        stop_ids = self._stop_ids(body)
        seed = self._seeds.getrandbits(63) if body.seed is None else body.seed
        self._check_allowed(body, stop_ids)
        requests = [
            EngineRequest(
                request_id=request_id if len(prompts) * body.n == 1 else f"{request_id}-{place * body.n + i}",
                prompt_ids=prompt.ids,
                sampling=self._sampling(body, seed + i),
                max_tokens=self._room(len(prompt.ids), body),
                stop_ids=stop_ids,
                stop=body.stop,
                priority=body.priority,
                structured=structured,
                include_stop_str=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens and not keep_special,
                speculative=body.speculative,
            )
            for place, prompt in enumerate(prompts)
            for i in range(body.n)
        ]
        return Prepared(tuple(prompts), tuple(requests))

    def tokenize(self, body: TokenizeText | TokenizeChat) -> dict[str, Any]:
        """vLLM's answer of /tokenize.

        Raises:
            APIError: another model, or a text that cannot be read.
        """
        if body.model is not None:
            self.check_name(body.model)
        if isinstance(body, TokenizeChat):
            ids = list(self.chat_prompt(body).ids)
        else:
            ids = self.encode(body.prompt, "prompt", special=body.add_special_tokens)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [self.token_text.text(i) for i in ids]
        return found

    def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """vLLM's answer of /detokenize.

        Raises:
            APIError: another model, or an id that does not exist.
        """
        if body.model is not None:
            self.check_name(body.model)
        self._check_ids(body.tokens, "tokens")
        return {"prompt": self.decode(body.tokens)}

    def chat_prompt(self, body: ChatRequest) -> Prompt:
        """The conversation in the chat template.

        Raises:
            APIError: there is no template, it refuses the messages, or the request may not bring its own.
        """
        if body.chat_template is not None and not self.trust_request_chat_template:
            raise invalid(
                "chat_template: this server uses its own; leave it out, or start the server with "
                "--trust-request-chat-template",
                "chat_template",
            )
        generate = body.add_generation_prompt
        options: dict[str, Any] = {
            "add_generation_prompt": not body.continue_final_message if generate is None else generate,
            "continue_final_message": body.continue_final_message,
            "chat_template": body.chat_template or self.chat_template,
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools] or None,
            "documents": body.documents,
        }
        if body.reasoning_effort is not None:
            options["reasoning_effort"] = body.reasoning_effort
        extra = self.chat_template_kwargs | body.chat_template_kwargs
        options |= {name: value for name, value in extra.items() if name not in options}
        try:
            text = render_chat(self.tokenizer, [m.for_template() for m in body.messages], **options)
        except PromptError as error:
            raise invalid(
                f"{error}; send other messages, or the text itself to /v1/completions", "messages"
            ) from error
        return Prompt(tuple(self.encode(text, "messages", special=bool(body.add_special_tokens))), text)

    def encode(self, text: str, param: str, *, special: bool) -> list[int]:
        """Token ids of a text that may fit: tokenising one that cannot would hold the next request up.

        Raises:
            APIError: it cannot fit, or the tokenizer refuses it.
        """
        if len(text) > self.max_characters:
            raise APIError(
                f"the prompt has {len(text)} characters; this model's context of {self.max_model_len} tokens "
                f"takes at most {self.max_characters}; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )
        try:
            return encode(self.tokenizer, text, special=special)
        except PromptError as error:
            raise invalid(f"{error}; send another text", param) from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens among them."""
        return self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    def _completion_prompts(self, body: CompletionRequest) -> list[Prompt]:
        special = body.add_special_tokens is not False
        prompts = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                prompts.append(Prompt(tuple(self.encode(prompt, "prompt", special=special)), prompt))
            else:
                self._check_length(len(prompt), "prompt", body)
                self._check_ids(prompt, "prompt")
                prompts.append(Prompt(tuple(prompt), self.decode(prompt) if body.echo else ""))
        return prompts

    def _truncate(self, prompt: Prompt, body: GenerationRequest) -> Prompt:
        """Keeps the last tokens of a prompt (or the first), as many as ``truncate_prompt_tokens`` says."""
        most = body.truncate_prompt_tokens
        if most is None:
            return prompt
        if most == -1:
            most = max(self.max_model_len - (body.wanted_tokens or 1), 0)
        if len(prompt.ids) <= most:
            return prompt
        ids = prompt.ids[:most] if body.truncation_side == "right" else prompt.ids[len(prompt.ids) - most :]
        return Prompt(ids, self.decode(ids))

    def _chat_grammar(self, body: ChatRequest, prompt: str) -> GrammarSpec | None:
        """The grammar of an answer to the rendered prompt: its reasoning, and then what is demanded of it."""
        (spec, param), forced = grammar_of(body), None
        if body.choice != "none":
            if self.tool_parser is None:
                raise invalid(
                    "tools: this model calls none; leave them out, or start the server with "
                    "--tool-call-parser",
                    "tools",
                    "unsupported_parameter",
                )
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
            choice = body.choice if isinstance(body.choice, str) else body.choice.model_dump()
            forced = tool_format(tools, choice, self.tool_parser, body.parallel_tool_calls)
        if forced is not None:
            if spec is not None:
                raise invalid(f"{param} and a required tool call exclude each other", param)
            param = "tools"
        try:
            form = reasoning_form(self.reasoning_parser, prompt)
            return self._grammar(answer_grammar(spec, forced, form), param)
        except ValueError as error:
            raise invalid(f"{param}: {error}", param) from error

    def _grammar(self, spec: GrammarSpec | None, param: str) -> GrammarSpec | None:
        if spec is not None and self.check_grammar is not None:
            try:
                self.check_grammar(spec)
            except ValueError as error:
                raise invalid(f"{param}: {' '.join(str(error).split())[:300]}", param) from error
        return spec

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise invalid(
                f"{param}: token id {str(wrong)[:24]} is not in the vocabulary of {self.vocab_size}", param
            )

    def _check_length(self, prompt: int, param: str, body: GenerationRequest | None = None) -> None:
        limit = self.max_model_len
        if prompt == 0:
            raise invalid("the prompt is empty; send at least one token", param)
        if prompt >= limit and (body is None or body.truncate_prompt_tokens is None):
            raise APIError(
                f"the prompt has {prompt} tokens; this model's context of {limit} leaves room for a prompt "
                f"of at most {limit - 1}; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )

    def _check_logprobs(self, body: GenerationRequest) -> None:
        param = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"
        for name, wanted in ((param, body.top_tokens), ("prompt_logprobs", body.prompt_logprobs)):
            if wanted is not None and wanted > self.max_logprobs:
                raise invalid(f"{name}: expected at most {self.max_logprobs}, found {str(wanted)[:24]}", name)

    def _stop_ids(self, body: GenerationRequest) -> frozenset[int]:
        self._check_ids(body.stop_token_ids or [], "stop_token_ids")
        stop_ids = frozenset((*(() if body.ignore_eos else self.eos_token_ids), *(body.stop_token_ids or ())))
        if len(stop_ids) > MAX_STOP_IDS:
            raise invalid(
                f"stop_token_ids: with the model's own, at most {MAX_STOP_IDS} are possible, "
                f"found {len(stop_ids)}",
                "stop_token_ids",
            )
        return stop_ids

    def _check_allowed(self, body: GenerationRequest, stop_ids: frozenset[int]) -> None:
        if body.min_tokens and body.allowed_token_ids and stop_ids.issuperset(body.allowed_token_ids):
            raise invalid(
                "allowed_token_ids: all of them end the answer, which min_tokens forbids at first; allow "
                "others too",
                "allowed_token_ids",
            )

    def _room(self, prompt: int, body: GenerationRequest) -> int:
        """How many tokens may be generated."""
        limit, wanted = self.max_model_len, body.wanted_tokens
        if wanted is None:
            if body.min_tokens > limit - prompt:
                raise invalid(
                    f"min_tokens: expected at most {limit - prompt}, what the context of {limit} leaves "
                    f"after the prompt, found {body.min_tokens}",
                    "min_tokens",
                )
            return limit - prompt
        if prompt + wanted > limit:
            raise APIError(
                f"the prompt has {prompt} tokens and max_tokens is {str(wanted)[:24]}, more than this "
                f"model's context of {limit}; ask for at most {limit - prompt}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return max(wanted, 1)  # 0 asks for an echo alone; the token that comes is not shown

    def _sampling(self, body: GenerationRequest, seed: int) -> SamplingParams:
        def pick(name: str) -> Any:
            value = getattr(body, name)
            return getattr(self.defaults, name) if value is None else value

        self._check_ids([token for token, _ in body.bias], "logit_bias")
        self._check_ids(body.allowed_token_ids or [], "allowed_token_ids")
        top, prompt_top = body.top_tokens, body.prompt_logprobs
        if prompt_top is None and isinstance(body, CompletionRequest) and body.echo:
            prompt_top = top
        try:
            return SamplingParams(
                temperature=pick("temperature"),
                top_k=pick("top_k"),
                top_p=pick("top_p"),
                min_p=pick("min_p"),
                seed=seed,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                repetition_penalty=pick("repetition_penalty"),
                min_tokens=body.min_tokens,
                logit_bias=body.bias,
                allowed_token_ids=tuple(sorted(set(body.allowed_token_ids)))
                if body.allowed_token_ids
                else None,
                logprobs=top,
                prompt_logprobs=prompt_top,
            )
        except ValueError as error:
            raise invalid(str(error)) from error
