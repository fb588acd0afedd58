"""The decode state: everything a round reads and replaces, donated to each dispatch."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array

from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.speculative.cache import KVCache, create_cache
from peagle_jax.speculative.logprobs import LogprobReport
from peagle_jax.speculative.rules import RulesState


@struct.dataclass
class Pending:
    """Committed drafter slots that are not yet in the drafter's cache.

    Row i < count is slot ``length - count + i``: the token after the feature's position.
    """

    tokens: Array  # int32 (B, K+1)
    features: Array  # (B, K+1, C)
    count: Array  # int32 (B,)


@struct.dataclass
class DecodeState:
    """B sequences between rounds.

    ``length`` is the index n of the last token, whose target KV is not computed yet: the target's
    cache holds slots 0..n-1. Slots past it, in either cache, are scratch.
    """

    target_cache: KVCache
    drafter_cache: KVCache | None
    pending: Pending | None
    length: Array  # int32 (B,)
    last_token: Array  # int32 (B,)
    limit: Array  # int32 (B,): most tokens of prompt and answer together
    ready: Array  # bool (B,): the prompt is complete and the answer is not
    rules: RulesState


@struct.dataclass
class Chunk:
    """T prompt tokens a sequence, to be prefilled.

    ``following`` holds the token after each: known, even at a chunk's end, except after the
    prompt's last one. ``count`` (B,) rows are real; ``final`` (B,) marks the prompt's end. ``masks``
    are what grammars allow as the answer's first token; None where no slot has a grammar.
    """

    tokens: Array  # int32 (B, T)
    following: Array  # int32 (B, T)
    count: Array  # int32 (B,)
    final: Array  # bool (B,)
    masks: Array | None = None  # uint32 (B, 1, ceil(V / 32))


@struct.dataclass
class RoundOutput:
    """One round (or a prefill, with K+1 columns too): new tokens, how many are real, drafts accepted.

    ``drafted`` is 0 for a prefill's token and for sequences that were not running. ``accepted``
    counts every draft that agreed, also past a stop id or the limit that cut ``count``, as vLLM does.
    """

    tokens: Array  # int32 (B, K+1)
    count: Array  # int32 (B,)
    accepted: Array  # int32 (B,)
    drafted: Array  # int32 (B,)
    stopped: Array  # bool (B,): ended by a stop id
    ended: Array  # bool (B,): ended by a stop id or by the limit
    logprobs: LogprobReport  # of ``tokens``; zeros where no slot asked
    prompt: LogprobReport | None = None  # of a dispatch's chunk's ``following`` (B, T): no axis of rounds


def empty_state(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    num_speculative_tokens: int,
    slots: int,
    rules: RulesState,
    limit: Array,
    dtype: jnp.dtype,
    stacked: bool,
) -> DecodeState:
    """A state of B idle sequences whose caches hold ``slots`` slots."""
    batch = limit.shape[0]
    t = target.block
    target_cache = create_cache(target.num_layers, batch, t.num_kv_heads, slots, t.head_dim, dtype, stacked)
    drafter_cache = pending = None
    if drafter is not None:
        d, width = drafter.block, num_speculative_tokens + 1
        drafter_cache = create_cache(
            drafter.num_layers, batch, d.num_kv_heads, slots, d.head_dim, dtype, False
        )
        pending = Pending(
            tokens=jnp.zeros((batch, width), jnp.int32),
            features=jnp.zeros((batch, width, drafter.feature_size), jnp.float32),
            count=jnp.zeros((batch,), jnp.int32),
        )
    zeros = jnp.zeros((batch,), jnp.int32)
    return DecodeState(
        target_cache=target_cache,
        drafter_cache=drafter_cache,
        pending=pending,
        length=zeros,
        last_token=jnp.zeros((batch,), jnp.int32),
        limit=limit,
        ready=jnp.zeros((batch,), bool),
        rules=rules,
    )
