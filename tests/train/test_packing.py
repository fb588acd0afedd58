import numpy as np
import pytest

from peagle_jax.train.packing import pack
from peagle_jax.train.tokens import Document


def documents(lengths, flagged=True):
    out = []
    for i, length in enumerate(lengths):
        tokens = np.arange(length, dtype=np.int32) + 1000 * i
        out.append(Document(str(i), tokens, np.full(length, flagged)))
    return out


def test_documents_are_whole_and_positions_restart():
    made = documents([5, 9, 3, 7, 8, 2, 6])
    rows = pack(made, 10, seed=3)
    seen = {}
    for r in range(len(rows)):
        for segment in range(rows.segment_ids[r].max() + 1):
            where = np.flatnonzero(rows.segment_ids[r] == segment)
            assert (np.diff(where) == 1).all()
            assert rows.positions[r, where].tolist() == list(range(len(where)))
            seen[int(rows.tokens[r, where[0]]) // 1000] = rows.tokens[r, where]
    assert sorted(seen) == list(range(7))
    for i, document in enumerate(made):
        assert (seen[i] == document.tokens).all()


def test_padding_has_no_segment_and_no_flag():
    rows = pack(documents([4]), 10)
    assert rows.segment_ids.tolist() == [[0] * 4 + [-1] * 6]
    assert rows.flags.tolist() == [[1] * 4 + [0] * 6]


def test_a_long_document_becomes_pieces_and_unsupervised_pieces_go():
    document = documents([25])[0]
    document.flags[:10] = False
    rows = pack([document], 10)
    assert len(rows) == 2  # the first ten tokens hold nothing to learn
    assert sorted(rows.tokens[rows.segment_ids >= 0].tolist()) == list(range(10, 25))
    assert rows.positions.max() == 9


@pytest.mark.parametrize("row_length", [32, 64])
def test_packing_fills_rows_and_depends_on_the_seed_alone(row_length):
    rng = np.random.default_rng(0)
    made = documents(rng.integers(3, 20, 300).tolist())
    rows = pack(made, row_length, seed=1)
    assert (rows.segment_ids >= 0).mean() > 0.93
    again, other = pack(made, row_length, seed=1), pack(made, row_length, seed=2)
    assert (rows.tokens == again.tokens).all()
    assert rows.tokens.shape != other.tokens.shape or (rows.tokens != other.tokens).any()
