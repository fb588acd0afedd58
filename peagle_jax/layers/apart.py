"""A value that XLA:CPU computes once, not inside each operation that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def computed_apart(f: Callable[[Any], Any], x: Any, holds: Array) -> Any:
    """``f(x)`` as arrays of its own; ``holds`` is a traced scalar that is true for every sound x.

    XLA:CPU fuses what it takes for cheap into every reader and computes it again there: a rotation's sines
    once a layer, head and half, a transpose as a product with widened operands. It drops optimization
    barriers first, but it cannot fuse through a conditional. The other branch gives NaN or 0, and never runs.
    Other platforms get f alone.
    """

    def lost(a: jax.ShapeDtypeStruct) -> Array:
        value = jnp.nan if jnp.issubdtype(a.dtype, jnp.inexact) else 0
        return jnp.full(a.shape, value, a.dtype)

    def otherwise(x: Any) -> Any:
        return jax.tree.map(lost, jax.eval_shape(f, x))

    def guarded(x: Any, holds: Array) -> Any:
        return jax.lax.cond(holds, f, otherwise, x)

    return jax.lax.platform_dependent(x, holds, cpu=guarded, default=lambda x, _: f(x))
