"""Schedules against a model of the device that knows what each slot really holds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.serve.scheduler import LEAST_COPY, Job, Phase, Scheduler, common_prefix
from peagle_jax.speculative.sizes import Pool, Sizes

SCRATCH, AHEAD, CONTEXT = 7, 5, 120
K = 3


class Device:
    """Does what plans say. A slot holds tokens, and for the drafter the token after each of them; and for
    layers with windows the position that was written last to each place of its ring."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[int, list[tuple[int, int]]] = {}
        self.rings: dict[int, dict[int, int]] = {}
        self.widest = 0

    def write(self, slot: int, start: int, rows: int) -> None:
        ring = self.rings.setdefault(slot, {})
        for size in self.scheduler.sizes.rings:
            ring.update({p % size: p for p in range(start, start + rows)})

    def check_window(self, slot: int, end: int) -> None:
        """What a window sees before position ``end`` is still there."""
        for size, window in zip(self.scheduler.sizes.rings, self.scheduler.sizes.windows, strict=True):
            for p in range(max(0, end - window + 1), end):
                assert self.rings[slot][p % size] == p

    def run(self, rng: random.Random) -> None:
        """One dispatch and its results."""
        plan = self.scheduler.plan()
        pool = self.scheduler.pool
        if plan.pool is not None:
            self.slots = {i: list(self.slots.get(s, [])) for i, s in enumerate(plan.order)}
            self.rings = {i: dict(self.rings.get(s, {})) for i, s in enumerate(plan.order)}
        for source, target, count in plan.copies:
            assert source % self.scheduler.replicas == target % self.scheduler.replicas
            self.slots[target] = list(self.slots.get(source, [])[:count])
            self.rings[target] = dict(self.rings.get(source, {}))
        for parts in plan.chunks:
            assert len({part.slot % self.scheduler.replicas for part in parts}) == len(parts)
            for part in parts:
                tokens, held = part.job.tokens, self.slots.setdefault(part.slot, [])
                self.check(part.job, part.start)
                self.check_window(part.slot, part.start)
                self.write(part.slot, part.start, self.scheduler.sizes.chunk_for(part.count))
                assert 0 < part.count <= self.scheduler.sizes.chunks[-1]
                assert part.start + part.count + SCRATCH <= pool.positions
                following = [*tokens[1:], -1]
                new = zip(tokens[part.start : part.start + part.count], following[part.start :], strict=False)
                held[part.start :] = list(new)
        rows = [slot // self.scheduler.replicas for slot in plan.running]
        assert all(row < pool.slots for row in rows)
        self.widest = max([self.widest, *(row + 1 for row in rows)])
        for slot, job in plan.running.items():
            assert job.slot == slot and job.phase is Phase.RUNNING
            left = job.prompt_tokens + job.max_tokens - len(job.tokens)
            assert left > 0
            first = len(job.tokens) == job.dispatched and self.slots[slot][-1:] == [(job.tokens[-1], -1)]
            count = min(left, 1 if first else rng.randint(1, K + 1))
            self.check_window(slot, len(job.tokens) - 1)
            self.write(slot, len(job.tokens) - 1, K + 1)
            assert len(job.tokens) + count + SCRATCH <= pool.positions + 1
            self.commit(job, [rng.randrange(4) for _ in range(count)], None if first else K)

    def commit(self, job: Job, tokens: list[int], k: int | None) -> None:
        held = self.slots[job.slot]
        whole = [*job.tokens, *tokens]
        held[:] = list(zip(whole, whole[1:], strict=False))
        self.scheduler.commit(job, tokens, k)
        self.check(job, job.stored)
        if len(job.tokens) == job.prompt_tokens + job.max_tokens:
            self.scheduler.end(job)

    def check(self, job: Job, count: int) -> None:
        """The first ``count`` positions of its slot are the job's own."""
        want = list(zip(job.tokens, job.tokens[1:], strict=False))[:count]
        assert len(want) == count and self.slots[job.slot][:count] == want


def scheduler(pools=((4, CONTEXT + SCRATCH),), replicas=1, window=0, **options) -> Scheduler:
    widths = sorted({1, 2, *(slots for slots, _ in pools)})
    rings = ((window,), (window + SCRATCH + AHEAD + 8,)) if window else ((), ())
    sizes = Sizes(tuple(Pool(*p) for p in pools), tuple(widths), (0, K), (4, 16), 1, 1, *rings)
    return Scheduler(
        sizes, replicas, scratch=SCRATCH, ahead=AHEAD, window=max(sizes.drafts) + 1, drafter=True, **options
    )


def job(tokens=3, max_tokens=5, **changes) -> Job:
    prompt = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    return Job(prompt, len(prompt), max_tokens, **changes)


def finish(s: Scheduler, device: Device, jobs, dispatches=2000) -> None:
    rng = random.Random(1)
    for _ in range(dispatches):
        if all(j.phase is Phase.DONE for j in jobs):
            return
        device.run(rng)
    raise AssertionError("some jobs never ended")


POOLS = [
    ((1, CONTEXT + SCRATCH),),
    ((4, CONTEXT + SCRATCH),),
    ((5, 30 + SCRATCH), (2, 60 + SCRATCH), (1, CONTEXT + SCRATCH)),
]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(POOLS),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.integers(0, 2**30),
    st.sampled_from([None, 5, 40]),
    st.sampled_from([0, 6]),
)
def test_any_schedule_ends_with_every_slot_holding_what_it_should(
    pools, replicas, caching, seed, budget, window
):
    """The device checks each chunk's, copy's and round's ground."""
    rng = random.Random(seed)
    s = scheduler(pools, replicas, window, prefix_caching=caching, max_batched_tokens=budget)
    device, jobs = Device(s), []
    stems = [[rng.randrange(4) for _ in range(40)] for _ in range(2)]
    for _ in range(60):
        if rng.random() < 0.4:
            stem = rng.choice(stems)[: rng.randint(1, 40)]
            prompt = [*stem, *(rng.randrange(4) for _ in range(rng.randint(0, 30)))]
            jobs.append(job(prompt, rng.randint(1, CONTEXT - len(prompt)), priority=rng.choice([0, 0, 1])))
            s.add(jobs[-1])
        going = [j for j in jobs if j.phase is not Phase.DONE]
        if going and rng.random() < 0.1:
            s.end(rng.choice(going))
        placed = list(s.jobs.values())
        if placed and rng.random() < 0.05:
            s.preempt(rng.choice(placed))
        if rng.random() < 0.02:
            device.slots.clear()
            for lost in s.fail():
                assert lost.phase is Phase.DONE
        device.run(rng)
        assert 0 <= s.usage <= 1
    finish(s, device, jobs)
    assert not s.jobs and not s.waiting


def test_first_come_first_served_within_a_priority():
    s = scheduler(pools=((1, CONTEXT + SCRATCH),))
    jobs = [job(priority=p) for p in (1, 1, 0, 2, 0)]
    for j in jobs:
        s.add(j)
    order = []
    device, rng = Device(s), random.Random(0)
    while not all(j.phase is Phase.DONE for j in jobs):
        device.run(rng)
        order += [i for i, j in enumerate(jobs) if j.phase is Phase.DONE and i not in order]
    assert order == [2, 4, 0, 1, 3]


def test_a_higher_priority_takes_the_slot_of_the_latest_of_the_lowest():
    s = scheduler(pools=((2, CONTEXT + SCRATCH),))
    low = [job([7] * 20, 60, priority=5), job([8] * 20, 60, priority=5)]
    for j in low:
        s.add(j)
    device, rng = Device(s), random.Random(0)
    device.run(rng)
    urgent = job([9] * 20, 10)
    s.add(urgent)
    device.run(rng)
    assert urgent.placed and low[0].placed and low[1].phase is Phase.WAITING
    assert s.preemptions == 1 and low[1].epoch == 1
    finish(s, device, [*low, urgent])


def test_a_cancelled_jobs_slot_is_taken_by_the_next_plan():
    s = scheduler(pools=((1, CONTEXT + SCRATCH),))
    first, second = job([1] * 5, 50), job([2] * 5, 50)
    s.add(first)
    s.add(second)
    device = Device(s)
    device.run(random.Random(0))
    assert first.placed and not second.placed
    s.end(first)
    assert [part.job for parts in s.plan().chunks for part in parts] == [second]


def test_a_long_prompt_shares_its_dispatches_with_the_rounds_of_others():
    s = scheduler(max_batched_tokens=12)
    running, long = job(2, 60), job([5] * 100, 3)
    s.add(running)
    device, rng = Device(s), random.Random(0)
    device.run(rng)
    s.add(long)
    counts = []
    while long.phase is not Phase.RUNNING:
        before = len(running.tokens)
        plan_before = long.dispatched
        device.run(rng)
        counts.append(long.dispatched - plan_before)
        assert len(running.tokens) > before, "the running one stood still"
    assert counts == [8] * 12 + [4]  # 12 less the window of one running sequence


def test_a_beginning_that_a_slot_holds_is_not_computed_again():
    s = scheduler()
    device = Device(s)
    first = job(range(50), 4)
    s.add(first)
    finish(s, device, [first])
    answer = first.tokens[50:]
    longer = job([*range(50), *answer, 1, 2], 4)
    s.add(longer)
    plan = s.plan()
    # The answer's last tokens may not be in the drafter's cache yet.
    assert longer.cached_tokens >= 49 and longer.slot == 0 and plan.copies == []
    assert (s.prefix_queries, s.prefix_hits) == (50 + 56, longer.cached_tokens)


def test_a_beginning_is_copied_from_a_running_slot_without_its_last_position():
    s = scheduler()
    device, rng = Device(s), random.Random(0)
    first = job(range(40), 60)
    s.add(first)
    for _ in range(5):
        device.run(rng)
    second = job([*range(30), 99, 98], 5)
    s.add(second)
    plan = s.plan()
    # Position 29 of the drafter was computed with token 30.
    assert plan.copies == [(0, 1, 29)] and second.cached_tokens == 29


def test_a_beginning_that_a_window_has_left_far_behind_is_computed_again():
    """The ring of 6 + SCRATCH + AHEAD + 8 positions has forgotten what the window before token 30 needs."""
    s = scheduler(window=6)
    device, rng = Device(s), random.Random(0)
    s.add(job(range(40), 60))
    for _ in range(2):  # 32 rows fit a dispatch
        device.run(rng)
    near, far = job([*range(39), 99, 98], 5), job([*range(30), 99, 98], 5)
    s.add(near)
    s.add(far)
    s.plan()
    assert (near.cached_tokens, far.cached_tokens) == (38, 0)


def test_a_short_beginning_is_not_worth_a_copy():
    s = scheduler()
    device, rng = Device(s), random.Random(0)
    s.add(job(range(40), 60))
    device.run(rng)
    second = job([*range(LEAST_COPY), 99], 5)
    s.add(second)
    assert s.plan().copies == [] and second.cached_tokens == 0


def test_what_a_slot_holds_is_moved_up_before_another_takes_it():
    s = scheduler()
    device = Device(s)
    texts = [[t] * 30 for t in (1, 2, 3)]
    for text in texts:
        one = job(text, 2)
        s.add(one)
        finish(s, device, [one])
    assert device.widest == 1  # each ran alone, in the lowest slot
    for text in texts:
        again = job(text, 2)
        s.add(again)
        finish(s, device, [again])
        assert again.cached_tokens == 29


def test_running_jobs_move_down_when_few_are_left():
    s = scheduler()
    device, rng = Device(s), random.Random(0)
    jobs = [job([t] * 5, 100) for t in range(4)]
    for j in jobs:
        s.add(j)
    device.run(rng)
    for j in jobs[:3]:
        s.end(j)
    device.run(rng)
    assert jobs[3].slot == 0


def test_sequences_that_outgrow_their_slots_preempt_the_latest():
    s = scheduler(pools=((3, 30 + SCRATCH), (1, CONTEXT + SCRATCH)))
    device, rng = Device(s), random.Random(0)
    jobs = [job([t] * 10, 80) for t in range(3)]
    for j in jobs:
        s.add(j)
    while not s.preemptions:
        device.run(rng)
    assert jobs[0].placed
    finish(s, device, jobs)
    assert [len(j.tokens) for j in jobs] == [90] * 3


def test_after_a_failure_each_runs_alone_and_the_one_that_fails_alone_is_blamed():
    s = scheduler()
    device, rng = Device(s), random.Random(0)
    jobs = [job([t] * 5, 30) for t in range(3)]
    for j in jobs:
        s.add(j)
    device.run(rng)
    device.slots.clear()
    assert s.fail() == []
    assert len(s.plan().running) == 1
    assert s.fail() == [jobs[0]]
    device.slots.clear()
    finish(s, device, jobs[1:])


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([5], [6]) == 0


@pytest.mark.parametrize("lookup", [5, 16, 17])
def test_chunks_have_compiled_sizes(lookup):
    sizes = scheduler().sizes
    assert sizes.chunk_for(lookup) == 16
    assert sizes.chunk_for(3) == 4
