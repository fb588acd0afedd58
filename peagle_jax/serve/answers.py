"""What clients get: the shapes of both endpoints, whole and in chunks.

A choice takes its deltas one by one and gives, for each, what a chunk says of it; a whole answer is the
same chunks put together. So a stream says what the whole answer says.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from peagle_jax.serve.acceptance import Level, RequestAcceptance
from peagle_jax.serve.chat_parser import chat_parser, needs_special_tokens
from peagle_jax.serve.chat_protocol import ChatRequest, NamedChoice
from peagle_jax.serve.detokenize import Delta, Detokenizer
from peagle_jax.serve.logprobs import CompletionLogprobs, chat_logprobs, joined, prompt_logprobs
from peagle_jax.serve.parsing import ChatDelta
from peagle_jax.serve.protocol import CompletionRequest, GenerationRequest
from peagle_jax.serve.serving import Prepared, Prompt, ServedModel


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """What the server's flags add to answers. ``num_spec_tokens`` is K."""

    num_spec_tokens: int = 0
    spec_metrics: Level = "none"
    prompt_tokens_details: bool = False


class Choice:
    """What both endpoints know of one answer while it comes."""

    def __init__(
        self, index: int, body: GenerationRequest, prompt: Prompt, model: ServedModel, num_spec_tokens: int
    ) -> None:
        self.index, self.body, self.prompt, self.model = index, body, prompt, model
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self.cached_tokens = 0
        self.acceptance = RequestAcceptance(num_spec_tokens)
        self.started = False
        self.prompt_logprobs: list[dict[str, Any] | None] | None = None
        self._pieces = Detokenizer(model.tokenizer) if body.includes.include_spec_decode_rounds else None

    reasoning_tokens = 0

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """Takes a delta; returns the choices of the chunks that tell of it, the last with the finish."""
        first, self.started = not self.started, True
        if first:
            self.cached_tokens = delta.cached_tokens
            if self.body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
                self.prompt_logprobs = prompt_logprobs(
                    delta.prompt_logprobs,
                    self.body.prompt_logprobs,
                    self.model.token_text,
                    as_ids=self.body.return_tokens_as_token_ids,
                )
        self.tokens += delta.token_ids
        self.acceptance.add(delta.accepted, delta.drafted)
        self.finish, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self.stop_reason in self.model.eos_token_ids and self.stop_reason not in (
            self.body.stop_token_ids or ()
        ):
            self.stop_reason = None  # an ordinary end is no reason, as in vLLM
        chunks = []
        part = self._part(delta, first)
        if part is not None:
            chunks.append({"index": self.index, **part, "finish_reason": None} | self._traces(delta, first))
        if self.finish is not None:
            end = {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}
            chunks.append({"index": self.index, **self._empty(), **end})
        return chunks

    @property
    def finish_reason(self) -> str | None:
        """As the client is told it."""
        return self.finish

    def whole(self) -> dict[str, Any]:
        """The choice of a whole answer."""
        found = {"index": self.index, **self._whole()}
        found |= {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}
        if self.body.return_token_ids:
            found["token_ids"] = self.tokens
        return found

    def _part(self, delta: Delta, first: bool) -> dict[str, Any] | None:
        """What a chunk says of a delta; None if it says nothing yet."""
        raise NotImplementedError

    def _empty(self) -> dict[str, Any]:
        raise NotImplementedError

    def _whole(self) -> dict[str, Any]:
        raise NotImplementedError

    def _traced(self, delta: Delta) -> bool:
        """Whether a delta is told of although it shows no text."""
        body = self.body
        asked = body.top_tokens is not None or body.return_token_ids or self._pieces is not None
        return bool(asked and delta.token_ids)

    def _traces(self, delta: Delta, first: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.body.return_token_ids:
            found["token_ids"] = list(delta.token_ids)
        if self._pieces is not None:
            texts = [self._pieces.push(token) for token in delta.token_ids]
            ends = (*self.model.eos_token_ids, *(self.body.stop_token_ids or ()))
            if delta.finish_reason == "stop" and delta.token_ids and delta.token_ids[-1] in ends:
                texts[-1] = ""  # a stop token is not shown
            drafts = {"num_draft_tokens": delta.drafted, "num_accepted_draft_tokens": delta.accepted}
            found["spec_decode_round"] = drafts | {"tokens": texts}
        return found


class ChatChoice(Choice):
    """A choice of /v1/chat/completions."""

    def __init__(self, index: int, body: ChatRequest, *rest: Any) -> None:
        super().__init__(index, body, *rest)
        self._chat = body
        tool, reasoning = self.model.tool_parser, self.model.reasoning_parser
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        self._parser = chat_parser(
            tool, reasoning, self.prompt.text, calls=body.choice != "none", tools=tools
        )
        self._counter = ReasoningCounter(self.model, self.prompt.text) if reasoning else None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    @property
    def reasoning_tokens(self) -> int:  # type: ignore[override]
        return self._counter.tokens if self._counter is not None else 0

    @property
    def finish_reason(self) -> str | None:
        called = self._calls and not isinstance(self._chat.choice, NamedChoice)
        return "tool_calls" if called and self.finish == "stop" else self.finish

    @property
    def echoed(self) -> str:
        """With ``echo``, the last message that the answer goes on with."""
        last = self._chat.messages[-1]
        return (last.content or "") if self._chat.echo and last.role == "assistant" else ""

    def _part(self, delta: Delta, first: bool) -> dict[str, Any] | None:
        if self._counter is not None:
            self._counter.add(delta)
        parsed = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            parsed += self._parser.finish()
        said = self._take(parsed)
        logprobs = None
        if self._chat.logprobs:
            as_ids = self.body.return_tokens_as_token_ids
            top = self._chat.top_logprobs
            logprobs = chat_logprobs(delta.logprobs, top, self.model.token_text, as_ids=as_ids)
            self._logprobs += logprobs["content"]
        if not said and not self._traced(delta):
            return None
        return {"delta": said, "logprobs": logprobs}

    def _take(self, parsed: ChatDelta) -> dict[str, Any]:
        """Keeps what was parsed and returns it as a chunk's ``delta``."""
        said: dict[str, Any] = {}
        if parsed.content:
            said["content"] = parsed.content
            self._content.append(parsed.content)
        if parsed.reasoning and self._chat.include_reasoning:
            said["reasoning_content"] = parsed.reasoning
            self._reasoning.append(parsed.reasoning)
        for call in parsed.tool_calls:
            if call.index and not self._chat.parallel_tool_calls:
                continue
            function = {"name": call.name, "arguments": call.arguments}
            found = {"id": call.id, "type": "function", "function": function}
            self._calls.append(found)
            said.setdefault("tool_calls", []).append({"index": call.index, **found})
        return said

    def _empty(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def _whole(self) -> dict[str, Any]:
        content: str | None = self.echoed + "".join(self._content)
        if not content and (self._calls or self._reasoning):
            content = None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = {"content": self._logprobs, "refusal": None} if self._chat.logprobs else None
        return {"message": message, "logprobs": logprobs}


class ReasoningCounter:
    """How many of an answer's tokens are reasoning: those before its first word that is not, if it reasons.

    It walks single tokens, so that rounds of any width count alike.
    """

    def __init__(self, model: ServedModel, prompt: str) -> None:
        keep = needs_special_tokens(model.tool_parser, model.reasoning_parser)
        self._detokenizer = Detokenizer(model.tokenizer, not keep)
        self._parser = chat_parser(model.tool_parser, model.reasoning_parser, prompt, calls=False)
        self._count, self._reasons, self._answers = 0, False, False

    def add(self, delta: Delta) -> None:
        for token in delta.token_ids:
            parsed = ChatDelta() if self._answers else self._parser.feed(self._detokenizer.push(token))
            self._reasons |= bool(parsed.reasoning)
            self._answers |= bool(parsed.content)
            self._count += not self._answers

    @property
    def tokens(self) -> int:
        return self._count if self._reasons else 0


class CompletionChoice(Choice):
    """A choice of /v1/completions."""

    def __init__(self, index: int, body: CompletionRequest, *rest: Any) -> None:
        super().__init__(index, body, *rest)
        self._completion = body
        self._text: list[str] = []
        self._lists: list[dict[str, list[Any]]] = []
        self._logprobs = None
        if body.logprobs is not None:
            as_ids = body.return_tokens_as_token_ids
            self._logprobs = CompletionLogprobs(body.logprobs, self.model.token_text, as_ids=as_ids)

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        if self._completion.max_tokens == 0:  # an echo alone: the engine's one token is not shown
            delta = Delta(
                finish_reason=delta.finish_reason and "length",
                prompt_logprobs=delta.prompt_logprobs,
                cached_tokens=delta.cached_tokens,
            )
        return super().add(delta)

    def _part(self, delta: Delta, first: bool) -> dict[str, Any] | None:
        echo = first and self._completion.echo
        text = self.prompt.text + delta.text if echo else delta.text
        self._text.append(text)
        lists = None
        if self._logprobs is not None:
            parts = []
            if echo:
                parts.append(self._logprobs.part(self.prompt.ids, delta.prompt_logprobs or ()))
            parts.append(self._logprobs.part(delta.token_ids, delta.logprobs))
            lists = joined(parts)
            self._lists.append(lists)
        if not text and not self._traced(delta):
            return None
        return {"text": text, "logprobs": lists}

    def _traces(self, delta: Delta, first: bool) -> dict[str, Any]:
        found = super()._traces(delta, first)
        if first and self.body.return_token_ids:
            found["prompt_token_ids"] = list(self.prompt.ids)
        return found

    def _empty(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _whole(self) -> dict[str, Any]:
        found: dict[str, Any] = {"text": "".join(self._text), "logprobs": None}
        if self._logprobs is not None:
            found["logprobs"] = joined(self._lists)
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = self.prompt_logprobs
        if self.body.return_token_ids:
            found["prompt_token_ids"] = list(self.prompt.ids)
        return found


class Response:
    """All of a request's choices, and what wraps them."""

    def __init__(
        self,
        request_id: str,
        body: GenerationRequest,
        prepared: Prepared,
        model: ServedModel,
        options: AnswerOptions,
    ) -> None:
        self._chat = isinstance(body, ChatRequest)
        kind: Any = ChatChoice if self._chat else CompletionChoice
        prompts = [prompt for prompt in prepared.prompts for _ in range(body.n)]
        self.choices: list[Choice] = [
            kind(i, body, prompt, model, options.num_spec_tokens) for i, prompt in enumerate(prompts)
        ]
        self._body, self._prepared, self._options = body, prepared, options
        self._id, self._created, self._model = request_id, int(time.time()), model.names[0]

    def start(self) -> list[dict[str, Any]]:
        """Chunks before any text: a chat choice begins with its role."""
        if not self._chat:
            return []
        chunks = []
        for choice in self.choices:
            echoed = choice.echoed if isinstance(choice, ChatChoice) else ""
            delta = {"role": "assistant", "content": echoed}
            chunks.append(
                self._chunk({"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None})
            )
        if self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = list(self._prepared.prompts[0].ids)
        return chunks

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The chunks that a delta of one choice makes."""
        made = [self._chunk(choice) for choice in self.choices[index].add(delta)]
        includes = self._body.includes
        if includes.include_usage and includes.continuous_usage_stats:
            for chunk in made:
                chunk["usage"] = self.usage()
        return made

    def last(self) -> dict[str, Any]:
        """The chunk with the usage, after all choices have ended."""
        return self._chunk(None) | {"usage": self.usage()} | self._metrics()

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        kind = "chat.completion" if self._chat else "text_completion"
        found = self._wrap(kind, [choice.whole() for choice in self.choices]) | {"usage": self.usage()}
        if self._chat and self._body.return_token_ids:
            found["prompt_token_ids"] = list(self._prepared.prompts[0].ids)
        if self._chat and self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = self.choices[0].prompt_logprobs
        return found | self._metrics()

    def usage(self) -> dict[str, Any]:
        """Tokens so far: each prompt once, every answer's tokens."""
        prompt = self._prepared.prompt_tokens
        completion = sum(len(choice.tokens) for choice in self.choices)
        found: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if self._options.prompt_tokens_details:
            cached = sum(choice.cached_tokens for choice in self.choices[:: self._body.n])
            found["prompt_tokens_details"] = {"cached_tokens": cached}
        if reasoning := sum(choice.reasoning_tokens for choice in self.choices):
            found["completion_tokens_details"] = {"reasoning_tokens": min(reasoning, completion)}
        return found

    def _metrics(self) -> dict[str, Any]:
        level = self._options.spec_metrics
        if level == "none":
            return {}
        if len(self.choices) > 1:  # one answer's rounds cannot stand for several
            return {"metrics": None}
        return {"metrics": {"speculative_decoding": self.choices[0].acceptance.report(level)}}

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = self._wrap(kind, [] if choice is None else [choice])
        if self._body.includes.include_usage:
            chunk["usage"] = None
        return chunk

    def _wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return head | {"choices": choices}
