"""The flags for weights and caches of few bits, and what a report says of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax.checkpoint.model import LoadedTarget
from peagle_jax.checkpoint.quantization import QUANTIZATIONS
from peagle_jax.config import TargetConfig
from peagle_jax.layers.quantized import QuantizedWeight
from peagle_jax.speculative.cache import row_bytes

KV_CACHE_DTYPES = ("auto", "int8")


def add_quantization(add: Callable[..., Any]) -> None:
    """``--quantization`` on a parser, by its ``add_argument``."""
    add(
        "--quantization",
        "-q",
        choices=QUANTIZATIONS,
        help="of the model's matrices: int8, int4, fp8 (not on CPU), or gguf, packed as the file has them "
        "(default: none)",
    )


def kv_cache_dtype(text: str) -> str:
    """An argument's type: one of KV_CACHE_DTYPES."""
    if text in KV_CACHE_DTYPES:
        return text
    why = "no kernel here reads fp8; int8 takes as much memory" if text.startswith("fp8") else "no such dtype"
    raise argparse.ArgumentTypeError(
        f"must be one of {', '.join(KV_CACHE_DTYPES)}, found {text[:40]!r}: {why}"
    )


def add_kv_cache_dtype(add: Callable[..., Any]) -> None:
    """``--kv-cache-dtype`` on a parser, by its ``add_argument``."""
    add(
        "--kv-cache-dtype",
        type=kv_cache_dtype,
        default="auto",
        metavar="{auto,int8}",
        help="of the model's keys and values: auto is that of the computation; a head's always are in that",
    )


def describe_quantization(target: LoadedTarget) -> str:
    """What of a quantised target is quantised, and what that saves."""
    leaves = jax.tree.leaves(target.params, is_leaf=lambda x: isinstance(x, QuantizedWeight))
    found = [w for w in leaves if isinstance(w, QuantizedWeight)]
    bytes_, size = sum(w.nbytes for w in found), sum(math.prod(w.shape) for w in found)
    whole = sum(w.nbytes for w in leaves)
    return (
        f"{target.quantization}, {8 * bytes_ / max(size, 1):.2f} bits a value: {size / 1e6:.1f} million in "
        f"{bytes_ / 1e6:.1f} MB; all weights {whole / 1e6:.1f} MB"
    )


def describe_cache(config: TargetConfig, dtype: jnp.dtype) -> str:
    """What an int8 cache saves."""
    taken, plain = (row_bytes(config.block.head_dim, dtype, int8) for int8 in (True, False))
    return f"int8, {taken} bytes a head and position instead of {plain}"
