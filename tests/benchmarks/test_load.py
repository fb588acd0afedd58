"""The load test against servers that say what they are told: one that keeps its word, others that do not."""

from __future__ import annotations

import asyncio
import itertools
import json

import judge
import load
import pytest
from answers import Ask, Difference

from peagle_jax.bench import servers
from peagle_jax.bench.clients import http_client
from tests.serve.conftest import running
from tests.serve.doubles import END, TOKENIZER
from tests.serve.engine_double import ScriptedEngine

A, Z = TOKENIZER.encode("az")
TEXTS = ("first", "second one", "third é", "fourth", "fifth")


def answer_to(request) -> list[int]:
    """A text of its own for every prompt, some longer than the clients ask for."""
    start = sum(request.prompt_ids)
    return [*(A + (start + len(request.prompt_ids) * i * i) % 26 for i in range(24)), END]


@pytest.fixture
def arguments(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    argv = ["--prompts", str(path), "--clients", "6", "--minutes", "0.02", "--answers", "5"]
    argv += ["--output-tokens", "30", "--max-model-len", "200", "--health-limit", "60000"]

    def parse(*more: str):
        return load.parse([*argv, *more])

    return parse


def result(engine, args) -> tuple[dict, dict[str, bool | None]]:
    with running(engine) as server:
        report: dict = {}
        load.run(servers.Server("double", server.url), args, report)
    verdicts = judge.verdicts(report, args.health_limit, args.growth_limit)
    return report, {verdict["condition"]: verdict["holds"] for verdict in verdicts}


def test_a_server_that_keeps_its_word_holds_every_condition_that_was_measured(arguments):
    engine = ScriptedEngine(answer_to, pause=0.002)
    report, holds = result(engine, arguments())
    assert {key for key, value in holds.items() if value is not True} == {
        "memory grows by less than 32 MiB",
        "no growth of compilations in the log",
    }
    assert holds["memory grows by less than 32 MiB"] is None
    assert report["requests"]["answers"] >= report["requests"]["finished"] > 0
    assert "errors" not in report["requests"]
    alone, loaded = engine.seen[:5], engine.seen[5:]
    assert not any(request.speculative for request in alone)
    assert len(loaded) >= report["requests"]["finished"]
    assert all(request.speculative for request in loaded)


def test_an_answer_of_another_prompt_is_found(arguments):
    numbers = itertools.count()

    def mixed(request):
        tokens = answer_to(request)
        return tokens if next(numbers) < 5 else [tokens[0], *(Z - i % 26 for i in range(23)), END]

    report, holds = result(ScriptedEngine(mixed, pause=0.002), arguments("--leave", "0"))
    assert holds["no answer mixed or changed"] is False
    assert holds["no answer lost"] is True
    assert report["wrong_answers"] > 0
    assert report["differences"][0]["position"] == 1
    assert report["ties"] == 0


def test_an_answer_that_breaks_off_is_lost(arguments):
    numbers = itertools.count()
    engine = ScriptedEngine(answer_to, pause=0.002, fail=lambda request: next(numbers) > 5 * 30)
    report, holds = result(engine, arguments("--leave", "0"))
    assert holds["no answer lost"] is False
    assert report["requests"]["errors"] > 0
    assert report["errors"]


def test_other_tokens_count_apart_only_where_the_server_itself_finds_them_equal(arguments):
    with running(ScriptedEngine(lambda request: [A] * 9)) as double:
        server = servers.Server("double", double.url)
        expected = load.answer_alone(server, list(b"abc"), 6)
        assert (expected.token_ids, expected.pieces, expected.finish) == ((A,) * 6, ("a",) * 6, "length")

        # The double's best are the next token at -0.25, the chosen one at -1.5, and more from -4 on.
        def judged(found: int) -> dict:
            return judge.judge(server, judge.Found(Ask(expected, 6), Difference("another token", 2, found)))

        assert judged(A + 1)["logprobs"] == [-1.5, -0.25]
        assert judged(A)["tie"] is True
        assert judged(A + 1)["tie"] is judged(5)["tie"] is False
        assert judged(5)["logprobs"] == [-1.5, None]
    found = [judge.Found(Ask(expected, 6), Difference("no finish reason"))] * 3
    differences, wrong, ties = judge.judge_all(server, found)
    assert (len(differences), differences[0]["answers"], wrong, ties) == (1, 3, 3, 0)


def test_a_client_that_leaves_reads_no_further_and_frees_its_place():
    engine = ScriptedEngine(lambda request: [A] * 150, pause=0.01)
    with running(engine) as double:
        server = servers.Server("double", double.url)
        tally = load.Tally()
        expected = load.answer_alone(server, list(b"abc"), 150)

        async def leave() -> None:
            async with http_client(server.url) as client:
                for after, stream in ((0.0, True), (3.0, True), (0.05, False)):
                    ask = Ask(expected, 150, n=2, stream=stream, leave_after=after)
                    await load.send(client, server.model, ask, tally)

        asyncio.run(leave())
        assert load.becomes_idle(server)
    assert tally.counts == {"requests": 3, "left": 3, "beginnings": 4}
    assert tally.differences == []
    assert all(engine.closed[1:])


def test_a_condition_that_was_not_met_is_told_with_its_figures():
    report = {
        "requests": {"requests": 9, "answers": 7, "errors": 1, "finished": 7},
        "wrong_answers": 0,
        "ties": 2,
        "idle": True,
        "idle_within_s": 10,
        "health_ms": {"median": 1.0, "p99": 50.0, "max": 130.0},
        "health_failures": [],
        "watcher_late_ms": {"median": 0.1, "p99": 1.0, "max": 3.0},
        "memory_mib": {"start": 100.0, "end": 190.0, "growth": 40.0, "minutes": [100.0]},
        "compilations": 1,
        "logged_compilations": 0,
    }
    verdicts = judge.verdicts(report, health_limit=100, growth_limit=32)
    failed = [verdict["found"] for verdict in verdicts if verdict["holds"] is False]
    assert failed == [
        "1 errors in 9 requests",
        "median 1.0, p99 50.0, max 130.0 ms, 0 failed; the watcher itself was up to 3.0 ms late",
        "100 to 190 MiB, growth 40.0",
        "1 more",
    ]
