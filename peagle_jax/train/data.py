"""Batches of rows, in an order and with rollouts that depend on (seed, step) alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from peagle_jax.train import features
from peagle_jax.train.cod import CodOptions, sample_batch, supervised_positions
from peagle_jax.train.packing import PackedRows
from peagle_jax.train.partition import Batch
from peagle_jax.train.recipe import TrainError

VALIDATION_EPOCH = 2**31  # keys of held-out rollouts; no training epoch has this number
AHEAD = 2  # batches that are made while a step runs


class RowStore:
    """The rows of one split of some folders, memory-mapped, with the features of chosen taps.

    ``on_prompts`` flags every real token of a row as supervised.

    Raises TrainError: a shard is missing, a tap was not stored, or the folders do not go together.
    """

    def __init__(
        self, folders: Sequence[str | Path], split: str, taps: tuple[int, ...], on_prompts: bool = False
    ):
        self.on_prompts = on_prompts
        self.shards: list[dict[str, np.ndarray]] = []
        self.columns: list[list[int]] = []  # of each shard
        first = features.read_manifest(Path(folders[0]))
        self.row_length: int = first["row_length"]
        self.width: int = first["hidden_size"]
        for folder in map(Path, folders):
            manifest = features.read_manifest(folder)
            for key in ("target", "weights", "dtype", "row_length", "hidden_size"):
                if manifest[key] != first[key]:
                    raise TrainError(
                        f"{folder} and {folders[0]} differ in {key}: {manifest[key]} and {first[key]}; "
                        "folders of one run hold rows of one length, by one target"
                    )
            stored = manifest["taps"]
            absent = [t for t in taps if t not in stored]
            if absent:
                raise TrainError(
                    f"{folder} holds features of taps {stored}, not of {absent}; compute them again with "
                    f"features.taps {sorted({*stored, *absent})}"
                )
            for i in range(len(manifest["shards"][split])):
                name = features.shard_name(split, i)
                shard = features.read_shard(folder, name, manifest["dtype"], manifest["vocab_size"])
                found = (*shard["features"].shape[1:], shard["hidden"].shape[2])
                wanted = (self.row_length, len(stored) * self.width, self.width)
                if found != wanted:
                    raise TrainError(
                        f"{folder / name} holds rows, features and states of sizes {found}, but its manifest "
                        f"says {wanted}; delete the folder and compute it again"
                    )
                self.shards.append(shard)
                self.columns.append([stored.index(t) for t in taps])
        self.starts = np.cumsum([0, *(len(s["tokens"]) for s in self.shards)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def array(self, key: str) -> np.ndarray:
        """All rows of a small array (tokens, segment_ids, positions or flags)."""
        return np.concatenate([np.asarray(s[key]) for s in self.shards])

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Chosen rows: every array of a shard, (B, n, ...), features in the order of the taps."""
        places = [(int(np.searchsorted(self.starts, i, "right")) - 1, int(i)) for i in indices]
        out = {
            key: np.stack([self.shards[s][key][i - self.starts[s]] for s, i in places])
            for key in features.ARRAYS
            if key != "features"
        }
        parts = []
        for s, i in places:
            row = self.shards[s]["features"][i - self.starts[s]]
            wide = [row[:, c * self.width : (c + 1) * self.width] for c in self.columns[s]]
            parts.append(np.concatenate(wide, -1))
        out["features"] = np.stack(parts)
        return _flagged(out, self.on_prompts)


class MemoryRows:
    """Packed rows without features, for steps that compute them: theirs have width 0."""

    def __init__(self, packed: PackedRows, on_prompts: bool = False):
        self.packed = packed
        self.on_prompts = on_prompts
        self.row_length: int = packed.tokens.shape[1]
        self.starts = np.array([0, len(packed)])

    def __len__(self) -> int:
        return len(self.packed)

    def array(self, key: str) -> np.ndarray:
        """All rows of tokens, segment_ids, positions or flags."""
        return getattr(self.packed, key)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Chosen rows, as of a RowStore."""
        out = {k: self.array(k)[indices] for k in ("tokens", "segment_ids", "positions", "flags")}
        none = np.zeros((*out["tokens"].shape, 0), np.float32)
        return _flagged({**out, "features": none, "hidden": none}, self.on_prompts)


Rows = RowStore | MemoryRows


def _flagged(rows: dict[str, np.ndarray], on_prompts: bool) -> dict[str, np.ndarray]:
    if on_prompts:
        rows["flags"] = (rows["segment_ids"] >= 0).astype(rows["flags"].dtype)
    return rows


def row_stream(count: int, seed: int) -> grain.MapDataset:
    """(epoch, row) of every place in the endless stream of epochs, each in an order of its own."""
    rows = grain.MapDataset.range(count).shuffle(seed=seed).repeat()
    return rows.map_with_index(lambda place, row: (place // count, int(row)))


def indices_of_step(step: int, batch_rows: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row indices and epochs, (B,), of a step: a window of the stream."""
    stream = row_stream(count, seed)
    pairs = np.array([stream[place] for place in range(step * batch_rows, (step + 1) * batch_rows)])
    return pairs[:, 1], pairs[:, 0]


def make_batch(store: Rows, indices: np.ndarray, keys: list[tuple], options: CodOptions | None) -> Batch:
    """A host batch (numpy arrays). Without ``options`` there are no rollouts (EAGLE-3)."""
    rows = store.rows(indices)
    if options is None:
        anchors = lengths = np.zeros((1, len(indices), 0), np.int32)
    else:
        valid = supervised_positions(rows["flags"], rows["segment_ids"])
        anchors, lengths = sample_batch(valid, rows["segment_ids"], keys, options)
    return Batch(
        tokens=rows["tokens"],
        segment_ids=rows["segment_ids"],
        positions=rows["positions"],
        loss_flags=rows["flags"].astype(bool),
        features=rows["features"],
        target_hidden=rows["hidden"],
        anchors=anchors,
        lengths=lengths,
    )  # pyright: ignore[reportArgumentType]


def _emptied(batch: Batch, real: np.ndarray) -> Batch:
    """The batch with nothing but padding in the rows that are not ``real`` (B,)."""
    return batch.replace(
        segment_ids=np.where(real[:, None], batch.segment_ids, -1),
        loss_flags=batch.loss_flags & real[:, None],
        lengths=np.where(real[:, None], batch.lengths, 0),
    )


def validation_batches(
    store: Rows,
    limit: int,
    batch_rows: int,
    seed: int,
    options: CodOptions | None,
    own: np.ndarray | None = None,
) -> Iterator[Batch]:
    """The first ``limit`` rows (0: all), always with the same rollouts; a last part is left out
    unless it is all there is. ``own`` are the rows of each batch to make; those past its end are empty."""
    count = min(limit or len(store), len(store))
    batch_rows = min(batch_rows, count)
    own = np.arange(batch_rows) if own is None else own
    real = own < batch_rows
    for start in range(0, count - batch_rows + 1, batch_rows):
        indices = start + np.where(real, own, 0)
        keys = [(seed, VALIDATION_EPOCH, int(i)) for i in indices]
        batch = make_batch(store, indices, keys, options)
        yield batch if real.all() else _emptied(batch, real)


class BatchLoader(Iterator[tuple[int, Batch]]):
    """Training batches without end, each with its number of real tokens, made in a thread while the
    step before runs. ``place`` is applied there too (it puts a batch on the devices). ``own`` are the rows
    of each batch that this process reads (None: all); tokens are always those of the whole batch.

    ``state`` is the position after the batches taken so far, as JSON data; a loader over the same rows
    with the same seed goes on from it after ``restore``. Errors surface at ``next``.
    """

    def __init__(
        self,
        store: Rows,
        batch_rows: int,
        seed: int,
        options: CodOptions | None,
        place: Callable[[Batch], Batch] = lambda batch: batch,
        own: np.ndarray | None = None,
    ):
        sizes = (store.array("segment_ids") >= 0).sum(1)
        places = range(batch_rows) if own is None else own.tolist()

        def load(pairs: Sequence[tuple[int, int]]) -> tuple[int, Batch]:
            tokens = int(sizes[[row for _, row in pairs]].sum())
            mine = [pairs[place] for place in places]
            keys = [(seed, epoch, row) for epoch, row in mine]
            return tokens, place(make_batch(store, np.array([row for _, row in mine]), keys, options))

        steps = row_stream(len(store), seed).batch(batch_rows, batch_fn=list).map(load)
        reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=AHEAD)
        self._batches = iter(steps.to_iter_dataset(reading))

    def __next__(self) -> tuple[int, Batch]:
        return next(self._batches)

    def state(self) -> dict[str, Any]:
        return dict(self._batches.get_state())

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position. Raises TrainError: it is none of this kind."""
        try:
            self._batches.set_state(state)
        except (KeyError, TypeError, IndexError) as error:
            raise TrainError(f"a checkpoint holds a data position that is not understood: {state}") from error

    def close(self) -> None:
        """Stops the thread."""
        self._batches.close()
