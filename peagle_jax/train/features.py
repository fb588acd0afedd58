"""Target features of packed rows, computed once and stored as memory-mapped arrays.

A folder holds ``manifest.json`` (what was computed, of what, by which weights) and one folder a
shard with plain .npy arrays: tokens, segment_ids, positions int32 (R, n), flags uint8 (R, n),
features (R, n, C) and hidden (R, n, D), the normed last state. bfloat16 is stored as its bits
(uint16), since .npy has no such type. A shard appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Int

from peagle_jax.config import TargetConfig
from peagle_jax.layers.attention import packed_attention
from peagle_jax.models import stack
from peagle_jax.parallel.sequence import WHOLE, SequenceParts
from peagle_jax.train.packing import PackedRows
from peagle_jax.train.places import existing
from peagle_jax.train.recipe import TrainError

ARRAYS = ("tokens", "segment_ids", "positions", "flags", "features", "hidden")
SPLITS = ("train", "heldout")
DTYPES = ("bfloat16", "float32")
VERSION = 1
LEFT_AFTER = 3600.0
"""Seconds without a change after which a part of a shard is nobody's: no shard takes so long to write."""


@functools.partial(jax.jit, static_argnames=("cfg", "taps", "dtype", "parts"))
def compute(
    params: stack.TargetParams,
    cfg: TargetConfig,
    tokens: Int[Array, "b t"],
    segment_ids: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    taps: tuple[int, ...],
    dtype: jnp.dtype,
    parts: SequenceParts = WHOLE,
) -> tuple[Array, Array]:
    """Tapped features (B, T, C) and the normed last state (B, T, D), both of ``dtype``. ``parts`` works on
    so many parts of every row, which a mesh can hold apart."""

    def part(tokens: Array, ids: Array, positions: Array, index: Array) -> tuple[Array, Array]:
        queries = None if parts.count == 1 else (ids, index)

        def attend(q: Array, k: Array, v: Array, **layer: Any) -> Array:
            k, v = (parts.whole(x) for x in (k, v))
            return packed_attention(q, k, v, all_ids, params.embed.dtype, queries=queries, **layer)

        out = stack.forward_packed(params, cfg, tokens, positions, attend, taps)
        return out.features.astype(dtype), stack.final_hidden(params, cfg, out.hidden).astype(dtype)

    all_ids = parts.everywhere(segment_ids)
    rows = map(parts.split, (tokens, segment_ids, positions))
    features, hidden = parts.map(part, *rows, parts.positions(tokens.shape[1]))
    return parts.join(features), parts.join(hidden)


def weights_digest(params: stack.TargetParams) -> str:
    """sha256 over the shapes, dtypes and bytes of a target's weights, in its unrolled form."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(stack.unstack_layers(params)):
        host = np.asarray(leaf)
        digest.update(f"{host.shape}{host.dtype}".encode())
        digest.update(np.ascontiguousarray(host).view(np.uint8))
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Identity:
    """What stored features depend on. A folder with another identity is refused."""

    target: str
    weights: str
    data: str
    taps: tuple[int, ...]
    dtype: str
    row_length: int
    hidden_size: int
    vocab_size: int

    def plain(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "taps": list(self.taps)}


def rows_digest(splits: dict[str, PackedRows]) -> str:
    """sha256 of the packed rows themselves: it changes with the data, the template, the tokenizer,
    the packing and the held-out share."""
    digest = hashlib.sha256()
    for name in SPLITS:
        for field in dataclasses.fields(PackedRows):
            digest.update(np.ascontiguousarray(getattr(splits[name], field.name)))
    return digest.hexdigest()


def bytes_per_token(identity: Identity) -> int:
    """Bytes on disk for one token of a row."""
    width = identity.hidden_size * (len(identity.taps) + 1)
    return width * (2 if identity.dtype == "bfloat16" else 4) + 3 * 4 + 1


def check_manifest(folder: Path, wanted: dict[str, Any]) -> bool:
    """Whether there is a manifest. Raises TrainError: it is not the ``wanted`` one."""
    if not (folder / "manifest.json").exists():
        return False
    found = read_manifest(folder)
    # What can be told goes before digests, which change with it.
    for key in sorted(wanted, key=lambda key: key in ("data", "weights", "shards")):
        value = wanted[key]
        if found.get(key) != value:
            shown = "" if key in ("data", "weights", "shards") else f" {found.get(key)}, not {value}"
            raise TrainError(
                f"{folder} holds features of other {key}{shown}; choose another features.folder or delete it"
            )
    return True


def check_row_length(row_length: int, cfg: TargetConfig) -> None:
    """Raises TrainError for rows longer than the target's positions."""
    if row_length > cfg.max_position:
        raise TrainError(
            f"features.row_length is {row_length}, but the target has {cfg.max_position} positions; "
            f"set it to {cfg.max_position} at most"
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest. Raises TrainError: none there, or not readable."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise TrainError(
            f"{folder} holds no features; compute them with "
            "`python -m peagle_jax.train features --config ...`"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise TrainError(f"{path} is not readable: {reason}; delete the folder") from error
    kinds = {"target": str, "weights": str, "data": str, "dtype": str, "row_length": int, "hidden_size": int}
    sound = isinstance(manifest, dict) and all(type(manifest.get(key)) is kind for key, kind in kinds.items())
    lists = [manifest.get("taps"), *_shard_counts(manifest)] if sound else []
    if not sound or manifest["dtype"] not in DTYPES or not all(_is_counts(part) for part in lists):
        raise TrainError(f"{path} is not what `features` wrote; delete the folder and compute it again")
    return manifest


def _shard_counts(manifest: dict[str, Any]) -> list[Any]:
    shards = manifest.get("shards")
    return [shards.get(split) for split in SPLITS] if isinstance(shards, dict) else [None]


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that readers see the old file or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)


def shard_name(split: str, index: int) -> str:
    return f"{split}-{index:05d}"


def shard_plan(rows: int, shard_rows: int) -> list[int]:
    """Rows of each shard."""
    return [min(shard_rows, rows - start) for start in range(0, rows, shard_rows)]


def drop_leftovers(folder: Path) -> None:
    """Removes parts of shards that killed processes have left, an hour after their last change."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):  # its process has just finished it
            if time.time() - part.stat().st_mtime > LEFT_AFTER:
                shutil.rmtree(part, ignore_errors=True)


def write_shard(folder: Path, name: str, arrays: dict[str, np.ndarray]) -> None:
    """Writes a shard under a temporary name, then renames it. bfloat16 is stored as uint16.

    Raises TrainError: the disk is full or refuses; nothing of this shard is left then.
    """
    part = folder / f".{name}.{os.getpid()}.part"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        record = {}
        for key, array in arrays.items():
            array = np.ascontiguousarray(array)
            stored = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
            with (part / f"{key}.npy").open("wb") as file:
                np.save(file, stored)
                file.flush()
                os.fsync(file.fileno())  # a full network disk may tell only now
            record[key] = {"bytes": stored.nbytes, "crc32": zlib.crc32(stored.view(np.uint8))}
        write_json(part / "shard.json", record)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise TrainError(
            f"{folder}: shard {name} cannot be written: {error.strerror or error}; finished shards are kept. "
            f"Make room ({shutil.disk_usage(folder).free / 1e9:.2f} GB are free) and run it again"
        ) from error
    try:
        os.replace(part, folder / name)
    except OSError:  # another process was faster with the same shard
        shutil.rmtree(part, ignore_errors=True)
        if not (folder / name).is_dir():
            raise


def read_shard(folder: Path, name: str, dtype: str, vocab_size: int) -> dict[str, np.ndarray]:
    """A shard's arrays, memory-mapped. Raises TrainError: the shard is missing, cut or damaged."""
    where = folder / name
    if not where.is_dir():
        raise TrainError(
            f"{folder} lacks the shard {name}; run `python -m peagle_jax.train features` to finish it"
        )
    out = {}
    for key in ARRAYS:
        try:
            array = np.load(where / f"{key}.npy", mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise TrainError(
                f"{where}/{key}.npy is not readable; delete {where} and compute it again"
            ) from error
        stored = np.uint16 if dtype == "bfloat16" else np.float32
        expected = {"flags": np.uint8, "features": stored, "hidden": stored}.get(key, np.int32)
        rows = array.shape[:2] if not out else out[ARRAYS[0]].shape
        dimensions = 3 if key in ("features", "hidden") else 2
        if array.dtype != expected or array.ndim != dimensions or array.shape[:2] != rows:
            raise TrainError(
                f"{where}/{key}.npy holds {array.dtype} of shape {array.shape}, not what `features` wrote; "
                f"delete {where} and compute it again"
            )
        out[key] = array.view(ml_dtypes.bfloat16) if expected == np.uint16 else array
    for key, least, most in (
        ("tokens", 0, vocab_size - 1),
        ("segment_ids", -1, rows[1] - 1),
        ("positions", 0, rows[1] - 1),
        ("flags", 0, 1),
    ):
        array = out[key]
        if array.size and not least <= array.min() <= array.max() <= most:
            raise TrainError(
                f"{where}/{key}.npy holds {array.min()} to {array.max()}, expected {least} to {most}: it is "
                f"damaged; delete {where} and compute it again"
            )
    return out


def verify_shard(folder: Path, name: str) -> None:
    """Raises TrainError unless a shard's arrays have the checksums written with them."""
    where = folder / name
    try:
        record = json.loads((where / "shard.json").read_text())
        for key in ARRAYS:
            stored = np.load(where / f"{key}.npy", mmap_mode="r")
            if zlib.crc32(np.ascontiguousarray(stored).view(np.uint8)) != record[key]["crc32"]:
                raise TrainError(
                    f"{where}/{key}.npy has a wrong checksum; delete {where} and compute it again"
                )
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError) as error:
        if isinstance(error, TrainError):
            raise
        raise TrainError(f"{where} is not readable; delete it and compute it again") from error


def compute_shard(
    params: stack.TargetParams,
    cfg: TargetConfig,
    rows: PackedRows,
    identity: Identity,
    batch_rows: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> dict[str, np.ndarray]:
    """Arrays of one shard. The last batch is filled up with padding, so one shape compiles."""
    dtype = jnp.dtype(identity.dtype)
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for start in range(0, len(rows), batch_rows):
        batch = rows[start : start + batch_rows]
        count = len(batch)
        fill = ((0, batch_rows - count), (0, 0))
        features, hidden = compute(
            params,
            cfg,
            jnp.asarray(np.pad(batch.tokens, fill)),
            jnp.asarray(np.pad(batch.segment_ids, fill, constant_values=-1)),
            jnp.asarray(np.pad(batch.positions, fill)),
            identity.taps,
            dtype,
        )
        parts.append((np.asarray(features)[:count], np.asarray(hidden)[:count]))
        advance(batch.tokens.size)
    arrays = {f.name: getattr(rows, f.name) for f in dataclasses.fields(PackedRows)}
    arrays["features"] = np.concatenate([f for f, _ in parts])
    arrays["hidden"] = np.concatenate([h for _, h in parts])
    if not all(np.isfinite(arrays[key].astype(np.float32)).all() for key in ("features", "hidden")):
        raise TrainError(
            "the target produced a value that is not finite; its weights or dtype cannot be used"
        )
    return arrays


def compute_folder(
    folder: Path,
    params: stack.TargetParams,
    cfg: TargetConfig,
    splits: dict[str, PackedRows],
    identity: Identity,
    *,
    batch_rows: int,
    shard_rows: int,
    files: Sequence[str] = (),
    advance: Callable[[int], None] = lambda tokens: None,
) -> int:
    """Computes every shard that is not there yet, and compares the others with their checksums;
    returns how many were computed. Several processes may work on one folder; a killed one leaves a
    hidden .part folder behind, which the next run removes. ``files`` are the names of the data, to be kept.

    Raises TrainError: the folder belongs to another identity, a shard is damaged, or the disk is
    too small.
    """
    stack.check_taps(cfg, identity.taps)
    check_row_length(identity.row_length, cfg)
    plan = {name: shard_plan(len(splits[name]), shard_rows) for name in SPLITS}
    manifest = {"version": VERSION, **identity.plain(), "shards": plan}
    begun = check_manifest(folder, manifest)
    missing = [
        (split, i)
        for split in SPLITS
        for i in range(len(plan[split]))
        if not (folder / shard_name(split, i)).is_dir()
    ]
    need = sum(plan[s][i] for s, i in missing) * identity.row_length * bytes_per_token(identity)
    free = shutil.disk_usage(existing(folder)).free
    if need > free:
        raise TrainError(
            f"features need {need / 1e9:.2f} GB in {folder}, but {free / 1e9:.2f} GB are free; make room or "
            "choose another features.folder"
        )
    if not begun:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "manifest.json", manifest | {"files": list(files)})
    drop_leftovers(folder)
    written = 0
    for split in SPLITS:
        for i, count in enumerate(plan[split]):
            if (folder / shard_name(split, i)).is_dir():
                verify_shard(folder, shard_name(split, i))
                advance(count * identity.row_length)
                continue
            rows = splits[split][i * shard_rows : i * shard_rows + count]
            arrays = compute_shard(params, cfg, rows, identity, batch_rows, advance)
            write_shard(folder, shard_name(split, i), arrays)
            written += 1
    return written
