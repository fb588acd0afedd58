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


class Ticket:
    """A submitted request. ``cancel`` drops it within one round, wherever it is; it may be repeated."""

    def __init__(self, request: EngineRequest, deliver: Callable[[Delta], None]) -> None:
        self.request = request
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
    """

    def __init__(
        self,
        decoder: Any,
        tokenizer: Any,
        num_speculative_tokens: int = 0,
        on_warm: Callable[[float | Exception], None] | None = None,
    ) -> None:
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
        answer = Answer(self._tokenizer, request.stop)
        acceptance = AcceptanceStatistics(self._num_speculative_tokens)
        count = 0
        rounds = self._decoder.generate(
            list(request.prompt_ids), request.sampling, request.max_tokens, set(request.stop_ids)
        )
        with contextlib.closing(rounds):
            for result in rounds:
                delta = answer.add(result.tokens, result.finish_reason)
                count += len(delta.token_ids)
                acceptance.add(result.accepted, result.drafted)
                if delta.finish_reason is None and (ticket.cancelled or self._abort.is_set()):
                    delta = dataclasses.replace(delta, finish_reason="abort")
                ticket.deliver(delta)
                if delta.finish_reason is not None:
                    break
            else:
                raise RuntimeError("the decoder ended without a finish reason")
        seconds = time.perf_counter() - began
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


def _one_line(error: Exception) -> str:
    """An exception's first line, for a client."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
