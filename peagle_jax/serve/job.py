"""What the scheduler plans with: requests as jobs, what idle slots keep, and the dispatch that results."""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Sequence

from peagle_jax.speculative.sizes import Pool


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    DONE = "done"


@dataclasses.dataclass(eq=False)
class Job:
    """A request as the scheduler sees it.

    ``tokens`` are the prompt and the answer so far. ``stored`` of them lie in its slot, in the target's
    and the drafter's cache. ``epoch`` counts preemptions: results of an earlier one are stale.
    """

    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    number: int = 0
    phase: Phase = Phase.WAITING
    slot: int | None = None
    stored: int = 0
    dispatched: int = 0  # tokens whose prompt chunk has been dispatched
    epoch: int = 0
    cached_tokens: int | None = None  # of the prompt, found in a slot when it first began
    reuse: bool = True  # False: every row of the prompt is wanted
    longest: int = 0  # tokens of the longest sequence that its slot was copied from or taken over from

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first: vLLM's priorities, then first come, first served."""
        return self.priority, self.number

    @property
    def placed(self) -> bool:
        return self.slot is not None


@dataclasses.dataclass
class Kept:
    """What a slot holds that nobody runs in: the beginning of ``tokens``, ``stored`` of them. ``longest`` is
    the most tokens that what lies in its rings belonged to."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    stored: int = 0
    used: int = 0
    longest: int = 0

    @classmethod
    def of(cls, job: Job, used: int) -> Kept:
        """What a job leaves in its slot."""
        return cls(list(job.tokens), job.stored, used, max(job.longest, len(job.tokens)))


@dataclasses.dataclass(frozen=True)
class Part:
    """A prompt chunk: ``count`` of the job's tokens from ``start`` on."""

    job: Job
    slot: int
    start: int
    count: int


@dataclasses.dataclass
class Plan:
    """One dispatch, in this order. Empty if there is nothing to do."""

    pool: Pool | None = None  # change to this one ...
    order: Sequence[int] = ()  # ... with these slots; () keeps none
    copies: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # source, target, positions
    chunks: list[list[Part]] = dataclasses.field(
        default_factory=list
    )  # one list a program, one part a replica
    running: dict[int, Job] = dataclasses.field(default_factory=dict)  # by slot

    @property
    def empty(self) -> bool:
        return not (self.pool or self.copies or self.chunks or self.running)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    size = min(len(a), len(b))
    return bisect.bisect_left(range(1, size + 1), True, key=lambda n: a[:n] != b[:n])
