"""What clients send to /v1/chat/completions: messages and tools."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from peagle_jax.serve.protocol import GenerationRequest, check_text, check_texts
from peagle_jax.serve.unserved import CHAT, refuse_unserved

# Template variables that are the server's to set.
_OWN_TEMPLATE_NAMES = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "tokenizer_kwargs"),
    )
)

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionCall(BaseModel):
    """A call of an earlier answer; the arguments are a JSON object as text, as the server gave them."""

    model_config = ConfigDict(strict=True)
    name: str
    arguments: str = "{}"

    @field_validator("arguments", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return json.dumps(value) if isinstance(value, dict) else value

    @field_validator("arguments")
    @classmethod
    def _object(cls, value: str) -> str:
        try:
            found = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise PydanticCustomError("arguments", "expected a JSON object as text")
        return value


class ToolCall(BaseModel):
    """``tool_calls`` of an assistant's message."""

    model_config = ConfigDict(strict=True)
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """A chat message. A list of text parts is joined by line ends, as vLLM does."""

    model_config = ConfigDict(strict=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _spellings(cls, data: Any) -> Any:
        data = refuse_unserved(data, {"function_call": (), "audio": ()})
        if isinstance(data, dict):
            if data.get("tool_calls") is None or "tool_calls" not in data:
                data = {key: value for key, value in data.items() if key != "tool_calls"}
            elif data["tool_calls"]:
                data = {"content": None} | data
            if "reasoning" in data:  # vLLM's newer name
                data = {"reasoning_content": data["reasoning"]} | data
        return data

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise PydanticCustomError("no_content", "{name} must be text", {"name": "content"})
        return self

    @field_validator("role", "content", "name", "tool_call_id", "reasoning_content")
    @classmethod
    def _text(cls, value: str | None) -> str | None:
        return value if value is None else check_text(value)

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        for part in value:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind not in ("text", "refusal"):
                found = f"{kind[:60]!a}" if isinstance(kind, str) else type(kind).__name__
                raise PydanticCustomError(
                    "content_part",
                    "content parts of type {kind} are not supported; send text",
                    {"kind": found},
                )
            text = part.get(kind) if isinstance(part, dict) else None
            if not isinstance(text, str):
                raise PydanticCustomError("content_part", 'expected parts like {"type": "text", "text": ...}')
        return "\n".join(part[part.get("type", "text")] for part in value)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: the arguments of calls are objects."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.reasoning_content is not None:
            # gpt-oss's name for it. Its template refuses one beside text and a call, and reads the text then.
            message["thinking"] = "" if self.content and self.tool_calls else self.reasoning_content
        if self.tool_calls:
            calls = []
            for call in self.tool_calls:
                arguments = json.loads(call.function.arguments.strip() or "{}")
                function = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": call.id, "type": call.type, "function": function})
            message["tool_calls"] = calls
        return message


class Function(BaseModel):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    model_config = ConfigDict(strict=True)
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """An entry of ``tools``."""

    model_config = ConfigDict(strict=True)
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    """The function of a ``tool_choice``."""

    name: str


class NamedChoice(BaseModel):
    """``tool_choice`` that names one function."""

    type: Literal["function"] = "function"
    function: FunctionName


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] = 0
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    echo: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _unserved(cls, data: Any) -> Any:
        return refuse_unserved(data, CHAT)

    @field_validator(
        "tools", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort", mode="before"
    )
    @classmethod
    def _readable(cls, value: Any) -> Any:
        return check_texts(value)

    @model_validator(mode="after")
    def _chat_fields_together(self) -> ChatRequest:
        def refuse(name: str, message: str) -> None:
            raise PydanticCustomError("together", message, {"name": name})  # type: ignore[arg-type]

        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "{name} needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            refuse("continue_final_message", "{name} and add_generation_prompt exclude each other")
        names = [tool.function.name for tool in self.tools]
        if self.tool_choice == "required" and not names:
            refuse("tool_choice", "{name} is required, but there are no tools; send some")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.function.name not in names:
            refuse("tool_choice", "{name} names a function that is not among the tools")
        if own := sorted(_OWN_TEMPLATE_NAMES & self.chat_template_kwargs.keys()):
            refuse("chat_template_kwargs", f"{{name}} must not set {own[0]}")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_tokens(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def choice(self) -> Literal["none", "auto", "required"] | NamedChoice:
        """``tool_choice`` with its default resolved."""
        return (self.tool_choice or "auto") if self.tools else "none"
