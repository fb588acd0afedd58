"""Losses to the target's distribution, with their gradient kept instead of their logits."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from peagle_jax.speculative.sampling import first_argmax


@struct.dataclass
class Metrics:
    """Sums per depth, each float32 (K,): divide by ``count`` only after every sum is complete."""

    loss_sum: Array
    correct: Array
    count: Array

    def __add__(self, other: Metrics) -> Metrics:
        return jax.tree.map(jnp.add, self, other)


LossKind = Literal["kl", "cross_entropy"]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def distillation_loss(
    draft_logits: Float[Array, "... v"],
    target_logits: Float[Array, "... v"],
    kind: LossKind,
    saved_dtype: jnp.dtype,
) -> Float[Array, "..."]:
    """Loss of each row over the draft vocabulary, float32.

    ``kl`` is KL(target || draft); cross-entropy to the target's whole distribution has the same
    gradient. ``cross_entropy`` is that to the target's best token. The target is a constant. The
    reverse pass keeps softmax(draft) minus the label's distribution, in ``saved_dtype``, and nothing
    else of the row.
    """
    return _forward(draft_logits, target_logits, kind, saved_dtype)[0]


def _forward(draft: Array, target: Array, kind: LossKind, saved_dtype: jnp.dtype) -> tuple[Array, Array]:
    log_q = draft - jax.nn.logsumexp(draft, axis=-1, keepdims=True)
    if kind == "kl":
        log_p = target - jax.nn.logsumexp(target, axis=-1, keepdims=True)
        label = jnp.exp(log_p)
        loss = jnp.sum(label * (log_p - log_q), axis=-1)
    else:
        label = jnp.arange(target.shape[-1]) == first_argmax(target)[..., None]
        loss = -jnp.sum(jnp.where(label, log_q, 0.0), axis=-1)
    return loss, (jnp.exp(log_q) - label).astype(saved_dtype)


def _backward(kind: LossKind, saved_dtype: jnp.dtype, difference: Array, g: Array) -> tuple[Array, Array]:
    gradient = difference.astype(jnp.float32) * g[..., None]
    return gradient, jnp.zeros_like(gradient)


distillation_loss.defvjp(_forward, _backward)


def agrees(draft_logits: Float[Array, "... v"], target_logits: Float[Array, "... v"]) -> Bool[Array, "..."]:
    """Whether the best draft token is the target's best, as one vectorised reduction."""
    best_draft = draft_logits >= draft_logits.max(-1, keepdims=True)
    best_target = target_logits >= target_logits.max(-1, keepdims=True)
    return jnp.any(best_draft & best_target, axis=-1)
