"""Clients of an OpenAI endpoint that read streams, and the times of what they read."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import httpx

PAUSE_AFTER_FAILURE = 0.1
"""Seconds; a server that refuses is not to be flooded."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class RequestError(RuntimeError):
    """An answer that did not come to its end as promised."""


def headers() -> dict[str, str]:
    """The key of ``OPENAI_API_KEY``, for endpoints that want one."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def http_client(url: str, timeout: float = 600.0) -> httpx.AsyncClient:
    """A client without a limit of its own on connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, headers=headers())


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
    prompt_tokens: int = 0
    text: str = ""

    @property
    def time_to_first_token(self) -> float:
        return self.arrivals[0] - self.begun

    @property
    def time_per_token(self) -> float:
        """Mean seconds of a token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.tokens - 1, 1)

    @property
    def latency(self) -> float:
        """Seconds from the request to the last text."""
        return self.arrivals[-1] - self.begun

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def tokens_by(self, moment: float) -> float:
        """Tokens that had come by then, each chunk holding its share of them."""
        return self.tokens * sum(at <= moment for at in self.arrivals) / max(len(self.arrivals), 1)


@dataclasses.dataclass(frozen=True)
class Talk:
    """A conversation with an endpoint: the first request's body, and what the user says after each answer."""

    path: str
    body: Mapping[str, Any]
    later: tuple[str, ...] = ()


def _text(choice: Mapping[str, Any]) -> str:
    """A chunk's text, in either endpoint's form."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


async def timed_request(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Timed:
    """Streams one answer. What goes wrong is told in ``error``; so is an answer shorter than max_tokens where
    ``ignore_eos`` asks for all of them."""
    arrivals, pieces, usage, error = [], [], {}, None
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    begun = time.monotonic()
    try:
        async with client.stream("POST", path, json=body) as response:
            async for event in events(response):
                now = time.monotonic()
                if text := "".join(map(_text, event.get("choices", ()))):
                    arrivals.append(now)
                    pieces.append(text)
                usage = event.get("usage") or usage
        tokens = usage.get("completion_tokens", 0)
        if not arrivals or not tokens or (body.get("ignore_eos") and tokens != body["max_tokens"]):
            error = f"{tokens} tokens in {len(arrivals)} chunks; expected {body['max_tokens']} tokens"
    except (httpx.HTTPError, RequestError, ValueError, LookupError, TypeError, AttributeError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    counts = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
    return Timed(begun, time.monotonic(), tuple(arrivals), counts[0], error, counts[1], "".join(pieces))


async def converse(client: httpx.AsyncClient, talk: Talk) -> list[Timed]:
    """All turns of a conversation, with the model's own answers between them; it ends at a failure."""
    found = [await timed_request(client, talk.path, talk.body)]
    messages = list(talk.body.get("messages", ()))
    for turn in talk.later:
        if found[-1].error is not None:
            break
        messages += [{"role": "assistant", "content": found[-1].text}, {"role": "user", "content": turn}]
        found.append(await timed_request(client, talk.path, {**talk.body, "messages": messages}))
    return found


@dataclasses.dataclass(frozen=True)
class Run:
    """Requests by client, and their beginning. In a closed loop clients are at work all the time."""

    begun: float
    clients: tuple[tuple[Timed, ...], ...]
    closed: bool = True

    @property
    def end(self) -> float:
        """When the first client of a closed loop had no more to do: until then all were at work. Of an open
        one, when all was answered."""
        return (min if self.closed else max)(requests[-1].ended for requests in self.clients)

    @property
    def ended(self) -> float:
        """When all was answered."""
        return max(request.ended for request in self.requests)

    @property
    def requests(self) -> list[Timed]:
        return [request for requests in self.clients for request in requests]


Told = Callable[[], None]
"""Called after each answered request."""


async def closed_loop(
    url: str,
    talks: Sequence[Talk],
    concurrency: int,
    each: int,
    seconds: float = 0.0,
    told: Told = lambda: None,
) -> Run:
    """``concurrency`` clients that each send their next request when the last one is answered.

    Client i's j-th conversation is talk (j * concurrency + i), from the first again after the last, so that
    every server gets the same ones. A client ends after ``each`` of them, and not before ``seconds``.
    """
    begun = time.monotonic()

    async def one(index: int) -> tuple[Timed, ...]:
        done: list[Timed] = []
        count = 0
        while count < each or time.monotonic() - begun < seconds:
            done += await converse(client, talks[(count * concurrency + index) % len(talks)])
            count += 1
            told()
            if done[-1].error is not None:
                await asyncio.sleep(PAUSE_AFTER_FAILURE)
        return tuple(done)

    async with http_client(url) as client:
        return Run(begun, tuple(await asyncio.gather(*(one(i) for i in range(concurrency)))))


async def open_loop(
    url: str,
    talks: Sequence[Talk],
    concurrency: int,
    count: int,
    rate: float,
    seed: int = 0,
    told: Told = lambda: None,
) -> Run:
    """``count`` conversations that begin ``rate`` times a second (Poisson), of which at most ``concurrency``
    are answered at once; the others wait for their turn, unseen by the server."""
    begun, rng, places = time.monotonic(), random.Random(seed), asyncio.Semaphore(concurrency)

    async def one(index: int, at: float) -> tuple[Timed, ...]:
        await asyncio.sleep(begun + at - time.monotonic())
        async with places:
            found = tuple(await converse(client, talks[index % len(talks)]))
        told()
        return found

    starts, at = [], 0.0
    for _ in range(count):
        starts.append(at)
        at += rng.expovariate(rate)
    async with http_client(url) as client:
        done = await asyncio.gather(*(one(i, at) for i, at in enumerate(starts)))
    return Run(begun, tuple(done), closed=False)
