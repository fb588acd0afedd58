"""Harmony's channels: reasoning, content and calls, in one piece or in many."""

import pytest

from peagle_jax.serve.harmony import MARKERS, HarmonyParser
from tests.serve.scripts import counter, every_cut, fuzz

ANALYSIS = "<|channel|>analysis<|message|>I need the weather.<|end|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Bern"}<|call|>'
)
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"


def make(calls=True):
    return lambda: HarmonyParser(calls, counter())


def test_three_messages_in_one_block_go_three_ways():
    delta = every_cut(make(), ANALYSIS + CALL + FINAL)
    assert (delta.reasoning, delta.content) == ("I need the weather.", "It rains.")
    (call,) = delta.tool_calls
    assert (call.name, call.arguments, call.index) == ("weather", '{"city": "Bern"}', 0)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "names"),
    [
        (FINAL.removeprefix("<|start|>assistant"), "", "It rains.", []),
        (ANALYSIS + FINAL.removesuffix("<|return|>"), "I need the weather.", "It rains.", []),
        (ANALYSIS.removesuffix("<|end|>"), "I need the weather.", "", []),
        (ANALYSIS + CALL.removesuffix("<|call|>"), "I need the weather.", "", ["weather"]),
        (" to=functions.f<|channel|>commentary<|message|>{}<|call|>", "", "", ["f"]),
        ("<|channel|>commentary<|message|>First I look.<|end|>" + CALL, "", "First I look.", ["weather"]),
        ("<|channel|>analysis to=python<|message|>1+1<|call|>", "1+1", "", []),
        (ANALYSIS + "<|start|>assistant" + ANALYSIS, "I need the weather.\nI need the weather.", "", []),
        (CALL + CALL, "", "", ["weather", "weather"]),
        ("<|channel|>final<|message|>a<|start|>assistant<|channel|>final<|message|>b", "", "a\nb", []),
    ],
)
def test_messages(text, reasoning, content, names):
    delta = every_cut(make(), text)
    assert (delta.reasoning, delta.content) == (reasoning, content)
    assert [c.name for c in delta.tool_calls] == names


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("No channels at all.", "No channels at all."),
        ("assistant is a word", "assistant is a word"),
        (CALL.replace('"Bern"}', "Be"), '{"city": Be'),
        (CALL.replace('{"city": "Bern"}<|call|>', '{"city": "Be'), '{"city": "Be'),
        ("<|channel|>final<|end|>" + FINAL, "It rains."),
        ("<|channel|>final<|message|>a<|channel|>b", "ab"),
        (ANALYSIS + "stray words", "stray words"),
        ("<|channel|>commentary to=functions.f", " to=functions.f"),
    ],
)
def test_what_does_not_fit_is_shown_without_special_tokens(text, content):
    delta = every_cut(make(), text)
    assert delta.content == content and delta.tool_calls == ()


def test_calls_are_content_when_no_tool_may_be_called():
    delta = every_cut(make(calls=False), ANALYSIS + CALL)
    assert delta.content == '{"city": "Bern"}' and delta.tool_calls == ()


def test_random_messages_never_show_a_special_token_and_lose_no_words():
    words = [*MARKERS, "assistant", "final", "analysis", " to=functions.f ", "{}", "xyz", " ", ANALYSIS, CALL]
    for text, delta in fuzz(make(), words):
        shown = delta.content + delta.reasoning
        assert not any(marker in shown for marker in MARKERS)
        in_channel_names = text.count("<|channel|>xyz") + text.count("<|start|>xyz")
        assert in_channel_names or shown.count("xyz") >= text.count("xyz") - 9 * text.count("<|message|>")
