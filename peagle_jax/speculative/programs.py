"""The compiled programs of a decoder, and the state that they hand on to each other.

A program is a step of ``speculative.round`` with its static sizes: how many slots a round serves, how many
drafts it makes, how long a prompt chunk is. The state lies in a pool of slots whose dimensions come from a
short list (``Pool``). ``warm_up`` runs every program once, and nothing compiles after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.speculative import round as steps
from peagle_jax.speculative.placement import Placement
from peagle_jax.speculative.rules import all_allowed
from peagle_jax.speculative.sizes import Pool, Sizes
from peagle_jax.speculative.state import (
    Chunk,
    Copy,
    DecodeState,
    Models,
    Params,
    RoundOutput,
    Settings,
    Turn,
    empty_state,
)

_START_OVER = "start_over"

IDLE_ROUNDS = 3
"""Of each program, of which the fastest counts."""

Progress = Callable[[str, int, int], None]
"""Told of a program that compiles: what it is, its number, and how many there are."""


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A step by its name, its NumPy inputs and its static sizes: what another process needs to repeat it."""

    step: str
    inputs: Any = None
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)


def _of_pool(turn: Turn, pool: Pool) -> Turn:
    """A turn of the first pool, for the fewer slots of another."""
    active, drafting = (x[:, : pool.slots] for x in (turn.active, turn.drafting))
    return turn.replace(active=active, drafting=drafting)


class Programs:
    """Runs the steps on a state of its own, for R replicas in lockstep.

    Inputs are NumPy trees with a leading axis of R; outputs are device arrays with one.

    Args:
        models: what is decoded.
        params: the target's and the head's weights.
        settings: of some request, for their dtypes: leaves (1, ...).
        guided: also compile the two halves of a round, for grammars.
    """

    def __init__(
        self,
        models: Models,
        params: Params,
        sizes: Sizes,
        settings: Settings,
        placement: Placement,
        cache_dtype: jnp.dtype,
        guided: bool,
    ) -> None:
        self.models, self.sizes, self.replicas, self.guided = models, sizes, placement.replicas, guided
        self.compilations = 0
        self.pool = sizes.pools[0]
        self.params = params
        self._placement, self._settings = placement, settings
        self._dtype = cache_dtype
        self._cached: dict[tuple, Callable] = {}
        self._shardings = placement.state(jax.eval_shape(partial(self._idle_state, self.pool)))
        self.announce: Callable[[Dispatch], None] = lambda dispatch: None
        self._state: DecodeState | None = None
        self._pending = 0  # rows that may wait for the drafter in any running slot

    # -- programs ----------------------------------------------------------------------------

    def _program(self, step: Callable[..., Any], donate: bool = True, **static: Any) -> Callable[..., Any]:
        key = (step, *sorted(static.items()))
        if key not in self._cached:
            bound = partial(step, **static)

            def counted(*arguments: Any) -> Any:
                self.compilations += 1
                return bound(*arguments)

            self._cached[key] = self._placement.program(counted, self._shardings, donate)
        return self._cached[key]

    def _run(self, step: Callable[..., Any], inputs: Any, **static: Any) -> Any:
        sizes = {name: value for name, value in static.items() if name != "models"}
        self.announce(Dispatch(step.__name__, inputs, sizes))
        program = self._program(step, step is not steps.run_reshape, **static)
        # Donated: a failed call leaves none, and the next one starts anew.
        state, self._state = self.state, None
        self._state, output = program(self.params, state, self._placement.inputs(inputs))
        return output

    @property
    def state(self) -> DecodeState:
        """The state; idle slots of the current pool if there is none."""
        if self._state is None:
            self._state, self._pending = self._empty(self.pool), 0
        return self._state

    def _idle_state(self, pool: Pool) -> DecodeState:
        state = empty_state(
            self.models.target,
            self.models.drafter,
            slots=pool.slots,
            positions=pool.positions,
            backlog=self.sizes.backlog,
            settings=self._settings,
            dtype=self._dtype,
            stacked=self.params[0].is_stacked,
            rings=self.sizes.rings,
            int8_cache=self.models.int8_cache,
        )
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *x.shape)), state)

    def _empty(self, pool: Pool) -> DecodeState:
        key = (pool,)
        if key not in self._cached:
            create = partial(self._idle_state, pool)
            self._cached[key] = jax.jit(create, out_shardings=self._shardings)
        return self._cached[key]()

    def start_over(self, pool: Pool) -> None:
        """Idle slots in a pool, whatever there was."""
        self.announce(Dispatch(_START_OVER, None, dataclasses.asdict(pool)))
        self.pool, self._state = pool, None

    def repeat(self, dispatch: Dispatch) -> None:
        """Runs what another process announced."""
        if dispatch.step == _START_OVER:
            self.start_over(Pool(**dispatch.sizes))
            return
        step = getattr(steps, dispatch.step)
        models = {} if step in (steps.run_copy, steps.run_reshape) else {"models": self.models}
        self._run(step, dispatch.inputs, **models, **dispatch.sizes)

    # -- steps -------------------------------------------------------------------------------

    def prefill(self, chunk: Chunk) -> RoundOutput:
        """A chunk a replica; see ``round.run_prefill``."""
        self._pending = max(self._pending, 1)
        return self._run(steps.run_prefill, chunk, models=self.models)

    def rounds(self, turn: Turn, width: int, k: int) -> RoundOutput:
        """Rounds of K drafts for the first ``width`` slots of each replica."""
        count = self.sizes.rounds
        self._make_room(width, k, count)
        return self._run(steps.run_rounds, turn, models=self.models, width=width, k=k, rounds=count)

    def draft(self, turn: Turn, width: int, k: int) -> jax.Array:
        """The first half of a guided round: the window (R, width, K + 1) that wants masks."""
        self._make_room(width, k, 1)
        return self._run(steps.run_draft, turn, models=self.models, width=width, k=k)

    def verify(self, turn: Turn, window: np.ndarray, masks: np.ndarray) -> RoundOutput:
        """The second half: the window, perhaps with other drafts, and masks uint32 (..., ceil(V/32))."""
        inputs = (turn, window, masks)
        return self._run(steps.run_verify, inputs, models=self.models, width=window.shape[1])

    def copy(self, copy: Copy) -> None:
        """A slot copied to another of its replica."""
        self._run(steps.run_copy, copy)

    def reshape(self, pool: Pool, order: np.ndarray) -> None:
        """Changes the pool; slot i becomes the old slot ``order[r, i]``."""
        self._run(steps.run_reshape, order.astype(np.int32), positions=pool.positions)
        self.pool = pool

    def _make_room(self, width: int, k: int, rounds: int) -> None:
        """Lets the drafter catch up, if a round needs it: drafts start from at most K_max + 1 rows."""
        if self.models.drafter is None:
            return
        fits = (
            self._pending <= self.models.most_drafts + 1
            if k
            else self._pending + rounds <= self.sizes.backlog
        )
        if not fits:
            self.catch_up(width)
        self._pending = k + 1 if k else self._pending + rounds

    def catch_up(self, width: int) -> None:
        """The drafter reads what plain rounds left for it."""
        self._run(steps.run_catch_up, None, models=self.models, width=width)
        self._pending = 1

    # -- warm-up -----------------------------------------------------------------------------

    def warm_up(self, progress: Progress, idle: Callable[[int], Chunk], still: Turn) -> None:
        """Runs every program once on idle slots; ``progress`` is told before each.

        ``idle(T)`` is a chunk of T and no tokens. ``still`` is a turn of no slot, of the first pool.
        """
        pools = self.sizes.pools
        plan = [(pool, *step) for i, pool in enumerate(pools) for step in self._uses(i, idle, still)]
        for number, (pool, what, use) in enumerate(plan, start=1):
            if self.pool != pool:
                self.start_over(pool)
            where = f", {pool.slots} slots of {pool.positions}" if len(pools) > 1 else ""
            progress(what + where, number, len(plan))
            use()
        self.start_over(self.sizes.pools[0])
        jax.block_until_ready(self.state)

    def idle_rounds(self, still: Turn, clock: Callable[[], float]) -> dict[tuple[int, int, int], float]:
        """Seconds of ``clock`` that a round takes which serves nobody, by width, K and nodes verified, in the
        first pool that has the width. ``still`` is a turn of no slot, of the first pool."""
        found = {}
        for pool, width in self.idle_widths():
            quiet = _of_pool(still, pool)
            for k in self.sizes.drafts:
                every = self.models.spec.nodes_of(k)
                for i, nodes in enumerate(every):
                    # The others would take forever.
                    pace = np.broadcast_to(
                        np.float32([1 if j == i else np.inf for j in range(len(every))]),
                        (self.replicas, len(every)),
                    )
                    turn = quiet.replace(pace=pace) if len(every) > 1 else quiet
                    found[width, k, nodes] = self.fastest(partial(self.rounds, turn, width, k), clock)
        return found

    def idle_widths(self) -> Iterator[tuple[Pool, int]]:
        """Every compiled width, in empty slots of the first pool that has it; at the end the first pool."""
        for pool, width in self.sizes.every_width():
            if self.pool != pool:
                self.start_over(pool)
            yield pool, width
        self.start_over(self.sizes.pools[0])

    def fastest(self, run: Callable[[], Any], clock: Callable[[], float]) -> float:
        """Seconds of ``clock`` that the fastest of IDLE_ROUNDS runs of a round takes, awaited."""
        times = []
        for _ in range(IDLE_ROUNDS):
            self._pending = 0  # nobody waits for the drafter
            jax.block_until_ready(self.state)
            began = clock()
            jax.block_until_ready(run())
            times.append(clock() - began)
        return min(times)

    def _uses(
        self, i: int, idle: Callable[[int], Chunk], still: Turn
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The programs of pool ``i``: what each is, and a call that runs it."""
        pools = self.sizes.pools
        pool = pools[i]
        turn = _of_pool(still, pool)
        for chunk in self.sizes.chunks:
            yield f"prompt chunk of {chunk}", lambda n=chunk: self.prefill(idle(n))
        for width in self.sizes.widths_of(pool):
            whom = f"{width} sequence{'s' * (width > 1)}"
            guided = self.guided and width in self.sizes.guided_widths_of(pool)
            for k in self.sizes.drafts:
                yield f"round of {whom}, K = {k}", partial(self.rounds, turn, width, k)
                if guided and k == self.models.most_drafts:
                    shape = (self.replicas, width, k + 1)
                    masks = all_allowed(self.models.target.vocab_size, *shape)
                    window = np.zeros(shape, np.int32)
                    yield f"drafts of {whom} under grammars", partial(self.draft, turn, width, k)
                    yield (
                        f"verification of {whom} under grammars",
                        partial(self.verify, turn, window, masks),
                    )
            if self.models.drafter is not None and 0 in self.sizes.drafts:
                yield f"drafter of {whom}", partial(self.catch_up, width)
        if pool.slots > 1:
            zeros = np.zeros(self.replicas, np.int32)
            yield "copy of a slot", partial(self.copy, Copy(zeros, zeros, zeros))
        for other in (pools[j] for j in (i - 1, i + 1) if 0 <= j < len(pools)):
            order = np.zeros((self.replicas, other.slots), np.int32)
            yield f"change to {other.slots} slots of {other.positions}", partial(self.reshape, other, order)
