"""The jitted step: an optional prompt chunk, then R rounds of draft, verify, accept and commit.

Shapes are static and the state is donated; nothing is read by the host inside.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from peagle_jax.config import DrafterConfig, SpecConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.attention import causal_mask
from peagle_jax.models import stack
from peagle_jax.models.stack import TargetOutput, TargetParams
from peagle_jax.speculative.cache import KVCache, write
from peagle_jax.speculative.draft import draft_parallel, draft_sequential, prefill_drafter
from peagle_jax.speculative.sampling import choose_tokens
from peagle_jax.speculative.state import Chunk, DecodeState, Pending, RoundOutput


def _run_target(
    params: TargetParams,
    cfg: TargetConfig,
    cache: KVCache,
    tokens: Int[Array, "b t"],
    start: Int[Array, " b"],
    taps: tuple[int, ...],
) -> tuple[TargetOutput, KVCache]:
    b, t = tokens.shape
    positions = start[:, None] + jnp.arange(t)
    out = stack.forward(params, cfg, tokens, positions, cache.k, cache.v, start, causal_mask(b, t), taps)
    return out, write(cache, out.k, out.v, start, out.hidden)


def _finish(
    state: DecodeState, tokens: Int[Array, "b w"], count: Int[Array, " b"]
) -> tuple[Array, Array, Array]:
    """Cuts ``count`` new tokens at the first stop id and at the limit, whichever comes first.

    Returns the count that is left, whether a stop id ended it, and whether anything did.
    """
    column = jnp.arange(tokens.shape[1])
    stops = jnp.any(tokens[..., None] == state.stop_ids[:, None], axis=-1)
    room = state.limit - (state.length + 1)
    within = (column < count[:, None]) & (column < room[:, None])
    hit = stops & within
    first = jnp.min(jnp.where(hit, column, tokens.shape[1]), axis=1)
    stopped = jnp.any(hit, axis=1)
    left = jnp.where(stopped, first + 1, within.sum(1))
    return left, stopped, stopped | (left >= room)


def run_round(
    params: tuple[TargetParams, DrafterParams | None],
    configs: tuple[TargetConfig, DrafterConfig | None],
    spec: SpecConfig,
    state: DecodeState,
) -> tuple[DecodeState, RoundOutput]:
    """One round (p-eagle-spec 2.3). K = 0 is plain decode."""
    (target, head), (target_cfg, cfg), k = params, configs, spec.num_speculative_tokens
    tokens, drafter_cache = state.last_token[:, None], state.drafter_cache
    if k:
        assert head is not None
        assert cfg is not None
        draft = draft_parallel if cfg.method == "peagle" else draft_sequential
        drafts, drafter_cache = draft(head, cfg, state, k)
        tokens = jnp.concatenate([tokens, drafts], axis=1)

    taps = cfg.taps if k and cfg is not None else ()
    out, target_cache = _run_target(target, target_cfg, state.target_cache, tokens, state.length, taps)
    logits = stack.logits(target, target_cfg, out.hidden)
    positions = state.length[:, None] + 1 + jnp.arange(k + 1)
    chosen = choose_tokens(logits, positions, state.sampling)

    agreed = jnp.cumprod(tokens[:, 1:] == chosen[:, :-1], axis=1)
    accepted = agreed.sum(1).astype(jnp.int32)
    count, stopped, ended = _finish(state, chosen, accepted + 1)
    count = jnp.where(state.ready, count, 0)
    last = jnp.take_along_axis(chosen, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    pending = state.pending
    if k:
        running = state.ready[:, None]
        old = cast(Pending, pending)
        pending = Pending(
            tokens=jnp.where(running, chosen, old.tokens),
            features=jnp.where(running[..., None], out.features, old.features),
            count=jnp.where(state.ready, count, old.count),
        )
    output = RoundOutput(
        tokens=chosen,
        count=count,
        accepted=jnp.where(state.ready, accepted, 0),
        drafted=jnp.where(state.ready, k, 0),
        stopped=state.ready & stopped,
        ended=state.ready & ended,
    )
    state = state.replace(
        target_cache=target_cache,
        drafter_cache=drafter_cache,
        pending=pending,
        length=state.length + count,
        last_token=jnp.where(state.ready, last, state.last_token),
        ready=state.ready & ~ended,
    )
    return state, output


def run_prefill(
    params: tuple[TargetParams, DrafterParams | None],
    configs: tuple[TargetConfig, DrafterConfig | None],
    spec: SpecConfig,
    state: DecodeState,
    chunk: Chunk,
) -> tuple[DecodeState, RoundOutput]:
    """A prompt chunk: both caches fill, and a final chunk chooses the answer's first token."""
    (target, head), (target_cfg, cfg) = params, configs
    speculating = spec.num_speculative_tokens > 0
    taps = cfg.taps if speculating and cfg is not None else ()
    out, target_cache = _run_target(target, target_cfg, state.target_cache, chunk.tokens, state.length, taps)
    end = jnp.maximum(chunk.count - 1, 0)[:, None]

    def at_end(x: Array) -> Array:
        return jnp.take_along_axis(x, end[..., None], axis=1)

    logits = stack.logits(target, target_cfg, at_end(out.hidden))
    prompt = state.length + chunk.count
    first = choose_tokens(logits, prompt[:, None], state.sampling)
    final = chunk.final & (chunk.count > 0)
    drafter_cache, pending = state.drafter_cache, state.pending
    if speculating:
        assert head is not None
        assert cfg is not None
        drafter_cache = prefill_drafter(
            head, cfg, cast(KVCache, drafter_cache), chunk.following, out.features, state.length
        )
        # The last slot waits for its token, which has only now been chosen.
        old = cast(Pending, pending)
        tokens = jnp.zeros_like(old.tokens).at[:, 0].set(first[:, 0])
        features = jnp.zeros_like(old.features).at[:, :1].set(at_end(out.features))
        pending = Pending(
            tokens=jnp.where(final[:, None], tokens, old.tokens),
            features=jnp.where(final[:, None, None], features, old.features),
            count=jnp.where(final, 1, old.count),
        )
    state = state.replace(
        target_cache=target_cache, drafter_cache=drafter_cache, pending=pending, length=prompt
    )
    width = spec.num_speculative_tokens + 1
    tokens = jnp.pad(first, ((0, 0), (0, width - 1)))
    _, stopped, ended = _finish(state.replace(length=prompt - 1), tokens, jnp.ones_like(prompt))
    output = RoundOutput(
        tokens=tokens,
        count=final.astype(jnp.int32),
        accepted=jnp.zeros_like(prompt),
        drafted=jnp.zeros_like(prompt),
        stopped=final & stopped,
        ended=final & ended,
    )
    state = state.replace(
        last_token=jnp.where(final, first[:, 0], state.last_token),
        ready=jnp.where(final, ~ended, state.ready),
    )
    return state, output


def step(
    params: tuple[TargetParams, DrafterParams | None],
    state: DecodeState,
    chunk: Chunk | None,
    *,
    configs: tuple[TargetConfig, DrafterConfig | None],
    spec: SpecConfig,
    rounds: int,
) -> tuple[DecodeState, RoundOutput]:
    """One dispatch: a prompt chunk if there is one, then ``rounds`` rounds.

    Returns the state and outputs with a leading axis of ``rounds`` (+ 1 with a chunk).
    """
    outputs = []
    if chunk is not None:
        state, output = run_prefill(params, configs, spec, state, chunk)
        outputs.append(jax.tree.map(lambda x: x[None], output))
    if rounds == 1:  # outside a loop the caches are updated in place; a loop would copy them twice
        state, output = run_round(params, configs, spec, state)
        outputs.append(jax.tree.map(lambda x: x[None], output))
    elif rounds:
        state, output = jax.lax.scan(
            lambda state, _: run_round(params, configs, spec, state), state, None, length=rounds
        )
        outputs.append(output)
    return state, jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)
