"""How one request's drafts fared, in vLLM's words (``--per-request-spec-decode-metrics``)."""

from __future__ import annotations

from typing import Any, Literal

Level = Literal["none", "summary", "detailed"]
LEVELS: tuple[Level, ...] = ("none", "summary", "detailed")


class RequestAcceptance:
    """Counts one answer's rounds. A round that drafted nothing is not a speculative step.

    An acceptance length counts the token that the target adds itself; the histograms do not.
    """

    def __init__(self, num_spec_tokens: int) -> None:
        self._num_spec_tokens = num_spec_tokens
        self._accepted: list[int] = []
        self._drafted: list[int] = []

    def add(self, accepted: int, drafted: int) -> None:
        if drafted > 0:
            self._accepted.append(accepted)
            self._drafted.append(drafted)

    def report(self, level: Level) -> dict[str, Any]:
        """vLLM's ``metrics.speculative_decoding``."""
        steps, accepted, drafted = len(self._accepted), sum(self._accepted), sum(self._drafted)
        longest = max([self._num_spec_tokens, *self._drafted])
        by_length = {
            str(length): _histogram(
                [a for a, d in zip(self._accepted, self._drafted, strict=True) if d == length], length
            )
            for length in sorted(set(self._drafted))
        }
        found: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": _histogram(self._accepted, longest),
            "acceptance_histogram_by_draft_length": by_length,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": self._num_spec_tokens,
        }
        if level == "detailed":
            found |= {"per_step_accepted": self._accepted, "per_step_drafted": self._drafted}
        return found


def _histogram(values: list[int], longest: int) -> list[int]:
    """How often each of 0..longest is among the values."""
    counts = [0] * (longest + 1)
    for value in values:
        counts[value] += 1
    return counts
