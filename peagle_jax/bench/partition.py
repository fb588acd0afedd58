"""The training pass against its rivals: the paper's partition and the flat masked pass, on the same rows.

The paper's partition (each of S segments carries the whole depth-0 prefix again) and the flat pass get an
attention that reads keys a block of queries at a time and is recomputed in the reverse pass, so that no
rows x rows array lives there either. Each of their passes is a program of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from peagle_jax.config import BlockConfig, DrafterConfig
from peagle_jax.drafter.head import DrafterParams, fuse, run_head
from peagle_jax.layers.attention import NEGATIVE, grouped, ungrouped
from peagle_jax.models.stack import TargetParams
from peagle_jax.train.cod import CodOptions, depth_counts, sample_rollouts, supervised_positions
from peagle_jax.train.partition import Batch, peagle_loss, row_losses, shifted, supervised
from peagle_jax.train.warm_start import at_random

QUERY_BLOCK = 128


class Rows(NamedTuple):
    """Elements of one pass: anchor and depth of each row, and whether this pass charges its loss."""

    anchor: np.ndarray | Array
    depth: np.ndarray | Array
    owned: np.ndarray | Array


def rollout_rows(anchors: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All mask rows (anchor, depth) of a sampling, depth-major."""
    flat_a, flat_l = anchors.ravel(), lengths.ravel()
    pairs = [(flat_a[flat_l >= d], d) for d in range(1, int(flat_l.max(initial=0)) + 1)]
    anchor = np.concatenate([flat_a[:0], *(a for a, _ in pairs)])
    return anchor, np.concatenate([np.zeros(0, int), *(np.full(len(a), d) for a, d in pairs)])


def paper_segments(n: int, anchor: np.ndarray, depth: np.ndarray, segments: int) -> list[Rows]:
    """The paper's assignment (algorithm 1): rollouts by anchor + 1, depth-0 rows by position, and
    every depth-0 row before the segment's end as context."""
    passes = []
    for s in range(segments):
        low, high = s * n // segments, (s + 1) * n // segments
        mine = (anchor + 1 >= low) & (anchor + 1 < high)
        prefix = np.arange(high)
        passes.append(
            Rows(
                np.concatenate([prefix, anchor[mine]]),
                np.concatenate([np.zeros(high, int), depth[mine]]),
                np.concatenate([prefix >= low, np.ones(mine.sum(), bool)]),
            )
        )
    return passes


def masked_attention(q: Array, k: Array, v: Array, anchor: Array, depth: Array, dtype: Any) -> Array:
    """Rows (1, R, heads, H) over all rows by the rule of the partition, a block of queries at a time."""
    groups, rows = k.shape[2], q.shape[1]
    q, k, v = (
        (q * q.shape[-1] ** -0.5).astype(dtype),
        k.astype(dtype).swapaxes(1, 2),
        v.astype(dtype).swapaxes(1, 2),
    )
    pad = -rows % QUERY_BLOCK

    def blocks(x: Array) -> Array:
        x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, QUERY_BLOCK, *x.shape[1:])

    @jax.checkpoint
    def one(xs: tuple[Array, Array, Array]) -> Array:
        q_block, a, d = xs
        seen = (depth == 0) & (anchor <= a[:, None]) | (anchor == a[:, None]) & (depth <= d[:, None])
        scores = jnp.einsum(
            "bgth,bgsh->bgts", grouped(q_block[None], groups), k, preferred_element_type=jnp.float32
        )
        scores = jnp.where(seen, scores.reshape(1, groups, -1, QUERY_BLOCK, rows), NEGATIVE)
        p = jax.nn.softmax(scores, axis=-1).astype(dtype).reshape(1, groups, -1, rows)
        out = jnp.einsum("bgts,bgsh->bgth", p, v, preferred_element_type=jnp.float32)
        return ungrouped(out, QUERY_BLOCK)[0]

    out = jax.lax.map(one, (blocks(q[0]), blocks(anchor), blocks(depth)))
    return out.reshape(1, rows + pad, -1)[:, :rows]


def masked_loss(
    params: DrafterParams, cfg: DrafterConfig, target_head: Array, batch: Batch, rows: Rows, dense: int
) -> Array:
    """Summed KL of the owned, supervised rows of one masked pass; the first ``dense`` have depth 0."""
    anchor, depth = rows.anchor, rows.depth
    g = fuse(params, cfg, batch.features[0, :dense])
    mask_g = fuse(params, cfg, jnp.reshape(cast(Array, params.mask_hidden), (1, -1)))
    g = jnp.concatenate([g, jnp.broadcast_to(mask_g, (len(anchor) - dense, g.shape[1]))])
    tokens = jnp.where(depth == 0, shifted(batch.tokens, 1)[0, anchor], cfg.mask_token_id)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return masked_attention(q, k, v, anchor, depth, params.fc.dtype)

    positions = (anchor + depth)[None]
    hidden, _ = run_head(params, cfg, tokens[None], g[None], positions, [attend] * cfg.num_layers)
    at = jnp.minimum(anchor + depth + 1, batch.tokens.shape[1] - 1)
    kl, _ = row_losses(params, cfg, target_head, hidden, batch.target_hidden[:, at])
    charged = jnp.where(depth == 0, supervised(batch)[0, anchor], True) & rows.owned
    return jnp.sum(jnp.where(charged, kl[0], 0.0))


def masked_step(cfg: DrafterConfig, dense: int, count: int) -> Callable:
    """One pass: its loss and gradient, added to those of passes before it. ``dense`` rows have depth 0."""

    def step(
        params: DrafterParams, target_head: Array, batch: Batch, rows: Rows, before: tuple
    ) -> tuple[Array, DrafterParams]:
        fixed = params.embed

        def loss(p: DrafterParams) -> Array:
            return masked_loss(p.replace(embed=fixed), cfg, target_head, batch, rows, dense) / count

        found = jax.value_and_grad(loss)(params.replace(embed=None))
        return jax.tree.map(jnp.add, before, found)

    return step


def our_step(cfg: DrafterConfig, counts: tuple[int, ...]) -> Callable:
    def step(params: DrafterParams, target_head: Array, batch: Batch) -> tuple[Array, DrafterParams]:
        fixed = params.embed

        def loss(p: DrafterParams) -> Array:
            return peagle_loss(p.replace(embed=fixed), cfg, target_head, batch, counts)[0]

        return jax.value_and_grad(loss)(params.replace(embed=None))

    return step


def make_config(args: argparse.Namespace) -> DrafterConfig:
    block = BlockConfig(args.hidden, args.intermediate, args.heads, args.kv_heads, args.head_dim)
    taps = tuple(range(3))
    return DrafterConfig(
        "peagle", block, args.layers, args.vocab, args.draft_vocab, args.hidden, taps, 2**20, args.depths, 0
    )


def make_params(cfg: DrafterConfig, dtype: Any) -> tuple[DrafterParams, Array]:
    """Random weights and target rows: what is measured does not depend on them."""
    table = 0.02 * jax.random.normal(jax.random.key(0), (cfg.vocab_size, cfg.hidden_size))
    target = TargetParams(table, (), jnp.ones((cfg.hidden_size,)), None)
    params = at_random(cfg, target, np.arange(cfg.draft_vocab_size)).replace(embed=table)
    params = jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, params)
    return params, table[: cfg.draft_vocab_size].astype(dtype)


def make_batch(cfg: DrafterConfig, n: int, options: CodOptions, dtype: Any) -> Batch:
    """One supervised document of n tokens and its sampled rollouts."""
    rng = np.random.default_rng(n)
    document, flags = np.zeros(n, np.int32), np.ones(n, bool)
    valid = supervised_positions(flags, document)
    anchors, lengths = sample_rollouts(valid, document, (n,), options)

    def states(width: int) -> Array:
        return jax.random.normal(jax.random.key(n + width), (1, n, width)).astype(dtype)

    return Batch(
        tokens=jnp.asarray(rng.integers(1, cfg.vocab_size, (1, n))),
        segment_ids=jnp.asarray(document[None]),
        positions=jnp.arange(n)[None],
        loss_flags=jnp.asarray(flags[None]),
        features=states(cfg.feature_size),
        target_hidden=states(cfg.target_hidden_size),
        anchors=jnp.asarray(anchors[:, None]),
        lengths=jnp.asarray(lengths[:, None]),
    )


def sampling(n: int, args: argparse.Namespace) -> CodOptions:
    """COD with as many segments as hold about ``--segment-rows`` mask rows each."""
    masks = sum(depth_counts(n, CodOptions(args.depths, args.ratio)))
    return CodOptions(args.depths, args.ratio, segments=max(1, round(masks / args.segment_rows)))
