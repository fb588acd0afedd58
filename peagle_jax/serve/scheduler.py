"""Which requests run, in which slots, and what each dispatch does. Pure Python: no arrays, no clock.

Slot s is row s // R of replica s % R. Rounds serve the first rows of every replica, so that low rows
are filled first and running requests move down when few are left. Slots that nobody runs in keep what
they held: the beginning of a later prompt may be there (prefix caching).
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Sequence

from peagle_jax.serve.job import Job, Kept, Part, Phase, Plan, common_prefix
from peagle_jax.speculative.sizes import Pool, Sizes

LEAST_COPY = 16
"""A shorter common beginning is computed again rather than copied from another slot."""


class Scheduler:
    """Admits, places, preempts.

    Args:
        sizes: what the decoder is compiled for.
        scratch: positions of a slot that no sequence may count on.
        ahead: tokens that a sequence may get before the host knows of them.
        window: rows that a round computes for a request, at most.
        drafter: there is one. Its last stored position depends on the token after it.
        max_batched_tokens: rows that a dispatch may compute, prompt tokens and windows together. At least
            one short chunk goes with each dispatch whatever it says.
    """

    def __init__(
        self,
        sizes: Sizes,
        replicas: int = 1,
        *,
        scratch: int,
        ahead: int,
        window: int,
        drafter: bool,
        max_batched_tokens: int | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self.sizes, self.replicas, self._scratch, self._ahead = sizes, replicas, scratch, ahead
        self._drafter, self._caching = drafter, prefix_caching
        self._window = window
        slots = max(pool.slots for pool in sizes.pools) * replicas
        self._budget = max_batched_tokens or sizes.chunks[-1] + slots * window
        self.pool = sizes.pools[0]
        self.waiting: list[Job] = []
        self.jobs: dict[int, Job] = {}
        self._kept: dict[int, Kept] = {}
        self._count = self._time = 0
        self._suspects: set[Job] = set()
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    # -- what happens to a job ---------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Takes a new job, which waits for a slot."""
        self._count += 1
        job.number = self._count
        self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        job.phase = Phase.WAITING
        bisect.insort(self.waiting, job, key=lambda j: j.rank)

    def end(self, job: Job) -> None:
        """The job is over, wherever it was. Its slot is free for the next plan."""
        if job.phase is Phase.WAITING:
            self.waiting.remove(job)
        self._leave(job)
        job.phase = Phase.DONE
        self._suspects.discard(job)

    def commit(self, job: Job, tokens: Sequence[int], k: int | None) -> None:
        """Tokens that the host has read: of a round of K drafts, or (None) of the prompt's last chunk."""
        before = len(job.tokens)
        job.tokens.extend(tokens)
        self._suspects.discard(job)
        if not self._drafter:
            job.stored = len(job.tokens) - 1
        elif k is None or k > 0:
            job.stored = max(job.stored, before - 1)

    def preempt(self, job: Job) -> None:
        """Back to the queue, before those that came later. It is computed again from its tokens."""
        self._leave(job)
        job.epoch += 1
        self.preemptions += 1
        self._enqueue(job)

    def fail(self) -> list[Job]:
        """A dispatch has failed and the slots' contents are lost. Returns the job to blame, if it is clear.

        All that were placed run again, one at a time, so that what fails alone is found.
        """
        placed = list(self.jobs.values())
        for job in placed:
            self.preempt(job)
        self._kept.clear()
        self.pool = self.sizes.pools[0]
        if len(placed) == 1:
            self.end(placed[0])
            return placed
        self._suspects.update(placed)
        return []

    def _leave(self, job: Job) -> None:
        if job.slot is not None:
            del self.jobs[job.slot]
            if self._caching:
                self._kept[job.slot] = Kept.of(job, self._tick())
        job.slot, job.stored, job.dispatched, job.longest = None, 0, 0, 0

    def _tick(self) -> int:
        self._time += 1
        return self._time

    @property
    def usage(self) -> float:
        """Share of the positions that running requests hold."""
        room = (self.pool.positions - self._scratch) * self.pool.slots * self.replicas
        return min(1.0, sum(len(job.tokens) for job in self.jobs.values()) / max(room, 1))

    # -- a dispatch --------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What to dispatch now. The decoder must do it, in its order."""
        plan = Plan()
        self._fit(plan)
        self._admit(plan)
        self._compact(plan)
        self._prefill(plan)
        plan.running = {slot: job for slot, job in self.jobs.items() if job.phase is Phase.RUNNING}
        return plan

    def _need(self, job: Job) -> int:
        """Positions that the job may need before the next plan."""
        limit = job.prompt_tokens + job.max_tokens
        return max(len(job.tokens), min(len(job.tokens) + self._ahead, limit)) + self._scratch

    def _pool_for(self, jobs: Iterable[Job]) -> Pool:
        need = max((self._need(job) for job in jobs), default=0)
        return next((p for p in self.sizes.pools if p.positions >= need), self.sizes.pools[-1])

    def _fit(self, plan: Plan) -> None:
        """Longer slots if a sequence outgrows them, which may be too few for all."""
        while (pool := self._pool_for(self.jobs.values())).positions > self.pool.positions:
            crowded = self._crowded(pool)
            if not crowded:
                self._change(plan, pool)
                return
            self.preempt(max(crowded, key=lambda j: j.rank))

    def _crowded(self, pool: Pool) -> list[Job]:
        """Running jobs of replicas that have more than the pool has slots for."""
        rows = collections.Counter(slot % self.replicas for slot in self.jobs)
        return [job for slot, job in self.jobs.items() if rows[slot % self.replicas] > pool.slots]

    def _change(self, plan: Plan, pool: Pool) -> None:
        """Moves everything to slots of another shape: running jobs first, then what was used last."""
        at, to = self.sizes.pools.index(self.pool), self.sizes.pools.index(pool)
        if abs(at - to) > 1:  # only neighbours are compiled; what runs is computed again
            for job in list(self.jobs.values()):
                self.preempt(job)
            self._kept.clear()
            plan.pool, self.pool = pool, pool
            return
        order, jobs, kept = [0] * self._room(pool), {}, {}
        for r in range(self.replicas):
            mine = list(range(r, self._room(self.pool), self.replicas))
            mine.sort(key=lambda s: (s not in self.jobs, -self._kept[s].used if s in self._kept else 0, s))
            for row in range(pool.slots):
                source, slot = mine[min(row, len(mine) - 1)], row * self.replicas + r
                order[slot] = source
                if row >= len(mine):
                    continue
                if source in self.jobs:
                    jobs[slot] = self.jobs[source]
                    jobs[slot].slot = slot
                elif source in self._kept and self._kept[source].stored <= pool.positions - self._scratch:
                    kept[slot] = self._kept[source]
        assert len(jobs) == len(self.jobs), "every running job has a slot"
        plan.pool, plan.order = pool, order
        self.pool, self.jobs, self._kept = pool, jobs, kept

    def _admit(self, plan: Plan) -> None:
        while self.waiting and not (self._suspects and self.jobs):
            job = self.waiting[0]
            pool = self._pool_for([*self.jobs.values(), job])
            if pool.positions < self.pool.positions and len(self.jobs) < self._room(self.pool):
                pool = self.pool  # there is no need for more slots
            if len(self.jobs) < self._room(pool) and not self._crowded(pool):
                if pool != self.pool:
                    if plan.pool is not None or plan.copies:
                        return  # in the next dispatch
                    self._change(plan, pool)
                self.waiting.remove(job)
                self._place(plan, job)
                continue
            worst = max(self.jobs.values(), key=lambda j: j.rank)
            if worst.priority <= job.priority:
                return
            self.preempt(worst)

    def _room(self, pool: Pool) -> int:
        return pool.slots * self.replicas

    # -- places ------------------------------------------------------------------------------

    def _reusable(self, job: Job, tokens: Sequence[int], stored: int, longest: int) -> int:
        """How many positions of a slot hold what the job's would. At least its last token is computed."""
        if not stored:
            return 0
        # The drafter's position p was computed with token p + 1: the last common one is not safe.
        common = common_prefix(job.tokens, tokens) - self._drafter
        count = max(0, min(common, stored, len(job.tokens) - 1))
        written = max(len(tokens), longest) + self._ahead + self._scratch
        return count if count >= self.sizes.least_kept(written) else 0

    def _place(self, plan: Plan, job: Job) -> None:
        """Gives the job the lowest free slot, with the longest beginning of it that any slot holds."""
        best, source = 0, None
        if self._caching and job.reuse:
            for slot, holder in [*self._kept.items(), *self.jobs.items()]:
                count = self._reusable(job, holder.tokens, holder.stored, holder.longest)
                if count > best and self._free(slot % self.replicas):
                    best, source = count, slot
                    job.longest = max(holder.longest, len(holder.tokens))
        target = self._choose(best, source)
        lost = self._kept.pop(target, None)
        if lost is not None:
            self._rescue(plan, target, lost, best if target == source else 0, source)
        if target != source:
            if source is not None and best >= LEAST_COPY:
                plan.copies.append((source, target, best))
                if source in self._kept:
                    self._kept[source].used = self._tick()
            else:
                best = 0
        job.longest = job.longest if best else 0
        self.jobs[target] = job
        job.slot, job.phase = target, Phase.PREFILLING
        job.stored = job.dispatched = best
        if job.cached_tokens is None:
            job.cached_tokens = best
            self.prefix_queries += job.prompt_tokens
            self.prefix_hits += best

    def _rescue(self, plan: Plan, slot: int, lost: Kept, used: int, source: int | None) -> None:
        """Moves what ``slot`` holds, but for ``used`` positions that stay in use, to the least recently
        used of the slots above (not to ``source``, which is wanted), where nobody will run soon."""
        others = [s for s in self._free(slot % self.replicas) if s > slot and s != source]
        age = {s: self._kept[s].used if s in self._kept else 0 for s in others}
        for kept in self._kept.values():  # what another slot holds too is not lost
            used = max(used, min(common_prefix(lost.tokens, kept.tokens), kept.stored))
        if lost.stored - used < LEAST_COPY or not others or min(age.values()) >= lost.used:
            return
        victim = min(others, key=lambda s: (age[s], -s))
        plan.copies.append((slot, victim, lost.stored))
        self._kept[victim] = lost

    def _free(self, replica: int) -> list[int]:
        """Slots of a replica in which nobody runs, lowest first."""
        slots = range(replica, self.pool.slots * self.replicas, self.replicas)
        return [slot for slot in slots if slot not in self.jobs]

    def _choose(self, best: int, source: int | None) -> int:
        """The lowest free slot: of the replica that holds the beginning, else of the emptiest one. A slot
        that holds it and is no worse is taken as it is."""
        if source is None or best < LEAST_COPY:
            return min(self._free(r)[0] for r in range(self.replicas) if self._free(r))
        lowest = self._free(source % self.replicas)[0]
        if source in self.jobs:
            return lowest
        running = [slot for slot in self.jobs if slot % self.replicas == source % self.replicas]
        width = self.sizes.width_for(max(row // self.replicas for row in [lowest, *running]) + 1, self.pool)
        whole = self._kept[source].stored - best < LEAST_COPY  # nothing is lost of what it holds
        inside = source // self.replicas < width
        return source if inside and (whole or source == lowest) else lowest

    def _compact(self, plan: Plan) -> None:
        """Moves running jobs to lower slots, where that makes the rounds narrower."""
        for r in range(self.replicas):
            while True:
                rows = [slot // self.replicas for slot in self.jobs if slot % self.replicas == r]
                free = self._free(r)
                if not rows or not free:
                    break
                highest, lowest = max(rows), free[0] // self.replicas
                narrow = self.sizes.width_for(len(rows), self.pool)
                if lowest > highest or highest < narrow:
                    break
                self._move(plan, highest * self.replicas + r, free[0])

    def _move(self, plan: Plan, source: int, target: int) -> None:
        job = self.jobs.pop(source)
        plan.copies.append((source, target, min(self._need(job), self.pool.positions)))
        self.jobs[target], job.slot = job, target
        self._kept.pop(target, None)
        if self._caching:
            self._kept[source] = Kept.of(job, self._tick())

    # -- prompts -----------------------------------------------------------------------------

    def _prefill(self, plan: Plan) -> None:
        """Chunks for those that wait for their first token, in order, one a replica and program."""
        running = sum(job.phase is Phase.RUNNING for job in self.jobs.values())
        budget = max(self._budget - running * self._window, self.sizes.chunks[0])
        while budget > 0:
            parts: list[Part] = []
            for r in range(self.replicas):
                mine = [job for slot, job in self.jobs.items() if slot % self.replicas == r]
                mine = [job for job in mine if job.phase is Phase.PREFILLING]
                if not mine or budget <= 0:
                    continue
                job = min(mine, key=lambda j: j.rank)
                left = len(job.tokens) - job.dispatched
                count = min(left, self.sizes.chunks[-1], budget)
                assert job.slot is not None
                parts.append(Part(job, job.slot, job.dispatched, count))
                budget -= count
                job.dispatched += count
                job.stored = job.dispatched
                if job.dispatched == len(job.tokens):
                    job.phase = Phase.RUNNING
                    job.stored -= self._drafter
            if not parts:
                return
            plan.chunks.append(parts)
