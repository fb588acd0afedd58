"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def rms_norm(x: Float[Array, "... d"], weight: Shaped[Array, " d"], eps: float) -> Float[Array, "... d"]:
    """RMSNorm in float32, multiplied by ``weight``. Returns float32."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight.astype(jnp.float32)
