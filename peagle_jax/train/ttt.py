"""EAGLE-3's training-time test: the head runs on its own output for several steps.

Step s of position p reads the ground-truth token p + 1 + s and, for s > 0, its own pre-norm hidden
state of step s - 1, at RoPE position p + s. It attends to the step-0 keys up to p and to the keys
of steps 1..s at p itself, under one softmax. Its label is the target's distribution for token
p + 2 + s.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from peagle_jax.config import DrafterConfig
from peagle_jax.drafter.head import DrafterParams, fuse, run_head
from peagle_jax.layers.attention import NEGATIVE, grouped, ungrouped
from peagle_jax.parallel.sequence import WHOLE, SequenceParts
from peagle_jax.train.losses import LossKind, Metrics
from peagle_jax.train.partition import Batch, row_losses, shifted, supervised
from peagle_jax.train.remat import Remat, rematerialised

Rows = tuple[Array, Array]
"""Rotated keys and values of one layer at one step, (B, n, G, H) each."""


def unrolled_attention(
    q: Float[Array, "b n q h"],
    steps: list[Rows],
    causal: Bool[Array, "b n s"],
    dtype: jnp.dtype,
) -> Float[Array, "b n qh"]:
    """Attention of step s = len(steps) - 1: step-0 keys by ``causal``, later keys at the row's own
    position only. Step-0 keys may be more than the rows of q, which are a part of them then."""
    b, n, heads, h = q.shape
    k0, v0 = (x.astype(dtype) for x in steps[0])
    keys, g = k0.shape[1:3]
    q = q * h**-0.5
    old = jnp.einsum("bgth,bsgh->bgts", grouped(q, g).astype(dtype), k0, preferred_element_type=jnp.float32)
    old = jnp.where(causal[:, None, None], old.reshape(b, g, -1, n, keys), NEGATIVE)  # (B, G, r, n, s)
    apart = q.reshape(b, n, g, -1, h)
    own = [jnp.sum(apart * k[:, :, :, None], -1).transpose(0, 2, 3, 1) for k, _ in steps[1:]]
    top = old.max(-1)
    for scores in own:
        top = jnp.maximum(top, scores)
    top = jax.lax.stop_gradient(top)
    p_old = jnp.exp(old - top[..., None])
    p_own = [jnp.exp(scores - top) for scores in own]
    total = p_old.sum(-1) + sum(p_own)  # (B, G, r, n)
    flat = p_old.astype(dtype).reshape(b, g, -1, keys)
    out = jnp.einsum("bgts,bsgh->bgth", flat, v0, preferred_element_type=jnp.float32)
    out = ungrouped(out / total.reshape(b, g, -1, 1), n)
    for p, (_, v) in zip(p_own, steps[1:], strict=True):
        share = (p / total).transpose(0, 3, 1, 2)[..., None]  # (B, n, G, r, 1)
        out += (share * v[:, :, :, None]).reshape(b, n, heads * h)
    return out


def eagle3_loss(
    params: DrafterParams,
    cfg: DrafterConfig,
    target_head: Float[Array, "vd d"],
    batch: Batch,
    step_weights: tuple[float, ...],
    kind: LossKind = "kl",
    remat: Remat = "full",
    parts: SequenceParts = WHOLE,
) -> tuple[Float[Array, ""], Metrics]:
    """Weighted mean loss over the supervised rows of all steps.

    ``step_weights`` has one weight a step. Unlike the original's soft cross-entropy, whose gradient
    is the same, KL is zero for a perfect head; rows whose best target token lies outside the draft
    vocabulary are kept, as in ``peagle_loss``. ``remat`` is what is kept of a step until the reverse
    pass. ``parts`` works on so many parts of every row, which a mesh can hold apart.
    """
    n, dtype = batch.tokens.shape[1], params.fc.dtype
    along = jnp.arange(n)
    causal = (batch.segment_ids[:, :, None] == batch.segment_ids[:, None]) & (along <= along[:, None])

    def part(g: Array, earlier: list[list[Rows]], seen: Array, tokens: Array, positions: Array, *ends: Array):
        def attend_for(layer: int):
            def attend(q: Array, k: Array, v: Array) -> Array:
                (k0, v0), *later = [rows[layer] for rows in earlier] + [(k, v)]
                return unrolled_attention(q, [(parts.whole(k0), parts.whole(v0)), *later], seen, dtype)

            return attend

        attends = [attend_for(i) for i in range(cfg.num_layers)]
        hidden, rows = run_head(params, cfg, tokens, g, positions, attends)
        labels, real = ends
        loss, agreed = row_losses(params, cfg, target_head, hidden, labels, kind)
        correct = (agreed & real).sum()
        sums = (jnp.where(real, loss, 0.0).sum(), correct.astype(jnp.float32), real.sum().astype(jnp.float32))
        return hidden, rows, sums

    def run(step: int, g: Array, earlier: list[list[Rows]]) -> tuple[Array, list[Rows], tuple[Array, ...]]:
        inputs = (causal, shifted(batch.tokens, 1 + step), batch.positions + step)
        ends = (shifted(batch.target_hidden, 1 + step), supervised(batch, 2 + step))
        hidden, rows, sums = parts.map(part, g, earlier, *map(parts.split, (*inputs, *ends)))
        return hidden, rows, parts.total(sums)

    g = parts.map(lambda features: fuse(params, cfg, features), parts.split(batch.features))
    earlier: list[list[Rows]] = []
    totals = []
    for step in range(len(step_weights)):
        body = rematerialised(run, remat, static_argnums=(0,))
        g, rows, sums = body(step, g, earlier)
        earlier.append(rows)
        totals.append(sums)
    metrics = Metrics(*(jnp.stack(column) for column in zip(*totals, strict=True)))
    loss = jnp.sum(metrics.loss_sum * jnp.array(step_weights)) / jnp.maximum(metrics.count.sum(), 1.0)
    return loss, jax.lax.stop_gradient(metrics)
