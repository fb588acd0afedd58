"""Bodies are cut off where they pass the limit, whatever they say of their length."""

from __future__ import annotations

import asyncio

import pytest
from starlette.exceptions import HTTPException

from peagle_jax.serve.body_limit import LARGEST, REST, BodyLimit, body_limit


def read_through(limit: int, parts: list[bytes]) -> tuple[bytes, HTTPException | None]:
    """What an application behind the middleware gets of a body in parts, and how its reading ended."""
    waiting, got = list(parts), []

    async def receive():
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def application(scope, receive, send):
        more = True
        while more:
            message = await receive()
            got.append(message["body"])
            more = message["more_body"]

    async def send(message):
        raise AssertionError(message)

    try:
        asyncio.run(BodyLimit(application, limit)({"type": "http"}, receive, send))
    except HTTPException as error:
        return b"".join(got), error
    return b"".join(got), None


def test_a_body_up_to_the_limit_passes_in_any_parts():
    assert read_through(6, [b"abcdef"]) == (b"abcdef", None)
    assert read_through(6, [b"ab", b"", b"cdef"]) == (b"abcdef", None)


@pytest.mark.parametrize("parts", [[b"abcdefg"], [b"abc", b"def", b"g", b"never read"]])
def test_one_byte_more_is_413_and_the_rest_is_not_read(parts):
    got, error = read_through(6, parts)
    assert len(got) <= 6
    assert (error.status_code, "more than 6 bytes" in error.detail) == (413, True)


def test_other_scopes_are_left_alone():
    seen = []

    async def application(scope, receive, send):
        seen.append((scope, receive, send))

    asyncio.run(BodyLimit(application, 1)({"type": "lifespan"}, "receive", "send"))
    assert seen == [({"type": "lifespan"}, "receive", "send")]


def test_the_limit_holds_every_prompt_that_fits_however_json_spells_it():
    assert body_limit(1000) == 12_000 + REST
    assert body_limit(10**9) == LARGEST
