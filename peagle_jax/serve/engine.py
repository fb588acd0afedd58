"""The engine: one thread owns the decoder and serves requests in the order in which they came.

The thread knows nothing of HTTP. A request's deltas go to its ``deliver`` function, which is
called on the engine's thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from peagle_jax.serve.detokenize import Answer, Delta
from peagle_jax.serve.grammar import GrammarSpec
from peagle_jax.speculative.sampling import SamplingParams
from peagle_jax.speculative.statistics import AcceptanceStatistics

log = logging.getLogger(__name__)

State = Literal["new", "warming", "ready", "failed", "stopped"]


class EngineStoppedError(RuntimeError):
    """The engine takes no more requests; the message says why."""


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """A checked request: ``len(prompt_ids) + max_tokens`` fits the context, the prompt is not empty.

    ``stop_ids`` are token ids that end the answer (eos ids among them, if they are to).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    priority: int = 0
    structured: GrammarSpec | None = None
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    speculative: bool = True


@dataclasses.dataclass(frozen=True)
class EngineSnapshot:
    """What the engine does now (``kv_usage`` is in 0..1), and totals since its start."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    compilations: int = 0


@dataclasses.dataclass(frozen=True)
class FinishedRequest:
    """A request that has ended. Times are monotonic seconds; None is a moment that never came."""

    request_id: str
    arrival: float
    scheduled: float | None
    first_token: float | None
    finished: float
    prompt_tokens: int
    generation_tokens: int
    finish_reason: str
    accepted_per_pos: tuple[int, ...] = ()


class Ticket:
    """A submitted request. ``cancel`` drops it within one round, wherever it is; it may be repeated."""

    def __init__(self, request: EngineRequest, deliver: Callable[[Delta], None]) -> None:
        self.request = request
        self.arrival = time.monotonic()
        self._deliver = deliver
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    def deliver(self, delta: Delta) -> None:
        """Hands over a delta; a receiver that is gone cancels the request."""
        try:
            self._deliver(delta)
        except Exception:  # the receiver's fault must not end the engine
            self.cancel()


class Engine:
    """Runs a decoder in a thread.

    Args:
        decoder: what ``speculative.decoder.Decoder`` promises (batch 1). Only the engine's thread calls it.
        tokenizer: used by the engine's thread only; fast tokenizers are not safe to share.
        num_speculative_tokens: K, for the acceptance statistics.
        on_warm: called on the engine's thread after warm-up, with the seconds that it took or the
            exception that ended it.
        on_finish: called on the engine's thread with each request that has ended.
    """

    def __init__(
        self,
        decoder: Any,
        tokenizer: Any,
        num_speculative_tokens: int = 0,
        on_warm: Callable[[float | Exception], None] | None = None,
        on_finish: Callable[[FinishedRequest], None] | None = None,
    ) -> None:
        self._on_finish = on_finish
        self._totals = EngineSnapshot(accepted_per_pos=(0,) * num_speculative_tokens)
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._on_warm = on_warm
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._abort = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peagle-engine", daemon=True)
        self._num_speculative_tokens = num_speculative_tokens
        self.state: State = "new"
        self.failure: str | None = None

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
        return dataclasses.replace(self._totals, waiting=self._queue.qsize())

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

    def _run(self) -> None:
        began = time.perf_counter()
        outcome: float | Exception
        try:
            self._decoder.warm_up()
            outcome = time.perf_counter() - began
        except Exception as error:
            log.exception("warm-up failed")
            outcome = error
        with self._lock:
            if isinstance(outcome, Exception):
                self.failure, self.state = _one_line(outcome), "failed"
            elif self.state == "warming":
                self.state = "ready"
        if self._on_warm is not None:
            self._on_warm(outcome)
        while True:
            if self.state == "failed" and self._queue.empty():
                return
            ticket = self._queue.get()
            if ticket is None:
                return
            self._serve(ticket)

    def _serve(self, ticket: Ticket) -> None:
        """Decodes one request to its end. Nothing that happens to it reaches the next one."""
        if self.state == "failed":
            ticket.deliver(Delta(finish_reason="error", error=self.failure))
            return
        try:
            self._decode(ticket)
        except Exception as error:
            log.exception("request %s failed", ticket.request.request_id)
            ticket.deliver(Delta(finish_reason="error", error=_one_line(error)))

    def _decode(self, ticket: Ticket) -> None:
        request = ticket.request
        if ticket.cancelled or self._abort.is_set():
            ticket.deliver(Delta(finish_reason="abort"))
            return
        began = time.perf_counter()
        scheduled, first = time.monotonic(), None
        self._count(running=1, prompt_tokens=len(request.prompt_ids))
        per_position = [0] * self._num_speculative_tokens
        answer = Answer(self._tokenizer, request.stop)
        acceptance = AcceptanceStatistics(self._num_speculative_tokens)
        count = 0
        rounds = self._decoder.generate(
            list(request.prompt_ids), request.sampling, request.max_tokens, set(request.stop_ids)
        )
        with contextlib.closing(rounds):
            for result in rounds:
                delta = answer.add(result.tokens, result.finish_reason)
                delta = dataclasses.replace(
                    delta,
                    accepted=result.accepted,
                    drafted=result.drafted,
                    logprobs=tuple((result.logprobs or ())[: len(delta.token_ids)]),
                    prompt_logprobs=result.prompt_logprobs and (None, *result.prompt_logprobs),
                )
                first = first or time.monotonic()
                count += len(delta.token_ids)
                for position in range(result.accepted):
                    per_position[position] += 1
                self._count(
                    generation_tokens=len(delta.token_ids),
                    num_drafts=int(result.drafted > 0),
                    num_draft_tokens=result.drafted,
                    num_accepted_tokens=result.accepted,
                )
                acceptance.add(result.accepted, result.drafted)
                if delta.finish_reason is None and (ticket.cancelled or self._abort.is_set()):
                    delta = dataclasses.replace(delta, finish_reason="abort")
                ticket.deliver(delta)
                if delta.finish_reason is not None:
                    break
            else:
                raise RuntimeError("the decoder ended without a finish reason")
        seconds = time.perf_counter() - began
        together = zip(self._totals.accepted_per_pos, per_position, strict=True)
        self._totals = dataclasses.replace(self._totals, accepted_per_pos=tuple(map(sum, together)))
        self._count(running=-1)
        if self._on_finish is not None:
            self._on_finish(
                FinishedRequest(
                    request.request_id,
                    ticket.arrival,
                    scheduled,
                    first,
                    time.monotonic(),
                    len(request.prompt_ids),
                    count,
                    delta.finish_reason or "abort",
                    tuple(per_position),
                )
            )
        log.info(
            "%s: prompt %d tokens, answer %d tokens in %.2f s (%.1f tokens/s), acceptance length %.2f, "
            "finished: %s",
            request.request_id,
            len(request.prompt_ids),
            count,
            seconds,
            count / max(seconds, 1e-9),
            acceptance.mean_acceptance_length,
            delta.finish_reason,
        )

    def _count(self, **more: int) -> None:
        """Adds to the totals; only the engine's thread does."""
        sums = {name: getattr(self._totals, name) + value for name, value in more.items()}
        self._totals = dataclasses.replace(self._totals, **sums)


def _one_line(error: Exception) -> str:
    """An exception's first line, for a client."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
