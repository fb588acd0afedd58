"""A model whose weights lie over the tensor axis: what must divide, and kv heads that devices share.

A device reads the kv heads of its own query heads. Where there are fewer kv heads than devices, each is
stored as often as devices need it: rows of wk and wv are repeated, and the model has that many kv heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.config import BlockConfig, ConfigError, DrafterConfig, TargetConfig
from peagle_jax.layers.quantized import QuantizedWeight
from peagle_jax.parallel.rules import field_of, splits_inputs

Config = TypeVar("Config", TargetConfig, DrafterConfig)

_KV_MATRICES, _KV_VECTORS = ("wk", "wv"), ("bk", "bv")


def check_split(cfg: TargetConfig | DrafterConfig, tensor: int, target: TargetConfig | None = None) -> None:
    """Raises ConfigError, naming the dimension and the sizes that would do, unless the model can be split
    over ``tensor`` devices. A head's advice is for its ``target`` too."""
    if found := _misfit(cfg, tensor):
        models = (cfg,) if target is None else (cfg, target)
        whole = ", or for a draft_tensor_parallel_size of 1" if isinstance(cfg, DrafterConfig) else ""
        raise ConfigError(f"a tensor parallel size of {tensor} {found}; ask for {_fitting(models)}{whole}")


def _misfit(cfg: TargetConfig | DrafterConfig, tensor: int) -> str | None:
    """What does not divide."""
    block, whose = cfg.block, "the head's" if isinstance(cfg, DrafterConfig) else "the model's"
    sizes = {"num_attention_heads": block.num_heads}
    if block.moe is None or block.moe.num_experts % tensor:  # devices have whole experts, or a part of each
        sizes["intermediate_size"] = block.intermediate_size
    sizes["vocab_size"] = cfg.vocab_size
    if isinstance(cfg, DrafterConfig):
        sizes["draft_vocab_size"] = cfg.draft_vocab_size
        sizes["the width of its features"] = cfg.feature_size
    for name, size in sizes.items():
        if size % tensor:
            return f"does not divide {whose} {name}, {size}"
    kv = block.num_kv_heads
    if kv % tensor and tensor % kv:
        return f"neither divides {whose} num_key_value_heads, {kv}, nor is a multiple of it"
    return None


def _fitting(models: Sequence[TargetConfig | DrafterConfig], units: int = 0) -> str:
    """The sizes that all models can be split over, and that divide ``units``."""
    sizes = range(1, models[0].block.num_heads + 1)
    fit = [size for size in sizes if units % size == 0 and not any(_misfit(m, size) for m in models)]
    *more, last = map(str, fit)
    return f"{', '.join(more)} or {last}" if more else last


def check_units(cfg: TargetConfig, weights: Any, tensor: int) -> None:
    """Raises ConfigError where a device's part of a quantised weight would end within a ``unit`` of it.
    ``weights`` is a tree of them in which their fields can be seen."""
    is_quantized = lambda w: isinstance(w, QuantizedWeight)  # noqa: E731
    for path, w in jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_quantized):
        if not is_quantized(w) or not splits_inputs(field := field_of(path), w.shape, tensor):
            continue
        units = w.shape[-1] // w.unit
        if units % tensor:
            raise ConfigError(
                f"a tensor parallel size of {tensor} does not divide the {units} groups of {field}, {w.unit} "
                f"of its {w.shape[-1]} inputs each; ask for {_fitting((cfg,), units)}, or for int8"
            )


def kv_copies(block: BlockConfig, tensor: int) -> int:
    """How often each kv head is stored."""
    return max(1, tensor // block.num_kv_heads)


def with_copies(field: str, x: Any, block: BlockConfig, copies: int) -> Any:
    """A layer's weight, or a stack of them (NumPy or JAX), with each kv head's rows ``copies`` times."""
    if copies == 1 or field not in _KV_MATRICES + _KV_VECTORS:
        return x
    axis = x.ndim - (2 if field in _KV_MATRICES else 1)
    heads = x.reshape(*x.shape[:axis], block.num_kv_heads, -1, *x.shape[axis + 1 :])
    repeat = jnp.repeat if isinstance(x, jax.Array) else np.repeat
    return repeat(heads, copies, axis=axis).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def spread(cfg: Config, tensor: int) -> Config:
    """The config of a model whose kv heads are stored for ``tensor`` devices."""
    heads = cfg.block.num_kv_heads * kv_copies(cfg.block, tensor)
    return dataclasses.replace(cfg, block=dataclasses.replace(cfg.block, num_kv_heads=heads))


def spread_weights(cfg: TargetConfig | DrafterConfig, params: Any, tensor: int) -> Any:
    """The weights for ``spread(cfg, tensor)``."""
    copies = kv_copies(cfg.block, tensor)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: with_copies(field_of(path), x, cfg.block, copies), params
    )
