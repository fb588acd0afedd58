"""A head as files hold it, under our names and in its own dtypes: what conversions start from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.checkpoint.dialects import (
    HEAD_NAMES,
    OWN_SECTION,
    Convention,
    MapKind,
    layer_name,
    read_facts,
)
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.fields import Config, integer, lookup, optional_integer, section, token_ids
from peagle_jax.checkpoint.folder import read_json
from peagle_jax.checkpoint.head_reader import HeadOutline, HeadReader
from peagle_jax.checkpoint.tensors import TensorSource, layer_shapes
from peagle_jax.checkpoint.weights import open_weights
from peagle_jax.config import TargetConfig
from peagle_jax.models.family import LAYER_NAMES

FORMAT_VERSION = 1
_OWN_KEYS = ("format_version", "taps", "verifier", "speculative_tokens")


@dataclasses.dataclass(frozen=True)
class About:
    """What a config says beside the head itself. ``verifier`` is speculators' name for the target;
    ``speculative_tokens`` what an EAGLE-3 head proposes to draft; ``metadata`` our section's free keys."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    verifier: Config = dataclasses.field(default_factory=dict)
    speculative_tokens: int | None = None
    metadata: Config = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StoredHead:
    """A head: outline, tensors by the names that we save (``mask_hidden`` as [1, 1, C]), and the rest."""

    outline: HeadOutline
    tensors: dict[str, np.ndarray]
    about: About = About()

    @property
    def dtype(self) -> np.dtype:
        return self.tensors[HEAD_NAMES["fc"]].dtype

    def layer_has(self, field: str) -> list[bool]:
        """Whether each layer has a ``BlockParams`` field."""
        return [layer_name(field, i) in self.tensors for i in range(self.outline.num_layers)]


def read_stored_head(
    folder: Path,
    target: TargetConfig | None = None,
    *,
    taps: tuple[int, ...] | None = None,
    convention: Convention = "auto",
    map_kind: MapKind = "offsets",
) -> StoredHead:
    """A head of any supported layout and kind of file; every tensor has a place.

    Args:
        target: needed only where the head does not say its vocabulary or its target's width. Given, it is
            checked, and taps that the head does not name become the default ones.
        taps, convention, map_kind: as ``load_head`` has them.

    Raises:
        CheckpointError: the head contradicts itself, does not suffice, or is not supported.
    """
    place, config = str(folder / "config.json"), read_json(folder / "config.json")
    reader = HeadReader(read_facts(config, place), open_weights(folder), target, place)
    outline = reader.outline(taps, convention)
    tensors = {name: reader.stored(name, shape) for name, shape in reader.shapes(outline).items()}
    ids = reader.target_ids(outline, map_kind)
    if map_kind == "absolute" and ids is not None:
        offsets = tensors[HEAD_NAMES["d2t"]]
        tensors[HEAD_NAMES["d2t"]] = (ids - np.arange(len(ids))).astype(offsets.dtype)
    reader.finish()
    if outline.method == "peagle":
        mask = tensors[HEAD_NAMES["mask_hidden"]]
        tensors[HEAD_NAMES["mask_hidden"]] = mask.reshape(1, 1, -1)
    return StoredHead(outline, tensors, read_about(config, outline, place))


def read_about(config: Config, outline: HeadOutline, place: str) -> About:
    """Raises CheckpointError when a key is of another kind than expected."""
    own = section(config, OWN_SECTION, place)
    block = {**section(config, "transformer_layer_config", place), **config}
    bos = token_ids(block, "bos_token_id", place)
    verifier = section(config, "speculators_config.verifier", place) or section(own, "verifier", place)
    proposed = optional_integer(own, "speculative_tokens", place, least=1)
    if outline.method == "eagle3" and proposed is None:
        proposals = lookup(config, "speculators_config.proposal_methods", place) or []
        stated = [integer(p, "speculative_tokens", place, 0) for p in proposals]
        proposed = next((count for count in stated if count), None)
    return About(
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(block, "eos_token_id", place),
        verifier=verifier,
        speculative_tokens=proposed,
        metadata={key: value for key, value in own.items() if key not in _OWN_KEYS},
    )


def dialect_of(config: Config, source: TensorSource, kind: str) -> str:
    """Whose layout a head has, as people call it. ``kind`` is that of its files."""
    names, architectures = set(source.names()), config.get("architectures") or [None]
    mid = any("midlayer." in name for name in names)
    if config.get("speculators_model_type") or "transformer_layer_config" in config:
        return "speculators"
    if architectures[0] == "LlamaEagle3DraftModel" or any(name.startswith("model.") for name in names):
        return "NeMo"
    if architectures[0] == "PEagleDraftModel":
        return "SpecForge"
    if OWN_SECTION in config:
        return f"vLLM, as peagle_jax writes it{', in Orbax' if kind == 'Orbax' else ''}"
    if "mask_hidden" in names:
        return "AWS" if mid else "vLLM"
    if mid and (lookup_ids(config) or architectures[0] != "LlamaForCausalLM"):
        return "EAGLE-3, as SpecForge and others train it"
    return "original EAGLE-3" if mid else "vLLM"


def lookup_ids(config: Config) -> Any:
    """The layer ids that a config names, wherever it does."""
    key = "eagle_aux_hidden_state_layer_ids"
    inner = config.get("eagle_config")
    return config.get(key) or (isinstance(inner, dict) and inner.get(key)) or None


def check_whole(head: StoredHead) -> None:
    """Raises CheckpointError when the tensors do not fit the outline, so that it would not load."""
    o, tensors = head.outline, head.tensors
    d, c = o.block.hidden_size, o.feature_size
    wanted: dict[str, tuple[int, ...]] = {
        "embed": (o.vocab_size, d),
        "fc": (d, c),
        "fc_bias": (d,),
        "input_norm": (c,),
        "hidden_norm": (d,),
        "final_norm": (d,),
        "lm_head": (o.draft_vocab_size, d),
        "mask_hidden": (1, 1, c),
    }
    shapes = {HEAD_NAMES[field]: shape for field, shape in wanted.items()}
    for index in range(o.num_layers):
        own = layer_shapes(o.block, 2 * d if index == 0 else None)
        shapes |= {layer_name(field, index): own[field] for field in LAYER_NAMES if field in own}
    for name, value in tensors.items():
        if name in shapes and value.shape != shapes[name]:
            raise CheckpointError(
                f"{name} has shape {list(value.shape)}; expected {list(shapes[name])} to save it"
            )
