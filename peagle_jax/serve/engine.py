"""The engine: one thread that owns the decoder and serves many requests at once.

Each turn it asks the scheduler for a dispatch, hands it to the device, reads the results of an earlier one
and delivers them. It knows nothing of HTTP: a request's deltas go to its ``deliver`` function, which is
called on the engine's thread.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from peagle_jax.serve.detokenize import Delta
from peagle_jax.serve.draft_length import DraftLength
from peagle_jax.serve.job import Job, Plan
from peagle_jax.serve.live import EngineRequest, EngineSnapshot, FinishedRequest, Live, Sent, Ticket, one_line
from peagle_jax.serve.scheduler import Scheduler
from peagle_jax.speculative.programs import Progress
from peagle_jax.speculative.request import PromptChunk, RoundResult

log = logging.getLogger(__name__)

State = Literal["new", "warming", "ready", "failed", "stopped"]


class EngineStoppedError(RuntimeError):
    """The engine takes no more requests; the message says why."""


class Engine:
    """Runs a decoder in a thread.

    Args:
        decoder: what ``speculative.decoder.Decoder`` promises. Only the engine's thread calls it.
        tokenizer: used by the engine's thread only; fast tokenizers are not safe to share.
        num_speculative_tokens: K, the most drafts of a round.
        on_warm: called on the engine's thread after warm-up, with the seconds that it took or the
            exception that ended it.
        on_finish: called on the engine's thread with each request that has ended.
        on_progress: called on the engine's thread before each program is compiled (``programs.Progress``).
        grammars: what ``serve.grammar.GrammarCompiler`` promises, for requests with ``structured``.
        enable_prefix_caching: reuse what slots hold of a new prompt's beginning.
        max_num_batched_tokens: see ``Scheduler``.
        draft_length: chooses each round's K among those compiled (default: from measured times).
    """

    def __init__(
        self,
        decoder: Any,
        tokenizer: Any,
        num_speculative_tokens: int = 0,
        on_warm: Callable[[float | Exception], None] | None = None,
        on_finish: Callable[[FinishedRequest], None] | None = None,
        on_progress: Progress | None = None,
        *,
        grammars: Any = None,
        enable_prefix_caching: bool = True,
        max_num_batched_tokens: int | None = None,
        draft_length: DraftLength | None = None,
    ) -> None:
        self._decoder, self._tokenizer, self._grammars = decoder, tokenizer, grammars
        self._on_warm, self._on_finish, self._on_progress = on_warm, on_finish, on_progress
        self._queue: queue.Queue[Ticket | None] = queue.Queue()
        self._lock = threading.Lock()
        self._abort = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peagle-engine", daemon=True)
        self._num_speculative_tokens = num_speculative_tokens
        sizes = decoder.sizes
        self._scheduler = Scheduler(
            sizes,
            decoder.replicas,
            scratch=decoder.scratch,
            ahead=(sizes.rounds * (max(sizes.drafts) + 1) + 1) * (decoder.lookahead + 1),
            window=max(sizes.drafts[-1], decoder.spec.most_nodes) + 1,
            drafter=decoder.drafter is not None,
            max_batched_tokens=max_num_batched_tokens,
            prefix_caching=enable_prefix_caching,
        )
        self._draft_length = draft_length or DraftLength(sizes.drafts, nodes_of=decoder.spec.nodes_of)
        self._live: dict[Job, Live] = {}
        self._sent: collections.deque[Sent] = collections.deque()
        self._last_read = 0.0
        self._totals = EngineSnapshot(accepted_per_pos=(0,) * num_speculative_tokens)
        self.state: State = "new"
        self.failure: str | None = None

    # -- other threads -----------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, which warms up first. Requests may be submitted at once; they wait."""
        self.state = "warming"
        self._thread.start()

    def submit(self, request: EngineRequest, deliver: Callable[[Delta], None]) -> Ticket:
        """Queues a request. Its last delta has a finish reason, whatever happens.

        Raises:
            EngineStoppedError: the engine shuts down, or its warm-up failed.
        """
        ticket = Ticket(request, deliver)
        with self._lock:
            self.check()
            self._queue.put(ticket)
        return ticket

    def check(self) -> None:
        """Raises EngineStoppedError if a request could not be submitted now."""
        if self.state == "failed":
            raise EngineStoppedError(f"the engine failed to start: {self.failure}")
        if self.state == "stopped":
            raise EngineStoppedError("the server is shutting down")

    def snapshot(self) -> EngineSnapshot:
        """What the engine does now, and its totals."""
        totals = self._totals
        with self._queue.mutex:
            queued = sum(ticket is not None and not ticket.cancelled for ticket in self._queue.queue)
        return dataclasses.replace(totals, waiting=totals.waiting + queued)

    def stop(self, finish_within: float = 0.0, abort_within: float = 5.0) -> bool:
        """Refuses new requests, finishes those submitted or aborts them, and ends the thread.

        Returns False if the thread still runs (compilation cannot be interrupted).
        """
        with self._lock:
            if self.state != "failed":
                self.state = "stopped"
            self._queue.put(None)
        if not self._thread.is_alive():
            return True
        self._thread.join(finish_within)
        self._abort.set()
        self._abort_queued()
        self._thread.join(abort_within)
        return not self._thread.is_alive()

    def _abort_queued(self) -> None:
        """Ends the requests that wait: the thread may be in a compilation, and they would never hear."""
        with contextlib.suppress(queue.Empty):
            while True:
                ticket = self._queue.get_nowait()
                if ticket is not None:
                    ticket.deliver(Delta(finish_reason="abort"))
        self._queue.put(None)

    # -- the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        began = time.perf_counter()
        outcome: float | Exception
        try:
            self._decoder.warm_up(self._on_progress or (lambda what, number, count: None))
            if self._draft_length.needs_times:
                self._draft_length.timed_idle(self._decoder.idle_rounds(time.perf_counter))
            self._decoder.start_over(self._scheduler.pool)
            outcome = time.perf_counter() - began
        except Exception as error:
            log.exception("warm-up failed")
            outcome = error
        with self._lock:
            if isinstance(outcome, Exception):
                self.failure, self.state = one_line(outcome), "failed"
            elif self.state == "warming":
                self.state = "ready"
        if self._on_warm is not None:
            self._on_warm(outcome)
        stopping = False
        while not (self.state == "failed" and self._queue.empty()):
            stopping |= self._take_new(wait=not (self._live or stopping))
            self._drop()
            if self._live:
                self._turn()
            elif stopping:
                return

    def _take_new(self, wait: bool) -> bool:
        """Takes what was submitted, waiting for something if there is nothing to do. True: no more comes."""
        with contextlib.suppress(queue.Empty):
            while True:
                ticket = self._queue.get(block=wait)
                if ticket is None:
                    return True
                self._begin(ticket)
                wait = False
        return False

    def _begin(self, ticket: Ticket) -> None:
        if self.state == "failed":
            ticket.deliver(Delta(finish_reason="error", error=self.failure))
            return
        try:
            structured, matcher = ticket.request.structured, None
            if structured is not None:
                if self._grammars is None:
                    raise ValueError("this engine has no grammars")
                matcher = self._grammars.compile(structured)
            live = Live(ticket, self._tokenizer, self._num_speculative_tokens, matcher)
            self._decoder.check(live.decoder_request)
        except Exception as error:  # a fault of the request, which was to be checked before
            log.exception("request %s cannot be served", ticket.request.request_id)
            ticket.deliver(Delta(finish_reason="error", error=one_line(error)))
            return
        self._live[live.job] = live
        self._scheduler.add(live.job)
        self._count(prompt_tokens=len(live.request.prompt_ids))
        self._look()

    def _drop(self) -> None:
        """Ends what was cancelled, what failed by itself, and at an abort all."""
        for live in list(self._live.values()):
            if live.problem is not None:
                self._end(live, Delta(finish_reason="error", error=one_line(live.problem)))
            elif live.ticket.cancelled or self._abort.is_set():
                self._end(live, Delta(finish_reason="abort"))

    def _turn(self) -> None:
        """One dispatch, and the results of those before it that are due."""
        guided = any(live.matcher is not None for live in self._live.values())
        try:
            plan = self._scheduler.plan()
            sent = None if plan.empty else self._dispatch(plan)
            if sent is not None:
                self._sent.append(sent)
            # A grammar's next masks need the tokens of the round before.
            ahead = self._decoder.lookahead if sent is not None and not guided else 0
            while len(self._sent) > ahead:
                self._read(self._sent.popleft())
        except Exception as error:
            log.exception("a dispatch failed")
            self._sent.clear()
            self._decoder.start_over(self._decoder.sizes.pools[0])
            for job in self._scheduler.fail():
                self._end(self._live[job], Delta(finish_reason="error", error=one_line(error)))
        self._look()

    # -- dispatches --------------------------------------------------------------------------

    def _dispatch(self, plan: Plan) -> Sent:
        decoder, flights = self._decoder, []
        began = time.perf_counter()
        if plan.pool is not None:
            if plan.order:
                decoder.reshape(plan.pool, plan.order)
            else:
                decoder.start_over(plan.pool)
        for copy in plan.copies:
            decoder.copy(*copy)
        for parts in plan.chunks:
            chunks, jobs = [], {}
            for part in parts:
                live = self._live[part.job]
                live.scheduled = live.scheduled or time.monotonic()
                chunk = PromptChunk(part.slot, live.decoder_request, part.job.tokens, part.start, part.count)
                if live.matcher is not None and chunk.final:
                    window = self._window(live, [])
                    chunk = dataclasses.replace(chunk, mask=None if window is None else window[1][0])
                chunks.append(chunk)
                jobs[part.slot] = part.job, part.job.epoch
            flights.append((decoder.prefill(chunks), jobs, None))
        begun = {part.job for parts in plan.chunks for part in parts}
        # The first token of a grammar's answer must be known before the masks of what follows it.
        active = {
            slot: self._live[job]
            for slot, job in plan.running.items()
            if self._live[job].matcher is None or job not in begun
        }
        timed = None
        if active:
            drafting = [slot for slot, live in active.items() if live.request.speculative]
            width = decoder.width_for(active)
            k = self._draft_length.choose(width, len(active)) if drafting else min(decoder.sizes.drafts)
            if any(live.matcher is not None for live in active.values()):
                k = decoder.sizes.drafts[-1]  # the one that is compiled; a grammar's own text is drafted too
                flight = decoder.guided_round(
                    active, k, lambda slot, drafts: self._window(active[slot], drafts), drafting
                )
            else:
                flight = decoder.round(active, k, drafting, self._draft_length.pace(width, k))
                if not (plan.chunks or plan.copies or plan.pool):
                    timed = width, k
            flights.append((flight, {slot: (x.job, x.job.epoch) for slot, x in active.items()}, k))
        return Sent(flights, began, timed)

    def _window(self, live: Live, drafts: Sequence[int]) -> tuple[Sequence[int], np.ndarray] | None:
        """What the request's grammar makes of a window; None (all is allowed) if it has none or has failed,
        which ends it."""
        if live.matcher is None:
            return None
        try:
            return live.matcher.window(drafts)
        except Exception as error:
            log.exception("the grammar of request %s failed", live.request.request_id)
            live.problem = error
            return None

    # -- results -----------------------------------------------------------------------------

    def _read(self, sent: Sent) -> None:
        nodes = 0
        for flight, jobs, k in sent.flights:
            for results in self._decoder.results(flight):
                verified = max((result.drafted for result in results.values()), default=0)
                nodes = max(nodes, verified)
                for slot, result in results.items():
                    if k and verified:  # the round is paid for by those that did not draft, too
                        self._draft_length.accepted(result.accepted, k)
                    job, epoch = jobs[slot]
                    # Results of a request that has left its slot since are stale.
                    live = self._live.get(job)
                    if live is not None and job.epoch == epoch and live.problem is None:
                        self._take(live, result, k)
        now = time.perf_counter()
        if sent.timed is not None and (nodes or not sent.timed[1]):
            self._draft_length.record(*sent.timed, nodes, now - max(sent.began, self._last_read))
        self._last_read = now

    def _take(self, live: Live, result: RoundResult, k: int | None) -> None:
        """One request's tokens of a round. Nothing that happens to it reaches another."""
        self._scheduler.commit(live.job, result.tokens, k)
        try:
            delta = live.take(result)
        except Exception as error:
            log.exception("request %s failed", live.request.request_id)
            live.problem = error
            return
        if delta is None:
            return
        if result.drafted:
            per_position = list(self._totals.accepted_per_pos)
            for position in range(result.accepted):
                per_position[position] += 1
            self._totals = dataclasses.replace(self._totals, accepted_per_pos=tuple(per_position))
        self._count(
            generation_tokens=len(delta.token_ids),
            num_drafts=int(result.drafted > 0),
            num_draft_tokens=result.drafted,
            num_accepted_tokens=result.accepted,
        )
        if delta.finish_reason is None:
            live.ticket.deliver(delta)
        else:
            self._end(live, delta)

    def _end(self, live: Live, delta: Delta) -> None:
        """The request's last delta; its slot is free."""
        self._scheduler.end(live.job)
        del self._live[live.job]
        self._look()
        finished = live.finished(delta.finish_reason or "abort")
        if self._on_finish is not None:
            try:
                self._on_finish(finished)
            except Exception:
                log.exception("the observer of finished requests failed")
        live.ticket.deliver(delta)
        seconds = finished.finished - (finished.scheduled or finished.finished)
        log.info(
            "%s: prompt %d tokens, answer %d tokens in %.2f s (%.1f tokens/s), %s, finished: %s",
            finished.request_id,
            finished.prompt_tokens,
            finished.generation_tokens,
            seconds,
            finished.generation_tokens / max(seconds, 1e-9),
            live.acceptance.line(),
            finished.finish_reason,
        )

    def _count(self, **more: int) -> None:
        """Adds to the totals; only the engine's thread does."""
        sums = {name: getattr(self._totals, name) + value for name, value in more.items()}
        self._totals = dataclasses.replace(self._totals, **sums)

    def _look(self) -> None:
        """Brings what the totals tell of the scheduler up to date. It sums over all that run: not for every
        result of a round."""
        scheduler = self._scheduler
        self._totals = dataclasses.replace(
            self._totals,
            running=len(scheduler.jobs),
            waiting=len(scheduler.waiting),
            kv_usage=scheduler.usage,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            compilations=self._decoder.compilations,
        )
