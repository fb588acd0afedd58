"""A request from its submission to its last delta: what the engine knows of it beside its slot."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from peagle_jax.serve.detokenize import Answer, Delta
from peagle_jax.serve.grammar import GrammarSpec
from peagle_jax.serve.scheduler import Job
from peagle_jax.speculative.request import Flight, Request, RoundResult, kept_by_grammar
from peagle_jax.speculative.rules import TokenMatcher
from peagle_jax.speculative.sampling import SamplingParams, TokenLogprob
from peagle_jax.speculative.statistics import AcceptanceStatistics


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """A checked request: ``len(prompt_ids) + max_tokens`` fits the context, the prompt is not empty.

    ``stop_ids`` are token ids that end the answer (eos ids among them, if they are to), ``stop`` are strings
    that do, kept in the text with ``include_stop_str``. A lower ``priority`` goes first. ``structured`` is a
    grammar of the answer (``serve.grammar.GrammarSpec``). Without ``speculative`` no draft is accepted.
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


class Ticket:
    """A submitted request. ``cancel`` drops it within one dispatch, wherever it is; it may be repeated."""

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


class Live:
    """A ticket that the engine works on. Only the engine's thread uses it."""

    def __init__(
        self, ticket: Ticket, tokenizer: Any, num_speculative_tokens: int, matcher: TokenMatcher | None
    ) -> None:
        request = ticket.request
        self.ticket, self.request, self.matcher = ticket, request, matcher
        self.job = Job(
            tokens=list(request.prompt_ids),
            prompt_tokens=len(request.prompt_ids),
            max_tokens=request.max_tokens,
            priority=request.priority,
            reuse=request.sampling.prompt_logprobs is None,
        )
        self.decoder_request = Request(
            request.prompt_ids, request.sampling, request.max_tokens, request.stop_ids
        )
        self.acceptance = AcceptanceStatistics(num_speculative_tokens)
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.generated = 0
        self.problem: Exception | None = None  # of this request alone; it ends with the dispatch
        self._prompt_logprobs: list[TokenLogprob] = []
        self._scored_in = 0  # the epoch in which the prompt was scored: a preemption begins it again
        self._answer = Answer(
            tokenizer,
            request.stop,
            include_stop_str=request.include_stop_str,
            skip_special_tokens=request.skip_special_tokens,
        )

    def take(self, result: RoundResult) -> Delta | None:
        """A round's result as a delta; None while the prompt is not complete."""
        if result.prompt_logprobs is not None:
            if self._scored_in != self.job.epoch:
                self._prompt_logprobs, self._scored_in = [], self.job.epoch
            self._prompt_logprobs += result.prompt_logprobs
        if not result.tokens:
            return None
        stop_token = result.finish_reason == "stop"
        if self.matcher is not None:
            result, stop_token = kept_by_grammar(result, self.matcher)
        delta = self._answer.add(result.tokens, result.finish_reason, stop_token)
        count = len(delta.token_ids)
        logprobs = tuple(result.logprobs[:count]) if result.logprobs is not None else ()
        delta = dataclasses.replace(
            delta, logprobs=logprobs, accepted=result.accepted, drafted=result.drafted
        )
        if not self.generated:
            wanted = not self.job.reuse
            delta = dataclasses.replace(
                delta,
                cached_tokens=self.job.cached_tokens or 0,
                prompt_logprobs=(None, *self._prompt_logprobs) if wanted else None,
            )
            self.first_token = time.monotonic()
        self.generated += count
        self.acceptance.add(result.accepted, result.drafted)
        return delta

    def finished(self, reason: str) -> FinishedRequest:
        return FinishedRequest(
            self.request.request_id,
            self.ticket.arrival,
            self.scheduled,
            self.first_token,
            time.monotonic(),
            len(self.request.prompt_ids),
            self.generated,
            reason,
            tuple(self.acceptance.accepted_at),
        )


def one_line(error: Exception) -> str:
    """An exception's first line, for a client."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclasses.dataclass
class Sent:
    """A dispatch on its way: each flight with the jobs in its slots, and their epochs."""

    flights: list[tuple[Flight, dict[int, tuple[Job, int]], int | None]]  # the last is K; None: a prompt
    began: float
    timed: tuple[int, int] | None = None  # (width, K) of a dispatch that was a round and nothing else
