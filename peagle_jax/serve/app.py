"""The HTTP side: OpenAI's endpoints, and those that operators and platforms read, over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import importlib.resources
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import Discriminator, Tag
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from peagle_jax.serve import answers, openapi
from peagle_jax.serve.access import ApiKey
from peagle_jax.serve.body_limit import BodyLimit, body_limit
from peagle_jax.serve.chat_protocol import ChatRequest
from peagle_jax.serve.engine import Engine
from peagle_jax.serve.errors import add_error_handlers
from peagle_jax.serve.generation import Admission, events, kept_alive, run
from peagle_jax.serve.metrics import Metrics, acceptance_warning
from peagle_jax.serve.protocol import CompletionRequest, GenerationRequest
from peagle_jax.serve.serving import ServedModel
from peagle_jax.serve.tokenize_protocol import DetokenizeRequest, TokenizeChat, TokenizeText

LONGEST_ID = 200

_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclasses.dataclass(frozen=True)
class AppOptions:
    """What the flags say of the HTTP side; each field is the flag of the same name."""

    answers: answers.AnswerOptions = answers.AnswerOptions()
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    sse_keep_alive_interval: float = 15.0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    log_stats: bool = True


def version() -> str:
    """The installed version; a checkout that is not installed has none."""
    try:
        return importlib.metadata.version("peagle_jax")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"


def _by_prompt(body: Any) -> str | None:
    """Which of the two kinds of body it is; tags in angle brackets are left out of error paths."""
    if isinstance(body, dict):
        return "<chat>" if "messages" in body else "<text>" if "prompt" in body else None
    return "<chat>" if isinstance(body, ChatRequest) else "<text>"


_EITHER = Discriminator(
    _by_prompt,
    custom_error_type="either",
    custom_error_message="the body must be a JSON object with messages or a prompt",
)
AnyGeneration = Annotated[
    Annotated[ChatRequest, Tag("<chat>")] | Annotated[CompletionRequest, Tag("<text>")], _EITHER
]
AnyTokenize = Annotated[
    Annotated[TokenizeChat, Tag("<chat>")] | Annotated[TokenizeText, Tag("<text>")], _EITHER
]


async def _only_json(http: Request) -> None:
    """What SageMaker's contract asks of /invocations."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"expected Content-Type: application/json, found {kind[:60] or 'none'}")


def create_app(
    engine: Engine, model: ServedModel, options: AppOptions | None = None, metrics: Metrics | None = None
) -> FastAPI:
    """The application. It starts the engine and stops it."""
    options = options or AppOptions()
    metrics = metrics or Metrics(model.names[0], model.max_model_len)
    tokenizing = ThreadPoolExecutor(1, thread_name_prefix="peagle-tokenize")
    admission = Admission(options.max_num_queued_reqs, options.max_num_queued_tokens)
    metrics.attach(engine.snapshot, lambda: admission.rejected)
    created = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        logger = asyncio.create_task(metrics.log_forever()) if options.log_stats else None
        yield
        if logger is not None:
            logger.cancel()
        await asyncio.to_thread(engine.stop)
        tokenizing.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="peagle_jax", version=version(), lifespan=lifespan, redoc_url=None)
    app.add_middleware(BodyLimit, limit=body_limit(model.max_characters))
    if options.api_keys:
        app.add_middleware(ApiKey, keys=options.api_keys)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=["X-Request-Id"],
        )
    add_error_handlers(app)
    openapi.describe_errors(app)

    def health() -> JSONResponse:
        detail = {"status": engine.state}
        if engine.failure:
            detail["detail"] = engine.failure
        elif engine.state == "ready" and (warning := acceptance_warning(engine.snapshot())):
            detail = {"status": "degraded", "detail": warning}  # it answers, and rightly, but slowly
        return JSONResponse(detail, 200 if engine.state == "ready" else 503)

    @app.get("/health", responses={503: {}})
    async def get_health() -> JSONResponse:
        """200 once everything is compiled, 503 before and after."""
        return health()

    @app.get("/ping", responses={503: {}})
    @app.post("/ping", responses={503: {}})
    async def ping() -> JSONResponse:
        """The same for SageMaker."""
        return health()

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": version()}

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Requests that wait or run."""
        return {"server_load": admission.requests}

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def get_metrics() -> Response:
        """Prometheus' text format."""
        return Response(metrics.text(), media_type=metrics.content_type)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def playground() -> HTMLResponse:
        page = importlib.resources.files("peagle_jax.serve").joinpath("playground.html").read_text("utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY})

    def card(name: str) -> dict[str, Any]:
        facts = {"object": "model", "created": created, "owned_by": "peagle_jax", "root": model.names[0]}
        return {"id": name, **facts, "max_model_len": model.max_model_len}

    @app.get("/v1/models", response_model=openapi.ModelList, responses=openapi.errors(401))
    async def models() -> Any:
        return {"object": "list", "data": [card(name) for name in model.names]}

    @app.get("/v1/models/{name:path}", response_model=openapi.ModelCard, responses=openapi.errors(401, 404))
    async def one_model(name: str) -> Any:
        model.check_name(name)
        return card(name)

    @app.post("/v1/chat/completions", responses=openapi.generated(openapi.ChatCompletion))
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        return await respond(body, http)

    @app.post("/v1/completions", responses=openapi.generated(openapi.TextCompletion))
    async def completions(body: CompletionRequest, http: Request) -> Response:
        return await respond(body, http)

    @app.post(
        "/invocations",
        dependencies=[Depends(_only_json)],
        responses=openapi.generated(openapi.ChatCompletion | openapi.TextCompletion) | openapi.errors(415),
    )
    async def invocations(body: AnyGeneration, http: Request) -> Response:
        """Either of the two, by what the body has: SageMaker's one endpoint."""
        return await respond(body, http)

    async def respond(body: GenerationRequest, http: Request) -> Response:
        engine.check()
        prefix = "chatcmpl" if isinstance(body, ChatRequest) else "cmpl"
        given = http.headers.get("x-request-id", "")[:LONGEST_ID] or body.request_id
        request_id = f"{prefix}-{given or uuid.uuid4().hex}"
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(tokenizing, model.prepare, body, request_id)
        response = answers.Response(request_id, body, prepared, model, options.answers)
        deltas = run(engine, prepared.requests, http, admission, metrics.on_delta)
        await anext(deltas)  # refusals come before the status is sent
        headers = {"X-Request-Id": given or request_id}
        if body.stream:
            source = events(deltas, response, request_id, bool(body.includes.include_usage))
            return StreamingResponse(
                kept_alive(source, options.sse_keep_alive_interval),
                media_type="text/event-stream",
                headers=headers | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        async for place, delta in deltas:
            response.chunks(place, delta)
        return JSONResponse(response.whole(), headers=headers)

    @app.post("/tokenize", response_model=openapi.Tokens, responses=openapi.errors(400, 401, 404, 413))
    async def tokenize(body: AnyTokenize) -> Any:
        """The ids of a text or a conversation."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(tokenizing, model.tokenize, body)

    @app.post("/detokenize", response_model=openapi.Detokenized, responses=openapi.errors(400, 401, 404, 413))
    async def detokenize(body: DetokenizeRequest) -> Any:
        """The text of token ids."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(tokenizing, model.detokenize, body)

    return app
