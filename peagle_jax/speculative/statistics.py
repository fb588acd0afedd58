"""Acceptance counted as vLLM counts it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class AcceptanceStatistics:
    """Counts over verification rounds of at most ``num_speculative_tokens`` drafts.

    Acceptance length includes the bonus token: 3 rounds of K = 3 that accept 0, 2 and 3 drafts
    have a mean of (1 + 3 + 4) / 3 = 2.67, and position 1 has rate 2/3 (conditional: 2/2).
    """

    num_speculative_tokens: int
    rounds: int = 0
    accepted_at: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_at = self.accepted_at or [0] * self.num_speculative_tokens

    def add(self, accepted: int, drafted: int) -> None:
        """Counts one round; a round without drafts (plain decode) is not a draft."""
        if drafted == 0:
            return
        self.rounds += 1
        for position in range(accepted):
            self.accepted_at[position] += 1

    def line(self) -> str:
        """In words, for a log."""
        if not self.rounds:
            return "no round drafted"
        return f"acceptance length {self.mean_acceptance_length:.2f} in {self.rounds} rounds that drafted"

    def merge(self, other: AcceptanceStatistics) -> None:
        """Adds the rounds of another count of the same K."""
        self.rounds += other.rounds
        pairs = zip(self.accepted_at, other.accepted_at, strict=True)
        self.accepted_at = [a + b for a, b in pairs]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round: 1 + accepted drafts / rounds; 1.0 before any round."""
        return 1.0 + (sum(self.accepted_at) / self.rounds if self.rounds else 0.0)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of all rounds in which at least j drafts were accepted, j = 1..K."""
        return [count / self.rounds if self.rounds else 0.0 for count in self.accepted_at]
