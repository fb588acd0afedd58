"""Products of activations with weights: narrow operands, float32 accumulation."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from peagle_jax.layers.apart import computed_apart
from peagle_jax.layers.mxfp4 import Mxfp4, dequantize
from peagle_jax.layers.quantized import QuantizedWeight, multiply, rows_of
from peagle_jax.parallel.rules import product_in_parts

# XLA:CPU multiplies a single bfloat16 row in a scalar loop (35 ms for SmolLM2's vocabulary
# product), while eight rows go to the matrix unit (2.5 ms). Rows are independent there, so a
# padded step also rounds like a wider one: plain decode and verification give the same bits.
MIN_ROWS = 8


def _contract(x: Array, w: Array, axis: int) -> Array:
    dims = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)


def _transposed(x: Array) -> Array:
    """x.T. XLA:CPU would fold it into the product beside it and then widen the operands, since it has no
    narrow kernel for a transposed first operand."""
    return computed_apart(jnp.transpose, x, jnp.isfinite(x[0, 0]))


@jax.custom_vjp
def _narrow_product(x: Array, w: Array) -> Array:
    """x (rows, d) times a narrow w (f, d)."""
    return _contract(x, w, 1)


def _narrow_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _contract(x, w, 1), (x, w)


def _narrow_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    # Both products of the reverse pass read narrow operands too. The barrier keeps a narrow result
    # from being fused into them, which would widen the operands.
    x, w = saved
    g = g.astype(w.dtype)
    dx, dw = jax.lax.optimization_barrier((_contract(g, w, 0), _contract(_transposed(g), x, 0)))
    return dx.astype(x.dtype), dw.astype(w.dtype)


_narrow_product.defvjp(_narrow_forward, _narrow_backward)


def product(
    x: Float[Array, "... d"], w: Shaped[Array, "f d"] | QuantizedWeight, field: str = ""
) -> Float[Array, "... f"]:
    """``x @ w.T`` in w's dtype with float32 accumulation. Returns float32.

    float32 weights give the plain product. Narrow weights round x to their dtype first.
    For quantised ones see ``quantized.multiply``; of those the rules must know the ``field``, by which
    they lie over devices.

    Weights are stored (out, in), as checkpoints do. On two CPU cores with AMX, the products of SmolLM2's
    blocks in bfloat16 take 0.6 of the time that the other order takes for 8 rows, and 0.8 for 128.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = product_in_parts(_quantized, rows, w, field) if isinstance(w, QuantizedWeight) else _dense(rows, w)
    return out.reshape(*x.shape[:-1], out.shape[1])


def _quantized(rows: Array, w: QuantizedWeight, axis: str | None) -> Array:
    if isinstance(w, Mxfp4):
        return _dense(rows, dequantize(w).astype(w.dtype))
    return multiply(rows, w, _dense, axis)


def _dense(rows: Array, w: Array) -> Array:
    if w.dtype == jnp.float32:
        return _contract(rows, w, 1)
    count = rows.shape[0]
    if count < MIN_ROWS:
        rows = jnp.pad(rows, ((0, MIN_ROWS - count), (0, 0)))
    return cast(Array, _narrow_product(rows.astype(w.dtype), w))[:count]


def table_rows(
    table: Shaped[Array, "v d"] | QuantizedWeight, ids: Int[Array, "..."]
) -> Float[Array, "... d"]:
    """Rows of a vocabulary table as float32."""
    return rows_of(table, ids) if isinstance(table, QuantizedWeight) else _array_rows(table, ids)


@jax.custom_vjp
def _array_rows(table: Array, ids: Array) -> Array:
    """XLA:CPU gathers narrow floats by widening the whole table first (27 ms for SmolLM2's), so a
    narrow table is read through its bits there, which have no gradient of their own. A TPU would copy the
    table to read it so."""
    if table.dtype == jnp.float32:
        return table[ids]

    def through_bits(table: Array, ids: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(table, jnp.uint16)[ids]
        return jax.lax.bitcast_convert_type(bits, table.dtype).astype(jnp.float32)

    def directly(table: Array, ids: Array) -> Array:
        return table[ids].astype(jnp.float32)

    return jax.lax.platform_dependent(table, ids, cpu=through_bits, default=directly)


def _read_rows(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return _array_rows(table, ids), (table, ids)


def _add_rows(read: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    table, ids = read
    return jnp.zeros(table.shape, gradient.dtype).at[ids].add(gradient).astype(table.dtype), None


_array_rows.defvjp(_read_rows, _add_rows)
