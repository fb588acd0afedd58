"""Errors as clients see them: every one has OpenAI's shape, those of the framework too."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from peagle_jax.serve.engine import EngineStoppedError

RETRY_AFTER = {"Retry-After": "1"}
"""For clients that came at a bad moment: the official ones read it and try again by themselves."""


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
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


INTERNAL = APIError("the server failed on this request; its log says why", status=500, kind="server_error")
_HTTP_MESSAGES = {404: "there is no {method} {path} here", 405: "{path} does not take {method}"}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> APIError:
    """A 400 about one field."""
    return APIError(message, param=param, code=code)


def unavailable(error: EngineStoppedError) -> APIError:
    """The 503 of an engine that takes no more requests."""
    return APIError(
        str(error), status=503, kind="server_error", code="unavailable", headers=dict(RETRY_AFTER)
    )


def as_json(value: Any) -> str:
    """A value as its sender spelled it, more or less."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return ascii(value)


def validation_error(errors: list[Any]) -> APIError:
    """The first of pydantic's findings (of a body), as one line that names the field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        reason, place = first.get("ctx", {}).get("error", "unreadable"), first["loc"][-1]
        reason = reason.removesuffix(" at")
        return APIError(f"the body is not valid JSON: {reason} at character {place}", code="invalid_json")
    path = [str(part)[:60] for part in first["loc"] if part != "body" and not _is_tag(part)]
    context = first.get("ctx") or {}
    if "name" in context:  # a validator of the whole object found the field
        path.append(context["name"])
        message = first["msg"]
    elif first["type"] == "either":
        message = first["msg"]
    elif not path:
        message = "the body must be a JSON object; send it with Content-Type: application/json"
    else:
        message = f"{'.'.join(path)}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        if first["type"] != "missing" and not isinstance(first.get("input"), dict | list):
            message += f", found {as_json(first.get('input'))[:80]}"
    code = "unsupported_parameter" if first["type"] == "unsupported_parameter" else "invalid_value"
    return APIError(" ".join(message.split()), param=".".join(path) or None, code=code)


def _is_tag(part: Any) -> bool:
    """Whether a part of a path names which of several kinds of body it is, and is no field."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


def add_error_handlers(app: FastAPI) -> None:
    """Gives every error of an application OpenAI's shape."""

    def answer(error: APIError, headers: Any = None) -> JSONResponse:
        return JSONResponse(error.body, error.status, headers=headers or error.headers)

    @app.exception_handler(APIError)
    async def _api(_: Request, error: APIError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(EngineStoppedError)
    async def _stopped(_: Request, error: EngineStoppedError) -> JSONResponse:
        return answer(unavailable(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return answer(validation_error(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def _http(http: Request, error: HTTPException) -> JSONResponse:
        template = _HTTP_MESSAGES.get(error.status_code, "{detail}")
        method, path = http.method[:20], http.url.path[:60]
        message = template.format(method=method, path=path, detail=error.detail)
        return answer(APIError(message, status=error.status_code), error.headers)

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, error: Exception) -> JSONResponse:
        return answer(INTERNAL)
