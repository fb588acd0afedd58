"""Prompts become token ids, or one line that says why not."""

from __future__ import annotations

import pytest

from peagle_jax.serve.prompt import PromptError, encode, longest_token, render_chat
from tests.serve.doubles import EOS, TOKENIZER, byte_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def test_messages_are_rendered_up_to_where_the_answer_begins():
    assert render_chat(TOKENIZER, MESSAGES) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def test_a_template_may_read_names_that_this_function_has_too():
    tokenizer = byte_tokenizer("{{ tokenizer }}{{ options }}")
    assert render_chat(tokenizer, MESSAGES, tokenizer="a", options="b") == "ab"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the model has no chat template"),
        ("{{ raise_exception('no\nway') }}", "refused the messages: no"),
        ("{{ raise_exception('') }}", "refused the messages: TemplateError"),
        ("{{ messages + 1 }}", "refused the messages: can only concatenate list"),
        ("{{ messages[0].content.nothing.more }}", "refused the messages: "),
        ("{% if %}", "refused the messages: "),
        ("{{ raise_exception('x' * 9999) }}", "refused the messages: " + "x" * 200),
    ],
)
def test_a_template_that_is_absent_or_raises_is_one_line(template, words):
    with pytest.raises(PromptError) as error:
        render_chat(byte_tokenizer(template), MESSAGES)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_a_text_longer_than_the_tokenizer_was_made_for_gives_no_warning(caplog, capfd):
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 3
    assert len(encode(tokenizer, "x" * 10, special=True)) == 10
    out, err = capfd.readouterr()
    assert (out, err, caplog.records) == ("", "", [])


def test_a_text_that_the_tokenizer_refuses_is_one_line():
    with pytest.raises(PromptError, match="tokenizer refused the prompt: "):
        encode(TOKENIZER, "\ud800", special=False)


def test_the_longest_token_is_measured_with_the_special_ones():
    assert longest_token(TOKENIZER) == len("<|start|>") > len(EOS)
