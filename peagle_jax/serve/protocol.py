"""What clients send: OpenAI's requests, with vLLM's additions.

Here a body is checked by itself; ``serving`` checks it against the model. Fields that are known but
not honoured are in ``unserved``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from peagle_jax.serve.structured import ResponseFormat, StructuredOutputs
from peagle_jax.serve.unserved import COMPLETION, refuse_unserved

INT64 = 2**63 - 1
MAX_STOP_STRINGS = 4
MAX_CHOICES = 128
"""Of one prompt: OpenAI's limit."""
MAX_PROMPTS = 2048
MAX_BIAS = 100.0
MAX_DEPTH = 100
"""Of schemas, templates' values and documents: what reads them goes down a call a level."""

Int64 = Annotated[int, Field(ge=-INT64 - 1, le=INT64)]
Count = Annotated[int, Field(ge=0, le=INT64)]
TokenIds = list[int]


def check_text(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no encoder takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "unicode", "expected valid Unicode, found half of a surrogate pair"
        ) from None
    return text


def check_texts(value: Any, depth: int = 0) -> Any:
    """``check_text`` for every string in a JSON value, keys among them, and a bound on how deep it goes."""
    if depth > MAX_DEPTH:
        raise PydanticCustomError(
            "depth", "expected at most {most} levels, one inside the other", {"most": MAX_DEPTH}
        )
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(str(key))
            check_texts(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_texts(item, depth + 1)
    return value


class StreamOptions(BaseModel):
    """``stream_options``. ``include_spec_decode_rounds`` is ours: each chunk tells its round's drafts."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_spec_decode_rounds: bool | None = False


class GenerationRequest(BaseModel):
    """What both endpoints take. None means the served default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Count = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    best_of: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] = {}
    allowed_token_ids: TokenIds | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 = 0
    speculative: bool = True
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,200}$")] | None = None  # it goes into a header
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _absent(cls, data: Any) -> Any:
        """null means the default, as in OpenAI's and vLLM's schemas; for max_tokens it means no limit."""
        if isinstance(data, dict):
            kept = {name for name, field in cls.model_fields.items() if field.is_required()} | {"max_tokens"}
            return {name: value for name, value in data.items() if value is not None or name in kept}
        return data

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, value: Any) -> tuple[str, ...]:
        stop = [value] if isinstance(value, str) else value
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
        return tuple(map(check_text, stop))

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _bias_ids(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) < 20 and str(int(key)) == key):
                raise PydanticCustomError(
                    "bias_key", "expected token ids as keys, found {key}", {"key": ascii(key[:40])}
                )
        return value

    @field_validator("allowed_token_ids", mode="after")
    @classmethod
    def _some_allowed(cls, value: list[int] | None) -> list[int] | None:
        if value == []:
            raise PydanticCustomError("allowed_empty", "at least one token must be allowed")
        return value

    @field_validator("guided_json", "guided_regex", "guided_choice", "guided_grammar", mode="after")
    @classmethod
    def _readable(cls, value: Any) -> Any:
        return check_texts(value)

    @field_validator("response_format", "structured_outputs", mode="before")
    @classmethod
    def _readable_grammars(cls, value: Any) -> Any:
        return check_texts(value)

    @model_validator(mode="after")
    def _fields_together(self) -> GenerationRequest:
        def refuse(name: str, message: str) -> None:
            raise PydanticCustomError("together", message, {"name": name})  # type: ignore[arg-type]

        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "{name} is only allowed with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "{name} cannot be streamed; leave it out or send stream: false")
        if self.best_of is not None and self.best_of != self.n:
            refuse("best_of", "{name} must equal n; choosing among more answers is not supported here")
        if self.wanted_tokens is not None and self.min_tokens > max(self.wanted_tokens, 1):
            refuse("min_tokens", "{name} must not be more than max_tokens")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """How many new tokens the client asked for, at most."""
        return self.max_tokens

    @property
    def top_tokens(self) -> int | None:
        """How many of the best tokens to report beside each, None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def includes(self) -> StreamOptions:
        """What a stream tells beside the text."""
        return self.stream_options or StreamOptions()

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` by token id."""
        return tuple(sorted((int(token), value) for token, value in self.logit_bias.items()))


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions. The prompt is text, token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    # The default of OpenAI and vLLM for this endpoint; a chat answer may fill the context instead.
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _unserved(cls, data: Any) -> Any:
        # False is how some clients say that they want none.
        if isinstance(data, dict) and data.get("logprobs") is False:
            data = data | {"logprobs": None}
        return refuse_unserved(data, COMPLETION)

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        several = isinstance(value, list) and value and isinstance(value[0], str | list)
        prompts = value if several else [value]
        if len(prompts) > MAX_PROMPTS:
            raise PydanticCustomError(
                "prompt_count",
                "expected at most {most} prompts, found {found}",
                {"most": MAX_PROMPTS, "found": len(prompts)},
            )
        kinds = {_prompt_kind(prompt) for prompt in prompts}
        if None in kinds or len(kinds) > 1:
            raise PydanticCustomError(
                "prompt_type", "expected a string, a list of token ids, or a list of one of these"
            )
        for prompt in prompts:
            if isinstance(prompt, str):
                check_text(prompt)
        return value

    @model_validator(mode="after")
    def _completion_fields_together(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                "no_tokens", "{name} must be at least 1, or 0 with echo: true", {"name": "max_tokens"}
            )
        if len(self.prompts) * self.n > MAX_PROMPTS:
            raise PydanticCustomError(
                "choices",
                "{name} times the prompts must be at most {most}",
                {"name": "n", "most": MAX_PROMPTS},
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one; at least one."""
        several = isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], str | list)
        return self.prompt if several else [self.prompt]  # type: ignore[return-value]

    @property
    def top_tokens(self) -> int | None:
        return self.logprobs


def _prompt_kind(prompt: Any) -> type | None:
    if isinstance(prompt, str):
        return str
    return list if isinstance(prompt, list) and all(type(i) is int for i in prompt) else None
