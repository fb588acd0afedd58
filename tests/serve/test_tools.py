"""Calls are found whole or stay visible, however the text is cut; a choice of tools is a grammar."""

import json

import pytest

from peagle_jax.serve.grammar import GrammarSpec
from peagle_jax.serve.parsing import ToolCall
from peagle_jax.serve.tools import HermesParser, answer_grammar, tool_format
from tests.serve.scripts import counter, every_cut, fuzz

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "time"}},
]


def call(name="weather", arguments='{"city": "Bern"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def make() -> HermesParser:
    return HermesParser(counter())


def test_a_call_and_the_text_around_it():
    delta = every_cut(make, f"I will look.\n{call()}\n")
    assert delta.content == "I will look."
    assert delta.tool_calls == (ToolCall(0, "call_0", "weather", '{"city": "Bern"}'),)


def test_parallel_calls_are_numbered_and_their_gaps_are_dropped():
    delta = every_cut(make, f"{call()}\n{call('time', '{}')}  {call()}")
    assert delta.content == ""
    assert [(c.index, c.id, c.name) for c in delta.tool_calls] == [
        (0, "call_0", "weather"),
        (1, "call_1", "time"),
        (2, "call_2", "weather"),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": "</tool_call> \\" <tool_call>"}', {"a": '</tool_call> " <tool_call>'}),
        ('{"a": {"b": [1, 2.5, null, true]}, "ü": "\\u00fc"}', {"a": {"b": [1, 2.5, None, True]}, "ü": "ü"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("null", {}),
    ],
    ids=["markers in strings", "nested", "a string of JSON", "null"],
)
def test_arguments_are_json_text(arguments, expected):
    (found,) = every_cut(make, call("f", arguments)).tool_calls
    assert json.loads(found.arguments) == expected


def test_a_call_at_the_end_of_the_answer_needs_no_end_marker():
    delta = every_cut(make, call().removesuffix("</tool_call>"))
    assert len(delta.tool_calls) == 1 and delta.content == ""


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "a < b and <tool_calls> <tool_call",
        " leading and trailing \n",
        "<tool_call>{\"name\": 'x'}</tool_call> after",
        "<tool_call>\n</tool_call>",
        '<tool_call>[1, 2]</tool_call>\n\n<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 3000,
        '<tool_call>{"name": "f", "arguments": {"city": "Be',
        '</tool_call> <tool_call>{"name": "f</tool_call> rest',
    ],
)
def test_what_is_no_call_stays_as_it_was_written(text):
    delta = every_cut(make, text, tries=20)
    assert delta.content == text and delta.tool_calls == ()


def test_a_malformed_call_does_not_hide_the_next_one():
    delta = every_cut(make, f"<tool_call>oops</tool_call>\n{call()}")
    assert delta.content == "<tool_call>oops</tool_call>" and len(delta.tool_calls) == 1


def test_no_text_is_lost_whatever_comes():
    words = ["<tool_call>", "</tool_call>", '{"name": "f"}', "{", '"', "\\", " ", "\n", "x", "<", call()]
    for text, delta in fuzz(make, words):
        shown = delta.content + "".join(c.name for c in delta.tool_calls)
        if not delta.tool_calls:
            assert delta.content == text
        assert text.count("x") == delta.content.count("x") and (shown or not text.strip())


# -- grammars of a choice ------------------------------------------------------------------------


def test_only_required_and_named_choices_demand_anything():
    assert [tool_format(TOOLS, c, "hermes") for c in (None, "none", "auto")] == [None] * 3
    assert tool_format([], "auto", "hermes") is None


def test_a_named_function_is_forced_once_and_required_ones_as_often_as_allowed():
    named = tool_format(TOOLS, {"type": "function", "function": {"name": "time"}}, "hermes")
    assert named is not None
    assert len(named["tags"]) == 1 and '"time"' in named["tags"][0]["begin"] and named["stop_after_first"]
    assert named["tags"][0]["content"]["json_schema"] == {"type": "object"}
    required = tool_format(TOOLS, "required", "hermes")
    assert required is not None
    assert len(required["tags"]) == 2 and not required["stop_after_first"] and required["at_least_one"]
    single = tool_format(TOOLS, "required", "hermes", parallel=False)
    assert single is not None and single["stop_after_first"]


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        (TOOLS, {"type": "function", "function": {"name": "fly"}}, "'fly', which is not in tools"),
        ([], "required", "tools is empty"),
        (TOOLS, "sometimes", "'sometimes' is unknown"),
    ],
)
def test_choices_that_cannot_be_honoured_are_refused(tools, choice, words):
    with pytest.raises(ValueError, match=words):
        tool_format(tools, choice, "hermes")


def test_a_request_without_demands_has_no_grammar_and_one_without_reasoning_keeps_its_own():
    spec = GrammarSpec("regex", "[0-9]+")
    assert answer_grammar(None, None, "think") is None
    assert answer_grammar(spec, None, None) is spec


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("grammar", 'start: "a"'),
        GrammarSpec("structural_tag", '{"structures": [], "triggers": []}'),
    ],
)
def test_grammars_that_cannot_follow_reasoning_are_refused(spec):
    with pytest.raises(ValueError, match="follow reasoning"):
        answer_grammar(spec, None, "think")
