"""How many requests there may be, and what a silent stream sends."""

from __future__ import annotations

import asyncio

import pytest

from peagle_jax.serve.errors import APIError
from peagle_jax.serve.generation import KEEP_ALIVE, Admission, kept_alive


def test_counts_come_back_to_zero_whatever_happened():
    admission = Admission(3, 10)
    admission.enter(2, 8)
    admission.answered(5)
    admission.leave(2, 3)
    admission.enter(3, 100)  # alone: it may be longer than the limit
    with pytest.raises(APIError, match="100 prompt tokens wait"):
        Admission.enter(admission, 0, 1)
    with pytest.raises(APIError, match="3 requests wait or run"):
        admission.enter(1, 0)
    admission.leave(3, 100)
    assert admission.requests == 0
    assert admission.rejected == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 1}


async def slow(*pauses: float):
    for i, pause in enumerate(pauses):
        await asyncio.sleep(pause)
        yield str(i)


def test_comments_fill_silence_and_no_event_is_lost():
    async def collect(seconds):
        return [text async for text in kept_alive(slow(0, 0.25, 0), seconds)]

    got = asyncio.run(collect(0.1))
    assert [text for text in got if text != KEEP_ALIVE] == ["0", "1", "2"]
    assert got[1:3] == [KEEP_ALIVE, KEEP_ALIVE]
    assert asyncio.run(collect(0)) == ["0", "1", "2"]


def test_leaving_a_kept_stream_closes_its_source():
    closed = []

    async def source():
        try:
            yield "a"
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def leave():
        stream = kept_alive(source(), 0.01)
        assert await anext(stream) == "a"
        assert await anext(stream) == KEEP_ALIVE
        await stream.aclose()

    asyncio.run(leave())
    assert closed == [True]
