"""Writes tiny checkpoints: Hugging Face folders, GGUF files and heads, from our parameters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle_jax.checkpoint.tensors import gguf_name, hf_name, layer_shapes
from peagle_jax.config import TargetConfig
from peagle_jax.layers.block import BlockParams
from peagle_jax.models.registry import FAMILIES
from peagle_jax.models.stack import TargetParams

ARCHITECTURES = {family.name: family.architectures[0] for family in FAMILIES}


def target_tensors(params: TargetParams, name_of=hf_name) -> dict[str, np.ndarray]:
    """Tensors as a checkpoint stores them, by ``name_of(field, layer)``."""
    found = {
        name_of(field, None): np.asarray(getattr(params, field))
        for field in ("embed", "final_norm", "lm_head")
        if getattr(params, field) is not None
    }
    for i, layer in enumerate(params.layers):
        found |= {name_of(field, i): array for field, array in block_arrays(layer).items()}
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def block_arrays(layer: BlockParams) -> dict[str, np.ndarray]:
    fields = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)}
    return {name: np.asarray(value) for name, value in fields.items() if value is not None}


def with_fields(params: TargetParams, cfg: TargetConfig, fields: tuple[str, ...]) -> TargetParams:
    """Adds random biases or q/k norms to every layer."""
    rng, shapes = np.random.default_rng(5), layer_shapes(cfg.block)
    layers = tuple(
        layer.replace(**{f: jnp.asarray(rng.normal(size=shapes[f]), jnp.float32) for f in fields})
        for layer in params.layers
    )
    return params.replace(layers=layers)


def target_json(cfg: TargetConfig, **changes: Any) -> dict[str, Any]:
    block = cfg.block
    values = {
        "architectures": [ARCHITECTURES[cfg.family]],
        "model_type": cfg.family,
        "hidden_act": "silu",
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "rms_norm_eps": block.rms_norm_eps,
        "rope_theta": block.rope.theta,
        "num_hidden_layers": cfg.num_layers,
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.max_position,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "eos_token_id": list(cfg.eos_token_ids),
        "bos_token_id": cfg.bos_token_id,
    } | changes
    return {key: value for key, value in values.items() if value is not MISSING}


MISSING = object()
"""A value that takes the key out."""


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    write_json(folder / "config.json", config)
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_shards(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Three shards and their index."""
    write_json(folder / "config.json", config)
    names, weight_map = sorted(tensors), {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[i::3]}, folder / file)
        weight_map |= dict.fromkeys(names[i::3], file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def write_tokenizer(folder: Path) -> Path:
    """A word tokenizer, so that a folder loads whole."""
    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(folder)
    return folder


BYTES = sorted(
    set(range(0x21, 0x7F)) | set(range(0xA1, 0xAD)) | set(range(0xAE, 0x100))
)  # printed as themselves by byte-level BPE
BYTE_TOKENS = [chr(b) for b in BYTES] + [chr(0x100 + i) for i in range(256 - len(BYTES))]


def llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter writes them: each head's halves interleaved."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


@dataclasses.dataclass
class GGUFOptions:
    """``kinds`` gives tensors (by the end of their name) another type than F32."""

    kinds: Mapping[str, gguf.GGMLQuantizationType] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra_tensors: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    drop: tuple[str, ...] = ()
    tokens: list[str] | None = None
    token_types: list[int] | None = None
    merges: tuple[str, ...] = ("1 2",)
    scores: list[float] | None = None
    pre: str = "smollm"


def write_gguf(
    path: Path, cfg: TargetConfig, params: TargetParams, options: GGUFOptions | None = None
) -> Path:
    """A whole model, by the gguf package's writer. Keys whose extra value is MISSING are left out."""
    options = options or GGUFOptions()
    path.parent.mkdir(parents=True, exist_ok=True)
    arch, block = cfg.family, cfg.block
    tokens = options.tokens or [*BYTE_TOKENS, "12"]
    values: dict[str, Any] = {
        f"{arch}.block_count": cfg.num_layers,
        f"{arch}.context_length": cfg.max_position,
        f"{arch}.embedding_length": block.hidden_size,
        f"{arch}.feed_forward_length": block.intermediate_size,
        f"{arch}.attention.head_count": block.num_heads,
        f"{arch}.attention.head_count_kv": block.num_kv_heads,
        f"{arch}.attention.key_length": block.head_dim,
        f"{arch}.attention.value_length": block.head_dim,
        f"{arch}.rope.dimension_count": block.head_dim,
        f"{arch}.rope.freq_base": block.rope.theta,
        f"{arch}.attention.layer_norm_rms_epsilon": block.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": options.pre,
        "tokenizer.ggml.eos_token_id": cfg.eos_token_ids[0],
    } | options.extra
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        if value is MISSING:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_token_list(tokens)
    writer.add_token_types(options.token_types or [1] * len(tokens))
    writer.add_token_merges(list(options.merges))
    if options.scores:
        writer.add_token_scores(options.scores)
    arrays = target_tensors(params, gguf_name) | dict(options.extra_tensors)
    for name, array in arrays.items():
        if name in options.drop:
            continue
        part = name.split(".", 2)[-1]
        if arch == "llama" and part.startswith(("attn_q.", "attn_k.")):
            heads = block.num_heads if part.startswith("attn_q.") else block.num_kv_heads
            array = llama_cpp_order(array, heads)
        kind = next((k for end, k in options.kinds.items() if name.endswith(end)), None)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
