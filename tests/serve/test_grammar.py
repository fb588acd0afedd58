"""Grammars as masks: what they allow, where they end, what they refuse, and what a window leaves behind."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken

from peagle_jax.serve.grammar import GrammarCompiler, GrammarSpec
from peagle_jax.serve.tools import answer_grammar, tool_format
from tests.serve.doubles import END, byte_tokenizer

TOKENIZER = byte_tokenizer()
TOKENIZER.add_tokens(
    [AddedToken(t, special=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    + [AddedToken(f"<|{t}|>", special=True) for t in ("channel", "message", "constrain", "call")]
)
VOCAB = len(TOKENIZER) + 13  # logits beyond the tokenizer's ids, as padded tables have them
OTHER_END: int = TOKENIZER.get_vocab()["<|call|>"]


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, VOCAB, [OTHER_END])


def spec(kind, value="") -> GrammarSpec:
    return GrammarSpec(kind, value if isinstance(value, str) else json.dumps(value))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def allowed(row: np.ndarray) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def outcome(compiler, what: GrammarSpec, text: str) -> str:
    """ "no" if the text is refused, else whether it may end there, or must."""
    matcher = compiler.compile(what)
    for token in ids(text):
        if token not in allowed(matcher.window_masks([])[0]):
            return "no"
        assert matcher.advance([token]) == 1
    (row,) = matcher.window_masks([])
    ends = {END, OTHER_END} & allowed(row)
    assert len(ends) in (0, 2)  # every end of text, or none
    if matcher.finished:
        assert allowed(row) == ends
        return "must end"
    return "may end" if ends else "goes on"


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/n"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("what", "text", "expected"),
    [
        (spec("json_object"), '{"a": [1, "x", {"b": null}]}', "must end"),
        (spec("json_object"), '{"a": 1', "goes on"),
        (spec("json_object"), "[1]", "no"),
        (spec("json_object"), "{" + " " * 60, "no"),
        (spec("json_schema", PERSON), '{"name": "Zoë",\n  "age": 3}', "must end"),
        (spec("json_schema", PERSON), '{"name": "a", "age": -1', "no"),
        (spec("json_schema", True), "3", "may end"),
        (spec("json_schema", {"type": "boolean"}), "true", "must end"),
        (spec("regex", "[0-9]{3}"), "12", "goes on"),
        (spec("regex", "[0-9]{3}"), "123", "must end"),
        (spec("regex", "[a-z/]+"), "a/b", "may end"),
        (spec("choice", ["yes", "yes, please", "nein/ü\n"]), "yes", "may end"),
        (spec("choice", ["yes", "yes, please", "nein/ü\n"]), "nein/ü\n", "must end"),
        (spec("choice", ["yes", "no"]), "maybe", "no"),
        (spec("choice", [f"c{i}" for i in range(3000)]), "c29", "may end"),
        (spec("regex", r"a\\"), "a\\", "must end"),
        (spec("grammar", 'start: "x" NUMBER\nNUMBER: /[0-9]+/'), "x12", "may end"),
        (spec("grammar", 'root ::= "a" | "b" [0-9]'), "b1", "must end"),
    ],
    ids=str,
)
def test_an_answer_may_end_exactly_where_its_grammar_is_complete(compiler, what, text, expected):
    assert outcome(compiler, what, text) == expected


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (spec("json_schema", "{"), "json_schema cannot be used: expected JSON, found '{'"),
        (spec("json_schema", {"type": "foo"}), "Invalid type: foo"),
        (spec("json_schema", {"not": {"type": "string"}}), r'Unimplemented keys: \["not"\]'),
        (spec("json_schema", {"$ref": "http://example.org/x"}), "not present"),
        (spec("json_schema", []), "an object or a boolean, found"),
        (spec("regex", "[0-9"), "unclosed character class"),
        (spec("regex", "(?=a)b"), "look-ahead"),
        (spec("regex", ""), "regex cannot be used: it is empty"),
        (spec("choice", []), "one or more strings"),
        (spec("choice", ["a", 1]), "one or more strings"),
        (spec("choice", "yes"), "expected JSON"),
        (spec("grammar", "start: missing"), 'unknown name: "missing"'),
        (spec("structural_tag", {}), "'structures' must be a list"),
        (spec("structural_tag", "[" * 100_000), "structural_tag cannot be used: expected JSON"),
        (spec("json_schema", {"$ref": "#"}), "json_schema cannot be used: no text satisfies it"),
        (spec("regex", r"[^\s\S]"), "regex cannot be used: no text satisfies it"),
        (spec("grammar", 'root ::= root "a"'), "grammar cannot be used: no text satisfies it"),
        (spec("regex", "a{1000000}"), "too many expressions"),
        (spec("regex", "a\\"), "ends in a backslash"),
    ],
    ids=str,
)
def test_a_grammar_that_cannot_be_used_is_told_in_one_line(compiler, what, words):
    with pytest.raises(ValueError, match=words) as error:
        compiler.compile(what)
    assert (
        "\n" not in str(error.value) and len(str(error.value)) < 400 and "x-guidance" not in str(error.value)
    )


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'xml' is unknown"):
        GrammarSpec("xml")  # pyright: ignore[reportArgumentType]


def test_a_window_shows_each_draft_its_row_and_leaves_nothing_behind(compiler):
    matcher = compiler.compile(spec("regex", "[0-9]{3}"))
    digits = set(ids("0123456789"))
    matcher.advance(ids("1"))
    masks = matcher.window_masks([*ids("23"), END, 7])
    assert masks.dtype == np.uint32 and masks.shape == (5, -(-VOCAB // 32))
    assert [allowed(row) for row in masks[:3]] == [digits, digits, {END, OTHER_END}]
    assert (masks[3:] == 0xFFFFFFFF).all()  # past the end of text: never read
    refused = matcher.window_masks([*ids("2x3")])
    assert allowed(refused[1]) == digits and (refused[2:] == 0xFFFFFFFF).all()
    assert (matcher.window_masks([VOCAB - 1, 3])[1:] == 0xFFFFFFFF).all()
    assert matcher.advance([*ids("23"), END, END]) == 2 and matcher.finished
    assert allowed(matcher.window_masks([END, 3])[0]) == {END, OTHER_END}


def test_drafts_give_way_to_the_only_text_that_is_left(compiler):
    matcher = compiler.compile(spec("json_schema", PERSON))
    matcher.advance(ids('{"'))
    drafts, masks = matcher.window([3, 3, 3, 3, 3, 3])
    assert drafts[:4] == ids("name") and drafts[4] == ids('"')[0]
    np.testing.assert_array_equal(masks, matcher.window_masks(drafts))
    assert all(token in allowed(row) for token, row in zip(drafts[:5], masks, strict=False))
    good = ids("name")
    assert matcher.window(good)[0] == good
    free = compiler.compile(spec("regex", "[ab][0-9]{3}"))
    assert free.window([3, 3])[0] == [3, 3]  # nothing is forced: the head's drafts stay


def test_random_drafts_never_change_what_follows(compiler):
    rng = np.random.default_rng(5)
    what = spec("json_schema", PERSON)
    probed, plain = compiler.compile(what), compiler.compile(what)
    for token in [*ids('{"name": "the hi", "age": 31}'), END]:
        for _ in range(3):
            probed.window_masks([token, *rng.integers(0, VOCAB, 4).tolist()])
            probed.window_masks(rng.integers(0, VOCAB, 5).tolist())
        np.testing.assert_array_equal(probed.window_masks([]), plain.window_masks([]))
        assert probed.finished == plain.finished
        assert probed.advance([token]) == plain.advance([token])
    assert probed.finished


def test_an_open_end_is_closed_by_any_end_of_text(compiler):
    for end in (END, OTHER_END):
        matcher = compiler.compile(spec("regex", "[0-9]+"))
        assert matcher.advance([*ids("12"), end]) == 3 and matcher.finished
        assert matcher.advance([end]) == 0


def test_a_forbidden_token_fails_this_answer_alone(compiler):
    what = spec("regex", "[0-9]+")
    broken, sound = compiler.compile(what), compiler.compile(what)
    with pytest.raises(ValueError, match="the grammar failed") as error:
        broken.advance(ids("x"))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="the grammar failed"):
        broken.window_masks([])
    assert sound.advance(ids("5")) == 1 and compiler.compile(what).advance(ids("5")) == 1


def test_no_id_beyond_the_tokenizer_is_ever_allowed(compiler):
    for what in (spec("json_object"), spec("regex", r"(.|\n)*")):
        assert max(allowed(compiler.compile(what).window_masks([])[0])) < len(TOKENIZER)


def test_a_tokenizer_without_an_end_of_text_is_refused():
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="end-of-text"):
        GrammarCompiler(endless, VOCAB)


# -- answers with reasoning and calls ------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maxProperties": 0}}},
    {"type": "function", "function": {"name": "g", "parameters": PERSON}},
]
F = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {"name": "a", "age": 1}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "g"}}
BOOL = spec("json_schema", {"type": "boolean"})
ANALYSIS = "<|channel|>analysis<|message|>hm"


@pytest.mark.parametrize(
    ("choice", "parallel", "reasoning", "text", "expected"),
    [
        ("required", True, None, F + "\n" + G, "may end"),
        ("required", True, None, "Sure", "no"),
        ("required", False, None, F, "must end"),
        (NAMED, True, None, G, "must end"),
        (NAMED, True, None, F, "no"),
        ("required", False, "think", "<think>so</think>\n\n" + F, "must end"),
        ("required", False, "think", F, "must end"),
        ("required", False, "opened", "so</think>\n\n" + F, "must end"),
        ("required", False, "opened", "so", "goes on"),
    ],
    ids=str,
)
def test_a_choice_of_tools_forces_calls_that_the_parser_reads(
    compiler, choice, parallel, reasoning, text, expected
):
    forced = tool_format(TOOLS, choice, "hermes", parallel)
    assert outcome(compiler, answer_grammar(None, forced, reasoning), text) == expected


@pytest.mark.parametrize(
    ("what", "reasoning", "text", "expected"),
    [
        (BOOL, "opened", "why</think>\n\ntrue", "must end"),
        (BOOL, "opened", "true", "goes on"),
        (BOOL, "think", "<think>why</think>false", "must end"),
        (BOOL, "think", "false", "must end"),
        (spec("json_object"), "think", "{}", "must end"),
        (spec("regex", "[ab]{2}"), "opened", "</think>ab", "must end"),
        (spec("choice", ["ja", "nein"]), "opened", "</think>nein", "must end"),
        (BOOL, "harmony", "<|channel|>final<|message|>true", "must end"),
        (BOOL, "harmony", "true", "no"),
    ],
    ids=str,
)
def test_only_the_answer_after_the_reasoning_is_constrained(compiler, what, reasoning, text, expected):
    assert outcome(compiler, answer_grammar(what, None, reasoning), text) == expected


def test_a_forced_call_of_harmony_ends_with_its_arguments(compiler):
    forced = tool_format(TOOLS, NAMED, "openai")
    text = '<|channel|>commentary to=functions.g <|constrain|>json<|message|>{"name": "a", "age": 1}'
    assert outcome(compiler, answer_grammar(None, forced, None), text) == "must end"
