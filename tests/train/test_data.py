import json
import threading

import numpy as np
import pytest

from peagle_jax.train import prepare
from peagle_jax.train.cod import CodOptions
from peagle_jax.train.data import (
    BatchLoader,
    MemoryRows,
    RowStore,
    indices_of_step,
    make_batch,
    validation_batches,
)
from peagle_jax.train.packing import pack
from peagle_jax.train.recipe import TrainError
from peagle_jax.train.setup import template_ids
from peagle_jax.train.tokens import Document
from tests.train import tiny_run

OPTIONS = CodOptions(num_depths=4, ratio=0.7, segments=2)


def test_taps_are_selected_in_the_heads_order(prepared):
    stored = RowStore([prepared / "features"], "train", (1, 3, 4, 5))
    chosen = RowStore([prepared / "features"], "train", (5, 1))
    whole, part = stored.rows(np.array([2, 9])), chosen.rows(np.array([2, 9]))
    np.testing.assert_array_equal(part["features"], whole["features"][..., [*range(36, 48), *range(12)]])
    np.testing.assert_array_equal(part["hidden"], whole["hidden"])


def test_rows_are_found_across_shards(prepared):
    store = RowStore([prepared / "features"], "train", (1,))
    assert len(store.shards) > 1
    everything = store.array("tokens")
    indices = np.arange(len(store))[::-1]
    np.testing.assert_array_equal(store.rows(indices)["tokens"], everything[indices])


def test_a_tap_that_was_not_stored_is_named(prepared):
    with pytest.raises(TrainError, match=r"taps \[1, 3, 4, 5\], not of \[2\]"):
        RowStore([prepared / "features"], "train", (1, 2))


def test_rows_of_several_folders_follow_each_other(prepared, tmp_path, console):
    more = tiny_run.recipe(
        prepared, features={"folder": str(tmp_path / "more"), "taps": [3, 1]}, data={"heldout": 0.5}
    )
    prepare.compute_features(more, console)
    both = RowStore([prepared / "features", tmp_path / "more"], "train", (1, 3))
    first, second = (RowStore([f], "train", (1, 3)) for f in (prepared / "features", tmp_path / "more"))
    assert len(both) == len(first) + len(second)
    found = both.rows(np.array([1, len(first) + 2]))
    np.testing.assert_array_equal(found["features"][0], first.rows(np.array([1]))["features"][0])
    np.testing.assert_array_equal(found["features"][1], second.rows(np.array([2]))["features"][0])


def test_folders_that_do_not_go_together_are_refused(prepared, tmp_path, console):
    other = tiny_run.recipe(prepared, features={"folder": str(tmp_path / "more"), "row_length": 40})
    prepare.compute_features(other, console)
    with pytest.raises(TrainError, match="differ in row_length: 40 and 32"):
        RowStore([prepared / "features", tmp_path / "more"], "train", (1,))


def test_prompts_carry_loss_on_request(prepared):
    plain, all_tokens = (RowStore([prepared / "features"], "train", (1,), on) for on in (False, True))
    rows, more = plain.rows(np.array([3])), all_tokens.rows(np.array([3]))
    assert 0 < rows["flags"].sum() < more["flags"].sum() == (rows["segment_ids"] >= 0).sum()
    np.testing.assert_array_equal(plain.array("flags"), all_tokens.array("flags"))


def test_steps_cover_every_row_once_an_epoch():
    rows = np.concatenate([indices_of_step(step, 4, 10, 0)[0] for step in range(5)])
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()
    epochs = np.concatenate([indices_of_step(step, 4, 10, 0)[1] for step in range(5)])
    assert epochs.tolist() == [0] * 10 + [1] * 10


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def taken(loader, count):
    return [next(loader)[1] for _ in range(count)]


def test_a_restored_loader_goes_on_with_exactly_the_batches_that_were_left(prepared):
    store = RowStore([prepared / "features"], "train", (1, 3, 5))
    per_epoch = -(-len(store) // 3)
    unbroken = taken(BatchLoader(store, 3, 7, OPTIONS), 2 * per_epoch)
    stopped = BatchLoader(store, 3, 7, OPTIONS)
    taken(stopped, per_epoch - 1)  # more are made ahead; the position is that of the ones taken
    state = json.loads(json.dumps(stopped.state()))
    later = BatchLoader(store, 3, 7, OPTIONS)
    later.restore(state)
    rest = taken(later, per_epoch + 1)
    assert all(equal(a, b) for a, b in zip(unbroken[per_epoch - 1 :], rest, strict=True))
    assert not equal(unbroken[0], unbroken[1])
    assert later.state() != state
    again = BatchLoader(store, 3, 8, OPTIONS)
    assert not equal(next(again)[1], unbroken[0])


def test_the_loader_takes_the_rows_of_the_step(prepared):
    store = RowStore([prepared / "features"], "train", (1,))
    loader = BatchLoader(store, 4, 3, None)
    for step in range(len(store) // 2):
        rows, _ = indices_of_step(step, 4, len(store), 3)
        count, batch = next(loader)
        np.testing.assert_array_equal(batch.tokens, store.rows(rows)["tokens"])
        assert count == (batch.segment_ids >= 0).sum()


def test_a_batch_may_be_larger_than_the_data():
    rows, epochs = indices_of_step(2, 5, 1, 4)
    assert rows.tolist() == [0] * 5 and epochs.tolist() == [10, 11, 12, 13, 14]


def test_a_position_of_another_kind_is_refused(prepared):
    loader = BatchLoader(RowStore([prepared / "features"], "train", (1,)), 3, 7, OPTIONS)
    for state in ({"other": 1}, {"next_index": -5}, [3]):
        with pytest.raises(TrainError, match="a data position that is not understood"):
            loader.restore(state)


def test_rows_in_memory_are_those_that_would_be_stored(prepared, tiny_target):
    recipe = tiny_run.recipe(prepared)
    documents, _ = prepare.load_documents(recipe, tiny_target.tokenizer, tiny_target.config)
    packed = prepare.split_rows(recipe, documents)["train"]
    for on_prompts in (False, True):
        store = RowStore([prepared / "features"], "train", (1,), on_prompts)
        memory = MemoryRows(packed, on_prompts)
        assert (len(memory), memory.row_length) == (len(store), store.row_length)
        a, b = next(BatchLoader(store, 3, 7, OPTIONS))[1], next(BatchLoader(memory, 3, 7, OPTIONS))[1]
        assert b.features.shape == b.target_hidden.shape == (3, 32, 0)
        assert equal(a.replace(features=b.features, target_hidden=b.target_hidden), b)


def test_the_same_row_has_other_rollouts_in_another_epoch(prepared):
    store = RowStore([prepared / "features"], "train", (1,))
    batches = [make_batch(store, np.array([0]), [(0, epoch, 0)], OPTIONS) for epoch in (0, 1)]
    assert (batches[0].tokens == batches[1].tokens).all()
    assert not np.array_equal(batches[0].anchors, batches[1].anchors)


def test_validation_is_the_same_every_time(prepared):
    store = RowStore([prepared / "features"], "train", (1,))
    first, second = (list(validation_batches(store, 7, 3, 0, OPTIONS)) for _ in range(2))
    assert len(first) == 2
    assert all(equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(list(validation_batches(store, 2, 3, 0, OPTIONS))) == 1  # fewer rows than a batch


def test_eagle3_batches_have_no_rollouts(prepared):
    store = RowStore([prepared / "features"], "train", (1,))
    batch = make_batch(store, np.array([0, 1]), [(0, 0, 0), (0, 0, 1)], None)
    assert batch.anchors.shape == batch.lengths.shape == (1, 2, 0)


class Broken(MemoryRows):
    """Fails from the third batch on."""

    calls = 0

    def rows(self, indices):
        self.calls += 1
        if self.calls > 2:
            raise TrainError("the disk is gone")
        return super().rows(indices)


def packed_rows(count):
    tokens, flags = np.arange(8, dtype=np.int32), np.ones(8, bool)
    return pack([Document(str(i), tokens, flags) for i in range(count)], 8)


def test_an_error_while_a_batch_is_made_surfaces_with_its_batch():
    loader = BatchLoader(Broken(packed_rows(5)), 2, 0, None)
    taken(loader, 2)
    with pytest.raises(TrainError, match="the disk is gone"):
        next(loader)


def test_closing_stops_the_thread():
    before = set(threading.enumerate())
    loader = BatchLoader(MemoryRows(packed_rows(5)), 2, 0, None)
    next(loader)
    (thread,) = set(threading.enumerate()) - before
    loader.close()
    thread.join(10)
    assert not thread.is_alive()


def test_markers_of_the_template_have_a_meaning_and_spare_ids_do_not():
    meaning, special = template_ids(tiny_run.tokenizer())
    assert meaning == {tiny_run.START, tiny_run.END}
    assert special == {tiny_run.START, tiny_run.SPARE, tiny_run.END}
