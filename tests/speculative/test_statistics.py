import pytest

from peagle_jax.speculative.statistics import AcceptanceStatistics


def test_worked_example_with_the_bonus_token():
    counts = AcceptanceStatistics(3)
    for accepted in (0, 2, 3):
        counts.add(accepted, 3)
    assert counts.mean_acceptance_length == pytest.approx(8 / 3)
    assert counts.acceptance_per_position == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert counts.line() == "acceptance length 2.67 in 3 rounds that drafted"


def test_merged_counts_are_those_of_all_rounds():
    parts = [AcceptanceStatistics(3), AcceptanceStatistics(3)]
    parts[0].add(0, 3)
    for accepted in (2, 3):
        parts[1].add(accepted, 3)
    parts[0].merge(parts[1])
    assert (parts[0].rounds, parts[0].accepted_at) == (3, [2, 2, 1])


def test_plain_rounds_are_not_drafts():
    counts = AcceptanceStatistics(0)
    counts.add(0, 0)
    assert (counts.rounds, counts.mean_acceptance_length, counts.acceptance_per_position) == (0, 1.0, [])
    assert counts.line() == "no round drafted"
