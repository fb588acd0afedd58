"""A model whose weights lie over the tensor axis: what must divide, and kv heads that devices share.

A device reads the kv heads of its own query heads. Where there are fewer kv heads than devices, each is
stored as often as devices need it: rows of wk and wv are repeated, and the model has that many kv heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.config import BlockConfig, ConfigError, DrafterConfig, TargetConfig
from peagle_jax.parallel.rules import field_of

Config = TypeVar("Config", TargetConfig, DrafterConfig)

_KV_MATRICES, _KV_VECTORS = ("wk", "wv"), ("bk", "bv")


def check_split(cfg: TargetConfig | DrafterConfig, tensor: int) -> None:
    """Raises ConfigError, naming the dimension, unless the model can be split over ``tensor`` devices."""
    block, head = cfg.block, isinstance(cfg, DrafterConfig)
    sizes = {"num_attention_heads": block.num_heads}
    if block.moe is None or block.moe.num_experts % tensor:  # devices have whole experts, or a part of each
        sizes["intermediate_size"] = block.intermediate_size
    if isinstance(cfg, DrafterConfig):
        sizes |= {"vocab_size": cfg.vocab_size, "draft_vocab_size": cfg.draft_vocab_size}
        sizes["the width of its features"] = cfg.feature_size
    else:
        sizes["vocab_size"] = cfg.vocab_size
    whose = "the head's" if head else "the model's"
    advice = "ask for a divisor" + (", or a draft_tensor_parallel_size of 1" if head else "")
    for name, size in sizes.items():
        if size % tensor:
            raise ConfigError(
                f"a tensor parallel size of {tensor} does not divide {whose} {name}, {size}; {advice}"
            )
    kv = block.num_kv_heads
    if kv % tensor and tensor % kv:
        raise ConfigError(
            f"a tensor parallel size of {tensor} neither divides {whose} num_key_value_heads, {kv}, nor is a "
            f"multiple of it; {advice}"
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
