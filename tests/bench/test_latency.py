"""What the parts of a latency result are made of."""

from __future__ import annotations

import pytest

from peagle_jax.bench.latency import Answers, notes
from peagle_jax.bench.report import summary
from peagle_jax.bench.runner import Reply
from peagle_jax.bench.tally import Tally


def reply(*arrivals: float, tokens: int, first: int = 1) -> Reply:
    return Reply([1], 0.0, list(range(tokens)), "", list(arrivals), first, Tally(tokens=tokens), "length")


def test_rates_are_of_summed_times_and_ratios_of_the_same_repeat():
    # The machine is twice as slow in the second repeat; the method is 1.5 times the baseline in both.
    slow = Answers([[("a", reply(1, 4, tokens=7))], [("a", reply(2, 8, tokens=7))]])
    fast = Answers([[("a", reply(1, 3, tokens=7))], [("a", reply(1, 5, tokens=7))]])
    found = fast.described(slow)
    assert found["tokens_per_second"] == pytest.approx((3 + 1.5) / 2)
    assert found["tokens_per_second_spread"] == [1.5, 3.0]
    assert found["speedup"] == pytest.approx(1.5)
    assert found["categories"]["a"]["speedup_spread"] == pytest.approx([1.5, 1.5])
    assert found["ttft_ms"]["median"] == 1000
    assert found["tpot_ms"]["mean"] == pytest.approx(1000 * (2 / 6 + 4 / 6) / 2)
    assert (found["answers"], found["tokens"]) == (2, 14)


def test_categories_are_counted_apart():
    sums = Answers(
        [[("a", reply(0, 2, tokens=5)), ("b", reply(0, 1, tokens=5)), ("a", reply(0, 6, tokens=5))]]
    )
    assert (sums.rate(0, "a"), sums.rate(0, "b"), sums.rate(0)) == (8 / 8, 4, 12 / 9)
    one = Answers([[("a", reply(3, tokens=1))]])  # an answer of one round has no rate
    assert one.described(one)["tokens_per_second"] is None
    assert one.described(one)["tpot_ms"] == summary([])


def test_a_mixture_of_experts_is_told_of():
    assert notes({}) == []
    assert "8 of 64 a token" in notes({"experts": [8, 64]})[0]
