"""Clients against a server that says what it is told."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from peagle_jax.bench.clients import CHAT, COMPLETIONS, Talk, closed_loop, open_loop, timed_request
from tests.serve.conftest import running
from tests.serve.engine_double import ScriptedEngine, says


def talks(texts: str, **body) -> list[Talk]:
    common = {"model": "tiny", "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    return [Talk(COMPLETIONS, common | {"prompt": text} | body) for text in texts]


def test_clients_send_the_same_requests_whatever_the_order():
    engine = says("abcdefghijkl", width=4)
    with running(engine) as server:
        run = asyncio.run(closed_loop(server.url, talks("uvwxyz"), concurrency=4, each=2))
    assert [len(requests) for requests in run.clients] == [2] * 4
    assert all(r.error is None and r.tokens == 6 and len(r.arrivals) == 3 for r in run.requests)
    assert all(r.begun <= r.arrivals[0] <= r.ended and r.prompt_tokens == 1 for r in run.requests)
    prompts = sorted(server.tokenizer.decode(request.prompt_ids) for request in engine.seen)
    assert prompts == sorted("uvwxyzuv")


def test_later_turns_follow_the_models_own_answers():
    engine = says("abc")
    body = {"model": "tiny", "max_tokens": 6, "messages": [{"role": "user", "content": "one"}]}
    with running(engine) as server:
        run = asyncio.run(closed_loop(server.url, [Talk(CHAT, body, ("two",))], 1, 1))
        heard = [server.tokenizer.decode(request.prompt_ids) for request in engine.seen]
    assert [r.text for r in run.requests] == ["abc", "abc"]
    first, second = heard
    assert "one" in first and "two" not in first
    assert second.index("one") < second.index("abc") < second.index("two")


def test_an_open_loop_begins_requests_at_its_rate_and_answers_few_at_once():
    engine = says("abcdefghijkl", width=4)
    with running(engine) as server:
        run = asyncio.run(open_loop(server.url, talks("uv"), 2, 5, rate=50.0, seed=3))
    assert [r.error for r in run.requests] == [None] * 5
    assert len(run.clients) == 5 and run.end == run.ended
    begun = sorted(r.begun for r in run.requests)
    assert begun[-1] - run.begun > 0.02  # five at 50 a second take 80 ms on average


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        (says("abc"), "4 tokens in 2 chunks; expected 6 tokens"),
        (ScriptedEngine(lambda request: [97] * 9, fail=lambda request: True), "in the stream: "),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(engine, error):
    with running(engine) as server:
        run = asyncio.run(closed_loop(server.url, talks("u"), 1, 1))
        bad = asyncio.run(closed_loop(server.url, talks("u", max_tokens=0), 1, 1))
    assert error in (run.requests[0].error or "")
    assert "status 400" in (bad.requests[0].error or "")


@pytest.mark.parametrize("event", ["null", "[]", '{"choices": null}', "{"])
def test_an_event_of_another_form_is_a_failure(event):
    async def ask():
        answer = httpx.MockTransport(lambda request: httpx.Response(200, text=f"data: {event}\n\n"))
        async with httpx.AsyncClient(base_url="http://odd", transport=answer) as client:
            return await timed_request(client, COMPLETIONS, {"max_tokens": 6})

    assert "Error: " in (asyncio.run(ask()).error or "")
