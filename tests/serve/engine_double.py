"""A stand-in for the engine: it says what it is told, with the rounds, acceptances and log-probabilities
that a test can compute by itself."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from peagle_jax.serve.detokenize import Delta
from peagle_jax.serve.engine import EngineRequest, EngineSnapshot, EngineStoppedError, FinishedRequest
from peagle_jax.speculative.sampling import TokenLogprob
from tests.serve.doubles import END, TOKENIZER


def entry_of(token: int, top: int) -> TokenLogprob:
    """The log-probabilities that every token has here: the chosen one is the second best."""
    best = [
        ((token + 1) % len(TOKENIZER), -0.25),
        (token, -1.5),
        *(((token + i) % 256, -2.0 - i) for i in (2, 3, 4)),
    ]
    return TokenLogprob(token, -1.5, 2, tuple(best[:top]))


class ScriptedTicket:
    """A request in the double."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class ScriptedEngine:
    """Says ``script(request)``, one token and then ``width`` tokens a round, each request in its own thread.

    ``pause`` is the seconds that a round takes. ``fail`` raises after one round if it is true of the request.
    ``warm_up`` is called before the engine is ready. ``hold``, if given, stops every round until it is set.
    """

    def __init__(
        self,
        script: Callable[[EngineRequest], Sequence[int]],
        *,
        width: int = 4,
        pause: float = 0.0,
        fail: Callable[[EngineRequest], bool] = lambda request: False,
        warm_up: Callable[[], object] = lambda: None,
        hold: threading.Event | None = None,
        cached_tokens: int = 0,
        on_finish: Callable[[FinishedRequest], None] | None = None,
    ) -> None:
        self.script, self.width, self.pause, self.fail, self._warm_up = script, width, pause, fail, warm_up
        self.hold, self.cached_tokens, self.on_finish = hold, cached_tokens, on_finish
        self.state, self.failure = "new", None
        self.seen: list[EngineRequest] = []
        self.rounds = 0
        self.closed: list[bool] = []  # one a request: True if it was left before its end
        self.busy = threading.Event()
        self._totals = EngineSnapshot(accepted_per_pos=(0,) * (width - 1))
        self._running: set[ScriptedTicket] = set()
        self._lock = threading.Lock()
        self._abort = threading.Event()

    def start(self) -> None:
        self.state = "warming"
        threading.Thread(target=self._become_ready, daemon=True).start()

    def _become_ready(self) -> None:
        try:
            self._warm_up()
        except Exception as error:
            self.failure, self.state = f"{type(error).__name__}: {error}", "failed"
            return
        if self.state == "warming":
            self.state = "ready"

    def check(self) -> None:
        if self.state == "failed":
            raise EngineStoppedError(f"the engine failed to start: {self.failure}")
        if self.state == "stopped":
            raise EngineStoppedError("the server is shutting down")

    def submit(self, request: EngineRequest, deliver: Callable[[Delta], None]) -> ScriptedTicket:
        self.check()
        ticket = ScriptedTicket(request)
        with self._lock:
            self.seen.append(request)
            self._running.add(ticket)
        threading.Thread(target=self._serve, args=(ticket, deliver), daemon=True).start()
        return ticket

    def snapshot(self) -> EngineSnapshot:
        return dataclasses.replace(self._totals, running=len(self._running))

    def stop(self, finish_within: float = 0.0, abort_within: float = 5.0) -> bool:
        self.state = "stopped"
        deadline = time.monotonic() + finish_within
        while self._running and time.monotonic() < deadline:
            time.sleep(0.01)
        self._abort.set()
        deadline = time.monotonic() + abort_within
        while self._running and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._running

    def _serve(self, ticket: ScriptedTicket, deliver: Callable[[Delta], None]) -> None:
        request, arrival = ticket.request, time.monotonic()
        first, count = None, 0
        delta = Delta(finish_reason="abort")
        try:
            while self.state == "warming":
                time.sleep(0.005)
            for delta in self._deltas(request):
                self.busy.set()
                if self.hold is not None:
                    self.hold.wait(60)
                time.sleep(self.pause)
                self.rounds += 1
                if delta.finish_reason is None and (ticket.cancelled.is_set() or self._abort.is_set()):
                    delta = dataclasses.replace(delta, finish_reason="abort")
                first = first or time.monotonic()
                count += len(delta.token_ids)
                self._total(delta)
                deliver(delta)
                if delta.finish_reason is not None:
                    break
                if self.fail(request):
                    delta = Delta(finish_reason="error", error="RuntimeError: the accelerator is on fire")
                    deliver(delta)
                    break
        finally:
            self.busy.clear()
            self.closed.append(delta.finish_reason in ("abort", "error"))
            self._running.discard(ticket)
            if self.on_finish is not None:
                end = time.monotonic()
                self.on_finish(
                    FinishedRequest(
                        request.request_id,
                        arrival,
                        arrival,
                        first,
                        end,
                        len(request.prompt_ids),
                        count,
                        delta.finish_reason or "abort",
                    )
                )

    def _deltas(self, request: EngineRequest):
        """The answer in rounds: all but the last token of one were drafted."""
        tokens, finish, reason = list(self.script(request))[: request.max_tokens], "length", None
        stop = next((i for i, token in enumerate(tokens) if token in request.stop_ids), None)
        if stop is not None:
            tokens, finish = tokens[: stop + 1], "stop"
            reason = None if tokens[stop] == END else tokens[stop]
        shown, start, size = "", 0, 1
        while True:
            part = tokens[start : start + size]
            done = start + size >= len(tokens)
            text, cut = self._text(request, tokens[: start + size], finish, done)
            delta = Delta(text[len(shown) :], tuple(part), finish if done else None)
            drafted = self.width - 1 if start and request.speculative else 0
            delta = dataclasses.replace(
                delta,
                accepted=min(len(part) - 1, drafted),
                drafted=drafted,
                stop_reason=reason if done else None,
            )
            if cut is not None:
                delta = dataclasses.replace(delta, finish_reason="stop", stop_reason=cut)
            yield self._with_logprobs(request, delta, first=start == 0)
            if delta.finish_reason is not None:
                return
            shown, start, size = text, start + size, self.width if request.speculative else 1

    def _text(self, request, tokens, finish, done) -> tuple[str, str | None]:
        """The text that can be shown of tokens, and the stop string in it."""
        if done and finish == "stop":
            tokens = tokens[:-1]
        text = TOKENIZER.decode(tokens, skip_special_tokens=request.skip_special_tokens)
        for stop in request.stop:
            if stop in text:
                keep = len(stop) if request.include_stop_str else 0
                return text[: min(text.find(s) for s in request.stop if s in text) + keep], stop
        if not done:
            text = text.rstrip("\ufffd")
            held = max((len(s) - 1 for s in request.stop), default=0)
            text = text[: max(len(text) - held, 0)]
        return text, None

    def _with_logprobs(self, request: EngineRequest, delta: Delta, *, first: bool) -> Delta:
        sampling = request.sampling
        if sampling.logprobs is not None:
            entries = tuple(entry_of(token, sampling.logprobs) for token in delta.token_ids)
            delta = dataclasses.replace(delta, logprobs=entries)
        if first:
            delta = dataclasses.replace(delta, cached_tokens=self.cached_tokens)
            if sampling.prompt_logprobs is not None:
                rest = (entry_of(token, sampling.prompt_logprobs) for token in request.prompt_ids[1:])
                delta = dataclasses.replace(delta, prompt_logprobs=(None, *rest))
        return delta

    def _total(self, delta: Delta) -> None:
        with self._lock:
            old = self._totals
            per_position = tuple(n + (i < delta.accepted) for i, n in enumerate(old.accepted_per_pos))
            self._totals = dataclasses.replace(
                old,
                generation_tokens=old.generation_tokens + len(delta.token_ids),
                num_drafts=old.num_drafts + (delta.drafted > 0),
                num_draft_tokens=old.num_draft_tokens + delta.drafted,
                num_accepted_tokens=old.num_accepted_tokens + delta.accepted,
                accepted_per_pos=per_position,
            )


def says(text: str, **options) -> ScriptedEngine:
    """An engine that answers every prompt with ``text`` and the end token."""
    return ScriptedEngine(lambda request: [*TOKENIZER.encode(text), END], **options)
