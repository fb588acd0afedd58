"""The jitted step: an optional prompt chunk, then R rounds of draft, verify, accept and commit.

Shapes are static and the state is donated; nothing is read by the host inside.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from peagle_jax.config import DrafterConfig, SpecConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.attention import causal_mask
from peagle_jax.models import stack
from peagle_jax.models.stack import TargetOutput, TargetParams
from peagle_jax.speculative.cache import KVCache, write
from peagle_jax.speculative.draft import draft_parallel, draft_sequential, prefill_drafter
from peagle_jax.speculative.logprobs import LogprobReport, report_logprobs, report_prompt
from peagle_jax.speculative.rules import advance, choose, only
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
    stops = jnp.any(tokens[..., None] == state.rules.stop_ids[:, None], axis=-1)
    room = state.limit - (state.length + 1)
    within = (column < count[:, None]) & (column < room[:, None])
    hit = stops & within
    first = jnp.min(jnp.where(hit, column, tokens.shape[1]), axis=1)
    stopped = jnp.any(hit, axis=1)
    left = jnp.where(stopped, first + 1, within.sum(1))
    return left, stopped, stopped | (left >= room)


def draft_window(
    params: tuple[TargetParams, DrafterParams | None],
    configs: tuple[TargetConfig, DrafterConfig | None],
    spec: SpecConfig,
    state: DecodeState,
) -> tuple[DecodeState, Int[Array, "b w"]]:
    """The K + 1 tokens to verify: the last committed one and K drafts. K = 0 drafts nothing."""
    (_, head), (_, cfg), k = params, configs, spec.num_speculative_tokens
    tokens = state.last_token[:, None]
    if not k:
        return state, tokens
    assert head is not None
    assert cfg is not None
    draft = draft_parallel if cfg.method == "peagle" else draft_sequential
    drafts, drafter_cache = draft(head, cfg, state, k)
    return state.replace(drafter_cache=drafter_cache), jnp.concatenate([tokens, drafts], axis=1)


def verify_window(
    params: tuple[TargetParams, DrafterParams | None],
    configs: tuple[TargetConfig, DrafterConfig | None],
    spec: SpecConfig,
    state: DecodeState,
    tokens: Int[Array, "b w"],
    masks: UInt32[Array, "b w words"] | None = None,
) -> tuple[DecodeState, RoundOutput]:
    """Verifies, accepts and commits a window. ``masks`` are what grammars allow after each token."""
    (target, _), (target_cfg, cfg), k = params, configs, spec.num_speculative_tokens
    taps = cfg.taps if k and cfg is not None else ()
    out, target_cache = _run_target(target, target_cfg, state.target_cache, tokens, state.length, taps)
    logits = stack.logits(target, target_cfg, out.hidden)
    positions = state.length[:, None] + 1 + jnp.arange(k + 1)
    rules = only(state.rules, state.ready)
    chosen = choose(logits, positions, tokens, rules, masks)

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
        logprobs=report_logprobs(logits, chosen, jnp.any(rules.logprobs)),
    )
    state = state.replace(
        target_cache=target_cache,
        pending=pending,
        rules=advance(state.rules, chosen, count),
        length=state.length + count,
        last_token=jnp.where(state.ready, last, state.last_token),
        ready=state.ready & ~ended,
    )
    return state, output


def run_round(
    params: tuple[TargetParams, DrafterParams | None],
    configs: tuple[TargetConfig, DrafterConfig | None],
    spec: SpecConfig,
    state: DecodeState,
) -> tuple[DecodeState, RoundOutput]:
    """One round (p-eagle-spec 2.3). K = 0 is plain decode."""
    state, tokens = draft_window(params, configs, spec, state)
    return verify_window(params, configs, spec, state, tokens)


def run_prefill(
    params: tuple[TargetParams, DrafterParams | None],
    configs: tuple[TargetConfig, DrafterConfig | None],
    spec: SpecConfig,
    state: DecodeState,
    chunk: Chunk,
) -> tuple[DecodeState, RoundOutput, LogprobReport]:
    """A prompt chunk: both caches fill, and a final chunk chooses the answer's first token.

    The report is of ``chunk.following`` (T columns), so a prompt's first token has none.
    """
    (target, head), (target_cfg, cfg) = params, configs
    speculating = spec.num_speculative_tokens > 0
    taps = cfg.taps if speculating and cfg is not None else ()
    out, target_cache = _run_target(target, target_cfg, state.target_cache, chunk.tokens, state.length, taps)
    end = jnp.maximum(chunk.count - 1, 0)[:, None]

    def at_end(x: Array) -> Array:
        return jnp.take_along_axis(x, end[..., None], axis=1)

    logits = stack.logits(target, target_cfg, at_end(out.hidden))
    prompt = state.length + chunk.count
    final = chunk.final & (chunk.count > 0)
    rules = only(state.rules, final)
    first = choose(logits, prompt[:, None], None, rules, chunk.masks)
    prompt_report = report_prompt(
        lambda hidden: stack.logits(target, target_cfg, hidden),
        out.hidden,
        chunk.following,
        jnp.any(state.rules.prompt_logprobs & (chunk.count > 0)),
        target_cfg.vocab_size,
    )
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
        logprobs=jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, width - 1), *[(0, 0)] * (x.ndim - 2))),
            report_logprobs(logits, first, jnp.any(rules.logprobs)),
        ),
    )
    state = state.replace(
        rules=advance(state.rules, first, final.astype(jnp.int32)),
        last_token=jnp.where(final, first[:, 0], state.last_token),
        ready=jnp.where(final, ~ended, state.ready),
    )
    return state, output, prompt_report


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
    outputs, prompt_report = [], None
    if chunk is not None:
        state, output, prompt_report = run_prefill(params, configs, spec, state, chunk)
        outputs.append(jax.tree.map(lambda x: x[None], output))
    if rounds == 1:  # outside a loop the caches are updated in place; a loop would copy them twice
        state, output = run_round(params, configs, spec, state)
        outputs.append(jax.tree.map(lambda x: x[None], output))
    elif rounds:
        state, output = jax.lax.scan(
            lambda state, _: run_round(params, configs, spec, state), state, None, length=rounds
        )
        outputs.append(output)
    output = jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)
    return state, output.replace(prompt=prompt_report)


def draft_step(
    params: tuple[TargetParams, DrafterParams | None],
    state: DecodeState,
    _: None,
    *,
    configs: tuple[TargetConfig, DrafterConfig | None],
    spec: SpecConfig,
) -> tuple[DecodeState, Int[Array, "b w"]]:
    """The first half of a round, for slots with a grammar: the host needs the window for its masks."""
    return draft_window(params, configs, spec, state)


def verify_step(
    params: tuple[TargetParams, DrafterParams | None],
    state: DecodeState,
    window: tuple[Int[Array, "b w"], UInt32[Array, "b w words"]],
    *,
    configs: tuple[TargetConfig, DrafterConfig | None],
    spec: SpecConfig,
) -> tuple[DecodeState, RoundOutput]:
    """The second half: ``window`` is what ``draft_step`` gave and its masks. Outputs as from ``step``."""
    state, output = verify_window(params, configs, spec, state, *window)
    return state, jax.tree.map(lambda x: x[None], output)
