"""Targets from a Hugging Face folder: config.json, safetensors, generation_config.json."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from peagle_jax.checkpoint.config_reader import family_of, read_target_config, text_config
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.experts import EXPERTS
from peagle_jax.checkpoint.fields import boolean
from peagle_jax.checkpoint.folder import read_json
from peagle_jax.checkpoint.placing import Places
from peagle_jax.checkpoint.tensors import Reader, hf_name, read_target
from peagle_jax.checkpoint.weights import open_weights
from peagle_jax.config import TargetConfig
from peagle_jax.models.stack import TargetParams

log = logging.getLogger(__name__)


def read_generation(folder: Path) -> dict[str, Any]:
    """``generation_config.json``, or nothing when the folder has none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


def load_folder(
    folder: Path,
    dtype: DTypeLike = jnp.float32,
    stacked: bool = False,
    mesh: Mesh | None = None,
    quantization: str | None = None,
    places_of: Callable[[Mesh | None, TargetConfig], Places] = Places,
) -> tuple[TargetConfig, TargetParams]:
    """Config and weights of a target, on a ``mesh`` or the first device, or as ``places_of`` has it.

    An output table that differs from the embedding is kept even if the config ties them.

    Raises:
        CheckpointError: the config is not supported, or a tensor is missing, misshaped or unknown.
        ConfigError: a dimension cannot be split over the mesh.
    """
    raw = read_json(folder / "config.json")
    place = str(folder / "config.json")
    cfg = read_target_config(raw, read_generation(folder), place)
    reader = Reader(open_weights(folder), quantization)
    if cfg.tie_word_embeddings and reader.has("lm_head.weight"):
        cfg = _settle_tie(cfg, reader)
    family, keys = family_of(raw, place), text_config(raw, place)
    fields = family.layer_fields({flag: boolean(keys, flag, place) for flag, _ in family.by_flag})
    places, name_of = places_of(mesh, cfg), partial(hf_name, family=family)
    experts = EXPERTS.get(family.experts)
    params = read_target(reader, cfg, fields, name_of, dtype, stacked, places, experts)
    reader.finish(ignore=lambda name: name.endswith("rotary_emb.inv_freq"))
    return places.config, params


def _settle_tie(cfg: TargetConfig, reader: Reader) -> TargetConfig:
    head = reader.raw("lm_head.weight", (cfg.vocab_size, cfg.hidden_size))
    embed = reader.raw("model.embed_tokens.weight", (cfg.vocab_size, cfg.hidden_size))
    if np.array_equal(head, embed):
        return cfg
    log.warning(
        "%s ties the embeddings but has a different lm_head.weight; using lm_head.weight", reader.source.place
    )
    return dataclasses.replace(cfg, tie_word_embeddings=False)


def load_tokenizer(ref: str | Path, revision: str | None = None) -> Any:
    """The transformers tokenizer of a folder or hub id. Raises CheckpointError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(ref), revision=revision)
    except Exception as error:  # transformers raises what its parsers raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{ref} has no tokenizer that loads ({reason}); name one with the tokenizer option"
        ) from error
