"""The HTTP side: OpenAI's endpoints over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from peagle_jax.serve.body_limit import BodyLimit, body_limit
from peagle_jax.serve.detokenize import Delta
from peagle_jax.serve.engine import Engine, EngineRequest, EngineStoppedError
from peagle_jax.serve.protocol import (
    APIError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    validation_error,
)
from peagle_jax.serve.serving import ServedModel

log = logging.getLogger(__name__)


def version() -> str:
    """The installed version; a checkout that is not installed has none."""
    try:
        return importlib.metadata.version("peagle_jax")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"


def create_app(engine: Engine, model: ServedModel) -> FastAPI:
    """The application. It starts the engine and stops it."""
    tokenizing = ThreadPoolExecutor(1, thread_name_prefix="peagle-tokenize")
    created = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)
        tokenizing.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="peagle_jax", version=version(), lifespan=lifespan)
    app.add_middleware(BodyLimit, limit=body_limit(model.max_characters))
    _add_error_handlers(app)

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 once everything is compiled, 503 before and after."""
        detail = {"status": engine.state}
        if engine.failure:
            detail["detail"] = engine.failure
        return JSONResponse(detail, 200 if engine.state == "ready" else 503)

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": version()}

    def card(name: str) -> dict[str, Any]:
        facts = {"object": "model", "created": created, "owned_by": "peagle_jax", "root": model.names[0]}
        return {"id": name, **facts, "max_model_len": model.max_model_len}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in model.names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        model.check_name(name)
        return card(name)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, http: Request) -> Any:
        return await respond(body, http, _ChatShape(model.names[0]))

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Any:
        return await respond(body, http, _CompletionShape(model.names[0]))

    async def respond(body: GenerationRequest, http: Request, shape: _Shape) -> Any:
        engine.check()
        loop = asyncio.get_running_loop()
        request = await loop.run_in_executor(tokenizing, model.prepare, body, shape.id)
        deltas = _deltas(engine, request, http)
        if body.stream:
            events = _events(deltas, shape, len(request.prompt_ids), body.include_usage)
            return StreamingResponse(
                events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        text, count, finish = [], 0, None
        async for delta in deltas:
            text.append(delta.text)
            count += len(delta.token_ids)
            finish = delta.finish_reason
        return JSONResponse(shape.whole("".join(text), finish, _usage(len(request.prompt_ids), count)))

    return app


async def _deltas(engine: Engine, request: EngineRequest, http: Request) -> AsyncIterator[Delta]:
    """A request's deltas. Leaving early, and the client's leaving, cancels it.

    Raises:
        APIError: the engine failed on it or dropped it.
        EngineStoppedError: the engine takes no more.
    """
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Delta] = asyncio.Queue()

    def deliver(delta: Delta) -> None:
        loop.call_soon_threadsafe(inbox.put_nowait, delta)

    ticket = engine.submit(request, deliver)

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        ticket.cancel()

    watcher = asyncio.create_task(watch())
    try:
        while True:
            delta = await inbox.get()
            if delta.finish_reason == "error":
                raise APIError(delta.error or "unknown", status=500, kind="server_error", code="engine_error")
            if delta.finish_reason == "abort":  # the client has left, or the server is told to stop
                raise APIError("the request was aborted", status=503, kind="server_error", code="aborted")
            yield delta
            if delta.finish_reason is not None:
                return
    finally:
        watcher.cancel()
        ticket.cancel()


async def _events(
    deltas: AsyncIterator[Delta], shape: _Shape, prompt_tokens: int, include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events: first chunk, text, finish, usage if asked for, [DONE].

    An error after the first byte cannot change the status any more, so it is an event.
    """
    extra = {"usage": None} if include_usage else {}
    count = 0
    try:
        for chunk in shape.first():
            yield _event(chunk | extra)
        async for delta in deltas:
            count += len(delta.token_ids)
            if delta.text:
                yield _event(shape.chunk(delta.text, None) | extra)
            if delta.finish_reason is not None:
                yield _event(shape.chunk("", delta.finish_reason) | extra)
        if include_usage:
            yield _event(shape.chunk("", None) | {"choices": [], "usage": _usage(prompt_tokens, count)})
    except APIError as error:
        yield _event(error.body)
    except EngineStoppedError as error:
        yield _event(_unavailable(error).body)
    except Exception:
        log.exception("stream %s failed", shape.id)
        yield _event(_INTERNAL.body)
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class _Shape:
    """How an endpoint words its answers."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, model: str) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"created": int(time.time()), "model": model}

    def _wrap(self, kind: str, choice: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, **choice, "logprobs": None, "finish_reason": finish}
        return {"id": self.id, "object": kind, **self._head, "choices": [choice]}

    def first(self) -> list[dict[str, Any]]:
        """Chunks before any text."""
        return []

    def chunk(self, text: str, finish: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, text: str, finish: str | None, usage: dict[str, int]) -> dict[str, Any]:
        raise NotImplementedError


class _ChatShape(_Shape):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self) -> list[dict[str, Any]]:
        return [self._wrap(self.chunk_object, {"delta": {"role": "assistant", "content": ""}}, None)]

    def chunk(self, text: str, finish: str | None) -> dict[str, Any]:
        return self._wrap(self.chunk_object, {"delta": {"content": text} if text else {}}, finish)

    def whole(self, text: str, finish: str | None, usage: dict[str, int]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._wrap(self.object, {"message": message}, finish) | {"usage": usage}


class _CompletionShape(_Shape):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def chunk(self, text: str, finish: str | None) -> dict[str, Any]:
        return self._wrap(self.chunk_object, {"text": text}, finish)

    def whole(self, text: str, finish: str | None, usage: dict[str, int]) -> dict[str, Any]:
        return self._wrap(self.object, {"text": text}, finish) | {"usage": usage}


_INTERNAL = APIError("the server failed on this request; its log says why", status=500, kind="server_error")
_HTTP_MESSAGES = {404: "there is no {method} {path} here", 405: "{path} does not take {method}"}


def _unavailable(error: EngineStoppedError) -> APIError:
    return APIError(str(error), status=503, kind="server_error", code="unavailable")


def _add_error_handlers(app: FastAPI) -> None:
    """Every error has OpenAI's shape, those of the framework too."""

    def answer(error: APIError, headers: Any = None) -> JSONResponse:
        return JSONResponse(error.body, error.status, headers=headers)

    @app.exception_handler(APIError)
    async def _api(_: Request, error: APIError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(EngineStoppedError)
    async def _stopped(_: Request, error: EngineStoppedError) -> JSONResponse:
        return answer(_unavailable(error))

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
        return answer(_INTERNAL)
