"""Products of activations with weights: narrow operands, float32 accumulation."""

from __future__ import annotations

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

# XLA:CPU multiplies a single bfloat16 row in a scalar loop (35 ms for SmolLM2's vocabulary
# product), while eight rows go to the matrix unit (2.5 ms). Rows are independent there, so a
# padded step also rounds like a wider one: plain decode and verification give the same bits.
MIN_ROWS = 8


def _contract(x: Array, w: Array, axis: int) -> Array:
    dims = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)


def _materialised_transpose(x: Array) -> Array:
    """x.T as an array of its own. XLA:CPU folds any plain transpose into the product beside it, and
    then widens the operands, since it has no narrow kernel for a transposed first operand. It
    cannot fold through a conditional; the other branch is for values that are lost anyway."""
    return jax.lax.cond(
        jnp.isfinite(x[0, 0]), lambda x: x.T, lambda x: jnp.full(x.T.shape, jnp.nan, x.dtype), x
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow_product(x: Array, w: Array, axis: int) -> Array:
    """x (rows, d) times a narrow w that is (d, f) for ``axis`` 0 and (f, d) for 1."""
    return _contract(x, w, axis)


def _narrow_forward(x: Array, w: Array, axis: int) -> tuple[Array, tuple[Array, Array]]:
    return _contract(x, w, axis), (x, w)


def _narrow_backward(axis: int, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    # Both products of the reverse pass read narrow operands too. The barrier keeps a narrow result
    # from being fused into them, which would widen the operands.
    x, w = saved
    g = g.astype(w.dtype)
    dx = _contract(g, w, 1 - axis)
    dw = _contract(_materialised_transpose(x), g, 0)
    dx, dw = jax.lax.optimization_barrier((dx, dw))
    dw = dw.astype(w.dtype)
    return dx.astype(x.dtype), dw.T if axis else dw


_narrow_product.defvjp(_narrow_forward, _narrow_backward)


def _product(x: Array, w: Array, axis: int) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    if w.dtype == jnp.float32:
        out = _contract(rows, w, axis)
    else:
        count = rows.shape[0]
        if count < MIN_ROWS:
            rows = jnp.pad(rows, ((0, MIN_ROWS - count), (0, 0)))
        out = cast(Array, _narrow_product(rows.astype(w.dtype), w, axis))[:count]
    return out.reshape(*x.shape[:-1], out.shape[1])


def product(x: Float[Array, "... d"], w: Shaped[Array, "d f"]) -> Float[Array, "... f"]:
    """``x @ w`` in w's dtype with float32 accumulation. Returns float32.

    float32 weights give the plain product. Narrow weights round x to their dtype first.
    """
    return _product(x, w, 0)


def vocabulary_product(x: Float[Array, "... d"], table: Shaped[Array, "v d"]) -> Float[Array, "... v"]:
    """``x @ table.T``: logits of a (tied or own) vocabulary table, stored as V x D."""
    return _product(x, table, 1)


@jax.custom_vjp
def table_rows(table: Shaped[Array, "v d"], ids: Int[Array, "..."]) -> Float[Array, "... d"]:
    """Rows of a vocabulary table as float32.

    XLA:CPU gathers narrow floats by widening the whole table first (27 ms for SmolLM2's), so a
    narrow table is read through its bits, which have no gradient of their own.
    """
    if table.dtype == jnp.float32:
        return table[ids]
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)[ids]
    return jax.lax.bitcast_convert_type(bits, table.dtype).astype(jnp.float32)


def _read_rows(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return table_rows(table, ids), (table, ids)


def _add_rows(read: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    table, ids = read
    return jnp.zeros(table.shape, gradient.dtype).at[ids].add(gradient).astype(table.dtype), None


table_rows.defvjp(_read_rows, _add_rows)
