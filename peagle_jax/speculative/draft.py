"""Drafting: candidates for K positions from one parallel pass (P-EAGLE) or K passes in a scan (EAGLE-3)."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from peagle_jax.config import DrafterConfig
from peagle_jax.drafter.head import DrafterParams, draft_logits, forward_cached, fuse, to_target_ids
from peagle_jax.layers.attention import causal_mask
from peagle_jax.speculative.cache import KVCache, write
from peagle_jax.speculative.rules import choose, estimates, only
from peagle_jax.speculative.sampling import best_tokens
from peagle_jax.speculative.state import DecodeState, Pending
from peagle_jax.speculative.tree import Marginals


def _run(
    p: DrafterParams,
    cfg: DrafterConfig,
    cache: KVCache,
    tokens: Array,
    g: Array,
    base: Array,
    known: Array,
    slot: Array | int,
) -> tuple[Array, KVCache]:
    """One pass of W consecutive positions from ``base`` (B,), written to the cache, over ``known`` (B,)."""
    b, w = tokens.shape
    positions = base[:, None] + jnp.arange(w)
    k_cache, v_cache = cast(tuple, cache.k), cast(tuple, cache.v)
    mask = causal_mask(b, w)
    h, k, v = forward_cached(p, cfg, tokens, g, positions, k_cache, v_cache, known, mask, slot)
    return h, write(cache, k, v, base, h, slot)


def prefill_drafter(
    p: DrafterParams,
    cfg: DrafterConfig,
    cache: KVCache,
    tokens: Array,
    features: Array,
    base: Array,
    slot: Array | int,
) -> KVCache:
    """Commits positions from ``base`` (B,): ``tokens`` (B, T) follow the ``features`` (B, T, C)."""
    return _run(p, cfg, cache, tokens, fuse(p, cfg, features), base, base, slot)[1]


def catch_up(p: DrafterParams, cfg: DrafterConfig, state: DecodeState) -> DecodeState:
    """Commits what plain rounds left pending, all but the last row, from which the next draft starts."""
    pending, cache = cast(Pending, state.pending), cast(KVCache, state.drafter_cache)
    base = state.length - pending.count
    cache = prefill_drafter(p, cfg, cache, pending.tokens, pending.features, base, 0)
    last = jnp.maximum(pending.count - 1, 0)[:, None]
    pending = Pending(
        tokens=pending.tokens.at[:, :1].set(jnp.take_along_axis(pending.tokens, last, axis=1)),
        features=pending.features.at[:, :1].set(_rows(pending.features, last)),
        count=jnp.minimum(pending.count, 1),
    )
    return state.replace(drafter_cache=cache, pending=pending)


def _candidates(
    p: DrafterParams, cfg: DrafterConfig, state: DecodeState, h: Array, first: Array, count: int
) -> Marginals:
    """Target ids drafted from hidden states (B, J, D) whose tokens lie at ``first`` (B,) and on. With no
    ``count`` it is one a position, without an estimate."""
    positions = first[:, None] + jnp.arange(h.shape[1])
    rules, logits = only(state.settings.rules, state.ready), draft_logits(p, cfg, h)
    if not count:
        chosen = choose(logits, positions, None, rules, token_ids=p.draft_to_target)
        return Marginals(to_target_ids(p, chosen)[..., None], None)
    scores = estimates(logits, positions, rules, p.draft_to_target)
    top, ids = best_tokens(scores, count)
    return Marginals(to_target_ids(p, ids), top - jax.nn.logsumexp(scores, axis=-1, keepdims=True))


def _rows(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index[..., None], axis=1)


def draft_parallel(
    p: DrafterParams, cfg: DrafterConfig, state: DecodeState, k: int, width: int, count: int
) -> tuple[Marginals, KVCache]:
    """``count`` candidates for each of K positions from one pass (P-EAGLE, section 2), which has ``width`` +
    K - 1 rows. At most ``width`` of them are pending. Row i is a committed position while i < the pending
    count, then a mask. Rows past the K-1 masks are padding: causally invisible to the real ones and
    overwritten later.
    """
    pending, cache = cast(Pending, state.pending), cast(KVCache, state.drafter_cache)
    row, pad = jnp.arange(width + k - 1), k - 1
    tokens = jnp.pad(pending.tokens[:, :width], ((0, 0), (0, pad)))
    features = jnp.pad(pending.features[:, :width], ((0, 0), (0, pad), (0, 0)))
    committed = row < pending.count[:, None]
    tokens = jnp.where(committed, tokens, cfg.mask_token_id)
    features = jnp.where(committed[..., None], features, p.mask_hidden)
    base = state.length - pending.count
    known = jnp.where(state.ready, base, 0)
    h, cache = _run(p, cfg, cache, tokens, fuse(p, cfg, features), base, known, 0)
    rows = jnp.maximum(pending.count - 1, 0)[:, None] + jnp.arange(k)
    return _candidates(p, cfg, state, _rows(h, rows), state.length + 1, count), cache


def draft_sequential(
    p: DrafterParams, cfg: DrafterConfig, state: DecodeState, k: int, width: int, count: int
) -> tuple[Marginals, KVCache]:
    """One candidate for each of K positions from K passes: each later one reads the draft before it and the
    head's own pre-norm state in place of the feature (EAGLE-3)."""
    pending, cache = cast(Pending, state.pending), cast(KVCache, state.drafter_cache)
    base, ready = state.length - pending.count, state.ready
    g = fuse(p, cfg, pending.features[:, :width])
    h, cache = _run(p, cfg, cache, pending.tokens[:, :width], g, base, jnp.where(ready, base, 0), 0)
    h = _rows(h, jnp.maximum(pending.count - 1, 0)[:, None])
    first = _candidates(p, cfg, state, h, state.length + 1, count)

    def step(carry: tuple, i: Array) -> tuple[tuple, Marginals]:
        cache, token, h = carry
        at = state.length + i
        h, cache = _run(p, cfg, cache, token, h, at, jnp.where(ready, at, 0), 0)
        found = _candidates(p, cfg, state, h, state.length + 2 + i, count)
        return (cache, found.tokens[..., 0], h), found

    (cache, _, _), rest = jax.lax.scan(step, (cache, first.tokens[..., 0], h), jnp.arange(k - 1))
    joined = jax.tree.map(
        lambda one, more: jnp.concatenate([one, more[:, :, 0].swapaxes(0, 1)], axis=1), first, rest
    )
    return joined, cache
