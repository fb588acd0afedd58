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


def _narrow_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    # Both products of the reverse pass read narrow operands too. The transpose is materialised:
    # XLA:CPU has a fast kernel for (rows, k) x (k, columns) only.
    x, w = saved
    g = g.astype(w.dtype)
    dx = jax.lax.dot_general(g, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    xt = jax.lax.optimization_barrier(x.T)
    dw = jax.lax.dot(xt, g, preferred_element_type=jnp.float32)
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
