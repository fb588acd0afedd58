"""The engine over a target with sliding windows: what its rings still hold is used again."""

from __future__ import annotations

import dataclasses
import queue

import pytest

from peagle_jax.config import SpecConfig
from peagle_jax.serve.engine import Engine
from peagle_jax.serve.live import EngineRequest
from peagle_jax.speculative import sizes
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.sampling import SamplingParams
from tests.serve.doubles import END, TOKENIZER
from tests.serve.tiny_model import tiny_head
from tests.tiny import GPT_OSS, head_params, target_params

pytestmark = pytest.mark.timeout(1200)  # a busy machine compiles slowly

K, CONTEXT, RING = 3, 330, 128
CONFIG = dataclasses.replace(
    GPT_OSS, vocab_size=len(TOKENIZER), num_layers=2, eos_token_ids=(END,), windows=(8, 0)
)
PARAMS = target_params(CONFIG)


def answer(engine, prompt, max_tokens, seed) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were found in a slot."""
    inbox: queue.Queue = queue.Queue()
    sampling = SamplingParams(temperature=0.9, seed=seed)
    engine.submit(EngineRequest("r", tuple(prompt), sampling, max_tokens), inbox.put)
    tokens, cached = [], 0
    while True:
        delta = inbox.get(timeout=300)
        tokens += delta.token_ids
        cached = cached or delta.cached_tokens
        if delta.finish_reason is not None:
            return tokens, cached


def test_turns_of_a_chat_go_on_from_rings_and_older_beginnings_are_computed_again(monkeypatch):
    monkeypatch.setattr(sizes, "GOES_PAST", 60)
    head = tiny_head()
    options = dict(max_model_len=CONTEXT, prefill_chunk=16)
    plain = Decoder(CONFIG, PARAMS, widths=(1,), **options)
    spec = SpecConfig(K, "peagle")
    decoder = Decoder(CONFIG, PARAMS, head, head_params(head), spec, batch=2, widths=(2,), **options)
    assert decoder.sizes.rings == (RING, 0)

    def alone(prompt, max_tokens, seed) -> list[int]:
        sampling = SamplingParams(temperature=0.9, seed=seed)
        return [t for r in plain.generate(prompt, sampling, max_tokens) for t in r.tokens]

    engine = Engine(decoder, TOKENIZER, K)
    engine.start()
    try:
        first = [1 + i % 90 for i in range(200)]
        said, cached = answer(engine, first, 20, 1)
        assert (said, cached) == (alone(first, 20, 1), 0)
        second = [*first, *said, 7, 8, 9]
        said, cached = answer(engine, second, 30, 2)
        assert said == alone(second, 30, 2)
        assert cached >= 215  # the ring has what a window before that sees
        other = [*first[:120], 5, 6]
        said, cached = answer(engine, other, 10, 3)
        assert (said, cached) == (alone(other, 10, 3), 0)  # of position 120 it has forgotten that
    finally:
        assert engine.stop(finish_within=60)
