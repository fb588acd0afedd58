"""The head: one module for P-EAGLE and EAGLE-3 (P-EAGLE, section 2).

Slot p pairs the token at p+1 with the target's feature at p, has RoPE position p, and its logits
predict the token at p+2. A mask slot pairs the mask token with ``mask_hidden``.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.config import DrafterConfig
from peagle_jax.layers.attention import cached_attention
from peagle_jax.layers.block import Attend, BlockParams, run_block
from peagle_jax.layers.linear import product, table_rows
from peagle_jax.layers.norm import rms_norm
from peagle_jax.layers.rope import rope_tables
from peagle_jax.parallel.rules import joined


@struct.dataclass
class DrafterParams:
    """Weights of a head.

    ``layers[0]`` reads 2D inputs (normed embedding first, then normed feature); ``hidden_norm`` is
    the feature's norm. ``embed`` is the head's own table or the target's array when shared.
    ``draft_to_target`` holds target ids (not offsets), int32 (Vd,); None is the identity.
    """

    embed: Array  # (V, D)
    fc: Array  # (D, C)
    hidden_norm: Array  # (D,)
    layers: tuple[BlockParams, ...]
    final_norm: Array  # (D,)
    lm_head: Array  # (Vd, D)
    mask_hidden: Array | None = None  # (C,), P-EAGLE only
    input_norm: Array | None = None  # (C,), with norm_before_fc
    fc_bias: Array | None = None  # (D,)
    draft_to_target: Array | None = None  # (Vd,)


def fuse(p: DrafterParams, cfg: DrafterConfig, features: Float[Array, "... c"]) -> Float[Array, "... d"]:
    """g = fc(features), with the optional norm before it."""
    if p.input_norm is not None:
        features = rms_norm(features, p.input_norm, cfg.block.rms_norm_eps)
    g = joined(product(joined(features), p.fc))
    return g if p.fc_bias is None else g + p.fc_bias


def head_inputs(
    p: DrafterParams, cfg: DrafterConfig, tokens: Int[Array, "... w"], g: Float[Array, "... w d"]
) -> tuple[Float[Array, "... w d"], Float[Array, "... w e"]]:
    """The first layer's residual stream, and what its q, k and v read instead of it (2D wide)."""
    eps = cfg.block.rms_norm_eps
    e = table_rows(p.embed, tokens)
    normed = rms_norm(g, p.hidden_norm, eps)
    x = jnp.concatenate([rms_norm(e, p.layers[0].attn_norm, eps), normed], axis=-1)
    return (normed if cfg.norm_before_residual else g), x


def run_head(
    p: DrafterParams,
    cfg: DrafterConfig,
    tokens: Int[Array, "... w"],
    g: Float[Array, "... w d"],
    positions: Int[Array, "... w"],
    attends: list[Attend],
) -> tuple[Float[Array, "... w d"], list[tuple[Array, Array]]]:
    """All layers. ``attends[i]`` is layer i's attention.

    Returns the pre-norm hidden states and each layer's own (k, v). The pre-norm state is what
    EAGLE-3 feeds back as the next g.
    """
    tables = rope_tables(cfg.block.rope, cfg.block.head_dim, positions)
    h, x = head_inputs(p, cfg, tokens, g)
    rows = []
    for i, layer in enumerate(p.layers):
        h, kv = run_block(layer, cfg.block, h, tables, attends[i], x if i == 0 else None)
        rows.append(kv)
    return h, rows


def draft_logits(p: DrafterParams, cfg: DrafterConfig, hidden: Array) -> Float[Array, "... vd"]:
    """Logits over the draft vocabulary, float32, from pre-norm hidden states."""
    return product(rms_norm(hidden, p.final_norm, cfg.block.rms_norm_eps), p.lm_head, "lm_head")


def forward_cached(
    p: DrafterParams,
    cfg: DrafterConfig,
    tokens: Int[Array, "b w"],
    g: Float[Array, "b w d"],
    positions: Int[Array, "b w"],
    cache_k: tuple[Array, ...],
    cache_v: tuple[Array, ...],
    lengths: Int[Array, " b"],
    own_mask: Bool[Array, "b w w"],
    slot: Int[Array, ""] | int = 0,
) -> tuple[Float[Array, "b w d"], tuple[Array, ...], tuple[Array, ...]]:
    """One pass of W positions over slots ``slot``.. of the cache: hidden states, the rows' k and v."""
    attends = [
        lambda q, k, v, i=i: cached_attention(q, k, v, cache_k[i], cache_v[i], lengths, own_mask, slot)
        for i in range(cfg.num_layers)
    ]
    h, rows = run_head(p, cfg, tokens, g, positions, attends)
    return h, tuple(k for k, _ in rows), tuple(v for _, v in rows)


def to_target_ids(p: DrafterParams, draft_ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Target vocabulary ids of draft vocabulary ids."""
    return draft_ids if p.draft_to_target is None else p.draft_to_target[draft_ids]
