"""The P-EAGLE training pass: depth-0 rows once, then a scan over segments of rollouts.

Element (a, d) has anchor a and depth d, reference position p = a + d. Depth 0 reads the token at
a+1 with the feature at a; a deeper row reads the mask token with ``mask_hidden``. A row sees the
depth-0 rows up to its anchor and its own rollout's rows up to its depth (P-EAGLE, section 3).

Depth-0 rows never see mask rows, so they run once, as an ordinary causal pass that leaves each
layer's keys and values. Segments of rollouts then read those, and each row's at most K-1 rollout
mates, as two parts of one softmax. Each segment's gradient is taken with its loss, layer by layer, and
those of the weights and of the depth-0 keys and values add up over the scan (accumulation.py), so that the
gradients are those of the flat N x K pass, while no row is computed twice and one segment is alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from peagle_jax.config import DrafterConfig
from peagle_jax.drafter.head import DrafterParams, draft_logits, fuse, head_inputs
from peagle_jax.layers.attention import NEGATIVE, grouped, rows_at_once
from peagle_jax.layers.block import run_block
from peagle_jax.layers.linear import product, table_rows
from peagle_jax.layers.rope import rope_tables
from peagle_jax.parallel.rules import constrain, split_as_stored
from peagle_jax.parallel.sequence import WHOLE, SequenceParts
from peagle_jax.train.accumulation import summed
from peagle_jax.train.depth_zero import Context, Positions, depth_zero
from peagle_jax.train.losses import LossKind, Metrics, agrees, distillation_loss
from peagle_jax.train.remat import Remat, rematerialised

Shared = tuple[DrafterParams, Context]
"""What a stage reads and learns in every segment: weights, and depth-0 keys and values of its layer."""


@struct.dataclass
class Batch:
    """B packed rows of n positions. Documents in a row have ids >= 0, padding has -1.

    ``anchors`` and ``lengths`` hold the rollouts of COD dropping, the same static layout in every
    segment: the rows of depth d are the first M_d anchors, real where d <= length.
    """

    tokens: Array  # int32 (B, n)
    segment_ids: Array  # int32 (B, n)
    positions: Array  # int32 (B, n), restarting with each document
    loss_flags: Array  # bool (B, n), on the label token itself
    features: Array  # (B, n, C), the taps
    target_hidden: Array  # (B, n, D), the target's last state after its final norm
    anchors: Array  # int32 (segments, B, M_1)
    lengths: Array  # int32 (segments, B, M_1), 0 where unused


def shifted(x: Array, by: int) -> Array:
    """x moved left along axis 1 by ``by``, zeros at the end."""
    return jnp.pad(x[:, by:], ((0, 0), (0, by)) + ((0, 0),) * (x.ndim - 2))


def supervised(batch: Batch, ahead: int = 2) -> Array:
    """Positions p that carry loss: x_{p+ahead} is flagged and in p's document. A reference position
    predicts the token two ahead; a later step of EAGLE-3's training-time test looks further.

    speculators asks that x_{p+1}, the row's own token, is flagged. That differs at an answer's two
    ends: it leaves out the row that predicts the first token, and adds one past the closing token.
    """
    flags = shifted(batch.loss_flags, ahead).astype(bool)
    ids = batch.segment_ids
    inside = (ids >= 0) & (shifted(ids + 1, ahead) - 1 == ids)
    return flags & inside


def depth_zero_inputs(batch: Batch) -> Positions:
    """What the depth-0 pass reads."""
    return Positions(shifted(batch.tokens, 1), batch.segment_ids, batch.positions, batch.features)


def row_losses(
    params: DrafterParams,
    cfg: DrafterConfig,
    target_head: Array,
    hidden: Array,
    target_hidden: Array,
    kind: LossKind = "kl",
) -> tuple[Array, Array]:
    """Loss to the target, and whether the best tokens agree, of rows (..., D) and their labels (..., D)."""
    target = product(target_hidden, target_head)
    draft = draft_logits(params, cfg, hidden)
    loss = distillation_loss(draft, jax.lax.stop_gradient(target), kind, params.lm_head.dtype)
    return cast(Array, loss), agrees(draft, target)


def _own_scores(q: Array, k: Array, counts: tuple[int, ...]) -> Array:
    """Scores of each row with its rollout mates of depth 1..K-1, NEGATIVE past its own depth.

    q (B, M, G, r, H) and k (B, M, G, H), rows depth-major -> (B, M, G, r, K-1).
    """
    blocks, starts = [], _starts(counts)
    for depth, (start, count) in enumerate(zip(starts, counts, strict=True), 1):
        mates = jnp.stack([k[:, s : s + count] for s in starts[:depth]], axis=-2)
        rows = q[:, start : start + count]
        block = jnp.sum(rows[..., None, :] * mates[:, :, :, None], axis=-1)
        pad = ((0, 0),) * (block.ndim - 1) + ((0, len(counts) - depth),)
        blocks.append(jnp.pad(block, pad, constant_values=NEGATIVE))
    return jnp.concatenate(blocks, axis=1)


def _own_values(p: Array, v: Array, counts: tuple[int, ...]) -> Array:
    """Weighted rollout values: p (B, M, G, r, K-1), v (B, M, G, H) -> (B, M, G, r, H)."""
    blocks, starts = [], _starts(counts)
    for depth, (start, count) in enumerate(zip(starts, counts, strict=True), 1):
        mates = jnp.stack([v[:, s : s + count] for s in starts[:depth]], axis=-2)
        weights = p[:, start : start + count, ..., :depth]
        blocks.append(jnp.sum(weights[..., None] * mates[:, :, :, None], axis=-2))
    return jnp.concatenate(blocks, axis=1)


def _starts(counts: tuple[int, ...]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]


def context_attention(
    q: Array, k: Array, v: Array, sees: Callable[..., Array], rows: tuple[Array, ...], dtype: jnp.dtype
) -> tuple[Array, Array, Array]:
    """Rows q (B, M, N, H), scaled, over keys and values (B, n, G, H), as one part of a softmax.

    ``sees(*rows)`` is the mask (B, M, n) of ``rows``, arrays (B, M). Returns the sums of exp(score - top)
    times values (B, M, G, r, H), and of exp(score - top), and top, each (B, M, G, r). Where the scores are
    many, rows go in blocks that are recomputed in the reverse pass.
    """
    b, m, heads, h = q.shape
    groups = k.shape[2]
    k, v = k.astype(dtype), v.astype(dtype)

    def part(q: Array, *rows: Array) -> tuple[Array, Array, Array]:
        t = q.shape[1]

        def by_row(x: Array) -> Array:
            """(B, G, r, t, ...) -> (B, t, G, r, ...)"""
            return jnp.moveaxis(x, 3, 1)

        mask = sees(*rows)[:, None, None]
        scores = jnp.einsum(
            "bgmh,bsgh->bgms", grouped(q, groups).astype(dtype), k, preferred_element_type=jnp.float32
        )
        scores = jnp.where(mask, scores.reshape(b, groups, -1, t, k.shape[1]), NEGATIVE)
        top = jax.lax.stop_gradient(scores.max(-1))
        p = jnp.exp(scores - top[..., None])
        flat = p.astype(dtype).reshape(b, groups, -1, k.shape[1])
        out = jnp.einsum("bgms,bsgh->bgmh", flat, v, preferred_element_type=jnp.float32)
        return by_row(out.reshape(b, groups, -1, t, h)), by_row(p.sum(-1)), by_row(top)

    block = rows_at_once(heads * b, k.shape[1])
    if m <= block:
        return part(q, *rows)
    pad = -m % block

    def blocks(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(b, -1, block, *x.shape[2:]).swapaxes(0, 1)

    def whole(x: Array) -> Array:
        return x.swapaxes(0, 1).reshape(b, m + pad, *x.shape[3:])[:, :m]

    parts = jax.lax.map(lambda xs: jax.checkpoint(part)(*xs), tuple(blocks(x) for x in (q, *rows)))
    return cast(tuple[Array, Array, Array], jax.tree.map(whole, parts))


def rollout_attention(
    q: Array,
    k: Array,
    v: Array,
    context: tuple[Array, Array],
    sees: Callable[..., Array],
    rows: tuple[Array, ...],
    counts: tuple[int, ...],
    dtype: jnp.dtype,
) -> Array:
    """Mask rows over the depth-0 keys that ``sees(*rows)`` shows, and over their own rollout: two parts
    of one softmax, joined by their largest scores.

    q (B, M, N, H); k and v (B, M, G, H) of the segment's rows; context k and v (B, n, G, H).
    """
    b, m, n, h = q.shape
    groups = context[0].shape[2]
    k, v = (jnp.broadcast_to(x, (b, m, groups, h)) for x in (k, v))
    q = q * h**-0.5
    out, total, top = context_attention(q, *context, sees, rows, dtype)
    own = _own_scores(q.reshape(b, m, groups, -1, h), k, counts)  # (B, M, G, r, K-1)
    joint = jax.lax.stop_gradient(jnp.maximum(top, own.max(-1)))
    p_own, share = jnp.exp(own - joint[..., None]), jnp.exp(top - joint)
    total = total * share + p_own.sum(-1)
    out = out * share[..., None] + _own_values(p_own, v, counts)
    return (out / total[..., None]).reshape(b, m, n * h)


def segment_rows(batch: Batch, anchors: Array, lengths: Array, counts: tuple[int, ...]) -> tuple:
    """A segment's rows, depth-major: anchor, depth (static), and whether each row is real."""
    anchor = jnp.concatenate([anchors[:, :m] for m in counts], axis=1)
    depth = jnp.concatenate([jnp.full((m,), d) for d, m in enumerate(counts, 1)])
    real = jnp.concatenate([lengths[:, :m] >= d for d, m in enumerate(counts, 1)], axis=1)
    return anchor, depth, real


def with_mask_row(params: DrafterParams, cfg: DrafterConfig) -> DrafterParams:
    """The head as mask rows see it: the mask token's embedding is its only one."""
    return params.replace(embed=table_rows(params.embed, jnp.array([cfg.mask_token_id])))


def rollout_layer(
    layer: int,
    params: DrafterParams,
    cfg: DrafterConfig,
    batch: Batch,
    kv: tuple[Array, Array],
    rollouts: tuple[Array, Array],
    counts: tuple[int, ...],
    h: Float[Array, "b m d"] | None,
) -> Float[Array, "b m d"]:
    """One layer of a segment's mask rows, anchors and lengths ``rollouts``, over its depth-0 ``kv``,
    each (B, n, G, H). Layer 0 makes its own input, with ``params`` as ``with_mask_row`` gives them.
    """
    anchor, depth, real = segment_rows(batch, *rollouts, counts)
    along = jnp.arange(batch.tokens.shape[1])

    def sees(anchor: Array, ids: Array, real: Array) -> Array:
        same = batch.segment_ids[:, None] == ids[..., None]
        return (along <= anchor[..., None]) & same & real[..., None]

    def attend(q: Array, k: Array, v: Array) -> Array:
        rows = (anchor, jnp.take_along_axis(batch.segment_ids, anchor, axis=1), real)
        return rollout_attention(q, k, v, kv, sees, rows, counts, params.layers[layer].wq.dtype)

    positions = jnp.take_along_axis(batch.positions, anchor, axis=1) + depth
    x = None
    if h is None:
        # Every mask row has the same input, so fc and the first projections run for one row.
        g = fuse(params, cfg, cast(Array, params.mask_hidden).reshape(1, 1, -1))
        h, x = head_inputs(params, cfg, jnp.zeros((1, 1), jnp.int32), g)
    tables = rope_tables(cfg.block.rope, cfg.block.head_dim, positions)
    return run_block(params.layers[layer], cfg.block, h, tables, attend, x)[0]


def rollout_hidden(
    params: DrafterParams,
    cfg: DrafterConfig,
    batch: Batch,
    context: Context,
    anchors: Array,
    lengths: Array,
    counts: tuple[int, ...],
) -> Float[Array, "b m d"]:
    """Pre-norm hidden states of a segment's mask rows. ``context`` is each layer's k and v, (B, n, G, H).

    ``params`` are those of ``with_mask_row``.
    """
    h = None
    for layer, kv in enumerate(context):
        h = rollout_layer(layer, params, cfg, batch, kv, (anchors, lengths), counts, h)
    return cast(Array, h)


def _split_by_stage(params: DrafterParams, context: Context) -> tuple[Shared, ...]:
    """What each layer reads, and then what the loss does."""
    nothing = jax.tree.map(lambda _: None, params)
    layers = []
    for i, kv in enumerate(context):
        blocks = tuple(p if j == i else None for j, p in enumerate(params.layers))
        first = params.replace(final_norm=None, lm_head=None, draft_to_target=None) if i == 0 else nothing
        layers.append((first.replace(layers=blocks), [kv]))
    return *layers, (nothing.replace(layers=(), final_norm=params.final_norm, lm_head=params.lm_head), [])


def peagle_loss(
    params: DrafterParams,
    cfg: DrafterConfig,
    target_head: Float[Array, "vd d"],
    batch: Batch,
    depth_counts: tuple[int, ...],
    depth_weights: tuple[float, ...] | None = None,
    kind: LossKind = "kl",
    remat: Remat = "off",
    parts: SequenceParts = WHOLE,
) -> tuple[Float[Array, ""], Metrics]:
    """Mean weighted loss over all supervised rows of depths 0..K-1.

    ``depth_counts`` is (M_1, ..., M_{K-1}), the rows of each depth in one segment, and may be
    empty (K = 1). ``target_head`` are the target's vocabulary rows at the draft ids. ``remat`` is
    what is kept of a segment's forward pass for its own reverse pass, which follows at once.

    ``parts`` works on so many parts of every row and on as many segments at a time, so that a mesh can
    hold them apart; the number of segments is a multiple of it.
    """
    depths = len(depth_counts) + 1
    weights = jnp.ones((depths,)) if depth_weights is None else jnp.array(depth_weights[:depths])
    flags0 = parts.split(supervised(batch))
    along = parts.split(jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape))
    # From here on every part reads the rows of the others.
    batch = batch.replace(
        segment_ids=parts.everywhere(batch.segment_ids),
        positions=parts.everywhere(batch.positions),
        target_hidden=parts.everywhere(batch.target_hidden),
    )
    hidden0, context = depth_zero(params, cfg, depth_zero_inputs(batch), parts)
    if parts.count > 1:
        dtype = params.fc.dtype
        context = [tuple(parts.everywhere(parts.join(x.astype(dtype))) for x in kv) for kv in context]
    segments = max(batch.anchors.shape[0] // parts.count, 1) if depth_counts else 1

    def chunks(x: Array) -> Array:
        """(B, n, ...) -> (segments, B, n / segments, ...), padded at the end; so with parts in front."""
        along = 1 if parts.count == 1 else 2
        pad = [(0, -x.shape[along] % segments if i == along else 0) for i in range(x.ndim)]
        x = jnp.pad(x, pad)
        return jnp.moveaxis(x.reshape(*x.shape[:along], segments, -1, *x.shape[along + 1 :]), along, 0)

    def abreast(x: Array) -> Array:
        """Rollouts (segments * parts, B, M) -> (segments, parts, B, M)."""
        if parts.count == 1:
            return x
        return constrain(x.reshape(-1, parts.count, *x.shape[1:]), None, "sequence", "batch", None)

    def layer(i: int, shared: Shared, state: tuple[Array, ...], constants: tuple) -> tuple[Array, ...]:
        """State: hidden states (B, rows, D) of depth 0, and of the mask rows from the first layer on."""
        params, [kv] = shared
        hidden, *h = state

        def part(rollouts: tuple, *h: Array) -> Array:
            before = h[0] if h else None
            return rollout_layer(i, params, cfg, batch, kv, rollouts, depth_counts, before)

        return hidden, parts.map(part, constants[-1], *h)

    def sums(
        params: DrafterParams, state: tuple[Array, ...], anchor: Array, real: Array, rollouts: tuple
    ) -> Metrics:
        depth = jnp.zeros((anchor.shape[1],), jnp.int32)
        if depth_counts:
            anchors, lengths = rollouts
            row_anchor, row_depth, row_real = segment_rows(batch, anchors, lengths, depth_counts)
            anchor = jnp.concatenate([anchor, row_anchor], axis=1)
            real = jnp.concatenate([real, row_real], axis=1)
            depth = jnp.concatenate([depth, row_depth])
        at = jnp.minimum(anchor + depth + 1, batch.tokens.shape[1] - 1)
        labels = jnp.take_along_axis(batch.target_hidden, at[..., None], axis=1)
        loss, correct = row_losses(params, cfg, target_head, jnp.concatenate(state, axis=1), labels, kind)
        per_depth = jax.nn.one_hot(depth, depths)

        def by_depth(x: Array) -> Array:
            return jnp.where(real, x, 0.0).sum(0) @ per_depth

        ones = jnp.ones_like(loss)
        return Metrics(by_depth(loss), by_depth(correct * ones), by_depth(ones))

    def losses(shared: Shared, state: tuple[Array, ...], constants: tuple) -> tuple[Array, Metrics]:
        metrics = parts.total(parts.map(partial(sums, shared[0]), state, *constants))
        return jnp.sum(metrics.loss_sum * weights), metrics

    def place(gradient: Shared) -> Shared:
        return split_as_stored(gradient[0]), gradient[1]

    rollouts = (abreast(batch.anchors), abreast(batch.lengths)) if depth_counts else ()
    constants = (chunks(along), chunks(flags0), rollouts)
    masked = with_mask_row(params, cfg) if depth_counts else params.replace(embed=None)
    stages = (*(partial(layer, i) for i in range(cfg.num_layers if depth_counts else 0)), losses)
    shared = _split_by_stage(masked, context)[-len(stages) :]
    run = tuple(rematerialised(stage, remat) for stage in stages)
    found = summed(run, place, shared, (chunks(hidden0),), constants)
    total, metrics = cast(tuple[Array, Metrics], found)
    return total / jnp.maximum(metrics.count.sum(), 1.0), jax.lax.stop_gradient(metrics)
