"""How many tokens a round drafts: never slower than no head. Pure logic, no clock.

A round of K drafts gives 1 + sum of P(at least j accepted), j = 1..K, tokens a sequence on average, in a
time that depends on how many sequences it serves and on how many of its nodes it verifies. The K with the
most tokens a second wins here; how many nodes are verified the round itself decides, by its drafts' chances
and the times it is given (``pace``). Rounds of idle slots, timed before the first request, stand in for times
that no request has had yet.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Mapping, Sequence

MARGIN = 1.05
"""Another K must promise that much more than the one in use, so that noise does not switch."""

SAMPLES = 9
"""Round times whose median counts: one slow round says nothing."""

PROBE_SHARE = 0.005
"""Of the speed, what it may cost to make rounds now and then with a K that is not in use, to see whether
times or acceptance have changed: one nearly as good is tried more often than one that is far worse."""

PROBE_EVERY = 8, 128
"""Rounds of a width between such rounds, at least and at most."""

TRIALS = 2
"""Rounds that a K gets before its time is trusted."""

MEMORY = 0.02
"""Weight of one sequence's round in the running acceptance."""

RECENT = 0.1
"""Weight of one round in the shares of the numbers of nodes."""

PRIOR = 0.7
"""Share of drafts accepted, given that those before were, until there is evidence."""

Range = tuple[int, int, int]
"""vLLM's (first batch size, last one, K), as in ``num_speculative_tokens_per_batch_size``."""


class DraftLength:
    """Chooses K among ``drafts``, those that are compiled, for each round.

    Args:
        by_batch_size: fixes K by the number of running sequences instead; the largest compiled K that is
            not above it is used, and the largest of all beyond the ranges.
        nodes_of: how many nodes a round of K may verify (``SpecConfig.nodes_of``).
    """

    def __init__(
        self,
        drafts: Sequence[int],
        by_batch_size: Sequence[Range] | None = None,
        nodes_of: Callable[[int], tuple[int, ...]] = lambda k: (k,),
    ) -> None:
        self._nodes = {k: nodes_of(k) for k in drafts}
        self.drafts = tuple(sorted(drafts))
        self.rates = [PRIOR**j for j in range(1, self.drafts[-1] + 1)]
        self._fixed = by_batch_size
        self._times: dict[tuple[int, int, int], collections.deque[float]] = {}
        self._idle: dict[tuple[int, int, int], float] = {}
        self._shares: dict[tuple[int, int], dict[int, float]] = {}
        self._current: dict[int, int] = {}
        self._since_probe: collections.Counter[int] = collections.Counter()
        self._probes = 0

    @property
    def needs_times(self) -> bool:
        """Whether a choice depends on how long rounds take."""
        several = any(len(nodes) > 1 for nodes in self._nodes.values())
        return several or (self._fixed is None and len(self.drafts) > 1)

    def choose(self, width: int, running: int) -> int:
        """K of the next round, which serves ``running`` sequences in a program of ``width``."""
        if self._fixed is not None:
            wanted = next((k for first, last, k in self._fixed if first <= running <= last), self.drafts[-1])
            return max((k for k in self.drafts if k <= wanted), default=self.drafts[0])
        if len(self.drafts) == 1:
            return self.drafts[0]
        untried = [
            k
            for k in self.drafts
            if (width, k, self._nodes[k][-1]) not in self._idle
            and sum(len(self._of(width, k, nodes)) for nodes in self._nodes[k]) < TRIALS
        ]
        if untried:
            return untried[-1]
        speeds = {k: self.speed(width, k) for k in self.drafts}
        best = max(self.drafts, key=speeds.__getitem__)
        current = self._current.setdefault(width, best)
        if speeds[best] > MARGIN * speeds[current]:
            current = self._current[width] = best
        others = [k for k in self.drafts if k != current]
        other = others[self._probes % len(others)]
        self._since_probe[width] += 1
        lost = (speeds[current] / speeds[other] - 1) * self.tokens(other) / self.tokens(current)  # rounds
        least, most = PROBE_EVERY
        if self._since_probe[width] < min(max(lost / PROBE_SHARE, least), most):
            return current
        self._since_probe[width] = 0
        self._probes += 1
        return other

    def pace(self, width: int, k: int) -> dict[int, float]:
        """Seconds that a round of ``width`` and K takes, by how many nodes it verifies. Where some have no
        time yet, all are as fast, so that the most is verified."""
        times = {nodes: self._time(width, k, nodes) for nodes in self._nodes[k]}
        if all(time is not None for time in times.values()):
            return {nodes: time or 1.0 for nodes, time in times.items()}
        return dict.fromkeys(times, 1.0)

    def _of(self, width: int, k: int, nodes: int) -> collections.deque[float]:
        return self._times.setdefault((width, k, nodes), collections.deque(maxlen=SAMPLES))

    def tokens(self, k: int) -> float:
        """Tokens that a sequence may expect of a round."""
        return 1 + sum(self.rates[:k])

    def speed(self, width: int, k: int) -> float:
        """Tokens a second and sequence; the round must have been measured, or timed idle."""
        known = {nodes: self._time(width, k, nodes) for nodes in self._nodes[k]}
        times = {nodes: time for nodes, time in known.items() if time is not None}
        shares = self._shares.get((width, k), {})
        weight = sum(shares.get(nodes, 0.0) for nodes in times)
        if not weight:  # no round yet says how many nodes are worth it
            return self.tokens(k) / statistics.mean(times.values())
        return self.tokens(k) * weight / sum(shares.get(nodes, 0) * time for nodes, time in times.items())

    def _time(self, width: int, k: int, nodes: int) -> float | None:
        """The median of what was measured; else the idle time, and what requests have added to the others of
        the width (they fill the cache that a round reads)."""
        if self._of(width, k, nodes):
            return statistics.median(self._of(width, k, nodes))
        if (width, k, nodes) not in self._idle:
            return None
        added = [
            statistics.median(times) / self._idle[width, j, n]
            for j in self.drafts
            for n in self._nodes[j]
            if (times := self._of(width, j, n)) and (width, j, n) in self._idle
        ]
        return self._idle[width, k, nodes] * statistics.median(added or [1.0])

    def timed_idle(self, seconds: Mapping[tuple[int, int, int], float]) -> None:
        """The times of rounds of idle slots, by (width, K, nodes)."""
        self._idle.update({at: max(time, 1e-9) for at, time in seconds.items()})

    def record(self, width: int, k: int, nodes: int, seconds: float) -> None:
        """The time of a dispatch that was a round and nothing else, and verified so many nodes; of drafts
        that the host looks up perhaps fewer."""
        nodes = next(n for n in self._nodes[k] if n >= nodes)
        self._of(width, k, nodes).append(max(seconds, 1e-9))
        shares = self._shares.setdefault((width, k), {nodes: 1.0})
        for n in self._nodes[k]:
            shares[n] = shares.get(n, 0.0) * (1 - RECENT) + RECENT * (n == nodes)

    def accepted(self, accepted: int, k: int) -> None:
        """What one sequence's round of K drafts accepted, however many nodes of them it verified."""
        for j in range(min(k, len(self.rates))):
            self.rates[j] += MEMORY * ((accepted > j) - self.rates[j])
