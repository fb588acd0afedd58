"""Grammars over real vocabularies: what masks allow token by token, and what they refuse."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

from peagle_jax.serve.chat_parser import chat_parser
from peagle_jax.serve.grammar import GrammarCompiler, GrammarSpec
from peagle_jax.serve.tools import answer_grammar, coder_parser, tool_format
from tests.vocabularies.conftest import ALL, streamed

pytestmark = pytest.mark.vocabularies

DOCUMENTS = [
    {},
    {"a": [1, -2.5e3, True, None, {"b": {}}], "": "x"},
    {"日本語": "🦅🦅 naïve \u0001 \u2028", "quote": 'a "b" \\ /', "नमस्ते": "한국어"},
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
CALL = {"city": "東京", "days": 3}


def written(value, indent=None):
    return json.dumps(value, indent=indent, ensure_ascii=False)


@functools.cache
def compiler(name: str) -> GrammarCompiler:
    found = ALL[name]
    return GrammarCompiler(found.tokenizer, found.rows, found.eos_token_ids)


def refused_at(vocabulary, spec, text):
    """The text before the first token that may not follow it; None if all may, and then an end."""
    matcher = compiler(vocabulary.name).compile(spec)
    ids = vocabulary.ids(text)
    for count, token in enumerate([*ids, vocabulary.eos_token_ids[0]]):
        mask = bits(matcher, vocabulary.rows)
        assert not mask[len(vocabulary.tokenizer) :].any()  # rows without a name
        if not mask[token]:
            return vocabulary.tokenizer.decode(ids[:count])
        matcher.advance([token])
    assert matcher.finished
    return None


def bits(matcher, rows):
    """Bool (rows,): what may come next."""
    (mask,) = matcher.window_masks([])
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:rows].astype(bool)


@pytest.mark.parametrize("indent", [None, 1])
def test_json_is_accepted_token_by_token(vocabulary, indent):
    for document in DOCUMENTS:
        text = written(document, indent)
        assert refused_at(vocabulary, GrammarSpec("json_object"), text) is None


def test_an_escape_of_a_character_that_needs_none_is_refused(vocabulary):
    """llguidance's rule: the character itself has to be written."""
    assert refused_at(vocabulary, GrammarSpec("json_object"), '{"\\u0001": 1}') is None
    assert refused_at(vocabulary, GrammarSpec("json_object"), '{"\\u6771": 1}') == '{"\\u'


@pytest.mark.parametrize(
    ("wrong", "good"),
    [
        ('{"a": [1, 2.5e3 "x"]}', '{"a": [1, 2.5e3'),
        ("Sure! {}", ""),
        ('{"a": tru}', '{"a": tru'),
        ('{"a": "b', '{"a": "b'),
    ],
)
def test_what_is_no_json_is_refused_where_it_goes_wrong(vocabulary, wrong, good):
    found = refused_at(vocabulary, GrammarSpec("json_object"), wrong)
    assert found is not None and good.startswith(found) and len(good) - len(found) < 6


def test_a_schema_a_pattern_and_a_choice_are_followed(vocabulary):
    schema = GrammarSpec("json_schema", json.dumps(SCHEMA))
    assert refused_at(vocabulary, schema, written(CALL)) is None
    assert refused_at(vocabulary, schema, '{"city": "東京", "days": 15}') is not None
    assert refused_at(vocabulary, schema, '{"city": "東京", "months": 1}') is not None
    pattern = GrammarSpec("regex", r"[0-9]{3}-(東京|München)")
    assert refused_at(vocabulary, pattern, "123-München") is None
    assert refused_at(vocabulary, pattern, "123-Münster") is not None
    choice = GrammarSpec("choice", json.dumps(["🦅", "🦆"]))
    assert refused_at(vocabulary, choice, "🦆") is None
    assert refused_at(vocabulary, choice, "🦉") is not None


def test_a_window_of_drafts_gets_the_masks_of_single_steps(vocabulary):
    ids = vocabulary.ids('{"naïve": "🦅 日本語"}')
    matcher, ahead = (compiler(vocabulary.name).compile(GrammarSpec("json_object")) for _ in range(2))
    masks = ahead.window_masks(ids[:5])
    for mask, token in zip(masks, ids, strict=False):
        (single,) = matcher.window_masks([])
        assert (mask == single).all()
        matcher.advance([token])


THOUGHTS = {
    "think": "<think>\nTokyo, three days.\n</think>\n\n",
    "opened": "Tokyo, three days.\n</think>\n\n",
    None: "",
}


@pytest.mark.parametrize("form", THOUGHTS, ids=str)
def test_a_forced_call_of_qwens_may_follow_its_reasoning(form):
    vocabulary = ALL["qwen3"]
    spec = answer_grammar(None, tool_format([WEATHER], "required", "hermes"), form)
    arguments = written(CALL)
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    for calls in (call, f"{call}\n{call}"):
        text = THOUGHTS[form] + calls
        assert refused_at(vocabulary, spec, text) is None
        parser = chat_parser("hermes", "qwen3" if form else None, "<think>" if form == "opened" else "", True)
        delta = streamed(vocabulary.tokenizer, vocabulary.ids(text), parser, special=False)
        assert [json.loads(c.arguments) for c in delta.tool_calls] == [CALL] * calls.count("get_weather")
        assert (delta.content, delta.reasoning) == ("", "Tokyo, three days." if form else "")
    assert refused_at(vocabulary, spec, THOUGHTS[form] + "It rains.") == THOUGHTS[form]
    assert refused_at(vocabulary, spec, THOUGHTS[form] + call.replace("weather", "time")) is not None


def test_a_forced_call_of_gpt_oss_may_follow_its_analysis():
    vocabulary = ALL["gpt-oss"]
    spec = answer_grammar(None, tool_format([WEATHER], "required", "openai"), "harmony")
    head = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    for thought in ("", "<|channel|>analysis<|message|>Tokyo.<|end|><|start|>assistant"):
        assert refused_at(vocabulary, spec, thought + head + written(CALL)) is None
        assert refused_at(vocabulary, spec, thought + head + '{"city": 1') == thought + head + '{"city": '
        assert refused_at(vocabulary, spec, thought + "<|channel|>final<|message|>It rains.") is not None


def test_json_of_gpt_oss_stands_on_the_final_channel():
    vocabulary = ALL["gpt-oss"]
    spec = answer_grammar(GrammarSpec("json_schema", json.dumps(SCHEMA)), None, "harmony")
    thought = "<|channel|>analysis<|message|>Tokyo.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    assert refused_at(vocabulary, spec, thought + final + written(CALL)) is None
    assert refused_at(vocabulary, spec, thought + final + "It rains.") == thought + final
    assert refused_at(vocabulary, spec, thought + written(CALL)) == thought


def test_a_forced_call_of_qwen_coders_follows_the_schema():
    vocabulary = ALL["qwen3-coder"]
    spec = answer_grammar(None, tool_format([WEATHER], "required", "qwen3_coder"), None)
    start, end = "<tool_call>\n<function=get_weather>\n<parameter=city>\n", "</function>\n</tool_call>"
    rest = "東京 </b>\n</parameter>\n<parameter=days>\n"
    call = f"{start}{rest}3\n</parameter>\n{end}"
    assert refused_at(vocabulary, spec, call) is None
    assert refused_at(vocabulary, spec, f"{call}\n{call}") is None
    assert refused_at(vocabulary, spec, f"{start}{rest}15\n</parameter>\n{end}") == f"{start}{rest}1"
    assert refused_at(vocabulary, spec, f"{start}x\n</parameter>\n{end}") is not None
    assert refused_at(vocabulary, spec, "It rains.") == ""
    parser = coder_parser([WEATHER])
    delta = streamed(vocabulary.tokenizer, vocabulary.ids(call), parser, special=False)
    assert [json.loads(c.arguments) for c in delta.tool_calls] == [{"city": "東京 </b>", "days": 3}]
