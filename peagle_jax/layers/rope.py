"""Rotary position embedding: half-split pairs, indexed by position value."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle_jax.config import RopeConfig
from peagle_jax.layers.apart import computed_apart


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Per-pair inverse frequencies, float32 (H/2,), for every supported variant.

    Source: Hugging Face ``modeling_rope_utils`` (the meaning of the config keys), YaRN
    (arXiv 2309.00071) and the Llama 3.1 release for ``llama3``.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    base = rope.theta**-exponent
    if rope.variant == "default":
        out = base
    elif rope.variant == "linear":
        out = base / rope.factor
    elif rope.variant == "llama3":
        out = _llama3(base, rope)
    else:
        out = _yarn(base, rope, head_dim)
    return out.astype(np.float32)


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    wavelength = 2 * math.pi / base
    turns = rope.original_max_position / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(base: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    def pair_of_turns(turns: float) -> float:
        position = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(position) / (2 * math.log(rope.theta))

    low, high = pair_of_turns(rope.beta_fast), pair_of_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return base / rope.factor * ramp + base * (1 - ramp)


def attention_scale(rope: RopeConfig) -> float:
    """Factor on cos and sin: 1 except for YaRN."""
    if rope.variant != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "... t"]
) -> tuple[Float[Array, "... t h"], Float[Array, "... t h"]]:
    """cos and sin of each position's angles, float32 (..., T, H/2)."""
    frequencies, scale = inverse_frequencies(rope, head_dim), attention_scale(rope)

    def tables(positions: Array) -> tuple[Array, Array]:
        angles = positions[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(angles) * scale, jnp.sin(angles) * scale

    return computed_apart(tables, positions, positions[(0,) * positions.ndim] >= 0)


def apply_rope(
    x: Float[Array, "... t n h"], tables: tuple[Float[Array, "... t h2"], Float[Array, "... t h2"]]
) -> Float[Array, "... t n h"]:
    """Rotates the pairs (i, i + H/2) of x by the tables of its positions."""
    cos, sin = (t[..., None, :] for t in tables)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
