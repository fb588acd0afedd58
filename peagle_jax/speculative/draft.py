"""Drafting: K guesses from one parallel pass (P-EAGLE) or from K passes in a scan (EAGLE-3)."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from peagle_jax.config import DrafterConfig
from peagle_jax.drafter.head import DrafterParams, draft_logits, forward_cached, fuse, to_target_ids
from peagle_jax.layers.attention import causal_mask
from peagle_jax.speculative.cache import KVCache, write
from peagle_jax.speculative.rules import choose, only
from peagle_jax.speculative.state import DecodeState, Pending


def _run(
    p: DrafterParams,
    cfg: DrafterConfig,
    cache: KVCache,
    tokens: Array,
    g: Array,
    base: Array,
) -> tuple[Array, KVCache]:
    """One pass of W consecutive slots from ``base`` (B,), written to the cache."""
    b, w = tokens.shape
    positions = base[:, None] + jnp.arange(w)
    k_cache, v_cache = cast(tuple, cache.k), cast(tuple, cache.v)
    h, k, v = forward_cached(p, cfg, tokens, g, positions, k_cache, v_cache, base, causal_mask(b, w))
    return h, write(cache, k, v, base, h)


def prefill_drafter(
    p: DrafterParams, cfg: DrafterConfig, cache: KVCache, tokens: Array, features: Array, base: Array
) -> KVCache:
    """Commits the slots of a prompt chunk: ``tokens`` (B, T) follow the ``features`` (B, T, C)."""
    return _run(p, cfg, cache, tokens, fuse(p, cfg, features), base)[1]


def _choose(p: DrafterParams, cfg: DrafterConfig, state: DecodeState, h: Array, first: Array) -> Array:
    """Target ids drafted from hidden states (B, J, D) whose tokens lie at ``first`` (B,) and on."""
    positions = first[:, None] + jnp.arange(h.shape[1])
    rules = only(state.rules, state.ready)
    chosen = choose(draft_logits(p, cfg, h), positions, None, rules, token_ids=p.draft_to_target)
    return to_target_ids(p, chosen)


def _rows(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index[..., None], axis=1)


def draft_parallel(
    p: DrafterParams, cfg: DrafterConfig, state: DecodeState, k: int
) -> tuple[Int[Array, "b k"], KVCache]:
    """K drafts from one pass over 2K slots (p-eagle-spec 2.3).

    Row i is a committed slot while i < count, then a mask slot. Rows past the K-1 masks are
    padding: causally invisible to the real ones and overwritten later.
    """
    pending, cache = cast(Pending, state.pending), cast(KVCache, state.drafter_cache)
    row = jnp.arange(2 * k)
    pad = 2 * k - (k + 1)
    tokens = jnp.pad(pending.tokens, ((0, 0), (0, pad)))
    features = jnp.pad(pending.features, ((0, 0), (0, pad), (0, 0)))
    committed = row < pending.count[:, None]
    tokens = jnp.where(committed, tokens, cfg.mask_token_id)
    features = jnp.where(committed[..., None], features, p.mask_hidden)
    base = state.length - pending.count
    h, cache = _run(p, cfg, cache, tokens, fuse(p, cfg, features), base)
    rows = jnp.maximum(pending.count - 1, 0)[:, None] + jnp.arange(k)
    return _choose(p, cfg, state, _rows(h, rows), state.length + 1), cache


def draft_sequential(
    p: DrafterParams, cfg: DrafterConfig, state: DecodeState, k: int
) -> tuple[Int[Array, "b k"], KVCache]:
    """K drafts from K passes: each later slot reads the previous draft and the head's own
    pre-norm state in place of the feature (p-eagle-spec 3.10)."""
    pending, cache = cast(Pending, state.pending), cast(KVCache, state.drafter_cache)
    base = state.length - pending.count
    h, cache = _run(p, cfg, cache, pending.tokens, fuse(p, cfg, pending.features), base)
    h = _rows(h, jnp.maximum(pending.count - 1, 0)[:, None])
    first = _choose(p, cfg, state, h, state.length + 1)

    def step(carry: tuple, i: Array) -> tuple[tuple, Array]:
        cache, token, h = carry
        h, cache = _run(p, cfg, cache, token, h, state.length + i)
        token = _choose(p, cfg, state, h, state.length + 2 + i)
        return (cache, token, h), token[:, 0]

    (cache, _, _), rest = jax.lax.scan(step, (cache, first, h), jnp.arange(k - 1))
    return jnp.concatenate([first, rest.T], axis=1), cache
