"""Structured output with a head equals that without, and a head that knows no grammar breaks nothing."""

import json

import pytest

from peagle_jax.config import SpecConfig
from peagle_jax.models.stack import stack_layers
from peagle_jax.serve.grammar import GrammarCompiler, GrammarSpec
from peagle_jax.speculative.decoder import Decoder, Request
from peagle_jax.speculative.sampling import SamplingParams
from tests.serve.doubles import END, TOKENIZER
from tests.serve.tiny_model import CONFIG, PARAMS, tiny_head
from tests.tiny import head_params

PERSON = {
    "type": "object",
    "properties": {"sort": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["sort", "legs"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SPECS = [
    GrammarSpec("json_schema", json.dumps(PERSON)),
    None,
    GrammarSpec("regex", "[0-9]{3}"),
    GrammarSpec("json_schema", '{"type": "boolean"}'),
    GrammarSpec("choice", '["yes", "no", "the other"]'),
    None,
]
PROMPTS = ["Tell me", "the hi", "1 + 1 =", "Is it?", "Which?", "x"]


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, CONFIG.vocab_size)


@pytest.fixture(scope="module")
def decoders():
    target, cfg = stack_layers(PARAMS), tiny_head()
    sizes = dict(max_model_len=100, prefill_chunk=8, batch=len(SPECS))
    return [
        Decoder(CONFIG, target, **sizes),
        Decoder(CONFIG, target, cfg, head_params(cfg), SpecConfig(3, "peagle"), **sizes),
    ]


def answers(decoder, compiler, sampling, stop_ids):
    requests = [
        Request(TOKENIZER.encode(text), sampling, 60, stop_ids, compiler.compile(s) if s else None)
        for text, s in zip(PROMPTS, SPECS, strict=True)
    ]
    tokens, reasons, rounds = [[] for _ in requests], [""] * len(requests), [0] * len(requests)
    for results in decoder.run(requests):
        for b, result in enumerate(results):
            if result is not None:
                tokens[b] += result.tokens
                reasons[b], rounds[b] = result.finish_reason or "", rounds[b] + 1
    return tokens, reasons, rounds


@pytest.mark.parametrize("stop_ids", [frozenset({END}), frozenset()], ids=["end of text", "ignore_eos"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_schemas_hold_and_the_others_are_untouched(decoders, compiler, temperature, stop_ids):
    sampling = SamplingParams(temperature=temperature, seed=11)
    (plain, reasons, _), (headed, same, rounds) = (answers(d, compiler, sampling, stop_ids) for d in decoders)
    assert headed == plain and same == reasons
    person, digits, truth, choice = (
        TOKENIZER.decode(plain[i], skip_special_tokens=True) for i in (0, 2, 3, 4)
    )
    value = json.loads(person)
    assert value["sort"] in ("cat", "dog") and 0 <= value["legs"] <= 9
    assert len(digits) == 3 and digits.isdigit()
    assert truth in ("true", "false") and choice in ("yes", "no", "the other")
    assert [reasons[i] for i in (0, 2, 3, 4)] == ["stop"] * 4
    assert rounds[0] < len(plain[0]) / 2  # the fixed text came as drafts
    free = [Request(TOKENIZER.encode(PROMPTS[i]), sampling, 60, stop_ids) for i in (1, 5)]
    alone = [[t for r in decoders[0].run([request]) if r[0] for t in r[0].tokens] for request in free]
    assert [plain[1], plain[5]] == alone
