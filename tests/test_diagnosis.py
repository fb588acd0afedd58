"""What counts as ill, and as clearly better."""

from __future__ import annotations

import pytest

from peagle_jax.diagnosis import clearly_better, illness
from peagle_jax.speculative.statistics import AcceptanceStatistics


def rates(*shares: float, rounds: int = 100) -> AcceptanceStatistics:
    return AcceptanceStatistics(len(shares), rounds, [round(share * rounds) for share in shares])


@pytest.mark.parametrize(
    "shares",
    [
        (0.75, 0.50, 0.32),  # RedHat's Qwen3-8B speculator
        (0.675, 0.376, 0.196, 0.084),  # vLLM's continuous integration
        (0.41, 0.11, 0.016, 0.002),  # a sanity run of speculators on 5,000 conversations
        (0.46, 0.21, 0.07, 0.02, 0.02),  # the shipped head
        (0.30,),
    ],
)
def test_published_heads_are_healthy(shares):
    assert illness(rates(*shares)) is None


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((0.29, 0.2), "the first draft is accepted in 29% of rounds; a healthy head's in 30% or more"),
        ((0.10, 0.05), "the first draft"),  # features off by one layer, vLLM 43671
        ((0.012, 0.0), "the first draft"),  # taps that the config did not name, vLLM 50170
        ((0.6, 0.05), "the second draft is accepted in 8% of the rounds that accept the first"),
    ],
)
def test_reported_faults_are_ill(shares, said):
    assert said in (illness(rates(*shares)) or "")


def test_better_is_beyond_chance_and_by_an_amount_that_matters():
    assert clearly_better(rates(0.6, 0.3), rates(0.1, 0.0))
    assert not clearly_better(rates(0.1, 0.0), rates(0.6, 0.3))
    assert not clearly_better(rates(0.6, 0.3), rates(0.55, 0.3))
    assert not clearly_better(rates(0.6, 0.3, rounds=10), rates(0.4, 0.2, rounds=10))
    assert clearly_better(rates(0.6, 0.3, rounds=1000), rates(0.4, 0.2, rounds=1000))
    assert not clearly_better(rates(0.56, 0.3, rounds=10**6), rates(0.5, 0.3, rounds=10**6))
    assert not clearly_better(rates(1.0, rounds=1), rates(0.0, rounds=1))
