"""The jitted steps: prompt chunks, rounds of draft, verify, accept and commit, and the slots' upkeep.

Shapes are static and the state is donated; nothing is read by the host inside. A step works on the
first B slots of the state (``slots_of``), a prompt chunk on one; the others are not touched.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.attention import causal_mask
from peagle_jax.models import stack
from peagle_jax.models.stack import TargetOutput, TargetParams
from peagle_jax.speculative import draft
from peagle_jax.speculative.cache import KVCache, copy_slot, reshaped, write
from peagle_jax.speculative.logprobs import report_logprobs, report_prompt
from peagle_jax.speculative.rules import advance, choose, only
from peagle_jax.speculative.sampling import uniform_noise
from peagle_jax.speculative.state import (
    Chunk,
    Copy,
    DecodeState,
    Pending,
    RoundOutput,
    Turn,
    slots_of,
    with_slots_of,
)

Params = tuple[TargetParams, DrafterParams | None]


@dataclasses.dataclass(frozen=True)
class Models:
    """The static part of every step. ``most_drafts`` is the largest K: what a draft pass has room for.

    ``synthetic_rates``, for benchmarks, accept drafts by chance instead (vLLM's synthetic_acceptance_rates):
    in so great a share of all rounds that of each position. ``int8_cache`` is the form of the target's.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    most_drafts: int
    synthetic_rates: tuple[float, ...] | None = None
    int8_cache: bool = False

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.taps


def _run_target(
    params: TargetParams,
    models: Models,
    cache: KVCache,
    tokens: Int[Array, "b t"],
    start: Int[Array, " b"],
    known: Int[Array, " b"],
    slot: Array | int,
) -> tuple[TargetOutput, KVCache]:
    b, t = tokens.shape
    positions, mask = start[:, None] + jnp.arange(t), causal_mask(b, t)
    k, v = cache.k, cache.v
    out = stack.forward(params, models.target, tokens, positions, k, v, known, mask, models.taps, slot)
    return out, write(cache, out.k, out.v, start, out.hidden, slot)


def _finish(
    state: DecodeState, tokens: Int[Array, "b w"], count: Int[Array, " b"]
) -> tuple[Array, Array, Array]:
    """Cuts ``count`` new tokens at the first stop id and at the limit, whichever comes first.

    Returns the count that is left, whether a stop id ended it, and whether anything did.
    """
    column = jnp.arange(tokens.shape[1])
    stops = jnp.any(tokens[..., None] == state.settings.rules.stop_ids[:, None], axis=-1)
    room = state.settings.limit - (state.length + 1)
    within = (column < count[:, None]) & (column < room[:, None])
    hit = stops & within
    first = jnp.min(jnp.where(hit, column, tokens.shape[1]), axis=1)
    stopped = jnp.any(hit, axis=1)
    left = jnp.where(stopped, first + 1, within.sum(1))
    return left, stopped, stopped | (left >= room)


def _active(state: DecodeState, turn: Turn, width: int) -> DecodeState:
    """The first slots, ready only where the host still wants them."""
    part = slots_of(state, 0, width)
    return part.replace(ready=part.ready & turn.active[:width])


def _put_back(state: DecodeState, part: DecodeState, turn: Turn) -> DecodeState:
    """The state after a turn of its first slots. One that sat it out is as ready as it was."""
    width = part.ready.shape[0]
    ready = jnp.where(turn.active[:width], part.ready, state.ready[:width])
    return with_slots_of(state, part.replace(ready=ready), 0)


def draft_window(
    params: Params, models: Models, k: int, state: DecodeState
) -> tuple[DecodeState, Int[Array, "b w"]]:
    """The K + 1 tokens to verify: the last committed one and K drafts. K = 0 drafts nothing."""
    (_, head), cfg, last = params, models.drafter, state.last_token[:, None]
    if not k:
        return state, last
    assert head is not None
    assert cfg is not None
    guess = draft.draft_parallel if cfg.method == "peagle" else draft.draft_sequential
    drafts, cache = guess(head, cfg, state, k, models.most_drafts + 1)
    return state.replace(drafter_cache=cache), jnp.concatenate([last, drafts], axis=1)


def verify_window(
    params: Params,
    models: Models,
    state: DecodeState,
    tokens: Int[Array, "b w"],
    drafting: Array,
    masks: UInt32[Array, "b w words"] | None = None,
) -> tuple[DecodeState, RoundOutput]:
    """Verifies a window, accepts and commits. ``masks`` are what grammars allow after each of its tokens."""
    target, k, ready = params[0], tokens.shape[1] - 1, state.ready
    known = jnp.where(ready, state.length, 0)
    out, target_cache = _run_target(target, models, state.target_cache, tokens, state.length, known, 0)
    logits = stack.logits(target, models.target, out.hidden)
    positions = state.length[:, None] + 1 + jnp.arange(k + 1)
    rules = only(state.settings.rules, ready)
    chosen = choose(logits, positions, tokens, rules, masks)

    drafts = tokens[:, 1:]
    if models.synthetic_rates is not None:
        agreed = _by_chance(state, models.synthetic_rates, k) & drafting[:, None]
        chosen = chosen.at[:, :k].set(jnp.where(agreed, drafts, chosen[:, :k]))
    else:
        agreed = jnp.cumprod(drafts == chosen[:, :-1], axis=1)
    accepted = jnp.where(drafting, agreed.sum(1), 0).astype(jnp.int32)
    count, stopped, ended = _finish(state, chosen, accepted + 1)
    count = jnp.where(ready, count, 0)
    last = jnp.take_along_axis(chosen, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    output = RoundOutput(
        tokens=chosen,
        count=count,
        accepted=jnp.where(ready, accepted, 0),
        drafted=jnp.where(ready & drafting, k, 0),
        stopped=ready & stopped,
        ended=ready & ended,
        wanted=rules.logprobs,
        logprobs=report_logprobs(logits, chosen, jnp.any(rules.logprobs >= 0)),
    )
    pending = state.pending
    if pending is not None:
        new = _replaced if k else _appended
        pending = new(pending, ready, chosen, out.features, count)
    state = state.replace(
        target_cache=target_cache,
        pending=pending,
        settings=state.settings.replace(rules=advance(state.settings.rules, chosen, count)),
        length=state.length + count,
        last_token=jnp.where(ready, last, state.last_token),
        ready=ready & ~ended,
    )
    return state, output


def _by_chance(state: DecodeState, rates: tuple[float, ...], k: int) -> Array:
    """Drafts (B, K) that chance accepts, of one draw a sequence and round."""
    at = jnp.array((rates + (0.0,) * k)[:k])
    sampling, no_token = state.settings.rules.sampling, jnp.array([-1])
    return uniform_noise(sampling, state.length[:, None], no_token)[:, 0] < at


def _replaced(old: Pending, ready: Array, tokens: Array, features: Array, count: Array) -> Pending:
    """A drafting round has committed what was pending; its own tokens take the place."""
    w, mask = tokens.shape[1], ready[:, None]
    return Pending(
        tokens=old.tokens.at[:, :w].set(jnp.where(mask, tokens, old.tokens[:, :w])),
        features=old.features.at[:, :w].set(jnp.where(mask[..., None], features, old.features[:, :w])),
        count=jnp.where(ready, count, old.count),
    )


def _appended(old: Pending, ready: Array, tokens: Array, features: Array, count: Array) -> Pending:
    """A plain round adds its token: the drafter has not seen it, nor those before it."""
    here = (jnp.arange(old.tokens.shape[1]) == old.count[:, None]) & ready[:, None]
    return Pending(
        tokens=jnp.where(here, tokens, old.tokens),
        features=jnp.where(here[..., None], features, old.features),
        count=old.count + count,
    )


def run_rounds(
    params: Params, state: DecodeState, turn: Turn, *, models: Models, width: int, k: int, rounds: int
) -> tuple[DecodeState, RoundOutput]:
    """``rounds`` rounds of K drafts for the first ``width`` slots (p-eagle-spec 2.3).

    Returns the state and outputs with a leading axis of ``rounds``.
    """
    part, drafting = _active(state, turn, width), turn.drafting[:width]

    def one(part: DecodeState, _: None) -> tuple[DecodeState, RoundOutput]:
        part, window = draft_window(params, models, k, part)
        return verify_window(params, models, part, window, drafting)

    if rounds == 1:  # outside a loop the caches are updated in place; a loop would copy them twice
        part, output = one(part, None)
        output = jax.tree.map(lambda x: x[None], output)
    else:
        part, output = jax.lax.scan(one, part, None, length=rounds)
    return _put_back(state, part, turn), output


def run_draft(
    params: Params, state: DecodeState, turn: Turn, *, models: Models, width: int, k: int
) -> tuple[DecodeState, Int[Array, "b w"]]:
    """The first half of a round whose masks depend on the drafts: returns the window."""
    part, window = draft_window(params, models, k, _active(state, turn, width))
    return _put_back(state, part, turn), window


def run_verify(
    params: Params, state: DecodeState, inputs: tuple[Turn, Array, Array], *, models: Models, width: int
) -> tuple[DecodeState, RoundOutput]:
    """The second half: (turn, window (B, K+1), masks uint32 (B, K+1, ceil(V/32)))."""
    turn, window, masks = inputs
    part = _active(state, turn, width)
    part, output = verify_window(params, models, part, window, turn.drafting[:width], masks)
    return _put_back(state, part, turn), jax.tree.map(lambda x: x[None], output)


def run_prefill(
    params: Params, state: DecodeState, chunk: Chunk, *, models: Models
) -> tuple[DecodeState, RoundOutput]:
    """A prompt chunk of one slot: both caches fill, and a final chunk chooses the answer's first token.

    A chunk of no tokens writes scratch at ``start`` and changes nothing.
    """
    (target, head), cfg, slot = params, models.drafter, chunk.slot
    real, final = chunk.count > 0, (chunk.final & (chunk.count > 0))[None]
    old = slots_of(state, slot, 1)
    start, prompt = chunk.start[None], (chunk.start + chunk.count)[None]
    tokens = chunk.tokens[None]
    out, target_cache = _run_target(target, models, state.target_cache, tokens, start, start, slot)

    def at_end(x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, jnp.maximum(chunk.count - 1, 0), 1, axis=1)

    def logits_of(hidden: Array) -> Array:
        return stack.logits(target, models.target, hidden)

    logits, rules = logits_of(at_end(out.hidden)), only(chunk.settings.rules, final)
    first = choose(logits, prompt[:, None], None, rules, chunk.mask[None, None])
    new = old.replace(target_cache=target_cache, settings=chunk.settings, length=prompt - 1)
    _, stopped, ended = _finish(new, first, jnp.ones_like(prompt))
    counted = advance(chunk.settings.rules, first, final.astype(jnp.int32))
    settings = chunk.settings.replace(rules=counted)
    new = new.replace(settings=settings, length=prompt, last_token=first[:, 0], ready=final & ~ended)
    drafter_cache = state.drafter_cache
    if cfg is not None:
        assert head is not None
        cache, following = cast(KVCache, drafter_cache), chunk.following[None]
        drafter_cache = draft.prefill_drafter(head, cfg, cache, following, out.features, start, slot)
        # The last position waits for its token, which has only now been chosen.
        waiting = cast(Pending, old.pending)
        pending = Pending(
            tokens=waiting.tokens.at[:, 0].set(first[:, 0]),
            features=waiting.features.at[:, :1].set(at_end(out.features)),
            count=final.astype(jnp.int32),
        )
        new = new.replace(pending=pending)
    # What is no cache changes only with a real chunk.
    keep = {"target_cache": None, "drafter_cache": None}
    part = jax.tree.map(lambda n, o: jnp.where(real, n, o), new.replace(**keep), old.replace(**keep))
    part = part.replace(target_cache=target_cache, drafter_cache=drafter_cache)
    output = RoundOutput(
        tokens=first,
        count=final.astype(jnp.int32),
        accepted=jnp.zeros_like(prompt),
        drafted=jnp.zeros_like(prompt),
        stopped=final & stopped,
        ended=final & ended,
        wanted=rules.logprobs,
        logprobs=report_logprobs(logits, first, jnp.any(rules.logprobs >= 0)),
        prompt=report_prompt(
            logits_of,
            out.hidden,
            chunk.following[None],
            real & jnp.any(chunk.settings.rules.prompt_logprobs),
            models.target.vocab_size,
        ),
    )
    return with_slots_of(state, part, slot), jax.tree.map(lambda x: x[None], output)


def run_catch_up(
    params: Params, state: DecodeState, _: None, *, models: Models, width: int
) -> tuple[DecodeState, None]:
    """Commits what plain rounds left for the drafter, in the first ``width`` slots."""
    head, cfg = params[1], models.drafter
    assert head is not None
    assert cfg is not None
    part = draft.catch_up(head, cfg, slots_of(state, 0, width))
    return with_slots_of(state, part, 0), None


def run_copy(params: Params, state: DecodeState, copy: Copy) -> tuple[DecodeState, None]:
    """Copies a slot to another: ``count`` positions of its caches, and all else."""
    moved = with_slots_of(state, slots_of(state, copy.source, 1), copy.target)

    def copied(cache: KVCache) -> KVCache:
        return copy_slot(cache, copy.source, copy.target, copy.count)

    drafter_cache = None if state.drafter_cache is None else copied(state.drafter_cache)
    return moved.replace(target_cache=copied(state.target_cache), drafter_cache=drafter_cache), None


def run_reshape(
    params: Params, state: DecodeState, order: Int[Array, " slots"], *, positions: int
) -> tuple[DecodeState, None]:
    """A state of other dimensions: slot i is the old ``order[i]``."""
    drafter = state.drafter_cache
    caches = {
        "target_cache": reshaped(state.target_cache, order, positions),
        "drafter_cache": None if drafter is None else reshaped(drafter, order, positions),
    }
    rest = state.replace(target_cache=None, drafter_cache=None)
    return jax.tree.map(lambda x: jnp.take(x, order, axis=0), rest).replace(**caches), None
