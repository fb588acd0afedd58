"""Reasoning and calls out of answers that come token by token, spelled by the models' own templates."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.serve.chat_parser import chat_parser, needs_special_tokens
from peagle_jax.serve.detokenize import Answer
from peagle_jax.serve.parsing import ChatDelta
from tests.vocabularies.conftest import ALL, streamed
from tests.vocabularies.test_prompts import TOOL, USER

pytestmark = pytest.mark.vocabularies

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=40).map(str.strip)
"""Without the start of a marker, and without white space at the ends, which belongs to the markers."""
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
arguments = st.dictionaries(st.text(max_size=8), values, max_size=3)


def answer(vocabulary, message, **template):
    """(prompt, ids) of a message as the template writes it after the question, without its close."""
    tokenizer = vocabulary.tokenizer
    options = {"tokenize": False, "tools": [TOOL]} | template
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template([USER, message], **options)
    assert whole.startswith(prompt)
    ids = vocabulary.ids(whole[len(prompt) :])
    end = max(i for i, token in enumerate(ids) if token in vocabulary.eos_token_ids)
    return prompt, ids[:end]


def read(vocabulary, prompt, ids):
    """What a client gets, with the parsers that the server chooses."""
    names = vocabulary.served.tool_parser, vocabulary.served.reasoning_parser
    parser = chat_parser(*names, prompt, True, tools=[TOOL])
    return streamed(vocabulary.tokenizer, ids, parser, special=needs_special_tokens(*names))


def calling(*found):
    calls = [{"type": "function", "function": {"name": "get_weather", "arguments": a}} for a in found]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@settings(max_examples=60, deadline=None)
@given(thought=words, said=words, calls=st.lists(arguments, max_size=2), thinking=st.booleans())
def test_qwens_reasoning_text_and_calls_are_told_apart(thought, said, calls, thinking):
    vocabulary = ALL["qwen3"]
    message = calling(*calls) | {"content": said} if calls else {"role": "assistant", "content": said}
    thought = thought if thinking else ""
    prompt, ids = answer(
        vocabulary,
        message | {"reasoning_content": thought},
        **({} if thinking else {"enable_thinking": False}),
    )
    delta = read(vocabulary, prompt, ids)
    text = vocabulary.tokenizer.backend_tokenizer.normalizer.normalize_str
    assert (delta.reasoning, delta.content) == (text(thought), text(said))
    found = [json.loads(call.arguments) for call in delta.tool_calls]
    assert found == json.loads(text(json.dumps(calls, ensure_ascii=False)))
    assert {call.name for call in delta.tool_calls} <= {"get_weather"}


@settings(max_examples=60, deadline=None)
@given(
    said=words,
    city=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=20),
    days=st.none() | st.lists(st.integers(), max_size=3),
)
def test_qwen_coders_text_and_calls_are_told_apart(said, city, days):
    vocabulary = ALL["qwen3-coder"]
    found = {"city": city} | ({} if days is None else {"days": days})
    prompt, ids = answer(vocabulary, calling(found, found) | {"content": said})
    delta = read(vocabulary, prompt, ids)
    text = vocabulary.tokenizer.backend_tokenizer.normalizer.normalize_str
    assert (delta.reasoning, delta.content) == ("", text(said))
    calls = [(call.name, json.loads(call.arguments)) for call in delta.tool_calls]
    assert calls == [("get_weather", found | {"city": text(city)})] * 2


@settings(max_examples=60, deadline=None)
@given(thought=words, said=words)
def test_gpt_oss_reasoning_and_text_are_told_apart(thought, said):
    vocabulary = ALL["gpt-oss"]
    message = {"role": "assistant", "content": said, "thinking": thought}
    delta = read(vocabulary, *answer(vocabulary, message))
    assert delta == ChatDelta(said, thought)


@settings(max_examples=60, deadline=None)
@given(thought=words.filter(bool), found=arguments)
def test_gpt_oss_calls_are_found_behind_its_reasoning(thought, found):
    vocabulary = ALL["gpt-oss"]
    delta = read(vocabulary, *answer(vocabulary, calling(found) | {"thinking": thought}))
    assert (delta.reasoning, delta.content) == (thought, "")
    assert [(call.name, json.loads(call.arguments)) for call in delta.tool_calls] == [("get_weather", found)]


@pytest.mark.parametrize("name", ["llama3", "llama3.1", "llama3.1-tools", "qwen3-instruct-2507"])
def test_the_text_of_models_without_reasoning_is_content(name):
    text = "It rains: naïve 🦅, <b>x</b>.\n\n```py\nif a < 1: pass\n```"
    assert read(ALL[name], "", ALL[name].ids(text)) == ChatDelta(text)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_no_part_of_an_answer_waits_for_its_end(name):
    """Text is told at once; at most the end that may begin a marker is kept."""
    vocabulary = ALL[name]
    thought, said = "First this, then that.", "It rains in Paris and in Rome."
    message = {"role": "assistant", "content": said, "reasoning_content": thought, "thinking": thought}
    prompt, ids = answer(vocabulary, message)
    names = vocabulary.served.tool_parser, vocabulary.served.reasoning_parser
    parser = chat_parser(*names, prompt, True)
    stream = Answer(vocabulary.tokenizer, skip_special_tokens=not needs_special_tokens(*names))
    told = [parser.feed(stream.add([token]).text) for token in ids]
    assert sum(bool(delta) for delta in told) >= len(vocabulary.ids(thought)) + len(vocabulary.ids(said)) - 2
    whole = sum(told, ChatDelta()) + parser.finish()
    assert (whole.reasoning, whole.content) == (thought, said)
