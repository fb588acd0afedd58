"""Clients of /v1/completions that read streams, and the times of what they read."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

PAUSE_AFTER_FAILURE = 0.1
"""Seconds; a server that refuses is not to be flooded."""


class RequestError(RuntimeError):
    """An answer that did not come to its end as promised."""


def http_client(url: str, timeout: float = 600.0) -> httpx.AsyncClient:
    """A client without a limit of its own on connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits)


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events, up to [DONE].

    Raises:
        RequestError: the status is not 200, an object tells an error, or there was no [DONE].
    """
    if response.status_code != 200:
        text = (await response.aread()).decode(errors="replace")
        raise RequestError(f"status {response.status_code}: {text[:200]}")
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestError(f"in the stream: {json.dumps(event['error'])[:200]}")
        yield event
    raise RequestError("the stream ended without [DONE]")


@dataclasses.dataclass(frozen=True)
class Timed:
    """A request in a run: monotonic seconds, and tokens by the answer's own usage.

    ``arrivals`` are those of the chunks with text; a chunk may hold several tokens.
    """

    begun: float
    ended: float
    arrivals: tuple[float, ...] = ()
    tokens: int = 0
    error: str | None = None

    @property
    def time_to_first_token(self) -> float:
        return self.arrivals[0] - self.begun

    @property
    def time_per_token(self) -> float:
        """Mean seconds of a token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.tokens - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def tokens_by(self, moment: float) -> float:
        """Tokens that had come by then, each chunk holding its share of them."""
        return self.tokens * sum(at <= moment for at in self.arrivals) / max(len(self.arrivals), 1)


async def timed_completion(client: httpx.AsyncClient, body: dict[str, Any]) -> Timed:
    """Streams one answer. What goes wrong is told in ``error``; so is an answer shorter than max_tokens."""
    arrivals, tokens, error = [], 0, None
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    begun = time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for event in events(response):
                now = time.monotonic()
                if any(choice["text"] for choice in event["choices"]):
                    arrivals.append(now)
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        if tokens != body["max_tokens"] or not arrivals:
            error = f"{tokens} tokens in {len(arrivals)} chunks; expected {body['max_tokens']} tokens"
    except (httpx.HTTPError, RequestError, ValueError, KeyError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Timed(begun, time.monotonic(), tuple(arrivals), tokens, error)


@dataclasses.dataclass(frozen=True)
class Run:
    """A closed loop's requests, by client, and its beginning."""

    begun: float
    clients: tuple[tuple[Timed, ...], ...]

    @property
    def end(self) -> float:
        """When the first client had no more to do: until then all were at work."""
        return min(requests[-1].ended for requests in self.clients)

    @property
    def requests(self) -> list[Timed]:
        return [request for requests in self.clients for request in requests]


async def closed_loop(
    url: str, bodies: Sequence[dict[str, Any]], concurrency: int, each: int, seconds: float = 0.0
) -> Run:
    """``concurrency`` clients that each send their next request when the last one is answered.

    Client i's j-th request is body (j * concurrency + i), from the first again after the last, so that every
    server gets the same ones. A client ends after ``each`` requests, and not before ``seconds`` have passed.
    """
    begun = time.monotonic()

    async def one(index: int) -> tuple[Timed, ...]:
        done: list[Timed] = []
        while len(done) < each or time.monotonic() - begun < seconds:
            body = bodies[(len(done) * concurrency + index) % len(bodies)]
            done.append(await timed_completion(client, body))
            if done[-1].error is not None:
                await asyncio.sleep(PAUSE_AFTER_FAILURE)
        return tuple(done)

    async with http_client(url) as client:
        return Run(begun, tuple(await asyncio.gather(*(one(i) for i in range(concurrency)))))
