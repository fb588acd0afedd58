"""Batches of stored rows, in an order and with rollouts that depend on (seed, step) alone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from peagle_jax.train import features
from peagle_jax.train.cod import CodOptions, sample_batch, supervised_positions
from peagle_jax.train.partition import Batch
from peagle_jax.train.recipe import TrainError

T = TypeVar("T")

VALIDATION_EPOCH = 2**31  # keys of held-out rollouts; no training epoch has this number


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
            for key in ("target", "weights", "dtype", "row_length"):
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
                self.shards.append(features.read_shard(folder, name, manifest["dtype"]))
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
        if self.on_prompts:
            out["flags"] = (out["segment_ids"] >= 0).astype(out["flags"].dtype)
        return out


def row_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of all rows in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def indices_of_step(step: int, batch_rows: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row indices and epochs, (B,), of a step: a window of the endless stream of epochs."""
    places = np.arange(step * batch_rows, (step + 1) * batch_rows)
    epochs, within = np.divmod(places, count)
    rows = np.array([row_order(count, seed, e)[w] for e, w in zip(epochs, within, strict=True)])
    return rows, epochs


def make_batch(store: RowStore, indices: np.ndarray, keys: list[tuple], options: CodOptions | None) -> Batch:
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


def training_batches(
    store: RowStore, start: int, batch_rows: int, seed: int, options: CodOptions | None
) -> Iterator[Batch]:
    """Batches of steps ``start``, start + 1, ... without end."""
    step = start
    while True:
        indices, epochs = indices_of_step(step, batch_rows, len(store), seed)
        keys = [(seed, int(e), int(i)) for e, i in zip(epochs, indices, strict=True)]
        yield make_batch(store, indices, keys, options)
        step += 1


def validation_batches(
    store: RowStore, limit: int, batch_rows: int, seed: int, options: CodOptions | None
) -> Iterator[Batch]:
    """The first ``limit`` rows (0: all), always with the same rollouts; a last part is left out
    unless it is all there is."""
    count = min(limit or len(store), len(store))
    batch_rows = min(batch_rows, count)
    for start in range(0, count - batch_rows + 1, batch_rows):
        indices = np.arange(start, start + batch_rows)
        keys = [(seed, VALIDATION_EPOCH, int(i)) for i in indices]
        yield make_batch(store, indices, keys, options)


class Prefetched(Iterator[T]):
    """Runs an iterator in a thread, ``depth`` items ahead; its errors surface at ``next``."""

    _end = object()

    def __init__(self, source: Iterator[T], transform: Callable[[T], T] = lambda x: x, depth: int = 2):
        self._items: queue.Queue[Any] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(source, transform), daemon=True)
        self._thread.start()

    def _run(self, source: Iterator[T], transform: Callable[[T], T]) -> None:
        try:
            for item in source:
                if not self._put((transform(item), None)):
                    return
            self._put((self._end, None))
        except Exception as error:
            self._put((self._end, error))

    def _put(self, item: Any) -> bool:
        while not self._stop.is_set():
            try:
                self._items.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __next__(self) -> T:
        item, error = self._items.get()
        if item is self._end:
            self._items.put((item, error))
            raise error if error is not None else StopIteration
        return item

    def close(self) -> None:
        """Stops the thread and waits for it."""
        self._stop.set()
        self._thread.join()
