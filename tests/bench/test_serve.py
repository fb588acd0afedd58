"""Figures of servers from the times of their requests."""

from __future__ import annotations

import argparse

import pytest

from peagle_jax.bench.clients import Run, Timed
from peagle_jax.bench.serve import point, tables, throughput
from peagle_jax.bench.servers import COMPILED
from peagle_jax.bench.tally import DRAFTED, DRAFTS, PER_POSITION

CLOSED = argparse.Namespace(request_rate=float("inf"), goodput=())


def timed(begun: float, *arrivals: float, tokens: int = 4) -> Timed:
    return Timed(begun, arrivals[-1], arrivals, tokens, prompt_tokens=10)


def test_steady_throughput_counts_while_all_clients_are_at_work():
    # One client ends at 4 s; the other's second answer has then brought one of its two chunks.
    run = Run(0.0, ((timed(0, 1, 2), timed(2, 3, 4)), (timed(0, 1, 3), timed(3, 4, 6))))
    found = point([run], 2, {}, CLOSED)
    assert (run.end, run.ended, found["duration"]) == (4, 6, 6)
    assert found["steady_output_throughput"] == throughput(found) == (4 + 4 + 4 + 2) / 4
    assert found["output_throughput"] == 16 / 6
    assert found["total_token_throughput"] == (16 + 40) / 6
    assert found["request_throughput"] == 4 / 6
    assert found["median_ttft_ms"] == 1000
    # Three tokens after the first in 1, 1, 2 and 2 seconds.
    assert found["median_tpot_ms"] == pytest.approx(500)
    assert found["median_itl_ms"] == 1500
    assert (found["median_e2el_ms"], found["p99_e2el_ms"]) == (2500, pytest.approx(3000))
    assert (found["max_concurrency"], found["completed"], found["failed"]) == (2, 4, 0)


def test_runs_are_put_together_and_failures_counted():
    good = Run(0.0, ((timed(0, 1, 2),),))
    bad = Run(0.0, ((timed(0, 1, 4), Timed(4, 6, error="status 500")),))
    counted = {COMPILED: 0.0, DRAFTS: 2.0, DRAFTED: 6.0, f"{PER_POSITION}0": 2.0, f"{PER_POSITION}1": 1.0}
    found = point([good, bad], 1, counted, CLOSED)
    assert found["output_throughput_runs"] == [2.0, 4 / 6]
    assert found["output_throughput"] == pytest.approx((2 + 4 / 6) / 2)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["status 500"])
    assert (found["compilations"], found["spec_decode_acceptance_length"]) == (0, 2.5)
    assert found["spec_decode_acceptance_rate"] == 50
    assert found["spec_decode_per_position_acceptance_rates"] == [1, 0.5]


def test_a_run_without_an_answer_has_no_latencies():
    found = point([Run(0.0, ((Timed(0, 1, error="refused"),),))], 1, {}, CLOSED)
    assert found["output_throughput"] == 0
    assert found["mean_ttft_ms"] is found["p99_e2el_ms"] is None


def test_good_requests_keep_all_limits_that_are_given():
    run = Run(0.0, ((timed(0, 1, 2),), (timed(0, 0.5, 4),), (timed(0, 3, 4),)), closed=False)
    args = argparse.Namespace(request_rate=2.0, goodput=(("ttft", 1000.0), ("e2el", 3000.0)))
    found = point([run], 3, {}, args)
    assert found["request_goodput"] == 1 / 4
    assert (found["request_rate"], throughput(found)) == (2.0, 12 / 4)


def test_the_tables_compare_with_the_first_server():
    def entry(*rates: float) -> dict:
        none = dict.fromkeys(("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"))
        none |= dict.fromkeys(("p99_itl_ms", "median_e2el_ms"))
        points = [
            {"max_concurrency": 2**i, "output_throughput": rate, "completed": 3, "failed": 0, **none}
            for i, rate in enumerate(rates)
        ]
        return {"points": points}

    runs = {"off": entry(10.0, 20.0), "head": entry(15.0, 15.0), "peer": entry(5.0), "dead": {"error": "x"}}
    rates, ratios, latencies = tables({"runs": runs, "max_tokens": 9})
    assert rates.columns == ("", "1", "2")
    assert rates.rows[2] == ["peer", "5.0", ""]
    assert ratios.rows == [["head", "1.50", "0.75"], ["peer", "0.50", ""]]
    assert [row[0] for row in latencies.rows] == [
        "off at 1",
        "off at 2",
        "head at 1",
        "head at 2",
        "peer at 1",
    ]
