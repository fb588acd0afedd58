"""vLLM's metrics, with the numbers that hand calculation gives."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peagle_jax.serve.engine import EngineSnapshot, FinishedRequest
from peagle_jax.serve.metrics import Metrics, acceptance_warning, log_lines, token_buckets
from tests.serve.conftest import complete
from tests.serve.engine_double import says

LABELS = {"model_name": "tiny", "engine": "0"}


def samples(text: str) -> dict[tuple, float]:
    """Every value of a page, by name and the labels beside the two common ones."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert {name: labels.pop(name) for name in LABELS} == LABELS
            found[(sample.name, *labels.values())] = sample.value
    return found


def test_totals_are_the_engines_and_have_vllms_names():
    metrics = Metrics("tiny", 100)
    # Three rounds of K = 3 that accepted 0, 2 and 3.
    snapshot = EngineSnapshot(
        running=2,
        waiting=5,
        kv_usage=0.25,
        prompt_tokens=70,
        generation_tokens=8,
        preemptions=1,
        prefix_queries=60,
        prefix_hits=40,
        num_drafts=3,
        num_draft_tokens=9,
        num_accepted_tokens=5,
        accepted_per_pos=(2, 2, 1),
        compilations=11,
    )
    metrics.attach(lambda: snapshot, dict)
    found = samples(metrics.text().decode())
    expected = {
        ("vllm:num_requests_running",): 2,
        ("vllm:num_requests_waiting",): 5,
        ("vllm:kv_cache_usage_perc",): 0.25,
        ("vllm:prompt_tokens_total",): 70,
        ("vllm:generation_tokens_total",): 8,
        ("vllm:num_preemptions_total",): 1,
        ("vllm:prefix_cache_queries_total",): 60,
        ("vllm:prefix_cache_hits_total",): 40,
        ("vllm:spec_decode_num_drafts_total",): 3,
        ("vllm:spec_decode_num_draft_tokens_total",): 9,
        ("vllm:spec_decode_num_accepted_tokens_total",): 5,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): 2,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 2,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"): 1,
        ("peagle:compilations_total",): 11,
    }
    assert {key: found[key] for key in expected} == expected


def test_histograms_hold_the_times_of_finished_requests():
    metrics = Metrics("tiny", 100)
    request = FinishedRequest("a", 10.0, 10.5, 11.0, 15.0, 7, 5, "stop")
    metrics.on_finish(request)
    metrics.on_finish(dataclasses.replace(request, scheduled=None, first_token=None, finish_reason="abort"))
    found = samples(metrics.text().decode())
    for name, total, count in (
        ("time_to_first_token_seconds", 1.0, 1),
        ("request_queue_time_seconds", 0.5, 1),
        ("request_prefill_time_seconds", 0.5, 1),
        ("request_decode_time_seconds", 4.0, 1),
        ("request_inference_time_seconds", 4.5, 1),
        ("request_time_per_output_token_seconds", 1.0, 1),
        ("e2e_request_latency_seconds", 10.0, 2),
        ("request_prompt_tokens", 14, 2),
        ("request_generation_tokens", 10, 2),
    ):
        assert found[(f"vllm:{name}_sum",)] == pytest.approx(total), name
        assert found[(f"vllm:{name}_count",)] == count, name
    assert found[("vllm:request_success_total", "stop")] == 1
    assert found[("vllm:request_success_total", "abort")] == 1
    assert found[("vllm:request_success_total", "length")] == 0


def test_a_request_over_http_is_counted(serve):
    server = serve(says("abcdef", width=4))
    complete(server, prompt="xy", max_tokens=100)
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = samples(response.text)
    assert found[("vllm:request_success_total", "stop")] == 1
    assert found[("vllm:generation_tokens_total",)] == 7
    assert found[("vllm:inter_token_latency_seconds_count",)] == 2  # three rounds
    assert found[("vllm:request_prompt_tokens_sum",)] == 2
    assert found[("vllm:spec_decode_num_accepted_tokens_total",)] == 4


def test_the_log_line_is_vllms():
    before = EngineSnapshot(prompt_tokens=10, generation_tokens=100, accepted_per_pos=(0, 0, 0))
    now = EngineSnapshot(
        running=1,
        waiting=2,
        kv_usage=0.5,
        prompt_tokens=60,
        generation_tokens=200,
        prefix_queries=10,
        prefix_hits=4,
        num_drafts=3,
        num_draft_tokens=9,
        num_accepted_tokens=5,
        accepted_per_pos=(2, 2, 1),
    )
    assert log_lines(before, now, 10.0) == [
        "Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 10.0 tokens/s, Running: 1 reqs, "
        "Waiting: 2 reqs, KV cache usage: 50.0%, Prefix cache hit rate: 40.0%",
        "SpecDecoding metrics: Mean acceptance length: 2.67, Accepted throughput: 0.50 tokens/s, "
        "Drafted throughput: 0.90 tokens/s, Accepted: 5 tokens, Drafted: 9 tokens, "
        "Per-position acceptance rate: 0.667, 0.667, 0.333, Avg Draft acceptance rate: 55.6%",
    ]
    assert log_lines(now, dataclasses.replace(now, running=0, waiting=0), 10.0) == []


def test_buckets_of_lengths_end_within_the_context():
    assert token_buckets(100) == [1, 2, 5, 10, 20, 50, 100]
    assert token_buckets(1) == [1]


def test_a_head_that_does_not_fit_is_told_after_some_rounds_and_by_health(serve):
    wrong = EngineSnapshot(num_drafts=200, num_draft_tokens=600, num_accepted_tokens=3)
    assert "does not fit this model" in acceptance_warning(wrong)
    assert acceptance_warning(dataclasses.replace(wrong, num_drafts=199)) is None
    assert acceptance_warning(dataclasses.replace(wrong, num_accepted_tokens=4)) is None
    server = serve(says("x"))
    assert server.http.get("/health").json() == {"status": "ready"}
    server.engine.snapshot = lambda: wrong
    response = server.http.get("/health")
    assert (response.status_code, response.json()["status"]) == (200, "degraded")
