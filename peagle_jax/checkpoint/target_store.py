"""Targets as folders: what a head asks of its target, and targets written as Hugging Face names them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from peagle_jax.checkpoint import embedded, gguf
from peagle_jax.checkpoint.config_reader import read_target_config
from peagle_jax.checkpoint.config_writer import block_json
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.experts import named_experts
from peagle_jax.checkpoint.folder import WEIGHTS, locate_target, read_json, replace_folder
from peagle_jax.checkpoint.gguf_tokenizer import build_tokenizer
from peagle_jax.checkpoint.huggingface import load_folder, read_generation
from peagle_jax.checkpoint.placing import Nowhere
from peagle_jax.checkpoint.tensors import Reader, gguf_name, hf_name
from peagle_jax.checkpoint.weights import open_weights
from peagle_jax.config import TargetConfig
from peagle_jax.layers.block import BlockParams
from peagle_jax.models.family import LAYER_NAMES, MODEL_NAMES
from peagle_jax.models.registry import by_model_type
from peagle_jax.models.stack import TargetParams, unstack_layers

EMBEDDED = "embedded"
"""The reference that names the embedded model where None would mean no target."""

_KEPT = ("*.json", "*.jinja", "tokenizer.model", "*.txt")


@dataclasses.dataclass
class TargetFacts:
    """A target's config and, when asked for, its two tables; no layer is read."""

    config: TargetConfig
    ref: str
    architectures: tuple[str, ...]
    _reader: Reader
    _is_gguf: bool

    def table(self, field: str) -> np.ndarray:
        """``embed`` or ``lm_head`` (V, D) as stored; a tied model's lm_head is its embedding.

        Raises:
            CheckpointError: the file lacks it.
        """
        name_of = gguf_name if self._is_gguf else hf_name
        if field == "lm_head" and not self._reader.has(name_of("lm_head", None)):
            field = "embed"
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self._reader.take(name_of(field, None), shape, None)

    def tables(self, dtype: Any = jnp.float32) -> TargetParams:
        """Parameters that have the tables and no layers, for ``load_head``."""
        embed, norm = jnp.asarray(self.table("embed"), dtype), jnp.ones(self.config.hidden_size, dtype)
        return TargetParams(embed, (), norm, jnp.asarray(self.table("lm_head"), dtype))


def read_target_facts(ref: str, revision: str | None = None) -> TargetFacts:
    """Raises CheckpointError when there is no such target, or it is not supported."""
    path = embedded.embedded_path() if ref == EMBEDDED else locate_target(ref, revision)
    if path.is_file():
        file = gguf.GGUFFile(path)
        return TargetFacts(gguf.read_config(file), ref, file.family.architectures[:1], Reader(file), True)
    raw = read_json(path / "config.json")
    config = read_target_config(raw, read_generation(path), str(path / "config.json"))
    names = tuple(raw.get("architectures") or by_model_type(config.family).architectures[:1])
    return TargetFacts(config, ref, names, Reader(open_weights(path)), False)


def target_tensors(cfg: TargetConfig, params: TargetParams) -> dict[str, np.ndarray]:
    """Every weight under its Hugging Face name.

    Raises:
        CheckpointError: a layer has a weight that has no such name.
    """
    family = by_model_type(cfg.family)
    out = {
        names.hf: np.asarray(getattr(params, field))
        for field, names in MODEL_NAMES.items()
        if getattr(params, field) is not None
    }
    for index, layer in enumerate(_layers_of(params)):
        for part in dataclasses.fields(layer):
            array = getattr(layer, part.name)
            if array is None:
                continue
            if part.name == "experts":
                out |= named_experts(family, array, index)
                continue
            if part.name not in LAYER_NAMES:
                raise CheckpointError(f"a layer's {part.name} has no Hugging Face name to be saved under")
            out[hf_name(part.name, index, family)] = np.asarray(array)
    return {name: np.ascontiguousarray(value) for name, value in out.items()}


def target_json(cfg: TargetConfig, params: TargetParams) -> dict[str, Any]:
    """config.json of a target. ``read_target_config`` gives the same config back."""
    family, first = by_model_type(cfg.family), _layers_of(params)[0]
    out: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_types[0],
        **block_json(cfg.block),
        "num_hidden_layers": cfg.num_layers,
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.max_position,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": list(cfg.eos_token_ids),
        "torch_dtype": np.dtype(params.embed.dtype).name,
    }
    if cfg.windows:
        kinds = {True: "sliding_attention", False: "full_attention"}
        out |= {"layer_types": [kinds[w > 0] for w in cfg.windows], "sliding_window": max(cfg.windows)}
    if (moe := cfg.block.moe) is not None:
        each = family.experts == "each"
        out |= {"num_experts" if each else "num_local_experts": moe.num_experts}
        out |= {"num_experts_per_tok": moe.top_k, "norm_topk_prob": moe.norm_topk_prob}
        out |= {"moe_intermediate_size": cfg.block.intermediate_size} if each else {}
    if cfg.block.swiglu_limit is not None:
        out["swiglu_limit"] = cfg.block.swiglu_limit
    for flag, fields in family.by_flag:
        out[flag] = getattr(first, fields[0]) is not None
    return out


def _layers_of(params: TargetParams) -> tuple[BlockParams, ...]:
    layers = unstack_layers(params).layers
    assert isinstance(layers, tuple)
    return layers


def store_target(ref: str, folder: Path, revision: str | None = None) -> dict[str, np.ndarray]:
    """Writes a target as Orbax arrays under their Hugging Face names, with config.json, the generation
    defaults and the tokenizer beside them; all of it or nothing. Returns the arrays.

    A folder's tensors keep their dtypes; a GGUF file's are decoded to float32, as they are when it loads.

    Raises:
        CheckpointError: there is no such target, it is not supported, or would not load; or the disk refuses.
    """
    from peagle_jax.checkpoint.orbax import save_arrays  # importing Orbax takes a second

    path = embedded.embedded_path() if ref == EMBEDDED else locate_target(ref, revision)
    is_file = path.is_file()
    arrays, config = _from_gguf(path) if is_file else _from_folder(path)

    def write(into: Path) -> None:
        if is_file:
            file = gguf.GGUFFile(path)
            build_tokenizer(file).save_pretrained(into)
            _write_json(into / "generation_config.json", gguf.read_sampling(file))
        else:
            _copy_texts(path, into)
        save_arrays(into, arrays)
        _write_json(into / "config.json", config)

    replace_folder(folder, write, drop=WEIGHTS)
    return arrays


def _from_folder(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    load_folder(folder, jnp.bfloat16, places_of=Nowhere)  # refuses what would not load later
    source = open_weights(folder)
    return {name: source.read(name) for name in source.names()}, read_json(folder / "config.json")


def _from_gguf(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    file = gguf.GGUFFile(path)
    cfg = gguf.read_config(file)
    params = gguf.load_params(file, cfg, jnp.float32)
    return target_tensors(cfg, params), target_json(cfg, params)


def _copy_texts(folder: Path, into: Path) -> None:
    """The tokenizer's files and what else describes the model; indices of the old weights stay behind."""
    for pattern in _KEPT:
        for file in folder.glob(pattern):
            if not file.name.endswith(".index.json") and file.name != "orbax.json":
                shutil.copyfile(file, into / file.name)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
