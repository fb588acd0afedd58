"""KL divergence to the target, with its gradient kept instead of its logits."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float


@struct.dataclass
class Metrics:
    """Sums per depth, each float32 (K,): divide by ``count`` only after every sum is complete."""

    loss_sum: Array
    correct: Array
    count: Array

    def __add__(self, other: Metrics) -> Metrics:
        return jax.tree.map(jnp.add, self, other)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def kl_divergence(
    draft_logits: Float[Array, "... v"], target_logits: Float[Array, "... v"], saved_dtype: jnp.dtype
) -> Float[Array, "..."]:
    """KL(target || draft) of each row, over the draft vocabulary (p-eagle-spec 3.7).

    The target is a constant. The reverse pass keeps softmax(draft) - softmax(target) in
    ``saved_dtype`` and nothing else of the row.
    """
    return _kl_forward(draft_logits, target_logits, saved_dtype)[0]


def _kl_forward(draft: Array, target: Array, saved_dtype: jnp.dtype) -> tuple[Array, Array]:
    log_q = draft - jax.nn.logsumexp(draft, axis=-1, keepdims=True)
    log_p = target - jax.nn.logsumexp(target, axis=-1, keepdims=True)
    p = jnp.exp(log_p)
    kl = jnp.sum(p * (log_p - log_q), axis=-1)
    return kl, (jnp.exp(log_q) - p).astype(saved_dtype)


def _kl_backward(saved_dtype: jnp.dtype, difference: Array, g: Array) -> tuple[Array, Array]:
    gradient = difference.astype(jnp.float32) * g[..., None]
    return gradient, jnp.zeros_like(gradient)


kl_divergence.defvjp(_kl_forward, _kl_backward)


def agrees(draft_logits: Float[Array, "... v"], target_logits: Float[Array, "... v"]) -> Bool[Array, "..."]:
    """Whether the best draft token is the target's best, as one vectorised reduction."""
    best_draft = draft_logits >= draft_logits.max(-1, keepdims=True)
    best_target = target_logits >= target_logits.max(-1, keepdims=True)
    return jnp.any(best_draft & best_target, axis=-1)
