"""Writes heads of every published layout, from one tiny head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from peagle_jax.checkpoint.folder import read_json
from peagle_jax.checkpoint.head import load_head, save_head
from peagle_jax.config import BlockConfig, DrafterConfig, RopeConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.models.stack import TargetParams
from tests.checkpoint.files import MISSING, write_json
from tests.tiny import TARGET, head_config, head_params, target_params

TARGET_PARAMS = target_params()
SAME_WIDTH = BlockConfig(12, 14, 6, 3, 4, 1e-5, RopeConfig(theta=500.0))
"""A head's block as wide as the target, as sharing its embedding needs."""

Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


@dataclasses.dataclass
class Saved:
    """A saved head: what was saved, and its folder to edit and load."""

    folder: Path
    cfg: DrafterConfig
    params: DrafterParams
    target: TargetConfig = TARGET
    target_params: TargetParams = dataclasses.field(default_factory=lambda: TARGET_PARAMS)

    def edit(self, change: Change | None = None, **keys: Any) -> Saved:
        """Applies ``change(config, tensors)``, then config keys; MISSING takes a key out."""
        config = read_json(self.folder / "config.json")
        tensors = load_file(self.folder / "model.safetensors")
        if change is not None:
            change(config, tensors)
        config = {key: value for key, value in (config | keys).items() if value is not MISSING}
        write_json(self.folder / "config.json", config)
        save_file(tensors, self.folder / "model.safetensors")
        return self

    def load(self, **options: Any) -> tuple[DrafterConfig, DrafterParams]:
        return load_head(str(self.folder), self.target, self.target_params, **options)


def saved_head(
    folder: Path,
    method: str = "peagle",
    *,
    target: TargetConfig = TARGET,
    params: DrafterParams | None = None,
    share_embed: bool = False,
    **changes: Any,
) -> Saved:
    cfg = head_config(method, **changes)
    params = head_params(cfg) if params is None else params
    save_head(folder, cfg, params, target=target, dtype=jnp.float32, share_embed=share_embed)
    return Saved(folder, cfg, params, target)


def without_own_keys(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """As another program writes it."""
    del config["peagle_jax"]


def to_aws(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """midlayer.*, one mask key, no layer ids or flags, mask_hidden [1, 1, C]."""
    rename(tensors, lambda name: name.replace("layers.0.", "midlayer."))
    for key in ("peagle_jax", "mask_token_id", "pard_token", "parallel_drafting", "norm_before_fc"):
        del config[key]


def to_nemo(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """A model. prefix on the backbone."""
    own = ("lm_head", "mask_hidden", "d2t", "t2d")
    rename(tensors, lambda name: name if name.startswith(own) else f"model.{name}")
    for key in ("peagle_jax", "ptd_token_id", "pard_token"):
        del config[key]
    config["architectures"] = ["LlamaEagle3DraftModel"]


def to_speculators(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """The block's keys nested, the depth under the proposal."""
    own = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "eagle_aux_hidden_state_layer_ids")
    block = {key: value for key, value in config.items() if key not in own}
    for key in ("peagle_jax", "eagle_config", "num_depths", "parallel_drafting", "architectures"):
        del block[key]
    for key in ("mask_token_id", "ptd_token_id", "pard_token", "target_hidden_size"):
        del block[key]
    proposal = {"proposal_type": "greedy", "speculative_tokens": config["num_depths"]}
    outer = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": block,
        "mask_token_id": config["mask_token_id"],
        "target_hidden_size": None,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": True,
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "someone/model"},
        },
    } | {key: config[key] for key in own}
    config.clear()
    config.update(outer)


def to_specforge(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """midlayer.*, ids that mean outputs. EAGLE-3's architecture or P-EAGLE's."""
    to_aws(config | {"parallel_drafting": None, "mask_token_id": 0, "pard_token": 0}, tensors)
    for key in ("peagle_jax", "norm_before_fc", "num_depths"):
        config.pop(key, None)
    outputs = [tap - 1 for tap in config.pop("eagle_aux_hidden_state_layer_ids")]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
    if "mask_hidden" in tensors:
        config["architectures"] = ["PEagleDraftModel"]


def to_original_eagle3(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """A Llama config with the draft vocabulary, and no word about taps."""
    rename(tensors, lambda name: name.replace("layers.0.", "midlayer."))
    for key in ("peagle_jax", "eagle_aux_hidden_state_layer_ids", "eagle_config", "norm_before_fc"):
        del config[key]
    del config["norm_before_residual"], config["target_hidden_size"]
    config["architectures"] = ["LlamaForCausalLM"]


def to_vllm_names(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """The map under the name that vLLM has for it inside."""
    rename(tensors, lambda name: "draft_id_to_target_id" if name == "d2t" else name)
    del tensors["t2d"]
    without_own_keys(config, tensors)


def rename(tensors: dict[str, np.ndarray], name_of: Callable[[str], str]) -> None:
    renamed = {name_of(name): array for name, array in tensors.items()}
    tensors.clear()
    tensors.update(renamed)


def assert_same(a: Any, b: Any) -> None:
    """Equal bit for bit, leaf for leaf, in equal dtypes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
