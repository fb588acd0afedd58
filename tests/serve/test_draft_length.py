"""Chosen lengths on simulated machines: never slower than the best fixed one, but for the cost of knowing."""

import itertools
import random

import pytest

from peagle_jax.serve.draft_length import DraftLength


class Machine:
    """A round takes longer by its rows; drafts are accepted one after another with ``rate``."""

    def __init__(self, fixed: float, per_row: float, draft: float, rate: float, noise: float = 0.1) -> None:
        self.fixed, self.per_row, self.draft, self.rate, self.noise = fixed, per_row, draft, rate, noise
        self.rng = random.Random(3)

    def seconds(self, width: int, k: int) -> float:
        return self.fixed + self.per_row * width * (k + 1) + (self.draft * width if k else 0)

    def round(self, width: int, k: int) -> tuple[float, list[int]]:
        accepted = []
        for _ in range(width):
            n = 0
            while n < k and self.rng.random() < self.rate:
                n += 1
            accepted.append(n)
        return self.seconds(width, k) * self.rng.uniform(1, 1 + 2 * self.noise), accepted

    def speed(self, width: int, k: int) -> float:
        """Expected tokens a second of a fixed K."""
        return width * sum(self.rate**j for j in range(k + 1)) / self.seconds(width, k) / (1 + self.noise)


def run(chooser: DraftLength, machine: Machine, width: int, rounds: int) -> tuple[float, list[int]]:
    """Tokens a second over ``rounds`` rounds, and the K of each."""
    tokens = seconds = 0.0
    chosen = []
    for _ in range(rounds):
        k = chooser.choose(width, width)
        chosen.append(k)
        time, accepted = machine.round(width, k)
        chooser.record(width, k, k, time)
        for n in accepted:
            if k:
                chooser.accepted(n, k)
            tokens += n + 1
        seconds += time
    return tokens / seconds, chosen


@pytest.mark.parametrize("width", [1, 4, 16, 64])
@pytest.mark.parametrize("rate", [0.05, 0.4, 0.75, 0.95])
def test_at_every_width_and_acceptance_the_best_fixed_length_is_nearly_reached(width, rate):
    machine = Machine(fixed=20, per_row=0.25, draft=0.3, rate=rate)
    chooser = DraftLength((0, 2, 5))
    speed, _ = run(chooser, machine, width, 1500)
    best = max(machine.speed(width, k) for k in (0, 2, 5))
    assert speed > 0.95 * best


def test_lengths_nearly_as_good_do_not_take_turns():
    machine = Machine(fixed=20, per_row=0.25, draft=0.3, rate=0.5, noise=0.15)
    chooser = DraftLength((0, 2, 5))
    run(chooser, machine, 8, 300)
    _, chosen = run(chooser, machine, 8, 1000)
    most = max(set(chosen), key=chosen.count)
    assert sum(k != most for k in chosen) < 60  # tried now and then
    assert sum(a != most and b != most for a, b in itertools.pairwise(chosen)) < 10


def test_a_change_of_the_text_is_noticed_in_both_directions():
    chooser = DraftLength((0, 5))
    good, bad = (Machine(fixed=20, per_row=2.0, draft=1, rate=rate) for rate in (0.9, 0.02))
    assert run(chooser, good, 4, 200)[1][-1] == 5
    assert run(chooser, bad, 4, 200)[1][-1] == 0
    assert run(chooser, good, 4, 1500)[1].count(5) > 500


def test_drafting_that_nearly_pays_is_tried_again_soon():
    good, bad = (Machine(fixed=20, per_row=0.25, draft=2, rate=rate) for rate in (0.45, 0.02))
    chooser = DraftLength((0, 5))
    run(chooser, good, 1, 200)
    assert run(chooser, bad, 1, 200)[1][-50:].count(5) < 10
    assert run(chooser, good, 1, 300)[1].count(5) > 150


def test_a_stretch_of_slow_rounds_does_not_end_drafting_for_long():
    machine = Machine(fixed=20, per_row=0.25, draft=2, rate=0.45)
    chooser = DraftLength((0, 5))
    run(chooser, machine, 1, 200)
    for _ in range(9):
        chooser.record(1, 5, 5, 2 * machine.seconds(1, 5))  # another program had the cores
    chosen = run(chooser, machine, 1, 500)[1]
    assert chosen[:20].count(0) > 10 and chosen[-200:].count(5) > 180


def test_lengths_fixed_by_batch_size_need_no_measurement():
    chooser = DraftLength((0, 2, 5), by_batch_size=[(1, 4, 5), (5, 16, 3), (17, 64, 0)])
    assert [chooser.choose(64, n) for n in (1, 4, 5, 16, 17, 64, 65)] == [5, 5, 2, 2, 0, 0, 5]


def test_one_compiled_length_is_the_choice():
    assert DraftLength((3,)).choose(8, 2) == 3


def test_times_are_needed_only_where_there_is_a_choice():
    assert DraftLength((0, 5)).needs_times
    assert not DraftLength((5,)).needs_times
    assert not DraftLength((0, 5), by_batch_size=[(1, 4, 5)]).needs_times


def test_idle_times_stand_in_for_trials():
    machine = Machine(fixed=20, per_row=0.25, draft=0.3, rate=0.4)
    chooser = DraftLength((0, 2, 5))
    # A cache with nothing in it is soon read.
    chooser.timed_idle({(64, k, k): machine.seconds(64, k) / 2 for k in (0, 2, 5)})
    _, chosen = run(chooser, machine, 64, 100)
    assert chosen.count(0) > 95
    # Rounds that come with prompts are not timed; they must not be tried out for ever.
    fresh = DraftLength((0, 5))
    fresh.timed_idle({(8, 0, 0): 1.0, (8, 5, 5): 10.0})
    assert [fresh.choose(8, 8) for _ in range(20)] == [0] * 20


def test_an_idle_time_grows_with_what_requests_add_to_the_others():
    chooser = DraftLength((0, 5))
    chooser.timed_idle({(4, 0, 0): 1.0, (4, 5, 5): 2.0})
    before = chooser.speed(4, 5)
    chooser.record(4, 0, 0, 3.0)
    assert chooser.speed(4, 5) == pytest.approx(before / 3)
    assert chooser.speed(4, 0) == pytest.approx(1 / 3)


def test_each_number_of_nodes_has_a_time_of_its_own_which_the_round_is_told():
    chooser = DraftLength((0, 5), nodes_of=lambda k: (2, 5) if k else (0,))
    assert chooser.needs_times
    assert chooser.pace(4, 5) == {2: 1.0, 5: 1.0}  # nothing is known
    chooser.timed_idle({(4, 0, 0): 1.0, (4, 5, 2): 2.0, (4, 5, 5): 4.0})
    assert chooser.pace(4, 5) == {2: 2.0, 5: 4.0}
    chooser.record(4, 5, 5, 6.0)  # requests add half
    assert chooser.pace(4, 5) == pytest.approx({2: 3.0, 5: 6.0})


def test_a_k_is_as_fast_as_the_nodes_that_its_rounds_verify():
    chooser = DraftLength((0, 5), nodes_of=lambda k: (2, 5) if k else (0,))
    chooser.timed_idle({(4, 0, 0): 1.0, (4, 5, 2): 2.0, (4, 5, 5): 4.0})
    tokens = chooser.tokens(5)
    assert chooser.speed(4, 5) == pytest.approx(tokens / 3)  # before any round says more
    for _ in range(60):
        chooser.record(4, 5, 2, 2.0)
    assert chooser.speed(4, 5) == pytest.approx(tokens / 2, rel=0.02)


def test_acceptance_counts_every_position_however_few_nodes_were_verified():
    chooser = DraftLength((0, 3), nodes_of=lambda k: (1, 3) if k else (0,))
    for _ in range(400):
        chooser.accepted(1, 3)
    assert chooser.tokens(3) == pytest.approx(2, abs=0.02)
