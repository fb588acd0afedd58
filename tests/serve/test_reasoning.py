"""Reasoning and answer come apart in the same way however the text is cut."""

import pytest

from peagle_jax.serve.parsing import PlainParser
from peagle_jax.serve.reasoning import ThinkParser, is_opened
from peagle_jax.serve.tools import HermesParser
from tests.serve.scripts import counter, every_cut, fuzz


def make(opened=False):
    return lambda: ThinkParser(PlainParser(), opened)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nwhy\n\nso </think>\n\nyes \n", False, "why\n\nso", "yes \n"),
        ("\n <think>why</think>yes", False, "why", "yes"),
        ("why\n</think>\n\nyes", True, "why", "yes"),
        ("\n\n</think>\n\nyes", True, "", "yes"),
        ("cut off in the mid<", True, "cut off in the mid<", ""),
        ("<think>cut off", False, "cut off", ""),
        ("no thought < at all", False, "", "no thought < at all"),
        ("<thin", False, "", "<thin"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("", False, "", ""),
        ("\n", False, "", "\n"),
    ],
)
def test_the_two_parts(text, opened, reasoning, content):
    delta = every_cut(make(opened), text)
    assert (delta.reasoning, delta.content) == (reasoning, content)


def test_random_texts_lose_nothing_but_markers_and_blanks():
    words = ["<think>", "</think>", "<", "think>", " ", "\n", "a", "b"]
    for opened in (False, True):
        for text, delta in fuzz(make(opened), words):
            for letter in "ab":
                assert (delta.reasoning + delta.content).count(letter) == text.count(letter)


def test_the_last_words_of_reasoning_survive_a_call_in_the_same_piece():
    """The end marker and a call in one delta."""
    text = '<think>so I call</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    delta = every_cut(lambda: ThinkParser(HermesParser(counter())), text)
    assert delta.reasoning == "so I call" and delta.content == ""
    assert [c.name for c in delta.tool_calls] == ["f"]


def test_calls_inside_reasoning_are_thoughts():
    text = 'a <tool_call>{"name": "f"}</tool_call> b</think>c'
    delta = every_cut(lambda: ThinkParser(HermesParser(counter()), opened=True), text)
    assert delta.tool_calls == () and "<tool_call>" in delta.reasoning and delta.content == "c"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_template_that_opens_reasoning_is_seen(prompt, expected):
    assert is_opened(prompt) is expected
