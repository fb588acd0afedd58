import numpy as np
import pytest

from peagle_jax.train.cod import (
    CodOptions,
    depth_budgets,
    depth_counts,
    sample_batch,
    sample_rollouts,
    supervised_positions,
)
from peagle_jax.train.partition import Batch, supervised


def row(n=97, documents=(40, 31, 17), prompt=7, seed=0):
    """flags and segment ids of a packed row with a prompt of each document unsupervised."""
    flags, segments = np.zeros(n, np.uint8), np.full(n, -1, np.int32)
    at = 0
    for i, length in enumerate(documents):
        segments[at : at + length] = i
        flags[at + prompt : at + length] = 1
        at += length
    flags &= np.random.default_rng(seed).random(n) < 0.9
    return flags, segments


def elements(anchors, lengths):
    return {
        (int(a), d) for a, m in zip(anchors.ravel(), lengths.ravel(), strict=True) for d in range(1, m + 1)
    }


def test_supervised_positions_predict_two_ahead_within_a_document():
    # prompt of 4, answer of 3, then a second document of 3 tokens
    flags = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0])
    segments = np.array([0] * 7 + [1] * 3 + [-1])
    valid = supervised_positions(flags, segments)
    assert np.flatnonzero(valid).tolist() == [2, 3, 4, 7]  # labels 4, 5, 6 and 9


def test_the_loader_and_the_loss_agree_on_what_is_supervised():
    rows = [
        row(seed=seed, documents=sizes) for seed, sizes in enumerate([(40, 31, 17), (1, 2, 3, 90), (97,)])
    ]
    flags, segments = (np.stack(part) for part in zip(*rows, strict=True))
    nothing = np.zeros((1, 3, 0), np.int32)
    batch = Batch(segments, segments, segments, flags, segments, segments, nothing, nothing)
    np.testing.assert_array_equal(supervised(batch), supervised_positions(flags, segments))


def test_paper_example_counts():
    # n = 8192, K = 8, r = 0.8 keeps 34,088 rows in all, depth 0 included; the
    # reference procedure counts from n - d, which drops a few
    budgets = depth_budgets(8192, CodOptions(8, 0.8))
    assert 0 <= 34088 - (8192 + sum(budgets)) < 40
    assert depth_budgets(16, CodOptions(4, 0.7)) == (10, 6, 4)


def test_floor_and_max_anchors_bound_the_budgets():
    assert depth_budgets(1000, CodOptions(4, 0.5, 0.2, max_anchors=100)) == (49, 24, 19)
    assert depth_budgets(5, CodOptions(8, 0.5)) == (2,)
    assert depth_budgets(64, CodOptions(1)) == ()


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
@pytest.mark.parametrize("max_anchors", [0, 20])
def test_rollouts_are_nested_supervised_and_in_one_document(segments, max_anchors):
    flags, ids = row()
    valid = supervised_positions(flags, ids)
    options = CodOptions(6, 0.8, max_anchors=max_anchors, segments=segments)
    anchors, lengths = sample_rollouts(valid, ids, (1, 2, 3), options)
    kept = elements(anchors, lengths)
    assert kept
    for a, d in kept:
        assert a >= 0 and valid[a + d] and ids[a] == ids[a + d]
        assert d == 1 or (a, d - 1) in kept
    per_depth = [sum(d == k for _, d in kept) for k in range(1, 6)]
    assert all(x >= y for x, y in zip(per_depth, per_depth[1:]))
    assert all(x <= m for x, m in zip(per_depth, depth_budgets(len(ids), options)))
    used = anchors[lengths > 0]
    assert len(set(used.tolist())) == len(used)
    if max_anchors:
        assert len(used) <= max_anchors


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_every_segment_fits_the_static_counts(segments):
    flags, ids = row()
    options = CodOptions(6, 0.9, segments=segments)
    anchors, lengths = sample_rollouts(supervised_positions(flags, ids), ids, (0,), options)
    counts = depth_counts(len(ids), options)
    assert anchors.shape == lengths.shape == (segments, counts[0])
    for s in range(segments):
        assert (np.diff(lengths[s]) <= 0).all()
        for d, count in enumerate(counts, 1):
            assert (lengths[s, count:] < d).all()


def test_segments_do_not_change_what_is_kept():
    flags, ids = row()
    valid = supervised_positions(flags, ids)
    kept = [elements(*sample_rollouts(valid, ids, (9, 9), CodOptions(6, segments=s))) for s in (1, 3)]
    assert kept[0] == kept[1]


def test_whole_pool_is_kept_while_it_fits_the_budget():
    ids = np.zeros(50, np.int32)
    flags = np.zeros(50, np.uint8)
    flags[20:26] = 1
    valid = supervised_positions(flags, ids)
    anchors, lengths = sample_rollouts(valid, ids, (0,), CodOptions(4, 0.8))
    # positions 18..23 are supervised; anchor a reaches depth d while a + d stays among them
    assert dict(zip(anchors[lengths > 0].tolist(), lengths[lengths > 0].tolist(), strict=True)) == {
        17: 3, 18: 3, 19: 3, 20: 3, 21: 2, 22: 1
    }  # fmt: skip


def test_first_position_of_a_document_never_gets_an_anchor_outside_it():
    ids = np.repeat(np.arange(12, dtype=np.int32), 4)
    valid = supervised_positions(np.ones(48, np.uint8), ids)
    assert valid[0]
    anchors, lengths = sample_rollouts(valid, ids, (0,), CodOptions(3, 1.0))
    assert sorted(anchors[lengths > 0].tolist()) == list(range(0, 48, 4))
    assert set(lengths[lengths > 0].tolist()) == {1}


def test_equal_keys_give_equal_rollouts_and_other_keys_do_not():
    flags, ids = row()
    valid = supervised_positions(flags, ids)
    options = CodOptions(6, 0.5)
    first = sample_rollouts(valid, ids, (0, 1, 2), options)
    again = sample_rollouts(valid, ids, (0, 1, 2), options)
    other = sample_rollouts(valid, ids, (0, 1, 3), options)
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    assert elements(*first) != elements(*other)


def test_batch_puts_rows_on_the_second_axis():
    flags, ids = row()
    flags, ids = np.stack([flags, flags]), np.stack([ids, ids])
    valid = supervised_positions(flags, ids)
    options = CodOptions(4, 0.7, segments=2)
    anchors, lengths = sample_batch(valid, ids, [(0, 0), (0, 1)], options)
    assert anchors.shape == lengths.shape == (2, 2, depth_counts(97, options)[0])
    alone = sample_rollouts(valid[1], ids[1], (0, 1), options)
    assert (anchors[:, 1] == alone[0]).all() and (lengths[:, 1] == alone[1]).all()


def test_row_without_supervision_has_no_rollouts():
    ids = np.full(30, -1, np.int32)
    _, lengths = sample_rollouts(np.zeros(30, bool), ids, (0,), CodOptions(4))
    assert not lengths.any()
