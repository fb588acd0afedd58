"""What /openapi.json says of answers. The answers themselves are plain dictionaries (``answers``)."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every error."""

    error: ErrorDetail


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CalledFunction(BaseModel):
    name: str
    arguments: str


class CalledTool(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] = []


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatCompletionChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionChoice]
    usage: Usage


class TextCompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextCompletionChoice]
    usage: Usage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint: its errors, all of one shape."""
    return {status: {"model": Error} for status in statuses}


GENERATION_ERRORS = errors(400, 401, 404, 413, 500, 503)


def generated(model: type[BaseModel] | Any) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint that answers at once or in events."""
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"model": model, "content": stream}, **GENERATION_ERRORS}


def describe_errors(app: FastAPI) -> None:
    """Takes the framework's 422 out of the description: bad bodies are 400 here."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
