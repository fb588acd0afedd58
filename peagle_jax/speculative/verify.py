"""Verification: one pass of the target over a tree of drafts, and what is committed of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, UInt32

from peagle_jax.models import stack
from peagle_jax.parallel.rules import anywhere
from peagle_jax.speculative.cache import write
from peagle_jax.speculative.logprobs import LogprobReport, report_logprobs
from peagle_jax.speculative.rules import RulesState, advance, choose, only
from peagle_jax.speculative.sampling import uniform_noise
from peagle_jax.speculative.state import (
    DecodeState,
    DraftReport,
    Models,
    Params,
    Pending,
    RoundOutput,
    Turn,
)
from peagle_jax.speculative.tree import Tree, accepted_path, ancestors, first_children


def finish(
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


@struct.dataclass
class _Verified:
    """What a verification of some width found, in rows of the accepted path: K + 1 a sequence."""

    k: Any  # (B, K + 1, G, H) a layer
    v: Any
    hidden: Array  # (B, 1, D)
    features: Array  # (B, K + 1, C)
    chosen: Array  # int32 (B, K + 1)
    accepted: Array  # int32 (B,)
    logprobs: LogprobReport
    drafted: Array  # int32 (): nodes that were verified
    report: DraftReport | None  # of M nodes, (B, M)


def _verify(
    params: Params,
    models: Models,
    state: DecodeState,
    tree: Tree,
    drafting: Array,
    rules: RulesState,
    k: int,
    most: int,
    masks: Array | None,
) -> _Verified:
    """One pass of the target over a tree, and the path through it that the target agrees with."""
    seen = ancestors(tree)
    known = jnp.where(state.ready, state.length, 0)
    positions = state.length[:, None] + tree.depths
    kv, target = (state.target_cache.k, state.target_cache.v), params[0]
    out = stack.forward(target, models.target, tree.tokens, positions, *kv, known, seen, models.taps, 0)
    logits = stack.logits(target, models.target, out.hidden)
    chosen = choose(logits, positions + 1, (tree.tokens, seen), rules, masks)
    agreed = tree.tokens == jnp.take_along_axis(chosen, tree.parents, axis=1)
    if models.synthetic_rates is not None:
        passed = _by_chance(state, models.synthetic_rates, k)
        agreed = first_children(tree) & (tree.depths <= passed[:, None])
    path, count, alive = accepted_path(tree, seen, agreed & drafting[:, None], k)

    def along(x: Array, axis: int = 1) -> Array:
        """Rows (.., B, W, ..) of the path; a chain's lie there already."""
        if not tree.is_chain:
            at = path.reshape(*(1,) * (axis - 1), *path.shape, *(1,) * (x.ndim - axis - 1))
            return jnp.take_along_axis(x, at, axis=axis)
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, k + 1 - x.shape[axis])
        return jnp.pad(x, pad) if pad[axis][1] else x

    tokens = along(chosen)
    if models.synthetic_rates is not None:
        passed = jnp.arange(k) < count[:, None]
        tokens = tokens.at[:, :k].set(jnp.where(passed, along(tree.tokens)[:, 1:], tokens[:, :k]))
    return _Verified(
        k=jax.tree.map(lambda x: along(x, x.ndim - 3), out.k),
        v=jax.tree.map(lambda x: along(x, x.ndim - 3), out.v),
        hidden=out.hidden[:, :1],
        features=along(out.features),
        chosen=tokens,
        accepted=count,
        logprobs=report_logprobs(logits, tokens, jnp.any(rules.logprobs >= 0), along),
        drafted=jnp.int32(tree.nodes),
        report=_report_drafts(tree, alive, most, state.ready & drafting),
    )


def _report_drafts(
    tree: Tree, alive: Bool[Array, "b w"], most: int, asked: Bool[Array, " b"]
) -> DraftReport | None:
    if tree.confidences is None:
        return None
    reached = jnp.take_along_axis(alive, tree.parents, axis=1) & asked[:, None]

    def of_nodes(x: Array) -> Array:
        return jnp.pad(x[:, 1:], ((0, 0), (0, most - tree.nodes)))

    return DraftReport(*(of_nodes(x) for x in (tree.depths, tree.confidences, reached, alive & reached)))


def verify_tree(
    params: Params,
    models: Models,
    state: DecodeState,
    tree: Tree,
    turn: Turn,
    k: int,
    masks: UInt32[Array, "b w words"] | None = None,
) -> tuple[DecodeState, RoundOutput]:
    """Verifies a tree of K drafts, accepts and commits. ``masks`` are what grammars allow after each of its
    tokens. Where rounds may verify fewer nodes, the number with the most tokens a second is taken."""
    ready, drafting = state.ready, turn.drafting[: state.ready.shape[0]]
    rules, most = only(state.settings.rules, ready), tree.nodes
    widths = models.spec.nodes_of(k) if masks is None and tree.chances is not None else (most,)

    def verified(nodes: int) -> _Verified:
        return _verify(params, models, state, tree.first(nodes), drafting, rules, k, most, masks)

    if len(widths) == 1:
        done = verified(most)
    else:
        branches = [partial(verified, nodes) for nodes in widths]
        done = jax.lax.switch(_width(tree, widths, ready, drafting, turn.pace), branches)
    chosen, accepted = done.chosen, done.accepted
    cache = write(state.target_cache, done.k, done.v, state.length, done.hidden)
    count, stopped, ended = finish(state, chosen, accepted + 1)
    count = jnp.where(ready, count, 0)
    last = jnp.take_along_axis(chosen, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    output = RoundOutput(
        tokens=chosen,
        count=count,
        accepted=jnp.where(ready, accepted, 0),
        drafted=jnp.where(ready & drafting, done.drafted, 0),
        stopped=ready & stopped,
        ended=ready & ended,
        wanted=rules.logprobs,
        logprobs=done.logprobs,
        drafts=done.report,
    )
    pending = state.pending
    if pending is not None:
        new = _replaced if k else _appended
        pending = new(pending, ready, chosen, done.features, count)
    state = state.replace(
        target_cache=cache,
        pending=pending,
        settings=state.settings.replace(rules=advance(state.settings.rules, chosen, count)),
        length=state.length + count,
        last_token=jnp.where(ready, last, state.last_token),
        ready=ready & ~ended,
    )
    return state, output


def _width(tree: Tree, widths: tuple[int, ...], ready: Array, drafting: Array, pace: Array) -> Array:
    """Which of the widths promises the most tokens a second, of all sequences together."""
    assert tree.chances is not None
    counts = ready[:, None] & (drafting[:, None] | (jnp.arange(tree.nodes + 1) == 0))
    promised = jnp.cumsum(jnp.sum(jnp.where(counts, tree.chances, 0), axis=0))
    tokens = jnp.maximum(promised[np.array(widths)], 1.0)  # where nobody asks, the fastest one
    return anywhere(jnp.argmax(tokens / pace).astype(jnp.int32))


def _by_chance(state: DecodeState, rates: tuple[float, ...], k: int) -> Array:
    """How many drafts chance accepts, (B,), of one draw a sequence and round."""
    at = jnp.array((rates + (0.0,) * k)[:k])
    sampling, no_token = state.settings.rules.sampling, jnp.array([-1])
    return jnp.sum(uniform_noise(sampling, state.length[:, None], no_token)[:, 0] < at, axis=1)


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
