"""The measurement of servers: its arithmetic, its command lines, and a run against one that says what it is
told."""

from __future__ import annotations

import asyncio
import json

import pytest
import servers
from clients import Run, Timed, closed_loop

import serve as script
from tests.serve.conftest import running
from tests.serve.engine_double import ScriptedEngine, says


def timed(begun: float, *arrivals: float, tokens: int = 4) -> Timed:
    return Timed(begun, arrivals[-1], arrivals, tokens)


def test_tokens_count_while_all_clients_are_at_work():
    # One client ends at 4 s; the other's second answer has then brought one of its two chunks.
    run = Run(0.0, ((timed(0, 1, 2), timed(2, 3, 4)), (timed(0, 1, 3), timed(3, 4, 6))))
    point = script.summary([run], {})
    assert run.end == point["seconds"] == 4
    assert point["output_tokens"] == 4 + 4 + 4 + 2
    assert point["output_tokens_per_second"] == 14 / 4
    assert point["ttft_s"]["median"] == 1
    # Three tokens after the first in 1, 1, 2 and 2 seconds.
    assert point["time_per_output_token_ms"]["median"] == pytest.approx(500)
    assert point["time_between_chunks_ms"]["median"] == 1500
    assert (point["concurrency"], point["requests"], point["failures"]) == (2, 4, 0)


def test_runs_are_put_together_and_failures_counted():
    good = Run(0.0, ((timed(0, 1, 2),),))
    bad = Run(0.0, ((timed(0, 1, 4), Timed(4, 6, error="status 500")),))
    counted = {servers.COMPILED: 0.0, servers.DRAFTS: 2.0, servers.DRAFTED: 6.0, servers.ACCEPTED: 3.0}
    point = script.summary([good, bad], counted)
    assert point["runs_output_tokens_per_second"] == [2.0, 4 / 6]
    assert point["output_tokens_per_second"] == pytest.approx((2 + 4 / 6) / 2)
    assert (point["requests"], point["failures"], point["errors"]) == (3, 1, ["status 500"])
    assert (point["compilations"], point["mean_acceptance_length"]) == (0, 2.5)


def test_a_run_without_an_answer_has_no_latencies():
    point = script.summary([Run(0.0, ((Timed(0, 1, error="refused"),),))], {})
    assert point["output_tokens_per_second"] == 0
    assert point["ttft_s"] == {"median": None, "p99": None}


def test_ratios_compare_what_was_measured():
    rates = {"off": {1: 10.0, 2: 20.0}, "peagle": {1: 15.0, 2: 15.0}, "adaptive": {1: 15.0, 2: 19.0}}
    assert script.ratios(rates) == {
        "adaptive / better of off and peagle": {1: 1.0, 2: 0.95},
        "peagle / off": {1: 1.5, 2: 0.75},
    }
    peer = rates | {"vllm": {1: 5.0}, "vllm-peagle": {1: 7.5}}
    assert script.ratios(peer)["adaptive / better of vllm's"] == {1: 2.0}
    assert script.ratios({}) == {}


def flags(*argv: str) -> dict[str, list[str]]:
    return {x.name: [*x.command, *x.flags] for x in script.launches(script.parse(["--prompts", "x", *argv]))}


def config(words: list[str]) -> object:
    return json.loads(words[words.index("--speculative-config") + 1])


def test_each_server_gets_its_flags():
    found = flags("--concurrency", "1,24", "--eagle3-head", "e", "--server-flag=--seed=3")
    assert list(found) == ["off", "peagle", "eagle3", "adaptive"]
    for words in found.values():
        assert words[words.index("--max-num-seqs") + 1] == "24"
        assert "--no-enable-prefix-caching" in words
        assert "--seed=3" in words
    assert config(found["off"]) is None
    k = {"num_speculative_tokens": 5}
    fixed = {"num_speculative_tokens_per_batch_size": [[1, 24, 5]]}
    assert config(found["adaptive"]) == {"method": "peagle", **k}
    assert config(found["peagle"]) == {"method": "peagle", **k, **fixed}
    assert config(found["eagle3"]) == {"model": "e", "method": "eagle3", **k, **fixed}
    more = flags("--num-speculative-tokens", "3", "--most-speculative-tokens", "7")
    assert [config(more[name])["num_speculative_tokens"] for name in ("peagle", "adaptive")] == [3, 7]


def test_our_server_takes_its_flags():
    from peagle_jax.serve import arguments
    from peagle_jax.serve.speculative_config import parse_speculative_config

    for words in flags("--eagle3-head", "e", "--head", "h", "--model", "m").values():
        args = arguments.build_parser().parse_args(words[3:])
        arguments.check(args)
        parse_speculative_config(args.speculative_config)
        assert (args.model, args.enable_prefix_caching, args.max_num_seqs) == ("m", False, 64)


def test_vllm_is_measured_with_and_without_the_head_if_it_is_there():
    argv = ["--vllm-python", "py", "--vllm-target", "t", "--servers", "vllm", "vllm-peagle"]
    found = flags(*argv, "--vllm-flag=--block-size=16")
    assert list(found) == ["vllm", "vllm-peagle"]
    for words in found.values():
        assert words[:5] == ["py", "-m", "vllm.entrypoints.openai.api_server", "--model", "t"]
        assert {"--enforce-eager", "--no-enable-prefix-caching", "--block-size=16"} <= set(words)
    head = config(found["vllm-peagle"])
    assert head | {"model": "x"} == {
        "method": "eagle3",
        "model": "x",
        "num_speculative_tokens": 5,
        "parallel_drafting": True,
    }
    with pytest.raises(SystemExit):
        script.parse(["--prompts", "x", "--vllm-python", "py"])


def test_clients_send_the_same_requests_whatever_the_order(tmp_path):
    engine = says("abcdefghijkl", width=4)
    with running(engine) as server:
        bodies = [{"prompt": text, "max_tokens": 6, "temperature": 0.0} for text in "uvwxyz"]
        run = asyncio.run(closed_loop(server.url, bodies, concurrency=4, each=2))
    assert [len(requests) for requests in run.clients] == [2] * 4
    assert all(r.error is None and r.tokens == 6 and len(r.arrivals) == 3 for r in run.requests)
    assert all(r.begun <= r.arrivals[0] <= r.ended for r in run.requests)
    prompts = sorted(server.tokenizer.decode(request.prompt_ids) for request in engine.seen)
    assert prompts == sorted("uvwxyzuv")


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        (says("abc"), "4 tokens in 2 chunks; expected 6 tokens"),
        (ScriptedEngine(lambda request: [97] * 9, fail=lambda request: True), "in the stream: "),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(engine, error):
    with running(engine) as server:
        run = asyncio.run(closed_loop(server.url, [{"prompt": "u", "max_tokens": 6}], 1, 1))
        bad = asyncio.run(closed_loop(server.url, [{"prompt": "u", "max_tokens": 0}], 1, 1))
    assert error in run.requests[0].error
    assert "RequestError: status 400" in bad.requests[0].error
