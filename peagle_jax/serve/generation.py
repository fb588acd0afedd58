"""Running a client's request: its engine requests together, as a whole answer or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request

from peagle_jax.serve.answers import Response
from peagle_jax.serve.detokenize import Delta
from peagle_jax.serve.engine import Engine, EngineRequest, EngineStoppedError
from peagle_jax.serve.errors import INTERNAL, RETRY_AFTER, APIError, unavailable

log = logging.getLogger(__name__)

KEEP_ALIVE = ": keep-alive\n\n"
"""A comment of server-sent events: clients skip it, and proxies see that the connection lives."""


class Admission:
    """How many engine requests there are at once, and the limits on them.

    Args:
        max_requests: waiting or running, None for no limit (vLLM's --max-num-queued-reqs).
        max_tokens: of the prompts that have no answer yet (vLLM's --max-num-queued-tokens).
    """

    def __init__(self, max_requests: int | None = None, max_tokens: int | None = None) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self.requests = self._tokens = 0
        self.rejected = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}

    def enter(self, requests: int, tokens: int) -> None:
        """Counts requests in.

        Raises:
            APIError: (503, with Retry-After) they are too many. One that comes alone may always pass the
                limit on tokens.
        """
        if self._max_requests is not None and self.requests + requests > self._max_requests:
            self._reject("max_num_queued_reqs", f"{self.requests} requests wait or run")
        if self._max_tokens is not None and self._tokens and self._tokens + tokens > self._max_tokens:
            self._reject("max_num_queued_tokens", f"{self._tokens} prompt tokens wait")
        self.requests += requests
        self._tokens += tokens

    def answered(self, tokens: int) -> None:
        """A prompt's answer has begun."""
        self._tokens -= tokens

    def leave(self, requests: int, tokens: int) -> None:
        """Counts requests out; ``tokens`` are those of prompts whose answer never began."""
        self.requests -= requests
        self._tokens -= tokens

    def _reject(self, reason: str, found: str) -> None:
        self.rejected[reason] += 1
        raise APIError(
            f"the server is busy: {found}; try again in a moment",
            status=503,
            kind="server_error",
            code="overloaded",
            headers=dict(RETRY_AFTER),
        )


async def run(
    engine: Engine,
    requests: tuple[EngineRequest, ...],
    http: Request,
    admission: Admission,
    on_delta: Callable[[EngineRequest, Delta], None],
) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of all requests as they come, each with its request's place.

    The first value comes when the engine has taken them all: (-1, an empty delta). Leaving early, and the
    client's leaving, cancels what still runs.

    Raises:
        APIError: too many requests wait, or the engine failed on one or dropped it.
        EngineStoppedError: the engine takes no more.
    """
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
    waiting = {place: len(request.prompt_ids) for place, request in enumerate(requests)}
    engine.check()
    admission.enter(len(requests), sum(waiting.values()))
    tickets = []

    def receiver(place: int) -> Callable[[Delta], None]:
        def deliver(delta: Delta) -> None:
            on_delta(requests[place], delta)
            loop.call_soon_threadsafe(inbox.put_nowait, (place, delta))

        return deliver

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        for ticket in tickets:
            ticket.cancel()

    watcher = asyncio.create_task(watch())
    try:
        tickets += [engine.submit(request, receiver(place)) for place, request in enumerate(requests)]
        yield -1, Delta()
        running = len(requests)
        while running:
            place, delta = await inbox.get()
            if delta.finish_reason == "error":
                raise APIError(delta.error or "unknown", status=500, kind="server_error", code="engine_error")
            if delta.finish_reason == "abort":  # the client has left, or the server is told to stop
                raise APIError("the request was aborted", status=503, kind="server_error", code="aborted")
            admission.answered(waiting.pop(place, 0))
            running -= delta.finish_reason is not None
            yield place, delta
    finally:
        watcher.cancel()
        for ticket in tickets:
            ticket.cancel()
        admission.leave(len(requests), sum(waiting.values()))


async def events(
    deltas: AsyncIterator[tuple[int, Delta]], response: Response, request_id: str, include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events: first chunks, text, finish, usage if asked for, [DONE].

    An error after the first byte cannot change the status any more, so it is an event.
    """
    try:
        for chunk in response.start():
            yield event(chunk)
        async for place, delta in deltas:
            for chunk in response.chunks(place, delta):
                yield event(chunk)
        if include_usage:
            yield event(response.last())
    except APIError as error:
        yield event(error.body)
    except EngineStoppedError as error:
        yield event(unavailable(error).body)
    except Exception:
        log.exception("stream %s failed", request_id)
        yield event(INTERNAL.body)
    yield "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def kept_alive(source: AsyncIterator[str], seconds: float) -> AsyncIterator[str]:
    """The events, with a comment after every ``seconds`` of silence; 0 is for never."""
    if seconds <= 0:
        async for text in source:
            yield text
        return
    coming: asyncio.Task[str] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(source))  # type: ignore[arg-type]
            while not (await asyncio.wait({coming}, timeout=seconds))[0]:
                yield KEEP_ALIVE
            try:
                yield coming.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None and not coming.done():
            coming.cancel()
            await asyncio.wait({coming})
        await source.aclose()  # type: ignore[attr-defined]
