"""The server over the real decoder: a head changes the speed and nothing else."""

from __future__ import annotations

import copy

import pytest

from peagle_jax.config import SpecConfig
from peagle_jax.serve.engine import Engine
from peagle_jax.speculative.decoder import Decoder
from tests.serve.conftest import running
from tests.serve.tiny_model import CONFIG, PARAMS, TOKENIZER, tiny_head
from tests.tiny import head_params

pytestmark = pytest.mark.timeout(1200)  # a busy machine compiles slowly

PROMPTS = ["the cat", "naïve 🦅", "x" * 100]


def tiny_engine(k: int) -> Engine:
    head = tiny_head() if k else None
    params = head_params(head) if head else None
    spec = SpecConfig(k, "peagle" if k else None)
    decoder = Decoder(CONFIG, PARAMS, head, params, spec, max_model_len=200, prefill_chunk=32)
    return Engine(decoder, copy.deepcopy(TOKENIZER), k)


@pytest.fixture(scope="module")
def speculative():
    with running(tiny_engine(3), tokenizer=TOKENIZER) as server:
        yield server


@pytest.fixture(scope="module")
def plain():
    with running(tiny_engine(0), tokenizer=TOKENIZER) as server:
        yield server


RULES = {
    "frequency_penalty": 1.5,
    "presence_penalty": -0.5,
    "logit_bias": {"70": -100, "71": 3},
    "extra_body": {"repetition_penalty": 1.3, "min_tokens": 20},
}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.2, "top_p": 0.9, "seed": 7},
        {"temperature": 0} | RULES,
        {"temperature": 1.2, "seed": 7} | RULES,
    ],
    ids=["greedy", "seeded", "greedy with rules", "seeded with rules"],
)
def test_the_answers_are_the_same_with_and_without_a_head(speculative, plain, sampling):
    for prompt in PROMPTS:
        request = {"model": "tiny", "prompt": prompt, "max_tokens": 60, **sampling}
        ours, theirs = (s.openai.completions.create(**request) for s in (speculative, plain))
        assert ours.choices[0].text == theirs.choices[0].text
        assert ours.choices[0].finish_reason == theirs.choices[0].finish_reason
        assert ours.usage == theirs.usage


def test_log_probabilities_are_those_without_a_head(speculative, plain):
    request = {
        "model": "tiny",
        "prompt": "the cat",
        "max_tokens": 40,
        "logprobs": 3,
        "echo": True,
        "temperature": 0,
    }
    answers = [s.openai.completions.create(**request) for s in (speculative, plain)]
    ours, theirs = (answer.choices[0].logprobs for answer in answers)
    assert len(ours.tokens) == answers[0].usage.total_tokens
    assert "".join(ours.tokens).startswith("the cat")
    assert (ours.tokens, ours.text_offset) == (theirs.tokens, theirs.text_offset)
    assert ours.token_logprobs[0] is None
    assert ours.token_logprobs[1:] == pytest.approx(theirs.token_logprobs[1:], abs=1e-4)
    assert [list(top) for top in ours.top_logprobs[1:]] == [list(top) for top in theirs.top_logprobs[1:]]


def test_a_stream_equals_the_whole_answer(speculative):
    request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 80, "seed": 3}
    whole = speculative.openai.chat.completions.create(**request)
    chunks = speculative.openai.chat.completions.create(**request, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content


def test_a_stop_string_from_the_answer_itself_cuts_it(speculative):
    request = {"model": "tiny", "prompt": "the cat", "max_tokens": 60, "temperature": 0}
    text = speculative.openai.completions.create(**request).choices[0].text
    stop = text[10:14]
    choice = speculative.openai.completions.create(**request, stop=stop).choices[0]
    assert choice.text == text[: text.find(stop)]
    assert choice.finish_reason == "stop"


def test_the_context_can_be_filled_to_the_last_token(speculative):
    for room in range(1, 7):
        answer = speculative.openai.completions.create(
            model="tiny", prompt=[70] * (200 - room), max_tokens=room, extra_body={"ignore_eos": True}
        )
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (room, "length")


def test_a_request_without_a_seed_varies_and_one_with_it_repeats(speculative):
    request = {"model": "tiny", "prompt": "the cat", "max_tokens": 30, "temperature": 1.5}
    ask = speculative.openai.completions.create
    assert len({ask(**request).choices[0].text for _ in range(4)}) > 1
    assert len({ask(**request, seed=5).choices[0].text for _ in range(3)}) == 1


def test_nothing_compiles_after_the_warm_up(speculative):
    before = speculative.engine._decoder.compilations
    assert before > 0
    for temperature in (0, 0.8):
        for prompt in PROMPTS:
            speculative.openai.completions.create(
                model="tiny", prompt=prompt, max_tokens=40, temperature=temperature, extra_body={"top_k": 5}
            )
    assert speculative.engine._decoder.compilations == before
