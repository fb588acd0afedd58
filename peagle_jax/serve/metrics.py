"""Prometheus metrics with vLLM's names and labels, and the line that is logged every ten seconds.

Dashboards, and clients that read acceptance from counters (vLLM's benchmark does), work unchanged.
Totals come from the engine's own counts when they are read; only histograms are kept here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from peagle_jax.serve.detokenize import Delta
from peagle_jax.serve.engine import EngineRequest, EngineSnapshot, FinishedRequest

log = logging.getLogger(__name__)

LOG_EVERY = 10.0
"""Seconds."""

ROUNDS_TO_JUDGE = 200
LOWEST_ACCEPTANCE = 0.02
"""Accepted drafts a round under which something must be wrong: a poor head still reaches ten times that."""

# vLLM's bounds, in seconds: dashboards compare quantiles across servers.
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_REASONS = ("stop", "length", "abort", "error")


def token_buckets(most: int) -> list[float]:
    """1, 2, 5, 10, ... up to ``most``."""
    bounds = [float(m * 10**e) for e in range(len(str(most))) for m in (1, 2, 5)]
    return [bound for bound in bounds if bound <= most] or [1.0]


class Metrics:
    """The metrics of one engine. Its methods may be called on any thread.

    Args:
        model_name: the label; the first served name.
        max_model_len: bounds the histograms of lengths.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        lengths = token_buckets(max_model_len)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Time to the first token.", _FIRST_TOKEN
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Time between rounds.", _BETWEEN_TOKENS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token of a request.", _BETWEEN_TOKENS
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Time from arrival to end.", _LATENCY)
        self._queued = self._histogram("request_queue_time_seconds", "Time spent waiting.", _LATENCY)
        self._inference = self._histogram("request_inference_time_seconds", "Time spent running.", _LATENCY)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From start to first token.", _LATENCY
        )
        self._decode = self._histogram("request_decode_time_seconds", "From first token to end.", _LATENCY)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", lengths)
        self._generation = self._histogram("request_generation_tokens", "Tokens of an answer.", lengths)
        self._max_tokens = self._histogram("request_params_max_tokens", "Tokens asked for.", lengths)
        self._finished = dict.fromkeys(_REASONS, 0)
        self._last_delta: dict[str, float] = {}
        self._snapshot: Callable[[], EngineSnapshot] = EngineSnapshot
        self._rejected: Callable[[], Mapping[str, int]] = dict
        self._registry.register(_Totals(self))

    def _histogram(
        self, name: str, documentation: str, buckets: tuple[float, ...] | list[float]
    ) -> Histogram:
        made = Histogram(
            f"vllm:{name}", documentation, list(self._labels), buckets=buckets, registry=self._registry
        )
        return made.labels(**self._labels)

    def attach(
        self, snapshot: Callable[[], EngineSnapshot], rejected: Callable[[], Mapping[str, int]]
    ) -> None:
        """Says where totals are read: the engine's, and requests turned away by the limit that did it."""
        self._snapshot, self._rejected = snapshot, rejected

    def on_delta(self, request: EngineRequest, delta: Delta) -> None:
        """Notes when a delta came."""
        now = time.monotonic()
        before = self._last_delta.pop(request.request_id, None)
        if before is not None and delta.token_ids:
            self._between.observe(now - before)
        if delta.finish_reason is None:
            self._last_delta[request.request_id] = now
        else:
            self._max_tokens.observe(request.max_tokens)

    def on_finish(self, request: FinishedRequest) -> None:
        """Takes a request that has ended; one that never ran or never answered tells only what it can."""
        reason = request.finish_reason if request.finish_reason in _REASONS else "error"
        self._finished[reason] += 1
        self._whole.observe(request.finished - request.arrival)
        self._prompt.observe(request.prompt_tokens)
        self._generation.observe(request.generation_tokens)
        if request.scheduled is not None:
            self._queued.observe(request.scheduled - request.arrival)
            self._inference.observe(request.finished - request.scheduled)
        if request.first_token is not None:
            self._first_token.observe(request.first_token - request.arrival)
            self._decode.observe(request.finished - request.first_token)
            if request.scheduled is not None:
                self._prefill.observe(request.first_token - request.scheduled)
            if request.generation_tokens > 1:
                decoding = request.finished - request.first_token
                self._per_token.observe(decoding / (request.generation_tokens - 1))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def totals(self) -> Iterator[Metric]:
        """Gauges and counters, from the engine's counts."""
        now = self._snapshot()
        yield self._gauge("num_requests_running", "Requests that run.", now.running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", now.waiting)
        yield self._gauge("kv_cache_usage_perc", "Used part of the KV cache; 1 is all.", now.kv_usage)
        for name, documentation, value in (
            ("num_preemptions", "Requests that were put back.", now.preemptions),
            ("prompt_tokens", "Prompt tokens processed.", now.prompt_tokens),
            ("generation_tokens", "Tokens generated.", now.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up.", now.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", now.prefix_hits),
            ("spec_decode_num_drafts", "Rounds that drafted.", now.num_drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", now.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts accepted.", now.num_accepted_tokens),
        ):
            yield self._counter(name, documentation, {(): value})
        positions = {(str(place),): count for place, count in enumerate(now.accepted_per_pos)}
        yield self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted, by place.", positions, ["position"]
        )
        reasons = {(reason,): count for reason, count in self._finished.items()}
        yield self._counter("request_success", "Requests that ended.", reasons, ["finished_reason"])
        rejected = {(reason,): count for reason, count in self._rejected().items()}
        yield self._counter("admission_rejections", "Requests turned away.", rejected, ["reason"])
        compiled = CounterMetricFamily("peagle:compilations", "Programs compiled.", labels=list(self._labels))
        compiled.add_metric(list(self._labels.values()), now.compilations)
        yield compiled

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(
        self,
        name: str,
        documentation: str,
        values: Mapping[tuple[str, ...], float],
        labels: list[str] | None = None,
    ) -> Metric:
        names = [*self._labels, *(labels or [])]
        family = CounterMetricFamily(f"vllm:{name}", documentation, labels=names)
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value)
        return family

    async def log_forever(self, every: float = LOG_EVERY) -> None:
        """Logs throughput, queue, cache and acceptance; nothing while the engine is idle."""
        before, began, warned = self._snapshot(), time.monotonic(), False
        while True:
            await asyncio.sleep(every)
            now, ended = self._snapshot(), time.monotonic()
            for line in log_lines(before, now, ended - began):
                log.info("%s", line)
            if not warned and (warning := acceptance_warning(now)):
                log.warning("%s", warning)
                warned = True
            before, began = now, ended


def acceptance_warning(now: EngineSnapshot) -> str | None:
    """Says so if drafts are hardly ever accepted: a head that does not fit looks just like that."""
    if now.num_drafts < ROUNDS_TO_JUDGE or now.num_accepted_tokens >= LOWEST_ACCEPTANCE * now.num_drafts:
        return None
    return (
        f"{now.num_accepted_tokens} drafts were accepted in {now.num_drafts} rounds; the head does not fit "
        f"this model: check that it was trained for this very target, its taps, and its draft vocabulary"
    )


class _Totals(Collector):
    """Makes a ``Metrics``' totals a part of its registry."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.totals()


def log_lines(before: EngineSnapshot, now: EngineSnapshot, seconds: float) -> list[str]:
    """What happened between two moments, in vLLM's words; nothing if nothing did.

    An acceptance length counts the target's own token; a position's rate is of all rounds that drafted.
    """

    def rate(name: str) -> float:
        return (getattr(now, name) - getattr(before, name)) / max(seconds, 1e-9)

    # Requests that wait while none runs wait for the warm-up, which has a log of its own.
    if not (now.running or rate("prompt_tokens") or rate("generation_tokens")):
        return []
    line = (
        f"Avg prompt throughput: {rate('prompt_tokens'):.1f} tokens/s, "
        f"Avg generation throughput: {rate('generation_tokens'):.1f} tokens/s, "
        f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, KV cache usage: {100 * now.kv_usage:.1f}%"
    )
    if now.prefix_queries:
        line += f", Prefix cache hit rate: {100 * now.prefix_hits / now.prefix_queries:.1f}%"
    lines = [line]
    drafts = now.num_drafts - before.num_drafts
    if drafts:
        accepted = now.num_accepted_tokens - before.num_accepted_tokens
        drafted = now.num_draft_tokens - before.num_draft_tokens
        old = [*before.accepted_per_pos, *([0] * len(now.accepted_per_pos))]
        rates = [(n - o) / drafts for n, o in zip(now.accepted_per_pos, old, strict=False)]
        lines.append(
            f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
            f"Accepted throughput: {rate('num_accepted_tokens'):.2f} tokens/s, "
            f"Drafted throughput: {rate('num_draft_tokens'):.2f} tokens/s, "
            f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
            f"Per-position acceptance rate: {', '.join(f'{r:.3f}' for r in rates)}, "
            f"Avg Draft acceptance rate: {100 * accepted / max(drafted, 1):.1f}%"
        )
    return lines
