"""The rows of a run with the target's states on them: stored ones, or rows alone for online features."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from peagle_jax.checkpoint.model import LoadedTarget, load_target
from peagle_jax.config import default_taps
from peagle_jax.train import features, prepare
from peagle_jax.train.data import MemoryRows, Rows, RowStore
from peagle_jax.train.recipe import Recipe, TrainError
from peagle_jax.train.records import file_names


@dataclasses.dataclass
class Source:
    """``weights`` and ``data`` are digests of the target and of the rows; they do not depend on where
    states come from, so that a run may go on with either kind. ``notes`` are for the console."""

    target: LoadedTarget
    train: Rows
    heldout: Rows
    dtype: str
    weights: str
    data: list[str]
    taps: tuple[int, ...]
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def online(self) -> bool:
        return isinstance(self.train, MemoryRows)

    def sample(self, count: int, batch_rows: int) -> dict[str, np.ndarray]:
        """Up to ``count`` training rows with their states, as ``RowStore.rows``."""
        rows = self.train.rows(np.arange(min(count, len(self.train))))
        if isinstance(self.train, RowStore):
            return rows
        identity = features.Identity(
            target=self.target.name,
            weights=self.weights,
            data=self.data[0],
            taps=self.taps,
            dtype=self.dtype,
            row_length=self.train.row_length,
            hidden_size=self.target.config.hidden_size,
            vocab_size=self.target.config.vocab_size,
        )
        params, cfg = self.target.params, self.target.config
        made = features.compute_shard(params, cfg, self.train.packed[:count], identity, batch_rows)
        return {**made, "flags": rows["flags"]}


def open_source(recipe: Recipe) -> Source:
    """Raises TrainError: no row to train on, or stored states of another target; CheckpointError."""
    source = _online(recipe) if recipe.features.mode == "online" else _stored(recipe)
    if not len(source.train):
        where = "data.files" if source.online else recipe.features.folder
        raise TrainError(f"{where} holds no training row")
    return source


def _stored(recipe: Recipe) -> Source:
    folders = (recipe.features.folder, *recipe.features.also)
    manifests = [features.read_manifest(Path(folder)) for folder in folders]
    manifest = manifests[0]
    for key in ("dtype", "row_length"):
        asked = getattr(recipe.features, key)
        if manifest[key] != asked:
            raise TrainError(
                f"{recipe.features.folder} holds features of {key} {manifest[key]}, but features.{key} is "
                f"{asked}; set it to that, or compute features into another folder"
            )
    target = load_target(recipe.target, dtype=jnp.dtype(manifest["dtype"]), tokenizer=recipe.tokenizer)
    weights = features.weights_digest(target.params)
    if manifest["weights"] != weights:
        raise TrainError(
            f"{recipe.features.folder} holds features of {manifest['target']} with other weights than "
            f"{target.name} in {manifest['dtype']}; compute them again or name that target"
        )
    made_of, named = manifest.get("files") or [], file_names(recipe.data.files)
    if made_of and made_of != named:
        raise TrainError(
            f"{recipe.features.folder} holds features of {', '.join(made_of)}, but data.files names "
            f"{', '.join(named)}; compute features of these into another features.folder, or name those"
        )
    width = target.config.hidden_size
    if manifest["hidden_size"] != width:
        raise TrainError(
            f"{recipe.features.folder} says that its hidden_size is {manifest['hidden_size']}, but "
            f"{target.name} has {width}; delete the folder and compute it again"
        )
    features.check_row_length(manifest["row_length"], target.config)
    taps = recipe.head.taps or default_taps(target.config.num_layers)
    train = RowStore(folders, "train", taps, recipe.loss.on_prompts)
    heldout = RowStore(folders, "heldout", taps)
    data = [m["data"] for m in manifests]
    return Source(target, train, heldout, manifest["dtype"], weights, data, taps)


def _online(recipe: Recipe) -> Source:
    dtype = recipe.features.dtype
    prepare.check_data(recipe)
    target = load_target(recipe.target, dtype=jnp.dtype(dtype), tokenizer=recipe.tokenizer)
    documents, summary = prepare.load_documents(recipe, target.tokenizer, target.config)
    splits = prepare.split_rows(recipe, documents)
    train = MemoryRows(splits["train"], recipe.loss.on_prompts)
    heldout = MemoryRows(splits["heldout"])
    taps = recipe.head.taps or default_taps(target.config.num_layers)
    weights, data = features.weights_digest(target.params), [features.rows_digest(splits)]
    notes = [summary.line(), *summary.notes(), "features: computed in every step"]
    return Source(target, train, heldout, dtype, weights, data, taps, notes)
