"""The jitted steps: prompt chunks, rounds of draft, verify, accept and commit, and the slots' upkeep.

Shapes are static and the state is donated; nothing is read by the host inside. A step works on the
first B slots of the state (``slots_of``), a prompt chunk on one; the others are not touched.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from peagle_jax.layers.attention import causal_mask
from peagle_jax.models import stack
from peagle_jax.models.stack import TargetOutput, TargetParams
from peagle_jax.speculative import draft
from peagle_jax.speculative.cache import KVCache, copy_slot, reshaped, write
from peagle_jax.speculative.logprobs import report_logprobs, report_prompt
from peagle_jax.speculative.rules import advance, choose, only
from peagle_jax.speculative.state import (
    Chunk,
    Copy,
    DecodeState,
    Models,
    Params,
    Pending,
    RoundOutput,
    Turn,
    slots_of,
    with_slots_of,
)
from peagle_jax.speculative.tree import (
    Marginals,
    Tree,
    best_tree,
    calibrated,
    candidates_of,
    chain_paths,
    fixed_tree,
    ordered_paths,
)
from peagle_jax.speculative.verify import finish, verify_tree


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


def _active(state: DecodeState, turn: Turn, width: int) -> DecodeState:
    """The first slots, ready only where the host still wants them."""
    part = slots_of(state, 0, width)
    return part.replace(ready=part.ready & turn.active[:width])


def _put_back(state: DecodeState, part: DecodeState, turn: Turn) -> DecodeState:
    """The state after a turn of its first slots. One that sat it out is as ready as it was."""
    width = part.ready.shape[0]
    ready = jnp.where(turn.active[:width], part.ready, state.ready[:width])
    return with_slots_of(state, part.replace(ready=ready), 0)


def draft_tree(
    params: Params, models: Models, k: int, state: DecodeState, turn: Turn, plain: bool = False
) -> tuple[DecodeState, Tree]:
    """What to verify: the last committed token and the nodes that K drafts make. K = 0 drafts nothing.

    ``plain`` makes a chain without estimates, whatever ``models.spec`` says.
    """
    (_, head), cfg, spec, last = params, models.drafter, models.spec, state.last_token
    if not k:
        nothing = Marginals(jnp.zeros((last.shape[0], 1, 1), jnp.int32), None)
        return state, fixed_tree(last, nothing, None, ())
    assert head is not None
    assert cfg is not None
    whole = k == models.most_drafts and not plain
    nodes = spec.num_speculative_nodes if whole else 0
    paths = ordered_paths(spec.speculative_token_tree if whole else ()) or chain_paths(k)
    estimated = whole and (spec.is_tree or len(spec.nodes_of(k)) > 1)
    # A best-first tree may take all M for one position.
    count = (nodes or candidates_of(paths)) if estimated else 0
    guess = draft.draft_parallel if cfg.method == "peagle" else draft.draft_sequential
    found, cache = guess(head, cfg, state, k, models.most_drafts + 1, count)
    chances = calibrated(found.log_probs, turn.calibration) if estimated else None
    tree = best_tree(last, found, chances, nodes) if nodes else fixed_tree(last, found, chances, paths)
    return state.replace(drafter_cache=cache), tree


def run_rounds(
    params: Params, state: DecodeState, turn: Turn, *, models: Models, width: int, k: int, rounds: int
) -> tuple[DecodeState, RoundOutput]:
    """``rounds`` rounds of K drafts for the first ``width`` slots (P-EAGLE, section 2).

    Returns the state and outputs with a leading axis of ``rounds``.
    """
    part = _active(state, turn, width)

    def one(part: DecodeState, _: None) -> tuple[DecodeState, RoundOutput]:
        part, tree = draft_tree(params, models, k, part, turn)
        return verify_tree(params, models, part, tree, turn, k)

    if rounds == 1:  # outside a loop the caches are updated in place; a loop would copy them twice
        part, output = one(part, None)
        output = jax.tree.map(lambda x: x[None], output)
    else:
        part, output = jax.lax.scan(one, part, None, length=rounds)
    return _put_back(state, part, turn), output


def run_draft(
    params: Params, state: DecodeState, turn: Turn, *, models: Models, width: int, k: int
) -> tuple[DecodeState, Int[Array, "b w"]]:
    """The first half of a round whose masks depend on the drafts: returns the window, a chain."""
    part, tree = draft_tree(params, models, k, _active(state, turn, width), turn, plain=True)
    return _put_back(state, part, turn), tree.tokens


def run_verify(
    params: Params, state: DecodeState, inputs: tuple[Turn, Array, Array], *, models: Models, width: int
) -> tuple[DecodeState, RoundOutput]:
    """The second half: (turn, window (B, K+1), masks uint32 (B, K+1, ceil(V/32)))."""
    turn, window, masks = inputs
    k = window.shape[1] - 1
    drafts = Marginals(window[:, 1:, None], None)
    tree = fixed_tree(window[:, 0], drafts, None, chain_paths(k))
    part, output = verify_tree(params, models, _active(state, turn, width), tree, turn, k, masks)
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
    _, stopped, ended = finish(new, first, jnp.ones_like(prompt))
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
