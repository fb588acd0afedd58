"""Free text with constrained parts, in both of vLLM's spellings."""

import json

import pytest
from tokenizers import AddedToken

from peagle_jax.serve.grammar import GrammarCompiler, GrammarSpec
from peagle_jax.serve.structural_tag import structural_tag_lark
from tests.serve.doubles import byte_tokenizer

TOKENIZER = byte_tokenizer()
TOKENIZER.add_tokens([AddedToken(t, special=False) for t in ("<call>", "</call>")])
BOOL = {"type": "json_schema", "json_schema": {"type": "boolean"}}
ANY = {"type": "any_text"}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, len(TOKENIZER))


def takes(compiler, value, text: str) -> bool:
    """Whether the text is a whole answer."""
    matcher = compiler.compile(GrammarSpec("structural_tag", json.dumps(value)))
    try:
        tokens = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
        taken = matcher.advance(tokens)
    except ValueError:
        return False
    return matcher.finished and taken >= len(tokens) - 1  # a grammar that must end needs no end of text


def const(value):
    return {"type": "const_string", "value": value}


def tag(begin, end, content=BOOL):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def form(kind, **fields):
    return {"type": "structural_tag", "format": {"type": kind, **fields}}


STRUCTURES = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=f>", "schema": {"type": "boolean"}, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "integer"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
TRIGGERED = dict(triggers=["<call>"], tags=[tag("<call>f:", "</call>"), tag("<call>g:", "</call>")])
SEPARATED = dict(tags=[tag("f:", ";"), tag("g:", ";")], separator=" ")


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        (
            STRUCTURES,
            ["", "text", "a <function=f>true</function> b <function=g>-12</function>"],
            ["<function=h>", "<function=f>1</function>", "<function=g>1"],
        ),
        (
            form("triggered_tags", **TRIGGERED),
            ["", "x", "x<call>f:true</call>y<call>g:false</call>"],
            ["<call>h:", "<call>f:1</call>"],
        ),
        (
            form("triggered_tags", **TRIGGERED, at_least_one=True),
            ["<call>f:true</call>", "<call>f:true</call> x <call>g:true</call>"],
            ["", "x"],
        ),
        (
            form("triggered_tags", **TRIGGERED, stop_after_first=True),
            ["", "x", "x<call>f:true</call>"],
            ["<call>f:true</call> x"],
        ),
        (
            form("tags_with_separator", **SEPARATED),
            ["", "f:true;", "f:true; g:false;"],
            ["f:true;g:true;", "x"],
        ),
        (
            form("tags_with_separator", **SEPARATED, at_least_one=True, stop_after_first=True),
            ["f:true;"],
            ["", "f:true; g:true;"],
        ),
        (
            form("sequence", elements=[ANY, const("END"), {"type": "regex", "pattern": "[a/]+"}]),
            ["ENDa", "xEN END/a"],
            ["END", "a", "xENDb"],
        ),
        (form("sequence", elements=[tag("<call>", "</call>", ANY), BOOL]), ["<call>hi</call>true"], ["true"]),
        (
            form("sequence", elements=[tag("", "--</call>", ANY), const("!")]),
            ["hi - --</call>!"],
            ["hi</call>!"],
        ),
        (form("or", elements=[const("ja"), const(""), BOOL]), ["ja", "", "true"], ["nein"]),
        (form("sequence", elements=[const("a"), ANY]), ["a", "abc"], ["b"]),
    ],
    ids=lambda value: str(value)[:70],
)
def test_what_a_tag_takes(compiler, value, good, bad):
    assert [t for t in good if not takes(compiler, value, t)] == []
    assert [t for t in bad if takes(compiler, value, t)] == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "'structures' must be a list"),
        ({"structures": [{"begin": "<a>", "end": ""}]}, "'triggers' must be a list"),
        ({"structures": [{"begin": 3, "end": ""}], "triggers": ["<"]}, "'begin' must be a str"),
        (STRUCTURES | {"triggers": ["<fn"]}, "no trigger starts '<function=f>'"),
        (form("wizardry"), "'wizardry' is not supported; expected one of any_text"),
        (form("sequence", elements=[]), "'elements' must be a list that is not empty"),
        (form("tag", begin="a", end="b"), "'content' must be a dict"),
    ],
    ids=str,
)
def test_what_is_missing_is_named_in_one_line(value, words):
    with pytest.raises(ValueError, match=words) as error:
        structural_tag_lark(value, [])
    assert "\n" not in str(error.value)


def test_a_special_token_that_llguidance_cannot_name_is_refused():
    with pytest.raises(ValueError, match=r"special token '\[CALL\]' cannot be part"):
        structural_tag_lark(form("const_string", value="a[CALL]"), ["[CALL]"])
