"""Drives the compiled steps from the host: prompts in, each round's tokens out."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import numpy as np

from peagle_jax.config import ConfigError, DrafterConfig, SpecConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.models.stack import TargetParams
from peagle_jax.speculative.cache import storage_dtype
from peagle_jax.speculative.pair import check_pair
from peagle_jax.speculative.placement import Placement
from peagle_jax.speculative.programs import Dispatch, Programs, Progress
from peagle_jax.speculative.request import (
    Flight,
    PromptChunk,
    Request,
    RoundResult,
    check_request,
    kept_by_grammar,
    settings_of,
)
from peagle_jax.speculative.results import local_rows, read
from peagle_jax.speculative.rules import all_allowed
from peagle_jax.speculative.sampling import SamplingParams
from peagle_jax.speculative.sizes import (
    PREFILL_CHUNK,
    SMALLEST_CACHE,
    Pool,
    Sizes,
    backlog_of,
    chunks_of,
    pools_of,
    rings_of,
    scratch_of,
    widths_of,
)
from peagle_jax.speculative.state import Chunk, Copy, Models, RoundOutput, Turn


class Decoder:
    """A pool of slots on each of R replicas, in which requests are decoded side by side.

    ``calibration``, float32 (K, 2), may be set at any time: see ``tree.calibrated``.

    Slots are numbered 0..R*batch-1; slot s is row s // R of replica s % R, so that the first slots
    are spread over the replicas. A request joins by its prompt's chunks (``prefill``), takes part in rounds
    while it is named ``active``, and leaves by not being named. ``generate`` and ``run`` do all of that
    for requests that come together.

    Args:
        batch: slots of a replica.
        placement: the devices, and how many of them are a replica (default: the first, alone).
        draft_lengths: the K that rounds may have (default: that of ``spec`` alone). Fewer than ``spec``'s
            are a chain.
        widths: how many of a replica's first slots a round may serve (default: powers of two).
        kv_tokens: positions that fit the memory, of all slots of a replica together (default: as many as
            needed). Where they do not suffice for ``batch`` whole contexts, the pool has more slots for
            short sequences (from ``smallest_cache`` tokens on) and fewer for long ones.
        guided: also compile what grammars need (``guided_round``), with the largest K.
        synthetic_rates: see ``state.Models``.
        int8_cache: keeps the target's keys and values in int8 (the head's have the target's dtype).

    Raises:
        ConfigError: the head does not fit the target, K or the tree is above what it can draft, one
            context needs more than ``kv_tokens``, or a dimension cannot be split over a replica's devices.
    """

    def __init__(
        self,
        target: TargetConfig,
        params: TargetParams,
        drafter: DrafterConfig | None = None,
        drafter_params: DrafterParams | None = None,
        spec: SpecConfig = SpecConfig(),
        *,
        max_model_len: int,
        batch: int = 1,
        prefill_chunk: int = PREFILL_CHUNK,
        placement: Placement | None = None,
        lookahead: int | None = None,
        draft_lengths: Collection[int] | None = None,
        widths: Sequence[int] | None = None,
        kv_tokens: int | None = None,
        smallest_cache: int = SMALLEST_CACHE,
        guided: bool = False,
        synthetic_rates: tuple[float, ...] | None = None,
        int8_cache: bool = False,
    ) -> None:
        if spec.num_speculative_tokens == 0:
            drafter = drafter_params = None
        elif drafter is None or drafter_params is None:
            raise ConfigError("num_speculative_tokens is above 0, but no head was given")
        else:
            spec = dataclasses.replace(spec, method=drafter.method)
            check_pair(target, drafter, spec)
        if not 0 < max_model_len <= target.max_position:
            raise ConfigError(
                f"max_model_len is {max_model_len}; this target takes 1 to {target.max_position}"
            )
        most = spec.num_speculative_tokens
        if most >= max_model_len:
            raise ConfigError(
                f"num_speculative_tokens is {most}; expected less than the context of {max_model_len} tokens"
            )
        self.placement = placement or Placement.on(jax.devices()[:1])
        (target, drafter), weights = self.placement.split((target, drafter), (params, drafter_params))
        self.target, self.drafter, self.spec = target, drafter, spec
        self.max_model_len, self.batch = max_model_len, batch
        self._all_allowed = all_allowed(target.vocab_size)
        self.calibration = np.tile(np.float32([1, 0]), (most, 1))
        platform = self.placement.mesh.devices.flat[0].platform
        # A CPU computes what it dispatches: reading late only adds a wasted round there.
        self.lookahead = (0 if platform == "cpu" else 1) if lookahead is None else lookahead
        chunk = min(prefill_chunk, max_model_len)
        self._programs = Programs(
            Models(target, drafter, spec, synthetic_rates if most else None, int8_cache),
            self.placement.weights(weights),
            Sizes(
                pools=pools_of(batch, max_model_len, scratch_of(chunk, spec), kv_tokens, smallest_cache),
                widths=tuple(widths or widths_of(batch)),
                drafts=tuple(sorted({most, *(draft_lengths or ())})),
                chunks=chunks_of(chunk),
                rounds=spec.rounds,
                backlog=backlog_of(spec),
                windows=target.windows[: target.cycle],
                rings=rings_of(target, chunk, spec),
            ),
            settings_of(Request([0]), max_model_len, target.vocab_size),
            self.placement,
            storage_dtype(params.embed.dtype, platform),
            guided,
        )

    # -- what there is -----------------------------------------------------------------------

    @property
    def compilations(self) -> int:
        """Programs compiled so far; none after ``warm_up``."""
        return self._programs.compilations

    @property
    def sizes(self) -> Sizes:
        return self._programs.sizes

    @property
    def pool(self) -> Pool:
        """The dimensions of the slots at the moment."""
        return self._programs.pool

    @property
    def replicas(self) -> int:
        return self.placement.replicas

    @property
    def scratch(self) -> int:
        """Positions of a slot that no sequence may count on."""
        return scratch_of(self.sizes.chunks[-1], self.spec)

    def check(self, request: Request) -> None:
        """Raises ValueError, in one line, for a request that cannot be decoded."""
        check_request(request, self.target.vocab_size, self.max_model_len)

    def replace_head(self, params: DrafterParams) -> None:
        """Drafts with other weights of the same head from now on; compiled programs stay in use.

        Raises:
            ValueError: there is no head, or the new one has other arrays, shapes or dtypes.
        """
        target, head = self._programs.params
        kinds = [jax.tree.map(lambda w: (w.shape, w.dtype), tree) for tree in (head, params)]
        if head is None or kinds[0] != kinds[1]:
            raise ValueError(
                "the new weights are not of this decoder's head: arrays, shapes or dtypes differ"
            )
        self._programs.params = self.placement.weights((target, params))

    def warm_up(self, progress: Progress = lambda what, number, count: None) -> None:
        """Compiles every program by running it once on idle slots; ``progress`` is told before each.

        Nothing compiles after it.
        """
        self._programs.warm_up(progress, lambda width: self._chunk({}, width), self._turn((), None))

    def idle_rounds(self, clock: Callable[[], float]) -> dict[tuple[int, int, int], float]:
        """Seconds of ``clock`` that a round takes which serves nobody, by (width, K, nodes verified). Slots
        are emptied."""
        self.start_over(self.sizes.pools[0])
        return self._programs.idle_rounds(self._turn((), None), clock)

    # -- dispatches --------------------------------------------------------------------------

    def _chunk(self, chunks: Mapping[int, PromptChunk], width: int) -> Chunk:
        """A chunk of ``width`` for every replica; one of no tokens where ``chunks`` has none."""
        parts = []
        for r in range(self.replicas):
            chunk = chunks.get(r)
            tokens = np.zeros((2, width), np.int32)
            if chunk is None:  # writes where only scratch lies
                numbers, final, request = (0, self.pool.positions - width, 0), False, Request([0])
                answer: Sequence[int] = ()
            else:
                end = chunk.start + chunk.count
                tokens[0, : chunk.count] = chunk.tokens[chunk.start : end]
                following = chunk.tokens[chunk.start + 1 : end + 1]
                tokens[1, : len(following)] = following
                numbers, final = (self._row(chunk.slot), chunk.start, chunk.count), chunk.final
                request, answer = chunk.request, chunk.tokens[len(chunk.request.prompt) :]
            slot, start, count = (np.int32(n) for n in numbers)
            settings = settings_of(request, self.max_model_len, self.target.vocab_size, answer)
            mask = self._all_allowed if chunk is None or chunk.mask is None else chunk.mask
            parts.append(Chunk(slot, start, tokens[0], tokens[1], count, np.bool_(final), mask, settings))
        return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)

    def _turn(
        self,
        active: Collection[int],
        drafting: Collection[int] | None,
        pace: Mapping[int, float] | None = None,
    ) -> Turn:
        flags = np.zeros((2, self.replicas, self.pool.slots), bool)
        for flag, slots in zip(flags, (active, active if drafting is None else drafting), strict=True):
            for slot in slots:
                flag[slot % self.replicas, self._row(slot)] = True
        widths = self.spec.nodes_of(self.spec.num_speculative_tokens)
        times = np.float32([(pace or {}).get(nodes, 1.0) for nodes in widths])
        shared = (np.broadcast_to(x, (self.replicas, *x.shape)) for x in (times, self.calibration))
        return Turn(*flags, *shared)

    def _row(self, slot: int) -> int:
        return slot // self.replicas

    def _flight(self, output: RoundOutput, width: int) -> Flight:
        n = self.replicas
        return Flight(output, tuple(range(r, width * n, n) for r in range(n)))

    def width_for(self, active: Collection[int], guided: bool = False) -> int:
        """The compiled width of a round of these slots."""
        return self.sizes.width_for(self._row(max(active)) + 1, self.pool, guided)

    def prefill(self, chunks: Sequence[PromptChunk]) -> Flight:
        """Prefills a chunk of one request on each of (some) replicas. A final one gives a token."""
        by_replica = {chunk.slot % self.replicas: chunk for chunk in chunks}
        assert len(by_replica) == len(chunks), "one chunk a replica"
        width = self.sizes.chunk_for(max(chunk.count for chunk in chunks))
        output = self._programs.prefill(self._chunk(by_replica, width))
        slots = tuple([by_replica[r].slot] if r in by_replica else [] for r in range(self.replicas))
        return Flight(output, slots, tuple(chunks))

    def round(
        self,
        active: Collection[int],
        k: int,
        drafting: Collection[int] | None = None,
        pace: Mapping[int, float] | None = None,
    ) -> Flight:
        """Rounds of K drafts for the ``active`` slots; those not ``drafting`` (default: all) go without.

        ``pace`` are seconds that a round takes which verifies so many nodes, of those that rounds may
        (``SpecConfig.nodes_of``): the most tokens a second are sought (default: the most tokens).
        """
        width = self.width_for(active)
        return self._flight(self._programs.rounds(self._turn(active, drafting, pace), width, k), width)

    def guided_round(
        self,
        active: Collection[int],
        k: int,
        window_for: Callable[[int, list[int]], tuple[Sequence[int], np.ndarray] | None],
        drafting: Collection[int] | None = None,
    ) -> Flight:
        """One round with the host in its middle. ``window_for(slot, drafts)`` is what a grammar makes of them
        (``TokenMatcher.window``): drafts, and masks uint32 (K + 1, ceil(V/32)); None allows all."""
        width, turn = self.width_for(active, guided=True), self._turn(active, drafting)
        tokens = local_rows(self._programs.draft(turn, width, k))
        masks = np.tile(self._all_allowed, (*tokens.shape, 1))
        for slot in active:
            r, row = slot % self.replicas, self._row(slot)
            found = window_for(slot, tokens[r, row, 1:].tolist())
            if found is not None:
                tokens[r, row, 1:], masks[r, row] = found
        return self._flight(self._programs.verify(turn, tokens, masks), width)

    def draft(self, active: Collection[int], k: int) -> jax.Array:
        """The drafts of a round of K alone, of which nothing is kept: to see how long they take."""
        return self._programs.draft(self._turn(active, None), self.width_for(active, guided=True), k)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies a slot to another of its replica: the first ``count`` positions, and all else.

        With a running sequence's length as ``count`` it moves; with less its beginning is there.
        """
        assert source % self.replicas == target % self.replicas, "a slot moves within its replica"
        rows = np.zeros((3, self.replicas), np.int32)
        rows[:, source % self.replicas] = self._row(source), self._row(target), count
        self._programs.copy(Copy(*rows))

    def reshape(self, pool: Pool, order: Sequence[int]) -> None:
        """A neighbour of this pool in ``sizes.pools``. ``order[i]`` is the slot that becomes slot i."""
        rows = np.array([self._row(slot) for slot in order], np.int32)
        self._programs.reshape(pool, rows.reshape(pool.slots, self.replicas).T)

    def start_over(self, pool: Pool) -> None:
        """Empty slots of these dimensions."""
        self._programs.start_over(pool)

    def announce_to(self, announce: Callable[[Dispatch], None]) -> None:
        """Tells ``announce`` of every dispatch before it runs, so that other processes ``repeat`` it."""
        self._programs.announce = announce

    def repeat(self, dispatch: Dispatch) -> None:
        """Runs what another process announced."""
        self._programs.repeat(dispatch)

    def results(self, flight: Flight) -> list[dict[int, RoundResult]]:
        """Waits for a dispatch; see ``results.read``."""
        return read(flight)

    # -- requests that come together ---------------------------------------------------------

    def run(self, requests: Sequence[Request]) -> Iterator[list[RoundResult | None]]:
        """Decodes at most ``batch`` requests (of each replica) together; yields each round's results, in
        their order. A request that got nothing in a round, or has ended, has None. Closing the
        iterator stops the work.

        Raises:
            ValueError: a request cannot be decoded (see ``check``), or there are too many.
        """
        for request in requests:
            self.check(request)
        longest = max((len(r.prompt) + r.max_tokens for r in requests), default=1)
        needed = min(longest, self.max_model_len) + self.scratch
        pool = next(p for p in self.sizes.pools if p.positions >= needed)
        if not 0 < len(requests) <= pool.slots * self.replicas:
            raise ValueError(
                f"this decoder takes 1 to {pool.slots * self.replicas} such requests at once, "
                f"found {len(requests)}"
            )
        return self._decode(list(requests), pool)

    def _decode(self, requests: list[Request], pool: Pool) -> Iterator[list[RoundResult | None]]:
        if pool != self.pool:
            self.start_over(pool)
        longest = self.sizes.chunks[-1]
        flights: collections.deque[Flight] = collections.deque()
        running = set(range(len(requests)))
        matchers = {i: r.matcher for i, r in enumerate(requests) if r.matcher is not None}
        ahead = 0 if matchers else self.lookahead  # a grammar's masks need the tokens of the round before

        def window_for(slot: int, drafts: list[int]) -> tuple[Sequence[int], np.ndarray] | None:
            return matchers[slot].window(drafts) if slot in matchers else None

        for first in range(0, len(requests), self.replicas):
            group = range(first, min(first + self.replicas, len(requests)))
            for start in range(0, max(len(requests[i].prompt) for i in group), longest):
                chunks = [
                    PromptChunk(i, r, r.prompt, start, min(longest, len(r.prompt) - start))
                    for i, r in ((i, requests[i]) for i in group)
                    if start < len(r.prompt)
                ]
                chunks = [
                    dataclasses.replace(c, mask=matchers[c.slot].window([])[1][0])
                    if c.final and c.slot in matchers
                    else c
                    for c in chunks
                ]
                flights.append(self.prefill(chunks))
        while running:
            while len(flights) > ahead:
                for results in self.results(flights.popleft()):
                    for i in matchers.keys() & results.keys():
                        if i in running:
                            results[i], _ = kept_by_grammar(results[i], matchers[i])
                    if results:
                        running -= {i for i, result in results.items() if result.finish_reason}
                        yield [results.get(i) for i in range(len(requests))]
            if running and matchers:
                flights.append(self.guided_round(running, self.spec.num_speculative_tokens, window_for))
            elif running:
                flights.append(self.round(running, self.spec.num_speculative_tokens))

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams = SamplingParams(),
        max_tokens: int = 128,
        stop_ids: frozenset[int] | set[int] = frozenset(),
    ) -> Iterator[RoundResult]:
        """Decodes one request; yields each round's new tokens."""
        request = Request(prompt_ids, sampling, max_tokens, frozenset(stop_ids))
        for (result,) in self.run([request]):
            if result is not None:
                yield result
