"""Keys and values in int8, with a scale for each position and head."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

SCALE_BYTES = 4
"""Of a position and head, beside a byte a value."""


@struct.dataclass
class Int8Rows:
    """values * scale; ``dtype`` is that of the operands they are read as."""

    values: Any  # int8 (..., h)
    scale: Any  # float32 (..., 1)
    dtype: Any = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def swapaxes(self, a: int, b: int) -> Int8Rows:
        return self.replace(values=self.values.swapaxes(a, b), scale=self.scale.swapaxes(a, b))


def quantize_rows(x: Float[Array, "... h"], dtype: jnp.dtype) -> Int8Rows:
    """The nearest rows. Each depends on its own values alone, whatever the step that computes it. A last
    bit of those may still decide a rounding, and no rule of rounding can help that."""
    largest = jnp.abs(x).max(-1, keepdims=True)
    # Single operations, which XLA does not join in one shape of step and leave apart in another.
    inverse = jnp.where(largest > 0, 127 / largest, 0)
    return Int8Rows(jnp.round(x * inverse).astype(jnp.int8), largest * (1 / 127), jnp.dtype(dtype))


def widened(rows: Int8Rows) -> Float[Array, "... h"]:
    """The rows as operands."""
    return (rows.values.astype(jnp.float32) * rows.scale).astype(rows.dtype)
