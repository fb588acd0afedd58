import pytest

from peagle_jax.speculative.statistics import AcceptanceStatistics


def test_worked_example_with_the_bonus_token():
    counts = AcceptanceStatistics(3)
    for accepted in (0, 2, 3):
        counts.add(accepted, 3)
    assert counts.mean_acceptance_length == pytest.approx(8 / 3)
    assert counts.acceptance_per_position == pytest.approx([2 / 3, 2 / 3, 1 / 3])


def test_plain_rounds_are_not_drafts():
    counts = AcceptanceStatistics(0)
    counts.add(0, 0)
    assert (counts.rounds, counts.mean_acceptance_length, counts.acceptance_per_position) == (0, 1.0, [])
