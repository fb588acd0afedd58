"""Qwen3-Coder's calls: values by the function's schema, markers in values, grammars that force a call."""

import json

import pytest

from peagle_jax.serve.coder import call_tag, closing, read_call
from peagle_jax.serve.grammar import GrammarCompiler, GrammarSpec
from peagle_jax.serve.tools import answer_grammar, coder_parser, tool_format
from tests.serve.doubles import byte_tokenizer
from tests.serve.scripts import counter, every_cut, fuzz

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "on": {"type": "boolean"},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "open": {},
    },
    "required": ["text"],
    "$defs": {"part": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]

MARKERS = "a <b> </parameter> c </tool_call> <function=g>"


def call(name="f", **values):
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def make():
    return coder_parser(TOOLS, counter())


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "12", "12"),
        ("text", "  two\n\nlines \n", "  two\n\nlines \n"),
        ("text", "", ""),
        ("text", "null", "null"),
        ("text", MARKERS, MARKERS),
        ("count", "12", 12),
        ("count", "many", "many"),
        ("on", "true", True),
        ("on", "False", False),
        ("parts", "[1, 2]", [1, 2]),
        ("parts", "(1, 2)", (1, 2)),
        ("parts", "{1, 2}", "{1, 2}"),
        ("maybe", "null", None),
        ("maybe", "nil", "nil"),
        ("open", "1", "1"),
        ("unknown", "1", "1"),
    ],
)
def test_a_value_is_read_as_its_schema_says(key, text, value):
    (found,) = every_cut(make, call(**{key: text})).tool_calls
    assert (found.name, found.arguments) == ("f", json.dumps({key: value}))


def test_calls_are_numbered_and_text_around_them_is_content():
    delta = every_cut(make, f"I look.\n\n{call(text='a', count=1)}\n{call('now')}")
    assert delta.content == "I look."
    assert [(c.id, c.name, json.loads(c.arguments)) for c in delta.tool_calls] == [
        ("call_0", "f", {"text": "a", "count": 1}),
        ("call_1", "now", {}),
    ]


def test_a_call_without_its_last_markers_counts_at_the_end():
    whole = call(text="a")
    for end in ("</tool_call>", "\n</tool_call>", "</function>\n</tool_call>"):
        assert len(every_cut(make, whole.removesuffix(end)).tool_calls) == 1


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        call(text="a").replace("</parameter>", ""),
        call(text="a").replace("<function=f>", "<function>"),
        call(text="a").replace("</function>", "and so on</function>"),
    ],
)
def test_what_is_no_call_stays_text(text):
    delta = every_cut(make, text)
    assert delta.tool_calls == () and delta.content == text


def test_random_pieces_of_calls_lose_no_words():
    words = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "</parameter>"]
    for text, delta in fuzz(make, [*words, "xyz", "\n", " ", call(text="xyz")]):
        shown = delta.content + "".join(c.arguments for c in delta.tool_calls)
        assert shown.count("xyz") == text.count("xyz")


def test_an_open_call_has_no_end_and_text_is_no_call():
    assert closing("<function=f>\n</function>\n") == closing("</tool_call>") == -1
    assert read_call("f(1)", {}) is None


@pytest.mark.parametrize(
    "schema", [None, True, [], {"properties": 1}, {"properties": {"a": 1}, "required": 1}]
)
def test_a_schema_that_says_nothing_useful_is_no_error(schema):
    assert call_tag("f", schema)["begin"] == "<tool_call>\n<function=f>\n"
    assert read_call("<function=f><parameter=a>1</parameter></function>", {"f": schema}) == ("f", {"a": "1"})


@pytest.mark.parametrize("schema", [{"type": 1}, {"type": [1]}, {"anyOf": 1}, {"type": "string", "enum": 1}])
def test_a_value_whose_schema_says_nothing_useful_is_text(schema):
    whole = {"properties": {"a": schema}}
    assert call_tag("f", whole)["content"]["elements"][0]["elements"][0]["content"] == {"type": "any_text"}
    assert read_call("<function=f><parameter=a>1</parameter></function>", {"f": whole}) == ("f", {"a": "1"})


def follows(spec, text):
    tokenizer = byte_tokenizer()
    matcher = GrammarCompiler(tokenizer, len(tokenizer)).compile(spec)
    for token in tokenizer.encode(text):
        (mask,) = matcher.window_masks([])
        if not mask[token // 32] >> (token % 32) & 1:
            return False
        matcher.advance([token])
    (mask,) = matcher.window_masks([])
    return bool(mask[tokenizer.eos_token_id // 32] >> (tokenizer.eos_token_id % 32) & 1)


@pytest.fixture(scope="module")
def required() -> GrammarSpec:
    spec = answer_grammar(None, tool_format(TOOLS, "required", "qwen3_coder"), None)
    assert spec is not None
    return spec


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (call(text="a\nb < c"), True),
        (call(text="a", count=1, on="true", parts="[1]", maybe="b", unit="C", open="x"), True),
        (call(text="a") + "\n" + call("now"), True),
        (call("now"), True),
        (call(count=1), False),
        (call(text="a", count="many"), False),
        (call(text="a", parts='["b"]'), False),
        (call(text="a", unit="K"), False),
        (call("g"), False),
        ("I will not.", False),
    ],
)
def test_a_required_call_follows_the_schema(required, text, allowed):
    assert follows(required, text) == allowed
    if allowed:
        assert len(every_cut(make, text, tries=3).tool_calls) == text.count("<tool_call>")


def test_a_named_function_is_called_once():
    choice = {"type": "function", "function": {"name": "now"}}
    spec = answer_grammar(None, tool_format(TOOLS, choice, "qwen3_coder"), None)
    assert (
        follows(spec, call("now"))
        and not follows(spec, call("now") * 2)
        and not follows(spec, call(text="a"))
    )
