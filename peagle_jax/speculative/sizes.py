"""The static sizes that a decoder's programs are compiled for."""

from __future__ import annotations

import dataclasses
import itertools

from peagle_jax.config import ConfigError, SpecConfig, TargetConfig
from peagle_jax.speculative.cache import ring_room

SMALLEST_CACHE = 512
BACKLOG = 16
"""Plain rounds whose tokens may wait for the drafter before it reads them in one pass."""

GOES_PAST = 128
"""About how many tokens a slot may hold past a beginning that another request can still take from its rings:
the end of a chat's turn, or another choice's first tokens."""

PREFILL_CHUNK = 128
"""Tokens of a prompt that a dispatch computes, at most."""

SHORT_CHUNK = 32
"""A second, shorter prompt chunk of this size pays for short prompts and the ends of long ones."""


@dataclasses.dataclass(frozen=True)
class Pool:
    """Dimensions of the state: slots of a replica, and positions of a slot."""

    slots: int
    positions: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """All static sizes. ``widths``, ``drafts`` and ``chunks`` ascend; the last width is all slots. A program
    is compiled for each pool with each width and K, and with each chunk. ``backlog`` is ``Pending``'s.

    ``windows`` are those of the target's layers, a cycle of them, and ``rings`` how many positions a slot
    holds of each (``cache.KVCache``); both empty where all layers see all."""

    pools: tuple[Pool, ...]
    widths: tuple[int, ...]
    drafts: tuple[int, ...]
    chunks: tuple[int, ...]
    rounds: int = 1
    backlog: int = 1
    windows: tuple[int, ...] = ()
    rings: tuple[int, ...] = ()

    def least_kept(self, written: int) -> int:
        """From how many positions of a sequence on a slot can still go on, of so many that were written to
        it: a ring forgets what windows before its end need."""
        pairs = zip(self.rings, self.windows, strict=True)
        return max((written - ring + window for ring, window in pairs if 0 < ring < written), default=0)

    def every_width(self) -> list[tuple[Pool, int]]:
        """The compiled widths of all pools, each with the first pool that has it."""
        first = {width: pool for pool in reversed(self.pools) for width in self.widths_of(pool)}
        return [
            (pool, width) for pool in self.pools for width in self.widths_of(pool) if first[width] is pool
        ]

    def widths_of(self, pool: Pool) -> tuple[int, ...]:
        """The compiled widths of a pool; its last one is all of its slots."""
        return tuple(sorted({min(w, pool.slots) for w in self.widths}))

    def width_for(self, slots: int, pool: Pool, guided: bool = False) -> int:
        """The narrowest compiled width that serves the first ``slots`` slots of a pool."""
        widths = self.guided_widths_of(pool) if guided else self.widths_of(pool)
        return next(w for w in widths if w >= slots)

    def guided_widths_of(self, pool: Pool) -> tuple[int, ...]:
        """The widths that rounds under grammars are compiled for: such a round waits for the host in any
        case, and each width of it is two more programs."""
        widths = self.widths_of(pool)
        return tuple(sorted({widths[0], widths[-1]}))

    def chunk_for(self, tokens: int) -> int:
        """The shortest compiled chunk that holds so many tokens, or the longest one."""
        return next((t for t in self.chunks if t >= tokens), self.chunks[-1])


def widths_of(slots: int) -> tuple[int, ...]:
    """Powers of two up to ``slots``, which is always one: a round pays for less than twice its sequences."""
    powers = itertools.takewhile(lambda w: w < slots, (1 << i for i in itertools.count()))
    return (*powers, slots)


def chunks_of(longest: int) -> tuple[int, ...]:
    """Prompt chunks of at most ``longest`` tokens."""
    return (SHORT_CHUNK, longest) if longest >= 2 * SHORT_CHUNK else (longest,)


def backlog_of(spec: SpecConfig) -> int:
    """Tokens that may wait for the drafter: what a drafting round leaves, then those of plain rounds."""
    return spec.num_speculative_tokens + 1 + max(BACKLOG, spec.rounds)


def scratch_of(chunk: int, spec: SpecConfig) -> int:
    """Positions that a dispatch may write past a sequence's length."""
    k, rounds = spec.num_speculative_tokens, spec.rounds
    return max(chunk, rounds * (k + 1) + 2 * k + 1, backlog_of(spec))


def rings_of(target: TargetConfig, chunk: int, spec: SpecConfig) -> tuple[int, ...]:
    """Positions that a slot holds of each layer of a cycle, 0 for all; empty where all layers see all."""
    most = scratch_of(chunk, spec) + GOES_PAST
    return tuple(ring_room(w, most) if w else 0 for w in target.windows[: target.cycle])


def pools_of(
    batch: int, max_model_len: int, scratch: int, kv_tokens: int | None, smallest: int = SMALLEST_CACHE
) -> tuple[Pool, ...]:
    """The whole batch at its longest if the memory has room; else fewer slots, the longer they are."""
    whole = max_model_len + scratch
    if kv_tokens is None or batch * whole <= kv_tokens:
        return (Pool(batch, whole),)
    if whole > kv_tokens:
        raise ConfigError(
            f"a context of {max_model_len} tokens needs room for {whole}, but the memory has {kv_tokens}; "
            f"ask for a max_model_len of at most {kv_tokens - scratch}"
        )
    pools, length = [], min(smallest, max_model_len)
    while length < max_model_len:
        pools.append(Pool(min(batch, kv_tokens // (length + scratch)), length + scratch))
        length *= 2
    pools.append(Pool(kv_tokens // whole, whole))
    # Of pools with as many slots the longest is enough.
    nexts = [*pools[1:], None]
    return tuple(p for p, longer in zip(pools, nexts, strict=True) if not longer or longer.slots < p.slots)
