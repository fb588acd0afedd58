"""The decode state: everything a dispatch reads and replaces, donated to each."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array

from peagle_jax.config import DrafterConfig, SpecConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.models.stack import TargetParams
from peagle_jax.speculative.cache import KVCache, create_cache
from peagle_jax.speculative.logprobs import LogprobReport
from peagle_jax.speculative.rules import RulesState

Params = tuple[TargetParams, DrafterParams | None]


@dataclasses.dataclass(frozen=True)
class Models:
    """The static part of every step. ``spec`` says how rounds of the largest K speculate.

    ``synthetic_rates``, for benchmarks, accept drafts by chance instead (vLLM's synthetic_acceptance_rates):
    in so great a share of all rounds that of each position. ``int8_cache`` is the form of the target's.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    spec: SpecConfig
    synthetic_rates: tuple[float, ...] | None = None
    int8_cache: bool = False

    @property
    def most_drafts(self) -> int:
        """The largest K: what a draft pass has room for."""
        return self.spec.num_speculative_tokens

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.taps


@struct.dataclass
class Pending:
    """Committed drafter positions that are not yet in the drafter's cache.

    Row i < count is position ``length - count + i``: the token after the feature's position. Plain
    rounds add a row each; W is how many may gather before ``catch_up`` commits them.
    """

    tokens: Array  # int32 (B, W)
    features: Array  # (B, W, C)
    count: Array  # int32 (B,)


@struct.dataclass
class Settings:
    """What a request asks for, each leaf (B, ...). It comes with each of its prompt's chunks."""

    limit: Array  # int32 (B,): most tokens of prompt and answer together
    rules: RulesState


@struct.dataclass
class DecodeState:
    """B slots between dispatches.

    ``length`` is the index n of the last token, whose target KV is not computed yet: the target's
    cache holds positions 0..n-1. Positions past it, in either cache, are scratch.
    """

    target_cache: KVCache
    drafter_cache: KVCache | None
    pending: Pending | None
    length: Array  # int32 (B,)
    last_token: Array  # int32 (B,)
    ready: Array  # bool (B,): the prompt is complete and the answer is not
    settings: Settings


@struct.dataclass
class Chunk:
    """Up to T prompt tokens of one request, to be prefilled into ``slot`` from position ``start`` on.

    ``following`` holds the token after each: known, even at a chunk's end, except after the
    prompt's last one. ``count`` rows are real (0: no request); ``final`` marks the prompt's end.
    """

    slot: Array  # int32 ()
    start: Array  # int32 ()
    tokens: Array  # int32 (T,)
    following: Array  # int32 (T,)
    count: Array  # int32 ()
    final: Array  # bool ()
    mask: Array  # uint32 (ceil(V/32),): what a grammar allows as the answer's first token
    settings: Settings  # of one request: leaves (1, ...)


@struct.dataclass
class Turn:
    """What the host says of a round: the slots that take part, and those that draft."""

    active: Array  # bool (B,): not cancelled, and occupied
    drafting: Array  # bool (B,): its drafts may be accepted
    pace: Array  # float32 (widths,): seconds that a round takes which verifies each number of nodes
    calibration: Array  # float32 (K, 2): see ``tree.calibrated``


@struct.dataclass
class Copy:
    """The first ``count`` positions of slot ``source``, and all else of it, into ``target``."""

    source: Array  # int32 ()
    target: Array  # int32 ()
    count: Array  # int32 ()


@struct.dataclass
class DraftReport:
    """Of each of M nodes, leaves (B, M): what the head thought of it, and what became of it."""

    depths: Array  # int32: 1 for the first position
    confidence: Array  # float32: the head's probability of it, given its parent
    reached: Array  # bool: it was verified, and its parent accepted
    accepted: Array  # bool


@struct.dataclass
class RoundOutput:
    """One round of B slots, or a prefill of one: new tokens, how many are real, drafts accepted.

    ``drafted`` counts the nodes that were verified; it is 0 for a prefill's token and for sequences that were
    not running. ``accepted``
    counts every draft that agreed, also past a stop id or the limit that cut ``count``, as vLLM does.
    """

    tokens: Array  # int32 (B, K+1)
    count: Array  # int32 (B,)
    accepted: Array  # int32 (B,)
    drafted: Array  # int32 (B,)
    stopped: Array  # bool (B,): ended by a stop id
    ended: Array  # bool (B,): ended by a stop id or by the limit
    wanted: Array  # int32 (B,): how many best tokens ``logprobs`` is to tell; -1 for no report
    logprobs: LogprobReport  # of ``tokens``; zeros where no slot asked
    prompt: LogprobReport | None = None  # a prefill's: of the chunk's ``following`` (1, T)
    drafts: DraftReport | None = None  # where rounds estimate their drafts' chances


def empty_state(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    slots: int,
    positions: int,
    backlog: int,
    settings: Settings,
    dtype: jnp.dtype,
    stacked: bool,
    rings: tuple[int, ...] = (),
    int8_cache: bool = False,
) -> DecodeState:
    """A state of idle slots. ``settings`` are those of one request, whatever they say; ``rings`` as in
    ``Sizes``. ``int8_cache`` is the target's; a drafter's has ``dtype`` in any case."""
    t = target.block
    target_cache = create_cache(
        target.num_layers, slots, t.num_kv_heads, positions, t.head_dim, dtype, stacked, rings, int8_cache
    )
    drafter_cache = pending = None
    if drafter is not None:
        d = drafter.block
        drafter_cache = create_cache(
            drafter.num_layers, slots, d.num_kv_heads, positions, d.head_dim, dtype, False
        )
        pending = Pending(
            tokens=jnp.zeros((slots, backlog), jnp.int32),
            features=jnp.zeros((slots, backlog, drafter.feature_size), jnp.float32),
            count=jnp.zeros((slots,), jnp.int32),
        )
    return DecodeState(
        target_cache=target_cache,
        drafter_cache=drafter_cache,
        pending=pending,
        length=jnp.zeros((slots,), jnp.int32),
        last_token=jnp.zeros((slots,), jnp.int32),
        ready=jnp.zeros((slots,), bool),
        settings=jax.tree.map(lambda x: jnp.zeros((slots, *x.shape[1:]), x.dtype), settings),
    )


def slots_of(tree: Any, slot: Array | int, count: int) -> Any:
    """Slots ``slot``..: ``count`` of them, of leaves (B, ...). Caches, if any, stay whole."""

    def take(x: Any) -> Any:
        return x if isinstance(x, KVCache) else jax.lax.dynamic_slice_in_dim(x, slot, count, 0)

    return jax.tree.map(take, tree, is_leaf=lambda x: isinstance(x, KVCache))


def with_slots_of(tree: Any, part: Any, slot: Array | int) -> Any:
    """The tree with what ``slots_of`` took replaced by ``part``, in place."""

    def put(x: Any, new: Any) -> Any:
        return new if isinstance(x, KVCache) else jax.lax.dynamic_update_slice_in_dim(x, new, slot, 0)

    return jax.tree.map(put, tree, part, is_leaf=lambda x: isinstance(x, KVCache))
