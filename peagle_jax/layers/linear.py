"""Products of activations with weights: narrow operands, float32 accumulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

# XLA:CPU multiplies a single bfloat16 row in a scalar loop (35 ms for SmolLM2's vocabulary
# product), while eight rows go to the matrix unit (2.5 ms). Rows are independent there, so a
# padded step also rounds like a wider one: plain decode and verification give the same bits.
MIN_ROWS = 8


@jax.custom_vjp
def _narrow_product(x: Array, w: Array) -> Array:
    return jax.lax.dot(x, w, preferred_element_type=jnp.float32)


def _narrow_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _narrow_product(x, w), (x, w)


def _materialised_transpose(x: Array) -> Array:
    """x.T as an array of its own. XLA:CPU folds any plain transpose into the product that follows,
    and then widens the operands, since it has no narrow kernel for a transposed first operand. It
    cannot fold through a conditional; the other branch is for values that are lost anyway."""
    return jax.lax.cond(
        jnp.isfinite(x[0, 0]), lambda x: x.T, lambda x: jnp.full(x.T.shape, jnp.nan, x.dtype), x
    )


def _narrow_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    # Both products of the reverse pass read narrow operands too. The barrier keeps a narrow result
    # from being fused into them, which would widen the operands.
    x, w = saved
    g = g.astype(w.dtype)
    dx = jax.lax.dot_general(g, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    dw = jax.lax.dot(_materialised_transpose(x), g, preferred_element_type=jnp.float32)
    dx, dw = jax.lax.optimization_barrier((dx, dw))
    return dx.astype(x.dtype), dw.astype(w.dtype)


_narrow_product.defvjp(_narrow_forward, _narrow_backward)


def product(x: Float[Array, "... d"], w: Shaped[Array, "d f"]) -> Float[Array, "... f"]:
    """``x @ w`` in w's dtype with float32 accumulation. Returns float32.

    float32 weights give the plain product. Narrow weights round x to their dtype first.
    """
    rows = x.reshape(-1, x.shape[-1])
    if w.dtype == jnp.float32:
        out = rows @ w
    else:
        count = rows.shape[0]
        if count < MIN_ROWS:
            rows = jnp.pad(rows, ((0, MIN_ROWS - count), (0, 0)))
        out = _narrow_product(rows.astype(w.dtype), w)[:count]
    return out.reshape(*x.shape[:-1], w.shape[1])


def vocabulary_product(x: Float[Array, "... d"], table: Shaped[Array, "v d"]) -> Float[Array, "... v"]:
    """Logits of a (tied or own) vocabulary table, stored as V x D. Returns float32."""
    return product(x, table.T)
