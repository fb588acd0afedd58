"""MXFP4 weights: 4-bit floats in blocks of 32 that share a power of two (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, UInt8

from peagle_jax.layers.quantized import QuantizedWeight

BLOCK = 32
"""Values that share a scale."""

BIAS = 127
"""Of the exponents that scales are (E8M0)."""


@struct.dataclass
class Mxfp4(QuantizedWeight):
    """A weight (..., out, in) as packed. The low half of a byte is the earlier value."""

    values: Any  # uint8 (..., out, in/2), two E2M1 values each
    scales: Any  # uint8 (..., out, in/32)
    dtype: Any = struct.field(pytree_node=False)

    @property
    def unit(self) -> int:
        return BLOCK

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], 2 * self.values.shape[-1])


def _widened(nibbles: UInt8[Array, "..."]) -> Array:
    """The bfloat16 of E2M1 bits: sign, two bits of exponent, one of mantissa."""
    bits = nibbles.astype(jnp.uint16)
    size, sign = bits & 7, (bits & 8) << 12
    # Exponent and mantissa are moved to where bfloat16 has them; 0 and 1/2 have no leading one there.
    normal = (size << 6) + ((BIAS - 1) << 7)
    small = jnp.where(size == 1, (BIAS - 1) << 7, 0).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(sign | jnp.where(size < 2, small, normal), jnp.bfloat16)


def _power_of_two(scales: UInt8[Array, "..."]) -> Array:
    """2**(scale - 127) as bfloat16, whose exponent has the same bias; 0 alone is not a normal one there."""
    bits = scales.astype(jnp.uint16) << 7
    return jax.lax.bitcast_convert_type(jnp.where(scales == 0, jnp.uint16(1 << 6), bits), jnp.bfloat16)


def dequantize(w: Mxfp4) -> Array:
    """The weight as bfloat16 (..., out, in). Exact, where no product leaves bfloat16's normal numbers."""
    halves = jnp.stack([_widened(w.values & 15), _widened(w.values >> 4)], axis=-1)
    blocks = halves.reshape(*w.scales.shape, BLOCK)
    return (blocks * _power_of_two(w.scales)[..., None]).reshape(w.shape)
