"""What clients send: OpenAI's requests, with vLLM's additions, and the errors that they get.

A field that is known but not served is refused by name unless it has its neutral value, so that
nobody gets an answer that silently ignored what was asked. Fields that nobody knows are ignored, as
vLLM does.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

INT64 = 2**63 - 1
MAX_STOP_STRINGS = 4

# Known fields that are not served yet, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "prompt_logprobs": (),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
_NEUTRAL_CHAT = _NEUTRAL | {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "store": (False,),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
}
_NEUTRAL_COMPLETION = _NEUTRAL | {
    "logprobs": (),  # here 0 asks for the chosen token's
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}


class APIError(Exception):
    """An error that a client sees in OpenAI's shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _equal(value: Any, neutral: Any) -> bool:
    """Equality that keeps booleans and numbers apart (in Python, 0 == False)."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return ascii(value)


def _refuse_unserved(data: Any, neutral: dict[str, tuple[Any, ...]]) -> Any:
    if isinstance(data, dict):
        for name, value in data.items():
            if name not in neutral or value is None or any(_equal(value, n) for n in neutral[name]):
                continue
            allowed = " or ".join(["leave it out", *(f"send {json.dumps(n)}" for n in neutral[name])])
            raise PydanticCustomError(
                "unsupported_parameter",
                "{name} is not supported here; {allowed}",
                {"name": name, "allowed": allowed},
            )
    return data


def _check_text(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no encoder takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "unicode", "expected valid Unicode, found half of a surrogate pair"
        ) from None
    return text


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(strict=True)
    include_usage: bool = False

    @model_validator(mode="before")
    @classmethod
    def _unserved(cls, data: Any) -> Any:
        return _refuse_unserved(data, {"continuous_usage_stats": (False,)})


class GenerationRequest(BaseModel):
    """What both endpoints take. None means the served default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, value: Any) -> tuple[str, ...]:
        stop = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(stop, list) or not all(isinstance(s, str) for s in stop):
            raise PydanticCustomError("stop_type", "expected a string or a list of strings")
        if len(stop) > MAX_STOP_STRINGS:
            raise PydanticCustomError(
                "stop_count",
                "expected at most {most} stop strings, found {found}",
                {"most": MAX_STOP_STRINGS, "found": len(stop)},
            )
        if "" in stop:
            raise PydanticCustomError("stop_empty", "a stop string must not be empty")
        return tuple(map(_check_text, stop))

    @field_validator("ignore_eos", mode="before")
    @classmethod
    def _absent_flag(cls, value: Any) -> Any:
        return False if value is None else value

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "{name} is only allowed with stream: true", {"name": "stream_options"}
            )
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """How many new tokens the client asked for, at most."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class Message(BaseModel):
    """A chat message. A list of text parts is joined by line ends, as vLLM does."""

    model_config = ConfigDict(strict=True)

    role: Annotated[str, Field(min_length=1)]
    content: str

    @model_validator(mode="before")
    @classmethod
    def _unserved(cls, data: Any) -> Any:
        return _refuse_unserved(data, {"tool_calls": ([],), "function_call": (), "audio": ()})

    @field_validator("role", "content")
    @classmethod
    def _text(cls, value: str) -> str:
        return _check_text(value)

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        for part in value:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind != "text":
                found = f"{kind[:60]!a}" if isinstance(kind, str) else type(kind).__name__
                raise PydanticCustomError(
                    "content_part",
                    "content parts of type {kind} are not supported; send text",
                    {"kind": found},
                )
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise PydanticCustomError(
                    "content_part", 'expected parts like {{"type": "text", "text": "..."}}'
                )
        return "\n".join(part["text"] for part in value)


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _unserved(cls, data: Any) -> Any:
        return _refuse_unserved(data, _NEUTRAL_CHAT)

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions. The prompt is text or token ids; one prompt a request."""

    prompt: str | list[int]
    # The default of OpenAI and vLLM for this endpoint; a chat answer may fill the context instead.
    max_tokens: Annotated[int, Field(ge=1)] | None = 16

    @model_validator(mode="before")
    @classmethod
    def _unserved(cls, data: Any) -> Any:
        return _refuse_unserved(data, _NEUTRAL_COMPLETION)

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        prompts = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
        if len(prompts) > 1:
            raise PydanticCustomError(
                "prompt_count",
                "expected one prompt, found {found}; send one request each",
                {"found": len(prompts)},
            )
        prompt = prompts[0]
        is_ids = isinstance(prompt, list) and all(type(i) is int for i in prompt)
        if not isinstance(prompt, str) and not is_ids:
            raise PydanticCustomError(
                "prompt_type", "expected a string, a list of token ids, or a list of one of these"
            )
        return _check_text(prompt) if isinstance(prompt, str) else prompt


def validation_error(errors: list[Any]) -> APIError:
    """The first of pydantic's findings (of a body), as one line that names the field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        reason, place = first.get("ctx", {}).get("error", "unreadable"), first["loc"][-1]
        return APIError(f"the body is not valid JSON: {reason} at character {place}", code="invalid_json")
    path = [str(part) for part in first["loc"] if part != "body"]
    context = first.get("ctx") or {}
    if "name" in context:  # a validator of the whole object found the field
        path.append(context["name"])
        message = first["msg"]
    elif not path:
        message = "the body must be a JSON object; send it with Content-Type: application/json"
    else:
        message = f"{'.'.join(path)}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        if first["type"] != "missing" and not isinstance(first.get("input"), dict | list):
            message += f", found {_as_json(first.get('input'))[:80]}"
    code = "unsupported_parameter" if first["type"] == "unsupported_parameter" else "invalid_value"
    return APIError(message, param=".".join(path) or None, code=code)
