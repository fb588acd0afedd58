"""The engine serves side by side and in order, drops what is cancelled, and survives what fails."""

from __future__ import annotations

import queue
import threading

import pytest

from peagle_jax.serve.engine import Engine, EngineRequest, EngineStoppedError
from peagle_jax.speculative.sampling import SamplingParams
from tests.serve.doubles import TOKENIZER, ScriptedDecoder


def request(prompt: str = "hi", max_tokens: int = 50, **changes) -> EngineRequest:
    return EngineRequest("r", tuple(TOKENIZER.encode(prompt)), SamplingParams(), max_tokens, **changes)


def echo(prompt):
    return [*prompt, *prompt]


def finished(inbox: queue.Queue) -> tuple[str, int, str, str | None]:
    """(text, tokens, finish reason, error) of a request that is awaited to its end."""
    text, count = "", 0
    while True:
        delta = inbox.get(timeout=60)
        text, count = text + delta.text, count + len(delta.token_ids)
        if delta.finish_reason:
            return text, count, delta.finish_reason, delta.error


@pytest.fixture
def run():
    """Starts engines and stops them."""
    engines = []

    def start(decoder, **options):
        engine = Engine(decoder, TOKENIZER, 3, **options)
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        assert engine.stop(), "the engine's thread did not end"


def submit(engine, *args, **kwargs):
    inbox = queue.Queue()
    return engine.submit(request(*args, **kwargs), inbox.put), inbox


def test_requests_are_answered_in_the_order_in_which_they_came(run):
    engine = run(ScriptedDecoder(echo, pause=0.001, slots=1))
    ended = []
    boxes = []
    for name in ("abc", "de", "f"):
        inbox = queue.Queue()

        def deliver(delta, inbox=inbox, name=name):
            inbox.put(delta)
            if delta.finish_reason:
                ended.append(name)

        engine.submit(request(name), deliver)
        boxes.append(inbox)
    assert [finished(box)[0] for box in boxes] == ["abcabc", "dede", "ff"]
    assert ended == ["abc", "de", "f"]


def test_requests_run_side_by_side(run):
    decoder = ScriptedDecoder(echo, pause=0.01)
    engine = run(decoder)
    boxes = [submit(engine, name * 8)[1] for name in ("abc", "de", "f")]
    assert [finished(box)[0] for box in boxes] == [name * 16 for name in ("abc", "de", "f")]
    alone = sum(1 + -(-(len(TOKENIZER.encode(n * 8)) * 2 - 1) // 4) for n in ("abc", "de", "f"))
    assert decoder.rounds < alone


def test_a_cancelled_request_is_left_within_one_dispatch_and_the_next_is_served(run):
    decoder = ScriptedDecoder(lambda p: [65] * 10_000 if len(p) == 4 else p, pause=0.005, slots=1)
    engine = run(decoder)
    ticket, inbox = submit(engine, "long", 10_000)
    _, after = submit(engine, "x")
    inbox.get(timeout=60)
    ticket.cancel()
    rounds = decoder.rounds
    assert finished(inbox)[2] == "abort"
    assert finished(after)[0] == "x"
    assert decoder.rounds <= rounds + 3  # at most one under way, one begun, and that of the next request


def test_a_request_cancelled_while_it_waits_never_runs(run):
    decoder = ScriptedDecoder(echo, pause=0.02, slots=1)
    engine = run(decoder)
    _, first = submit(engine, "first")
    ticket, second = submit(engine, "second")
    ticket.cancel()
    assert finished(first)[2] == "length"
    assert finished(second) == ("", 0, "abort", None)
    assert len(decoder.seen) == 1


def test_a_request_that_fails_says_so_in_one_line_and_the_next_is_served(run):
    engine = run(ScriptedDecoder(echo, fail=lambda prompt: len(prompt) == 3))
    _, bad = submit(engine, "bad")
    _, good = submit(engine, "good")
    assert finished(bad)[2:] == ("error", "RuntimeError: the accelerator is on fire")
    assert finished(good)[2] == "length"
    assert engine.state == "ready"


def test_a_receiver_that_raises_ends_its_request_only(run):
    decoder = ScriptedDecoder(echo)
    engine = run(decoder)

    def deliver(delta):
        raise RuntimeError("the loop is closed")

    engine.submit(request("long enough for rounds"), deliver)
    _, good = submit(engine, "good")
    assert finished(good)[0] == "goodgood"
    assert decoder.closed == [True, False]


def test_a_stop_string_ends_the_decoding_too(run):
    decoder = ScriptedDecoder(lambda p: TOKENIZER.encode("one two END " + "x" * 500))
    engine = run(decoder)
    _, inbox = submit(engine, "go", 400, stop=("END",))
    assert finished(inbox) == ("one two ", 10, "stop", None)  # " t" is one token
    assert decoder.rounds < 6
    assert engine.snapshot().running == 0


def test_stop_ids_and_limits_reach_the_decoder(run):
    decoder = ScriptedDecoder(echo)
    engine = run(decoder)
    _, inbox = submit(engine, "abab", 7, stop_ids=frozenset({5}))
    finished(inbox)
    assert decoder.seen == [(TOKENIZER.encode("abab"), SamplingParams(), 7, {5})]


def test_requests_wait_for_the_warm_up(run):
    gate, told = threading.Event(), []
    engine = run(ScriptedDecoder(echo, warm_up=lambda: gate.wait(60)), on_warm=told.append)
    _, inbox = submit(engine, "hi")
    left, _ = submit(engine, "no longer wanted")
    assert engine.state == "warming"
    assert inbox.empty()
    assert engine.snapshot().waiting == 2
    left.cancel()
    assert engine.snapshot().waiting == 1
    gate.set()
    assert finished(inbox)[0] == "hihi"
    assert engine.state == "ready"
    assert told[0] > 0


def test_a_failed_warm_up_fails_the_requests_that_wait_and_refuses_more(run):
    gate, told = threading.Event(), []

    def warm_up():
        gate.wait(60)
        raise MemoryError("no room")

    engine = run(ScriptedDecoder(echo, warm_up=warm_up), on_warm=told.append)
    _, inbox = submit(engine, "hi")
    gate.set()
    assert finished(inbox)[2:] == ("error", "MemoryError: no room")
    assert isinstance(told[0], MemoryError)
    with pytest.raises(EngineStoppedError, match="MemoryError: no room"):
        submit(engine, "more")


def test_stopping_finishes_what_was_submitted_and_refuses_more():
    engine = Engine(ScriptedDecoder(echo, pause=0.01), TOKENIZER, 3)
    engine.start()
    boxes = [submit(engine, name)[1] for name in ("abcdefg", "xyz")]
    assert engine.stop(finish_within=10)
    assert [finished(box)[0] for box in boxes] == ["abcdefg" * 2, "xyz" * 2]
    with pytest.raises(EngineStoppedError, match="shutting down"):
        submit(engine, "more")


def test_stopping_aborts_what_does_not_finish_in_time():
    engine = Engine(ScriptedDecoder(lambda p: [65] * 10_000, pause=0.005, slots=1), TOKENIZER, 3)
    engine.start()
    boxes = [submit(engine, "long", 10_000)[1] for _ in range(2)]
    boxes[0].get(timeout=60)
    assert engine.stop(finish_within=0.05)
    assert [finished(box)[2] for box in boxes] == ["abort", "abort"]
