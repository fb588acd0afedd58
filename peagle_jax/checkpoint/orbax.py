"""Heads as Orbax checkpoints: bit for bit, and restored by shapes that the checkpoint states itself.

The shapes come from ``head.json``, never from saved shardings, so what many devices wrote one device
can read. ``head.json`` is written last: a folder without it was never finished.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.folder import read_json, replace_folder
from peagle_jax.config import BlockConfig, ConfigError, DrafterConfig, RopeConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.block import BlockParams

FORMAT_VERSION = 1
_HEADER = "head.json"
_ARRAYS = "arrays"


def config_to_json(cfg: DrafterConfig) -> dict[str, Any]:
    """The config as JSON values."""
    return dataclasses.asdict(cfg)


def config_from_json(values: dict[str, Any]) -> DrafterConfig:
    """Inverse of ``config_to_json``. Raises ConfigError or TypeError on foreign values."""
    block = dict(values["block"])
    block["rope"] = RopeConfig(**block["rope"])
    return DrafterConfig(**{**values, "block": BlockConfig(**block), "taps": tuple(values["taps"])})


def _flatten(params: DrafterParams, share_embed: bool) -> dict[str, jax.Array]:
    flat = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name == "layers":
            for i, layer in enumerate(value):
                for part in dataclasses.fields(layer):
                    flat[f"layers.{i}.{part.name}"] = getattr(layer, part.name)
        elif not (share_embed and field.name == "embed"):
            flat[field.name] = value
    return {name: value for name, value in flat.items() if value is not None}


def _unflatten(flat: dict[str, jax.Array], num_layers: int) -> DrafterParams:
    layers: list[dict[str, jax.Array]] = [{} for _ in range(num_layers)]
    own = {}
    for name, value in flat.items():
        if name.startswith("layers."):
            _, index, field = name.split(".")
            layers[int(index)][field] = value
        else:
            own[name] = value
    return DrafterParams(layers=tuple(BlockParams(**layer) for layer in layers), **own)


def save(folder: str | Path, cfg: DrafterConfig, params: DrafterParams, *, share_embed: bool = False) -> None:
    """Writes the head, all of it or nothing. ``share_embed`` leaves the embedding out.

    Raises:
        CheckpointError: the disk refuses.
    """
    flat = _flatten(params, share_embed)
    shapes = {name: [list(value.shape), np.dtype(value.dtype).name] for name, value in flat.items()}
    header = {"format_version": FORMAT_VERSION, "config": config_to_json(cfg), "arrays": shapes}

    def write(into: Path) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((into / _ARRAYS).absolute(), flat)
        (into / _HEADER).write_text(json.dumps(header, indent=2) + "\n")

    replace_folder(Path(folder), write)


def restore(
    folder: str | Path,
    *,
    embed: jax.Array | None = None,
    sharding: jax.sharding.Sharding | None = None,
) -> tuple[DrafterConfig, DrafterParams]:
    """The head as saved, every array placed by ``sharding`` (None: the first device).

    Args:
        embed: the target's table, for a head that was saved without its own.

    Raises:
        CheckpointError: not such a checkpoint, another version, or no embedding.
    """
    folder = Path(folder)
    header = read_json(folder / _HEADER)
    if header.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder / _HEADER} has format_version {header.get('format_version')}; expected {FORMAT_VERSION}"
        )
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    try:
        cfg = config_from_json(header["config"])
        wanted = {
            name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)
            for name, (shape, dtype) in header["arrays"].items()
        }
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / _HEADER} does not describe a head: {error}") from error
    if "embed" not in wanted and embed is None:
        raise CheckpointError(f"{folder} was saved without its embedding; give the target's")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            flat = checkpointer.restore((folder / _ARRAYS).absolute(), wanted)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{folder / _ARRAYS} cannot be restored: {reason}") from error
    if "embed" not in wanted:
        flat["embed"] = embed
    return cfg, _unflatten(flat, cfg.num_layers)
