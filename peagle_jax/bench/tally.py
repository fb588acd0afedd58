"""How drafts fared: counts of rounds, in vLLM's words, from our own rounds or from a server's counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total/"
GENERATED = "vllm:generation_tokens_total"


@dataclasses.dataclass
class Tally:
    """Rounds that drafted, tokens that they drafted, drafts accepted at each position, tokens of all answers.

    A round without drafts counts nowhere but in ``tokens``.
    """

    drafts: int = 0
    draft_tokens: int = 0
    per_position: list[int] = dataclasses.field(default_factory=list)
    tokens: int = 0

    @classmethod
    def of_counters(cls, counted: Mapping[str, float]) -> Tally:
        """From ``servers.read_metrics``, or a change between two of them."""
        places = sorted((int(n.removeprefix(PER_POSITION)), n) for n in counted if n.startswith(PER_POSITION))
        per_position = [int(counted[name]) for _, name in places]
        numbers = (int(counted.get(name, 0)) for name in (DRAFTS, DRAFTED, GENERATED))
        drafts, drafted, tokens = numbers
        return cls(drafts, drafted, per_position, tokens)

    def add(self, accepted: int, drafted: int, tokens: int) -> None:
        """One round of one answer. ``drafted`` may be the nodes of a tree, of which a path was accepted."""
        self.tokens += tokens
        if drafted:
            self.drafts += 1
            self.draft_tokens += drafted
            self.per_position += [0] * (accepted - len(self.per_position))
            for position in range(accepted):
                self.per_position[position] += 1

    def merge(self, other: Tally) -> None:
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.tokens += other.tokens
        self.per_position += [0] * (len(other.per_position) - len(self.per_position))
        for position, count in enumerate(other.per_position):
            self.per_position[position] += count

    @property
    def accepted(self) -> int:
        return sum(self.per_position)

    @property
    def length(self) -> float:
        """Tokens that a drafting round gives, the target's own included; 1 before any."""
        return 1 + self.accepted / max(self.drafts, 1)

    def report(self) -> dict[str, Any]:
        """Counts, the mean acceptance length, and the share of drafting rounds that accept each position.

        ``share_of_tokens_from_drafting_rounds`` is how often speculation was chosen at all.
        """
        made = self.drafts + self.accepted
        return {
            "num_drafts": self.drafts,
            "num_draft_tokens": self.draft_tokens,
            "num_accepted_tokens": self.accepted,
            "mean_acceptance_length": self.length,
            "acceptance_per_position": [count / max(self.drafts, 1) for count in self.per_position],
            "draft_acceptance_rate": self.accepted / max(self.draft_tokens, 1),
            "mean_draft_length": self.draft_tokens / max(self.drafts, 1),
            "share_of_tokens_from_drafting_rounds": min(1.0, made / max(self.tokens, made, 1)),
        }
