"""Where the time of a round goes: it runs as it is served, and its drafts once more alone before it.

The drafts are timed as a chain's: what it takes to build a tree of them, by the head's estimates, is in
``verify``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.lookup import LookupDecoder
from peagle_jax.speculative.request import Flight, PromptChunk, RoundResult


@dataclasses.dataclass
class Times:
    """Seconds by part, and rounds by K with the seconds of their parts. ``twice`` are those of drafts that
    were made to be timed alone; a round's own are taken to take as long."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    host: float = 0.0
    twice: float = 0.0
    rounds: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    drafting: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    verifying: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def reset(self) -> None:
        """Forgets what was measured so far."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, collections.Counter() if field.name in _BY_K else 0.0)

    def report(self, wall: float) -> dict[str, Any]:
        """For a result; ``wall`` is what a client's clock says of the same answers. Drafts that only were
        timed do not count."""
        return {
            "wall_s": wall - self.twice,
            "prefill_s": self.prefill,
            "draft_s": self.draft,
            "verify_s": self.verify,
            "host_s": self.host,
            "rounds": {
                str(k): {
                    "rounds": count,
                    "draft_ms": 1000 * self.drafting[k] / count,
                    "verify_ms": 1000 * self.verifying[k] / count,
                }
                for k, count in sorted(self.rounds.items())
            },
        }


_BY_K = ("rounds", "drafting", "verifying")


class SplitDecoder:
    """A decoder, for one request at a time, that tells the time of every part.

    ``answering`` begins and ends an answer: what passes between its parts meanwhile is the host's.
    """

    lookahead = 0

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.times = decoder, Times()
        self._last: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        self._last = time.perf_counter()
        yield
        self.times.host += time.perf_counter() - self._last
        self._last = None

    def _begin(self) -> float:
        """A part begins; what was since the last one is the host's."""
        now = time.perf_counter()
        if self._last is not None:
            self.times.host += now - self._last
        return now

    def warm_up(self, progress: Callable[[str, int, int], None] = lambda what, number, count: None) -> None:
        self._decoder.warm_up(progress)
        for k in self._decoder.sizes.drafts:
            self.round([0], k)  # an idle slot: nothing comes of it
        self.times.reset()

    def prefill(self, chunks: Sequence[PromptChunk]) -> Flight:
        begun = self._begin()
        flight = self._decoder.prefill(chunks)
        jax.block_until_ready(flight.output)
        self._last = time.perf_counter()
        self.times.prefill += self._last - begun
        return flight

    def round(
        self,
        active: Collection[int],
        k: int,
        drafting: Collection[int] | None = None,
        pace: Mapping[int, float] | None = None,
    ) -> Flight:
        begun = self._begin()
        if isinstance(self._decoder, LookupDecoder):
            drafts = self._decoder.look_up(active, k, drafting)
            drafted = time.perf_counter() - begun
            flight = self._decoder.verify_drafts(active, drafts)
            k = k if any(drafts.values()) else 0
        else:
            drafted = 0.0
            if k:
                jax.block_until_ready(self._decoder.draft(active, k))
                drafted = time.perf_counter() - begun
                self.times.twice += drafted
                begun += drafted
            flight = self._decoder.round(active, k, drafting, pace)
        jax.block_until_ready(flight.output)
        self._last = time.perf_counter()
        self._count(k, min(drafted, self._last - begun), self._last - begun)
        return flight

    def _count(self, k: int, drafted: float, whole: float) -> None:
        self.times.draft += drafted
        self.times.verify += whole - drafted
        self.times.rounds[k] += 1
        self.times.drafting[k] += drafted
        self.times.verifying[k] += whole - drafted

    def results(self, flight: Flight) -> list[dict[int, RoundResult]]:
        return self._decoder.results(flight)
