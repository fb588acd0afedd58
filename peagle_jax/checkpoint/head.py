"""Loads and saves heads. What is saved has the layout that vLLM loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors.numpy import save_file

import peagle_jax
from peagle_jax.checkpoint.dialects import (
    AUX_KEY,
    HEAD_NAMES,
    MASK_TOKEN_KEYS,
    OWN_SECTION,
    Convention,
    layer_name,
    read_facts,
)
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.folder import SafeTensors, read_json, replace_folder, resolve
from peagle_jax.checkpoint.head_loader import HeadLoader
from peagle_jax.checkpoint.tensors import layer_shapes
from peagle_jax.config import DrafterConfig, RopeConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.models.stack import TargetParams

DEFAULT_HEAD = "smollm2-135m-instruct-p-eagle"
FORMAT_VERSION = 1


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
    revision: str | None = None,
    mesh: Mesh | None = None,
    split: bool = True,
) -> tuple[DrafterConfig, DrafterParams]:
    """A head of any supported layout, from a folder or hub id, for ``target``.

    Args:
        dtype: of every float weight; a table shared with the target keeps the target's.
        taps: boundaries that replace the config's.
        convention: what the config's layer ids mean; see ``dialects.resolve_taps``.
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
    loader = HeadLoader(facts, SafeTensors(folder), target, target_params, np.dtype(dtype), place)
    return loader.load(taps, convention, mesh, split)


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
    folder = Path(folder)
    if share_embed and cfg.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"a head of width {cfg.hidden_size} cannot share the embedding of a target of width "
            f"{target.hidden_size}; save it with its own"
        )
    tensors = head_tensors(cfg, params, np.dtype(dtype), share_embed)
    config = head_config(cfg, params, target, np.dtype(dtype), metadata or {})

    def write(into: Path) -> None:
        path = into / "model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors writes for its owner only
        (into / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    replace_folder(folder, write)


def head_tensors(
    cfg: DrafterConfig, params: DrafterParams, dtype: np.dtype, share_embed: bool
) -> dict[str, np.ndarray]:
    """The tensors by saved name. Raises CheckpointError on a wrong shape."""
    d, c, tensors = cfg.hidden_size, cfg.feature_size, {}

    def put(name: str, array: jax.Array | None, shape: tuple[int, ...]) -> None:
        if array is None:
            return
        value = np.asarray(array)
        if value.shape != shape:
            raise CheckpointError(f"{name} has shape {list(value.shape)}; expected {list(shape)} to save it")
        tensors[name] = np.ascontiguousarray(value.astype(dtype))

    if not share_embed:
        put(HEAD_NAMES["embed"], params.embed, (cfg.vocab_size, d))
    put(HEAD_NAMES["fc"], params.fc, (d, c))
    put(HEAD_NAMES["fc_bias"], params.fc_bias, (d,))
    put(HEAD_NAMES["input_norm"], params.input_norm, (c,))
    put(HEAD_NAMES["hidden_norm"], params.hidden_norm, (d,))
    if len(params.layers) != cfg.num_layers:
        raise CheckpointError(f"{len(params.layers)} layers to save; expected {cfg.num_layers}")
    for index, layer in enumerate(params.layers):
        for field, shape in layer_shapes(cfg.block, 2 * d if index == 0 else None).items():
            put(layer_name(field, index), getattr(layer, field), shape)
    put(HEAD_NAMES["final_norm"], params.final_norm, (d,))
    put(HEAD_NAMES["lm_head"], params.lm_head, (cfg.draft_vocab_size, d))
    if cfg.method == "peagle":
        if params.mask_hidden is None or params.mask_hidden.shape != (c,):
            raise CheckpointError(f"a P-EAGLE head needs mask_hidden of shape [{c}] to be saved")
        put(HEAD_NAMES["mask_hidden"], params.mask_hidden.reshape(1, 1, c), (1, 1, c))
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
    return tensors


def head_config(
    cfg: DrafterConfig, params: DrafterParams, target: TargetConfig, dtype: np.dtype, metadata: dict[str, Any]
) -> dict[str, Any]:
    """config.json, with every spelling of a key that some loader reads (p-eagle-spec 1.8)."""
    block, first = cfg.block, params.layers[0]
    qwen3, parallel = first.q_norm is not None, cfg.method == "peagle"
    architecture = "LlamaForCausalLMEagle3"
    if qwen3:
        architecture = "PeagleQwen3ForCausalLM" if parallel else "Eagle3Qwen3ForCausalLM"
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen3" if qwen3 else "llama",
        "hidden_act": "silu",
        "hidden_size": block.hidden_size,
        "target_hidden_size": target.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "intermediate_size": block.intermediate_size,
        "rms_norm_eps": block.rms_norm_eps,
        "rope_theta": block.rope.theta,
        "rope_scaling": rope_section(block.rope),
        "max_position_embeddings": cfg.max_position,
        "vocab_size": cfg.vocab_size,
        "draft_vocab_size": cfg.draft_vocab_size,
        "attention_bias": first.bq is not None,
        "mlp_bias": first.b_gate is not None,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids) or None,
        "torch_dtype": dtype.name,
        "norm_before_residual": cfg.norm_before_residual,
        "norm_before_fc": cfg.norm_before_fc,
        AUX_KEY: list(cfg.taps),
        "eagle_config": {"use_aux_hidden_state": True, AUX_KEY: list(cfg.taps)},
    }
    if parallel:
        config |= {"parallel_drafting": True, "num_depths": cfg.num_depths}
        config |= dict.fromkeys(MASK_TOKEN_KEYS[:3], cfg.mask_token_id)
    config[OWN_SECTION] = {**metadata, "format_version": FORMAT_VERSION, "taps": list(cfg.taps)}
    return config


def rope_section(rope: RopeConfig) -> dict[str, Any] | None:
    """``rope_scaling`` of a config, None for plain RoPE. ``read_rope`` gives the same config back."""
    if rope.variant == "default":
        return None
    section: dict[str, Any] = {"rope_type": rope.variant, "factor": rope.factor}
    if rope.variant in ("llama3", "yarn"):
        section["original_max_position_embeddings"] = rope.original_max_position
    if rope.variant == "llama3":
        section |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.variant == "yarn":
        section |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        stated = {key: getattr(rope, key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        section |= {key: value for key, value in stated.items() if value is not None}
    return section
