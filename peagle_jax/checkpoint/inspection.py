"""What a head is, line by line, with its faults among the lines: nothing stops at the first one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.checkpoint import dialects
from peagle_jax.checkpoint.config_reader import read_block
from peagle_jax.checkpoint.conversion import Reading
from peagle_jax.checkpoint.dialects import HEAD_NAMES, HeadFacts
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.fields import Config, lookup, optional_integer
from peagle_jax.checkpoint.folder import read_json
from peagle_jax.checkpoint.head_reader import DEFAULT_NUM_DEPTHS, MAPS, HeadOutline, HeadReader
from peagle_jax.checkpoint.pickles import Pickles
from peagle_jax.checkpoint.stored_head import dialect_of
from peagle_jax.checkpoint.target_store import TargetFacts
from peagle_jax.checkpoint.tensors import TensorSource
from peagle_jax.checkpoint.weights import is_orbax, open_weights
from peagle_jax.config import RopeConfig


@dataclasses.dataclass(frozen=True)
class Row:
    """One line: what, and what was found, which may be a fault."""

    name: str
    value: str
    fault: bool = False


class _Rows:
    """Collects lines; what raises becomes one."""

    def __init__(self, place: str) -> None:
        self.rows: list[Row] = []
        self._place, self._told = place, set[str]()

    def add(self, name: str, value: str | None) -> None:
        if value is not None:
            self.rows.append(Row(name, value))

    def fault(self, message: str) -> None:
        """A fault that two lines run into is told once; the folder's name is the table's title."""
        message = message.replace(f"{self._place}/", "").removeprefix(f"{self._place}: ")
        if message not in self._told:
            self._told.add(message)
            self.rows.append(Row("fault", message, True))

    def attempt(self, call: Callable[[], Any], default: Any = None) -> Any:
        try:
            return call()
        except CheckpointError as error:
            self.fault(str(error))
            return default

    def line(self, name: str, call: Callable[[], str | None]) -> None:
        self.add(name, self.attempt(call))


def inspect_head(folder: Path, target: TargetFacts | None = None, reading: Reading = Reading()) -> list[Row]:
    """Every line about a head, faults last.

    Raises nothing for what is wrong with the head: that is in the lines.
    """
    rows, place = _Rows(str(folder)), str(folder / "config.json")
    config = rows.attempt(lambda: read_json(folder / "config.json"), {})
    source = rows.attempt(lambda: open_weights(folder))
    facts = dialects.read_facts(config, place, rows.attempt) if config else None
    if source is not None:
        kind = _kind(folder, source)
        rows.add("files", _files(folder, source, kind))
        if config:
            rows.add("dialect", dialect_of(config, source, kind))
    if facts is None or source is None:
        return _faults_last(rows.rows)
    reader = HeadReader(facts, source, target and target.config, place)
    outline = _Outline(rows, reader, reading)
    _tell_config(rows, config, facts, outline, place)
    _tell_tensors(rows, reader, outline, target, reading)
    return _faults_last(rows.rows)


def _faults_last(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.fault)


def _kind(folder: Path, source: TensorSource) -> str:
    if is_orbax(folder):
        return "Orbax"
    return "PyTorch pickle" if isinstance(source, Pickles) else "safetensors"


def _files(folder: Path, source: TensorSource, kind: str) -> str:
    shards = len(list(folder.glob("*.safetensors" if kind == "safetensors" else "pytorch_model*.bin")))
    return f"{kind}, {f'{shards} shards, ' if shards > 1 else ''}{len(list(source.names()))} tensors"


class _Outline:
    """The parts of a ``HeadOutline``, each of them None where its own fault was told."""

    def __init__(self, rows: _Rows, reader: HeadReader, reading: Reading) -> None:
        attempt, facts = rows.attempt, reader.facts
        attempt(reader.check_target)
        self.block = attempt(lambda: read_block(facts.block, reader.place))
        self.width = self.block and attempt(lambda: reader.target_hidden_size(self.block))
        self.parallel = attempt(reader.is_parallel, reader.has("mask_hidden"))
        self.vocab_size = attempt(reader.vocab_size)
        self.draft_vocab_size = self.vocab_size and attempt(lambda: reader.draft_vocab_size(self.vocab_size))
        count = reader.shape("fc")[-1] // self.width if self.width else 0
        self.taps = count and attempt(lambda: reader.taps(count, reading.taps, reading.convention))
        self.whole: HeadOutline | None = attempt(lambda: reader.outline(reading.taps, reading.convention))
        if self.whole is not None and self.taps and self.taps.boundaries:
            attempt(lambda: self.whole and self.whole.config(reader.place))


def _tell_config(rows: _Rows, config: Config, facts: HeadFacts, outline: _Outline, place: str) -> None:
    rows.add("method", _method(facts, outline))
    layers = rows.attempt(lambda: optional_integer(facts.block, "num_hidden_layers", place))
    block = outline.block
    if block is not None:
        rows.add(
            "layers",
            f"{layers} of width {block.hidden_size}, {block.num_heads} heads and {block.num_kv_heads} of k "
            f"and v, {block.head_dim} wide, ffn {block.intermediate_size}, "
            f"{'Qwen3' if facts.needs_qk_norm else 'Llama'} block",
        )
    if outline.taps:
        boundaries = outline.taps.boundaries
        shown = "" if boundaries is None else f"{', '.join(map(str, boundaries))}; "
        rows.add("taps", f"{shown}{outline.taps.decided}")
    rows.add(
        "norms",
        f"residual {'after' if facts.norm_before_residual else 'before'} hidden_norm "
        f"(norm_before_residual {str(facts.norm_before_residual).lower()}), "
        f"{'one norm' if facts.norm_before_fc else 'no norm'} before fc",
    )
    if block is not None:
        rows.add("RoPE", _rope(block.rope))
    if outline.parallel:
        keys = [*dialects.MASK_TOKEN_KEYS, "dflash_config.mask_token_id"]
        said = [key for key in keys if rows.attempt(lambda key=key: lookup(config, key, place)) is not None]
        rows.add("mask token", f"{facts.mask_token_id}, by {', '.join(said)}" if said else "not named")


def _method(facts: HeadFacts, outline: _Outline) -> str:
    if not outline.parallel:
        return "EAGLE-3: drafts one token a pass"
    depths = facts.num_depths
    stated = f"up to {depths}" if depths else f"not stated, {DEFAULT_NUM_DEPTHS} is taken"
    return f"P-EAGLE: drafts in one pass, trained for K {stated}"


def _rope(rope: RopeConfig) -> str:
    if rope.variant == "default":
        return f"theta {rope.theta:g}, no scaling"
    return f"theta {rope.theta:g}, {rope.variant} by {rope.factor:g} from {rope.original_max_position}"


def _tell_tensors(
    rows: _Rows, reader: HeadReader, outline: _Outline, target: TargetFacts | None, reading: Reading
) -> None:
    whole = outline.whole
    if whole is not None:
        rows.line("vocabulary", lambda: _vocabulary(reader, whole, reading))
    elif outline.draft_vocab_size:
        rows.add("vocabulary", f"drafts {outline.draft_vocab_size} of {outline.vocab_size}")
    for field, what in (("embed", "embedding"), ("lm_head", "output table")):
        rows.line(what, lambda field=field: _table(reader, field, whole, target))
    shapes = None if whole is None else rows.attempt(lambda: reader.shapes(whole))
    sizes: Counter[str] = Counter()
    for name, shape in (shapes or {}).items():
        array = rows.attempt(lambda name=name, shape=shape: reader.stored(name, shape))
        if array is not None:
            sizes[array.dtype.name] += array.nbytes
            if name == HEAD_NAMES["mask_hidden"] and not np.any(array):
                rows.fault("mask_hidden is all zeros: it was not trained, or was lost when it was saved")
    if sizes:
        parts = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.most_common())
        rows.add("dtypes", parts)
    if shapes is not None:
        reader.reader.taken |= {reader.spelled(name) for name in shapes}  # misshaped ones were told
        rows.attempt(reader.finish)


def _vocabulary(reader: HeadReader, outline: HeadOutline, reading: Reading) -> str:
    size, drafts = outline.vocab_size, outline.draft_vocab_size
    ids = reader.target_ids(outline, reading.map_kind)
    maps = " and ".join(name for name in MAPS if reader.has(name))
    if ids is None:
        return f"{size}, all drafted; {f'{maps}: identity' if maps else 'no map'}"
    order = "ascending" if np.all(np.diff(ids) > 0) else "in another order"
    return f"drafts {drafts} of {size}; {maps}: {reading.map_kind}, {order}"


def _table(
    reader: HeadReader, field: str, outline: HeadOutline | None, target: TargetFacts | None
) -> str | None:
    if not reader.has(field):
        fits = outline is None or field == "embed" or outline.draft_vocab_size == outline.vocab_size
        if not fits:
            raise CheckpointError(f"the head drafts a part of the vocabulary and has no {HEAD_NAMES[field]}")
        return "absent: shared with the target"
    own = f"its own, {reader.name(field)} {list(reader.shape(field))}"
    if target is None or reader.shape(field) != (target.config.vocab_size, target.config.hidden_size):
        return own
    theirs = target.table(field)
    array = reader.reader.raw(reader.name(field), theirs.shape)
    same = np.array_equal(array, theirs.astype(array.dtype))
    return f"{own}, {'equal to the target' if same else 'other values than the target'}'s"
