"""From a client's request to the engine's: the model served, its context, its template, its defaults."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from peagle_jax.arguments import CommandError
from peagle_jax.config import MAX_STOP_IDS
from peagle_jax.serve.engine import EngineRequest
from peagle_jax.serve.prompt import PromptError, encode, longest_token, render_chat
from peagle_jax.serve.protocol import (
    APIError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    validation_error,
)
from peagle_jax.speculative.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets that names no value: ``generation_config.json``'s, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def from_generation_config(cls, values: dict[str, Any]) -> SamplingDefaults:
        """Reads the known keys; None means absent.

        Raises:
            CommandError: a value that a request could not have either.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        found = {name: values[name] for name in names if values.get(name) is not None}
        try:
            GenerationRequest.model_validate(found)
            SamplingParams(**found)
        except ValueError as error:
            reason = validation_error(list(error.errors())) if isinstance(error, ValidationError) else error
            raise CommandError(
                f"the model's generation config (generation_config.json, or a GGUF file's general.sampling) "
                f"is wrong: {reason}; correct the value there, or remove it"
            ) from error
        return cls(**found)

    def describe(self) -> str:
        """For the start-up report."""
        return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(self).items())


def unserved_defaults(values: dict[str, Any]) -> list[str]:
    """Settings of a generation config that change the answer and are not applied here yet."""
    neutral = {
        "repetition_penalty": 1,
        "no_repeat_ngram_size": 0,
        "typical_p": 1,
        "encoder_repetition_penalty": 1,
    }
    return [
        f"{name} {ascii(values[name])[:40]}"
        for name, off in neutral.items()
        if values.get(name) not in (None, off)
    ]


@dataclasses.dataclass
class ServedModel:
    """What the endpoints serve. ``names[0]`` is the name in answers.

    ``tokenizer`` is used by one thread at a time, and not by the engine.
    """

    names: Sequence[str]
    tokenizer: Any
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults = SamplingDefaults()
    seed: int | None = None

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.seed)
        self.max_characters = self.max_model_len * longest_token(self.tokenizer)

    def check_name(self, name: str) -> None:
        """Raises APIError (404) for a model that is not served here."""
        if name not in self.names:
            raise APIError(
                f"the model {name[:60]!a} does not exist; this server has {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def prepare(self, body: GenerationRequest, request_id: str) -> EngineRequest:
        """Checks a request against the model. Slow for a long prompt: it is tokenised here.

        Raises:
            APIError: another model, a prompt that cannot be read or does not fit, ids that do not exist.
        """
        if body.model is not None:
            self.check_name(body.model)
        if isinstance(body, ChatRequest):
            prompt, param = self._chat_prompt(body), "messages"
        elif isinstance(body, CompletionRequest):
            prompt, param = self._completion_prompt(body), "prompt"
        else:
            raise TypeError(f"no endpoint for {type(body).__name__}")
        self._check_length(len(prompt), param)
        self._check_ids(prompt, param)  # those of the tokenizer too: it may have been named by itself
        max_tokens = self._room(len(prompt), body.wanted_tokens)
        self._check_ids(body.stop_token_ids or [], "stop_token_ids")
        stop_ids = frozenset((*(() if body.ignore_eos else self.eos_token_ids), *(body.stop_token_ids or ())))
        if len(stop_ids) > MAX_STOP_IDS:
            raise APIError(
                f"stop_token_ids: with the model's own, at most {MAX_STOP_IDS} are possible, "
                f"found {len(stop_ids)}",
                param="stop_token_ids",
                code="invalid_value",
            )
        return EngineRequest(
            request_id=request_id,
            prompt_ids=tuple(prompt),
            sampling=self._sampling(body),
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            stop=body.stop,
        )

    def _chat_prompt(self, body: ChatRequest) -> list[int]:
        try:
            text = render_chat(self.tokenizer, [message.model_dump() for message in body.messages])
        except PromptError as error:
            raise APIError(
                f"{error}; send other messages, or the text itself to /v1/completions",
                param="messages",
                code="invalid_value",
            ) from error
        return self._encode(text, "messages", special=False)

    def _completion_prompt(self, body: CompletionRequest) -> list[int]:
        if isinstance(body.prompt, str):
            return self._encode(body.prompt, "prompt", special=True)
        return body.prompt

    def _encode(self, text: str, param: str, *, special: bool) -> list[int]:
        """Token ids of a text that may fit: tokenising one that cannot would hold the next request up."""
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
            raise APIError(f"{error}; send another text", param=param, code="invalid_value") from error

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise APIError(
                f"{param}: token id {str(wrong)[:24]} is not in the vocabulary of {self.vocab_size}",
                param=param,
                code="invalid_value",
            )

    def _check_length(self, prompt: int, param: str) -> None:
        limit = self.max_model_len
        if prompt == 0:
            raise APIError("the prompt is empty; send at least one token", param=param, code="invalid_value")
        if prompt >= limit:
            raise APIError(
                f"the prompt has {prompt} tokens; this model's context of {limit} leaves room for a prompt "
                f"of at most {limit - 1}; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )

    def _room(self, prompt: int, wanted: int | None) -> int:
        """How many tokens may be generated."""
        limit = self.max_model_len
        if wanted is None:
            return limit - prompt
        if prompt + wanted > limit:
            raise APIError(
                f"the prompt has {prompt} tokens and max_tokens is {str(wanted)[:24]}, more than this "
                f"model's context of {limit}; ask for at most {limit - prompt}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return wanted

    def _sampling(self, body: GenerationRequest) -> SamplingParams:
        def pick(name: str) -> Any:
            value = getattr(body, name)
            return getattr(self.defaults, name) if value is None else value

        try:
            return SamplingParams(
                temperature=pick("temperature"),
                top_k=pick("top_k"),
                top_p=pick("top_p"),
                min_p=pick("min_p"),
                seed=self._seeds.getrandbits(63) if body.seed is None else body.seed,
            )
        except ValueError as error:
            raise APIError(str(error), code="invalid_value") from error
