"""Prompts as the endpoints render them, against the tokenizer's own apply_chat_template."""

from __future__ import annotations

import json

import pytest

from peagle_jax.serve.chat_protocol import ChatRequest
from tests.vocabularies.conftest import ALL

pytestmark = pytest.mark.vocabularies

SYSTEM = {"role": "system", "content": "Be brief: naïve 🦅."}
USER = {"role": "user", "content": "Weather in 東京?  "}
ANSWER = {"role": "assistant", "content": "It rains.\n\n☔"}
AGAIN = {"role": "user", "content": "<b>And</b> in Paris?\n"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city"},
        "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS},
}
ARGUMENTS = {"city": "東京", "days": [1, 2], "unit": "C"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": "☔"}'}


def call(arguments):
    """An assistant's message with a call; clients send the arguments as text, templates read an object."""
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


SENT, READ = call(json.dumps(ARGUMENTS)), call(ARGUMENTS)
THOUGHT = {"reasoning_content": "I need the weather."}
BOTH = THOUGHT | {"thinking": "I need the weather."}

# What the client sends, what the template reads, the request's options and the template's.
CASES = {
    "one": ([USER], [USER], {}, {}),
    "system": ([SYSTEM, USER], [SYSTEM, USER], {}, {}),
    "turns": ([SYSTEM, USER, ANSWER, AGAIN], [SYSTEM, USER, ANSWER, AGAIN], {}, {}),
    "tools": ([SYSTEM, USER], [SYSTEM, USER], {"tools": [TOOL]}, {"tools": [TOOL]}),
    "call": ([USER, SENT, RESULT], [USER, READ, RESULT], {"tools": [TOOL]}, {"tools": [TOOL]}),
    "thought": (
        [USER, SENT | THOUGHT, RESULT],
        [USER, READ | BOTH, RESULT],
        {"tools": [TOOL]},
        {"tools": [TOOL]},
    ),
    "answered": (
        [USER, SENT | THOUGHT, RESULT, ANSWER | THOUGHT, AGAIN],
        [USER, READ | BOTH, RESULT, ANSWER | BOTH, AGAIN],
        {"tools": [TOOL]},
        {"tools": [TOOL]},
    ),
    "quiet": (
        [USER],
        [USER],
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
    ),
    "effort": ([USER], [USER], {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    "continued": (
        [USER, ANSWER],
        [USER, ANSWER],
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
}


def prompt(vocabulary, messages, **options):
    body = ChatRequest.model_validate({"messages": messages} | options)
    return vocabulary.served.chat_prompt(body)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ALL)
def test_a_prompt_is_what_the_template_makes_of_the_messages(name, case):
    vocabulary = ALL[name]
    sent, read, options, own = CASES[case]
    tokenizer = vocabulary.tokenizer
    own = {"add_generation_prompt": True, "tools": None, "documents": None} | own
    made = prompt(vocabulary, sent, **options)
    assert list(made.ids) == tokenizer.apply_chat_template(read, tokenize=True, return_dict=False, **own)
    assert made.text == tokenizer.apply_chat_template(read, tokenize=False, **own)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-instruct-2507", "qwen3-coder", "gpt-oss", "llama3.1-tools"])
def test_a_templates_tools_and_calls_are_in_the_prompt(name):
    text = prompt(ALL[name], [SYSTEM, USER, SENT, RESULT], tools=[TOOL]).text
    assert text.count("get_weather") >= 2 and "A city" in text and "東京" in text and "☔" in text


def test_a_model_that_thought_before_its_call_reads_its_thought_again():
    for name in ("qwen3", "gpt-oss"):
        for spelling in ("reasoning", "reasoning_content"):
            sent = SENT | {spelling: "I need the weather."}
            assert "I need the weather." in prompt(ALL[name], [USER, sent, RESULT], tools=[TOOL]).text


def test_a_thought_and_text_beside_a_call_are_not_refused():
    said = SENT | THOUGHT | {"content": "Let me look."}
    for name in ("qwen3", "qwen3-coder", "gpt-oss"):
        assert "Let me look." in prompt(ALL[name], [USER, said, RESULT], tools=[TOOL]).text


def test_special_tokens_of_a_prompt_are_single_and_its_first_comes_once(vocabulary):
    made = prompt(vocabulary, [SYSTEM, USER, ANSWER, AGAIN])
    bos = vocabulary.tokenizer.bos_token_id
    if vocabulary.name.startswith("llama"):
        assert made.ids[0] == bos and made.ids.count(bos) == 1
    named = vocabulary.tokenizer.get_added_vocab()
    for name, token in named.items():
        assert made.ids.count(token) == made.text.count(name)
