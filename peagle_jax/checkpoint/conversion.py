"""Heads from one layout to another, and the proof that nothing changed on the way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.checkpoint.dialects import HEAD_NAMES, Convention, MapKind
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.folder import read_json
from peagle_jax.checkpoint.head import load_head
from peagle_jax.checkpoint.layouts import Layout, write_head
from peagle_jax.checkpoint.stored_head import StoredHead, read_stored_head
from peagle_jax.checkpoint.target_store import EMBEDDED, TargetFacts
from peagle_jax.checkpoint.weights import open_weights
from peagle_jax.config import DrafterConfig
from peagle_jax.drafter.head import DrafterParams, draft_logits, fuse, run_head
from peagle_jax.layers.attention import packed_attention

_TABLES_OF: dict[Layout, tuple[str, ...]] = {"speculators": ("embed", "lm_head"), "eagle3": ("lm_head",)}
"""Tables that a layout always holds, where others may leave them to the target."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a head is to be read where its files do not say it, as ``load_head`` has it."""

    taps: tuple[int, ...] | None = None
    convention: Convention = "auto"
    map_kind: MapKind = "offsets"

    def options(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head rather than a target: it has fc, or a key that only heads have."""
    config = read_json(folder / "config.json")
    keys = ("draft_vocab_size", "transformer_layer_config", "speculators_model_type", "peagle_jax")
    if any(key in config for key in keys):
        return True
    return {"fc.weight", "model.fc.weight"} & set(open_weights(folder).names()) != set()


def convert_head(
    source: Path,
    into: Path,
    layout: Layout,
    target: TargetFacts | None = None,
    reading: Reading = Reading(),
) -> StoredHead:
    """Reads a head, writes it in another layout with its calibration, and returns what was written.

    Raises:
        CheckpointError: the head cannot be read, the layout cannot hold it, or the disk refuses.
    """
    head = read_stored_head(source, target and target.config, **reading.options())
    if target is not None:
        head = _with_target(head, layout, target)
    write_head(into, head, layout, target and target.config, calibrated_in=source)
    return head


def _with_target(head: StoredHead, layout: Layout, target: TargetFacts) -> StoredHead:
    """The head with the tables that the layout needs, and the target's name where it had none."""
    tensors = dict(head.tensors)
    d, outline = head.outline.block.hidden_size, head.outline
    rows = {"embed": outline.vocab_size, "lm_head": outline.draft_vocab_size}
    for field in _TABLES_OF.get(layout, ()):
        if HEAD_NAMES[field] not in tensors:
            table = target.table(field)
            if table.shape != (rows[field], d):
                raise CheckpointError(
                    f"the head has no {HEAD_NAMES[field]}, and the target's {list(table.shape)} cannot stand "
                    f"in; expected {[rows[field], d]}"
                )
            tensors[HEAD_NAMES[field]] = table.astype(head.dtype)
    verifier = head.about.verifier or {
        "name_or_path": None if target.ref == EMBEDDED else target.ref,  # no other loader knows that name
        "architectures": list(target.architectures),
    }
    return dataclasses.replace(
        head, tensors=tensors, about=dataclasses.replace(head.about, verifier=verifier)
    )


def verify_head(
    head: StoredHead, source: Path, written: Path, target: TargetFacts | None, reading: Reading
) -> dict[str, Any]:
    """Loads what was written and compares: every tensor bit for bit, every fact, and with a target the
    logits of both heads on the same random rows.

    Raises:
        CheckpointError: something differs; the message names it.
    """
    again = read_stored_head(written, target and target.config)
    for name in sorted(head.tensors.keys() | again.tensors.keys()):
        a, b = head.tensors.get(name), again.tensors.get(name)
        if a is None or b is None or not same_bits(a, b):
            raise CheckpointError(f"{written} does not hold tensor {name} as {source} does")
    for field in dataclasses.fields(head.outline):
        values = [getattr(h.outline, field.name) for h in (head, again)]
        if field.name == "taps":
            values = [taps.boundaries for taps in values]
        if values[0] != values[1]:
            raise CheckpointError(f"{written} has {field.name} {values[1]}, where {source} has {values[0]}")
    report: dict[str, Any] = {"tensors": len(again.tensors), "logits": None}
    if target is not None:
        tables = target.tables()
        ours = load_head(source, target.config, tables, **reading.options())
        theirs = load_head(written, target.config, tables)
        a, b = sample_logits(*ours), sample_logits(*theirs)
        if not np.array_equal(a, b):
            raise CheckpointError(
                f"{written} gives other logits than {source}: they differ by {np.abs(a - b).max():.3g}"
            )
        report["logits"] = list(a.shape)
    return report


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have one dtype, one shape and the same bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def sample_logits(cfg: DrafterConfig, params: DrafterParams, rows: int = 8) -> np.ndarray:
    """Draft logits (rows, Vd), float32, of random tokens and features, the same for every head of a shape."""
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, (1, rows)), jnp.int32)
    features = jnp.asarray(rng.normal(size=(1, rows, cfg.feature_size)), params.fc.dtype)
    document, positions = jnp.zeros_like(tokens), jnp.arange(rows)[None]

    @jax.jit
    def logits(params: DrafterParams) -> jax.Array:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return packed_attention(q, k, v, document)

        hidden, _ = run_head(
            params, cfg, tokens, fuse(params, cfg, features), positions, [attend] * cfg.num_layers
        )
        return draft_logits(params, cfg, hidden)[0]

    return np.asarray(logits(params))
