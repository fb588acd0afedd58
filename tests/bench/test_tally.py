"""Acceptance out of rounds, and out of a server's counters."""

from __future__ import annotations

import pytest

from peagle_jax.bench.servers import change, read_metrics
from peagle_jax.bench.tally import Tally

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 2.0
vllm:spec_decode_num_drafts_total{engine="1"} 1.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 9.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 5.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 1.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} 16.0
"""


def rounds(*accepted: int) -> Tally:
    """Rounds of three drafts."""
    found = Tally()
    for count in accepted:
        found.add(count, 3, count + 1)
    return found


def test_a_servers_counters_say_the_same_as_its_rounds():
    # Three rounds of three drafts that accepted 0, 2 and 3, and eight tokens of plain rounds.
    ours = rounds(0, 2, 3)
    for _ in range(8):
        ours.add(0, 0, 1)
    theirs = Tally.of_counters(read_metrics(PAGE))
    assert ours == theirs
    assert theirs.report() == {
        "num_drafts": 3,
        "num_draft_tokens": 9,
        "num_accepted_tokens": 5,
        "mean_acceptance_length": 1 + 5 / 3,
        "acceptance_per_position": [2 / 3, 2 / 3, 1 / 3],
        "draft_acceptance_rate": 5 / 9,
        "mean_draft_length": 3,
        "share_of_tokens_from_drafting_rounds": 0.5,
    }


def test_what_was_counted_before_does_not_count():
    counted = read_metrics(PAGE)
    assert Tally.of_counters(change(counted, counted)).report()["mean_acceptance_length"] == 1
    assert change({}, counted) == counted


def test_counts_of_different_lengths_are_merged():
    found = rounds(1, 3)
    found.merge(Tally(1, 5, [1, 1, 1, 1, 1], 6))
    assert (found.drafts, found.draft_tokens, found.tokens) == (3, 11, 12)
    assert found.per_position == [3, 2, 2, 1, 1]
    assert found.length == pytest.approx(1 + 9 / 3)


def test_nothing_counted_is_a_length_of_one():
    empty = Tally().report()
    assert (empty["mean_acceptance_length"], empty["acceptance_per_position"]) == (1, [])
