"""Loads a target by reference: the embedded default, a GGUF file, a folder or a hub id."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from peagle_jax.checkpoint import embedded, gguf
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.folder import local_path, locate_target
from peagle_jax.checkpoint.gguf_tokenizer import build_tokenizer
from peagle_jax.checkpoint.huggingface import load_folder, load_tokenizer, read_generation
from peagle_jax.checkpoint.placing import Places
from peagle_jax.checkpoint.quantization import check_quantization
from peagle_jax.config import TargetConfig
from peagle_jax.models.stack import TargetParams

log = logging.getLogger(__name__)


@dataclasses.dataclass
class LoadedTarget:
    """A target ready to run. ``generation`` holds the checkpoint's own sampling defaults, under
    ``generation_config.json``'s keys; it may be empty. ``source`` is the file or folder read.
    ``quantization`` is what the weights were loaded in, None for their dtype."""

    config: TargetConfig
    params: TargetParams
    tokenizer: Any
    name: str
    generation: dict[str, Any]
    source: str
    quantization: str | None = None


def load_target(
    ref: str | Path | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    stacked: bool | None = None,
    revision: str | None = None,
    tokenizer: str | None = None,
    mesh: Mesh | None = None,
    quantization: str | None = None,
) -> LoadedTarget:
    """Loads the target named by ``ref``; None is the embedded default.

    Args:
        ref: a .gguf file, a Hugging Face folder (or our Orbax form of one) or one that holds a single .gguf,
            or a hub id.
        dtype: of every weight.
        stacked: layers on a leading axis. None: off on CPU, on elsewhere.
        revision: of a hub id.
        tokenizer: folder or hub id of another tokenizer.
        mesh: a decoding mesh to place the weights on (default: the first device).
        quantization: of the matrices: int8, int4, or gguf (as the file has them); None: in ``dtype``.

    Raises:
        CheckpointError: the reference or its content cannot be loaded.
        ConfigError: a dimension cannot be split over the mesh.
    """
    check_quantization(quantization)
    if stacked is None:
        stacked = jax.default_backend() != "cpu"
    weights = {"dtype": dtype, "stacked": stacked, "quantization": quantization}
    if ref is None:
        return _load_gguf(embedded.embedded_path(), embedded.NAME, tokenizer, mesh, weights)
    ref = str(ref)
    folder = locate_target(ref, revision)
    if folder.suffix == ".gguf" and folder.is_file():
        return _load_gguf(folder, folder.stem, tokenizer, mesh, weights)
    config, params = load_folder(folder, mesh=mesh, **weights)
    name = folder.resolve().name if local_path(ref).is_dir() else ref
    loaded = checked_tokenizer(load_tokenizer(folder if tokenizer is None else tokenizer), config)
    return LoadedTarget(config, params, loaded, name, read_generation(folder), str(folder), quantization)


def _load_gguf(
    path: Path, name: str, tokenizer: str | None, mesh: Mesh | None, weights: dict[str, Any]
) -> LoadedTarget:
    file = gguf.GGUFFile(path)
    config = gguf.read_config(file)
    loaded = build_tokenizer(file) if tokenizer is None else load_tokenizer(tokenizer)
    loaded = checked_tokenizer(loaded, config)
    places = Places(mesh, config)
    params = gguf.load_params(file, config, places=places, **weights)
    sampling, quantization = gguf.read_sampling(file), weights["quantization"]
    return LoadedTarget(places.config, params, loaded, name, sampling, str(path), quantization)


def checked_tokenizer(tokenizer: Any, config: TargetConfig) -> Any:
    """The tokenizer itself. Added tokens past the embeddings are published at times, and only warned of:
    a text that has one is refused when it comes.

    Raises:
        CheckpointError: its vocabulary is larger than the model's; it belongs to another model.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model has {config.vocab_size} "
            "embeddings; name the tokenizer that belongs to this model"
        )
    if len(tokenizer) > config.vocab_size:
        log.warning(
            "the tokenizer's ids go up to %d, but the model has %d embeddings; text with the added tokens "
            "past them is refused",
            len(tokenizer) - 1,
            config.vocab_size,
        )
    return tokenizer
