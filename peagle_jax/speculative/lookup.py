"""Drafts without a head: what followed the last tokens where they stood before (vLLM's method ngram).

Cheap and often useless, but in answers that repeat their prompt hard to beat. The host finds the drafts,
since it has the tokens anyway, and the target verifies them as it does a head's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from peagle_jax.config import ConfigError, SpecConfig, TargetConfig
from peagle_jax.models.stack import TargetParams
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.programs import Progress
from peagle_jax.speculative.request import Flight, PromptChunk, RoundResult
from peagle_jax.speculative.sizes import Pool, Sizes, scratch_of

PLAIN = SpecConfig()


class Lookup(NamedTuple):
    """How many last tokens must have stood before, at most and at least (prompt_lookup_max and _min)."""

    most: int = 4
    least: int = 2

    @property
    def described(self) -> str:
        return f"lookup of the last {self.most} to {self.least} (ngram)"


def find_drafts(tokens: Sequence[int], k: int, lookup: Lookup) -> list[int]:
    """The K tokens (or fewer, at the end) that followed the most recent earlier occurrence of the last n
    tokens, for the largest n of the lookup's that has one; nothing if there is none."""
    history = np.asarray(tokens, np.int32)
    size = len(history)
    for n in range(min(lookup.most, size - 1), lookup.least - 1, -1):
        # Windows that begin at 0..size-n-1: all but the suffix itself.
        same = np.ones(size - n, bool)
        for i in range(n):
            same &= history[i : size - n + i] == history[size - n + i]
        if same.any():
            start = int(np.flatnonzero(same)[-1]) + n
            return history[start : start + k].tolist()
    return []


@dataclasses.dataclass(frozen=True)
class _Looked(Flight):
    """A round's flight with how many drafts were found, by slot."""

    found: Mapping[int, int] = dataclasses.field(default_factory=dict)


class LookupDecoder(Decoder):
    """A decoder without a head that drafts by lookup; it follows what every slot says.

    A round in which nothing was found, or for a slot whose last token has not been read yet, is a plain one.
    ``options`` are Decoder's.

    Raises:
        ConfigError: K or the lookup is out of range, or several rounds a dispatch are asked for.
    """

    def __init__(
        self,
        target: TargetConfig,
        params: TargetParams,
        k: int,
        lookup: Lookup,
        rounds: int = 1,
        **options: Any,
    ) -> None:
        if rounds != 1:
            raise ConfigError(f"the method ngram takes 1 round a dispatch, found {rounds}; leave it out")
        if not 1 <= lookup.least <= lookup.most:
            raise ConfigError(
                f"prompt_lookup_min must be in 1..prompt_lookup_max, found {lookup.least} and {lookup.most}"
            )
        super().__init__(target, params, spec=PLAIN, **{**options, "lookahead": 0, "draft_lengths": None})
        if not 1 <= k < self.scratch:
            raise ConfigError(f"num_speculative_tokens must be in 1..{self.scratch - 1}, found {k}")
        self.spec, self._k, self._lookup = SpecConfig(k, "ngram"), k, lookup
        self._said: dict[int, list[int]] = {}
        self._unread: set[int] = set()

    @property
    def sizes(self) -> Sizes:
        return dataclasses.replace(super().sizes, drafts=(0, getattr(self, "_k", 0)))

    @property
    def scratch(self) -> int:
        return scratch_of(self.sizes.chunks[-1], PLAIN)

    # -- warm-up -----------------------------------------------------------------------------

    def warm_up(self, progress: Progress = lambda what, number, count: None) -> None:
        super().warm_up(progress)
        plan = [(pool, width) for pool in self.sizes.pools for width in self.sizes.widths_of(pool)]
        for number, (pool, width) in enumerate(plan, start=1):
            if self.pool != pool:
                self.start_over(pool)
            progress(f"verification of {width} sequence{'s' * (width > 1)}", number, len(plan))
            self._verify_nothing(width)
        self.start_over(self.sizes.pools[0])

    def _verify_nothing(self, width: int) -> Any:
        window = np.zeros((self.replicas, width, self._k + 1), np.int32)
        return self._programs.verify(self._turn((), None), window, None)

    def idle_rounds(self, clock: Callable[[], float]) -> dict[tuple[int, int, int], float]:
        found = super().idle_rounds(clock)
        for _, width in self._programs.idle_widths():
            time = self._programs.fastest(partial(self._verify_nothing, width), clock)
            found[width, self._k, self._k] = time
        return found

    # -- dispatches --------------------------------------------------------------------------

    def prefill(self, chunks: Sequence[PromptChunk]) -> Flight:
        for chunk in chunks:
            self._said[chunk.slot] = list(chunk.tokens)
            self._unread.add(chunk.slot)
        return super().prefill(chunks)

    def round(
        self,
        active: Collection[int],
        k: int,
        drafting: Collection[int] | None = None,
        pace: Mapping[int, float] | None = None,
    ) -> Flight:
        return self.verify_drafts(active, self.look_up(active, k, drafting))

    def look_up(
        self, active: Collection[int], k: int, drafting: Collection[int] | None = None
    ) -> dict[int, list[int]]:
        """The first half of a round, the host's: drafts by slot."""
        if not k or self._unread.intersection(active):
            return {}
        asked = active if drafting is None else drafting
        return {slot: find_drafts(self._said[slot], self._k, self._lookup) for slot in asked}

    def verify_drafts(self, active: Collection[int], drafts: Mapping[int, Sequence[int]]) -> Flight:
        """The second half."""
        found = {slot: len(tokens) for slot, tokens in drafts.items() if tokens}
        self._unread |= set(active)
        if not found:
            return super().round(active, 0, ())
        width = self.width_for(active)
        # Token 0 where fewer were found: should the target agree, it is right, and not counted.
        window = np.zeros((self.replicas, width, self._k + 1), np.int32)
        for slot in active:
            row = window[slot % self.replicas, self._row(slot)]
            row[0] = self._said[slot][-1]
            row[1 : found.get(slot, 0) + 1] = drafts.get(slot, [])
        flight = self._flight(self._programs.verify(self._turn(active, found), window, None), width)
        return _Looked(flight.output, flight.slots, found=found)

    def guided_round(
        self, active: Collection[int], k: int, window_for: Any, drafting: Collection[int] | None = None
    ) -> Flight:
        """A plain round: a grammar's requests go without drafts."""
        self._unread |= set(active)
        return super().guided_round(active, 0, window_for, ())

    def results(self, flight: Flight) -> list[dict[int, RoundResult]]:
        found = flight.found if isinstance(flight, _Looked) else {}
        rounds = super().results(flight)
        for results in rounds:
            for slot, result in results.items():
                self._said.setdefault(slot, []).extend(result.tokens)
                drafted = found.get(slot, 0)
                accepted = min(result.accepted, drafted)
                results[slot] = dataclasses.replace(result, accepted=accepted, drafted=drafted)
        self._unread -= {slot for slots in flight.slots for slot in slots}
        return rounds

    def copy(self, source: int, target: int, count: int) -> None:
        super().copy(source, target, count)
        self._said[target] = list(self._said.get(source, ()))

    def reshape(self, pool: Pool, order: Sequence[int]) -> None:
        super().reshape(pool, order)
        self._said = {new: self._said[old] for new, old in enumerate(order) if old in self._said}

    def start_over(self, pool: Pool) -> None:
        super().start_over(pool)
        self._said, self._unread = {}, set()
