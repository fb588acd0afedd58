"""Loads and saves heads. What is saved has the layout that vLLM loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

import peagle_jax
from peagle_jax.checkpoint.dialects import HEAD_NAMES, Convention, MapKind, Taps, layer_name, read_facts
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.folder import read_json, resolve
from peagle_jax.checkpoint.head_loader import HeadLoader
from peagle_jax.checkpoint.head_reader import HeadOutline
from peagle_jax.checkpoint.layouts import write_head
from peagle_jax.checkpoint.stored_head import About, StoredHead, check_whole
from peagle_jax.checkpoint.weights import open_weights
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.models.family import LAYER_NAMES
from peagle_jax.models.stack import TargetParams

DEFAULT_HEAD = "smollm2-135m-instruct-p-eagle"


def default_head_path() -> Path | None:
    """The folder of the head shipped for the embedded target: in the wheel, or in a checkout."""
    package = Path(peagle_jax.__file__).parent
    for root in (package / "_heads", package.parent / "heads"):
        if (root / DEFAULT_HEAD / "config.json").is_file():
            return root / DEFAULT_HEAD
    return None


def load_head(
    ref: str | Path,
    target: TargetConfig,
    target_params: TargetParams,
    *,
    dtype: DTypeLike = jnp.float32,
    taps: tuple[int, ...] | None = None,
    convention: Convention = "auto",
    map_kind: MapKind = "offsets",
    revision: str | None = None,
    mesh: Mesh | None = None,
    split: bool = True,
) -> tuple[DrafterConfig, DrafterParams]:
    """A head of any supported layout, from a folder or hub id, for ``target``.

    Args:
        dtype: of every float weight; a table shared with the target keeps the target's.
        taps: boundaries that replace the config's.
        convention: what the config's layer ids mean; see ``dialects.resolve_taps``.
        map_kind: what d2t holds; see ``dialects.draft_to_target``.
        mesh: a decoding mesh to place the weights on (default: the first device), in parts if ``split``.

    Returns:
        The config and weights. An embedding (or output table) that is absent or equal to the
        target's is the target's own array.

    Raises:
        CheckpointError: the head contradicts itself, is for another model, or is not supported.
        ConfigError: a dimension cannot be split over the mesh.
    """
    folder = resolve(str(ref), revision)
    place = str(folder / "config.json")
    facts = read_facts(read_json(folder / "config.json"), place)
    loader = HeadLoader(facts, open_weights(folder), target, target_params, np.dtype(dtype), place)
    return loader.load(taps, convention, map_kind, mesh, split)


def save_head(
    folder: str | Path,
    cfg: DrafterConfig,
    params: DrafterParams,
    *,
    target: TargetConfig,
    metadata: dict[str, Any] | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    share_embed: bool,
) -> None:
    """Writes model.safetensors and config.json, both or neither.

    Other files of an existing ``folder`` stay.

    Args:
        target: the model that the head drafts for.
        metadata: JSON values, kept under ``peagle_jax`` in config.json.
        dtype: of every float tensor.
        share_embed: leaves the embedding out; loaders then take the target's.

    Raises:
        CheckpointError: the weights do not fit the config, or the disk refuses.
    """
    if share_embed and cfg.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"a head of width {cfg.hidden_size} cannot share the embedding of a target of width "
            f"{target.hidden_size}; save it with its own"
        )
    about = About(target.bos_token_id, target.eos_token_ids, metadata=metadata or {})
    write_head(Path(folder), to_stored(cfg, params, np.dtype(dtype), share_embed, about), "vllm", target)


def to_stored(
    cfg: DrafterConfig, params: DrafterParams, dtype: np.dtype, share_embed: bool, about: About
) -> StoredHead:
    """The head as files hold it. Raises CheckpointError on a wrong shape."""
    c, tensors = cfg.feature_size, {}

    def put(name: str, array: jax.Array | None) -> None:
        if array is not None:
            tensors[name] = np.ascontiguousarray(np.asarray(array).astype(dtype))

    for field in ("embed", "fc", "fc_bias", "input_norm", "hidden_norm"):
        if not (field == "embed" and share_embed):
            put(HEAD_NAMES[field], getattr(params, field))
    if len(params.layers) != cfg.num_layers:
        raise CheckpointError(f"{len(params.layers)} layers to save; expected {cfg.num_layers}")
    for index, layer in enumerate(params.layers):
        for field in LAYER_NAMES:
            if getattr(layer, field) is not None:
                put(layer_name(field, index), getattr(layer, field))
    put(HEAD_NAMES["final_norm"], params.final_norm)
    put(HEAD_NAMES["lm_head"], params.lm_head)
    if cfg.method == "peagle":
        if params.mask_hidden is None or params.mask_hidden.shape != (c,):
            raise CheckpointError(f"a P-EAGLE head needs mask_hidden of shape [{c}] to be saved")
        put(HEAD_NAMES["mask_hidden"], params.mask_hidden.reshape(1, 1, c))
    if cfg.draft_vocab_size < cfg.vocab_size:
        if params.draft_to_target is None or params.draft_to_target.shape != (cfg.draft_vocab_size,):
            raise CheckpointError(
                f"a head that drafts {cfg.draft_vocab_size} of {cfg.vocab_size} tokens needs draft_to_target "
                f"of shape [{cfg.draft_vocab_size}] to be saved"
            )
        ids = np.asarray(params.draft_to_target).astype(np.int64)
        in_draft = np.zeros(cfg.vocab_size, bool)
        in_draft[ids] = True
        tensors[HEAD_NAMES["d2t"]] = ids - np.arange(cfg.draft_vocab_size)
        tensors[HEAD_NAMES["t2d"]] = in_draft
    values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    outline = HeadOutline(**values | {"taps": Taps(cfg.taps, "boundaries"), "tap_count": len(cfg.taps)})
    head = StoredHead(outline, tensors, about)
    check_whole(head)
    return head
