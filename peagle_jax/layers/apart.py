"""A value that XLA:CPU computes once, not inside each operation that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def computed_apart(f: Callable[[Array], Any], x: Array, holds: Array) -> Any:
    """``f(x)`` as float arrays of its own; ``holds`` is a traced scalar that is true for every sound x.

    XLA:CPU fuses what it takes for cheap into every reader and computes it again there: a rotation's sines
    once a layer, head and half, a transpose as a product with widened operands. It drops optimization
    barriers first, but it cannot fuse through a conditional. The other branch gives NaN, and never runs.
    Other platforms get f alone.
    """

    def otherwise(x: Array) -> Any:
        return jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), jax.eval_shape(f, x))

    def guarded(x: Array, holds: Array) -> Any:
        return jax.lax.cond(holds, f, otherwise, x)

    return jax.lax.platform_dependent(x, holds, cpu=guarded, default=lambda x, _: f(x))
