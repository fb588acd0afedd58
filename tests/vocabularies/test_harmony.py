"""gpt-oss's format against OpenAI's own encoder and parser (openai-harmony)."""

from __future__ import annotations

import base64
import datetime
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.serve.harmony import HarmonyParser
from peagle_jax.serve.token_text import TokenText
from tests.vocabularies.conftest import ALL, streamed
from tests.vocabularies.test_answers import arguments, words
from tests.vocabularies.test_prompts import (
    AGAIN,
    ANSWER,
    ARGUMENTS,
    PARAMETERS,
    RESULT,
    SENT,
    SYSTEM,
    THOUGHT,
    TOOL,
    USER,
    prompt,
)

pytestmark = pytest.mark.vocabularies
harmony = pytest.importorskip(
    "openai_harmony", reason="openai-harmony is not installed; see `make vocabularies`"
)
Message, Role = harmony.Message, harmony.Role


@pytest.fixture(scope="module")
def encoding(tmp_path_factory):
    """OpenAI's encoding, given its file, which it would download: the vocabulary's own spellings."""
    folder = tmp_path_factory.mktemp("encodings")
    spelled = TokenText(ALL["gpt-oss"].tokenizer)
    lines = (base64.b64encode(spelled.bytes(i)) + b" %d\n" % i for i in range(199998))
    (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        yield harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def said(text, channel, recipient=None, content_type=None):
    message = Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)
    message = message.with_recipient(recipient) if recipient else message
    return message.with_content_type(content_type) if content_type else message


def asked(message):
    return Message.from_role_and_content(Role.USER, message["content"])


def conversation(messages, instructions=None, parameters=None):
    """A conversation as OpenAI's library is told of it, with today's date, as the template has it."""
    system = harmony.SystemContent.new().with_conversation_start_date(datetime.date.today().isoformat())
    developer = harmony.DeveloperContent.new()
    if instructions:
        developer = developer.with_instructions(instructions)
    if parameters:
        tool = harmony.ToolDescription.new("get_weather", "The weather", parameters=parameters)
        developer = developer.with_function_tools([tool])
    first = [Message.from_role_and_content(Role.SYSTEM, system)]
    if instructions or parameters:
        first.append(Message.from_role_and_content(Role.DEVELOPER, developer))
    return harmony.Conversation.from_messages([*first, *messages])


SPELLED = json.dumps(ARGUMENTS, ensure_ascii=False)
CALLED = [
    said(THOUGHT["reasoning_content"], "analysis"),
    said(
        json.dumps(ARGUMENTS, ensure_ascii=False), "commentary", "functions.get_weather", "<|constrain|>json"
    ),
    Message.from_author_and_content(harmony.Author.new(Role.TOOL, "functions.get_weather"), RESULT["content"])
    .with_channel("commentary")
    .with_recipient("assistant"),
]

# Where the template departs from OpenAI's encoder: the template's text, OpenAI's.
BEHIND_INSTRUCTIONS = (f"{SYSTEM['content']}\n\n<|end|>", f"{SYSTEM['content']}<|end|>")
BEHIND_A_DEFAULT = ('"C" | "F", // default: C,\n', '"C" | "F", // default: C\n')
CONTENT_TYPE = ("commentary json<|message|>", "commentary <|constrain|>json<|message|>")
RESULT_QUOTED = (json.dumps(RESULT["content"], ensure_ascii=False), RESULT["content"])
PLAIN = {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}}}

CASES = {
    "plain": (conversation([asked(USER)]), [USER], None, []),
    "turns": (
        conversation(
            [asked(USER), said("thought", "analysis"), said(ANSWER["content"], "final"), asked(AGAIN)]
        ),
        [USER, ANSWER | THOUGHT, AGAIN],
        None,
        [],
    ),
    "plain tools": (conversation([asked(USER)], None, PLAIN), [USER], PLAIN, []),
    "instructions": (
        conversation([asked(USER)], SYSTEM["content"]),
        [SYSTEM, USER],
        None,
        [BEHIND_INSTRUCTIONS],
    ),
    "both": (
        conversation([asked(USER)], SYSTEM["content"], PARAMETERS),
        [SYSTEM, USER],
        PARAMETERS,
        [BEHIND_A_DEFAULT],
    ),
    "call": (
        conversation([asked(USER), *CALLED], SYSTEM["content"], PARAMETERS),
        [SYSTEM, USER, SENT | THOUGHT, RESULT],
        PARAMETERS,
        [BEHIND_A_DEFAULT, CONTENT_TYPE, RESULT_QUOTED],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_is_openais_but_for_what_the_template_writes_differently(encoding, case):
    theirs, messages, parameters, differences = CASES[case]
    tools = [TOOL | {"function": TOOL["function"] | {"parameters": parameters}}] if parameters else []
    made = prompt(ALL["gpt-oss"], messages, tools=tools)
    text = made.text
    for own, official in differences:
        assert text.count(own) == 1
        text = text.replace(own, official)
    expected = encoding.render_conversation_for_completion(theirs, Role.ASSISTANT)
    assert ALL["gpt-oss"].ids(text) == expected
    assert differences or list(made.ids) == expected


def test_special_tokens_and_stops_are_those_of_the_vocabulary(encoding):
    vocabulary = ALL["gpt-oss"]
    for name in (
        "<|start|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ):
        assert encoding.encode(name, allowed_special="all") == vocabulary.ids(name)
    assert set(encoding.stop_tokens_for_assistant_actions()) <= set(vocabulary.eos_token_ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=100))
def test_text_has_the_same_tokens(encoding, text):
    assert encoding.encode(text, disallowed_special=()) == ALL["gpt-oss"].ids(text) or "<|" in text


SPOKEN = st.tuples(st.sampled_from(["analysis", "commentary", "final"]), words)
HEADERS = (
    " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    " to=functions.get_weather<|channel|>commentary json<|message|>",
    "<|channel|>analysis to=functions.get_weather code<|message|>",
)
CALLS = st.none() | st.tuples(st.sampled_from(HEADERS), arguments.map(json.dumps))


@settings(max_examples=100, deadline=None)
@given(spoken=st.lists(SPOKEN, max_size=4), call=CALLS)
def test_an_answer_is_read_as_openais_parser_reads_it(encoding, spoken, call):
    parts = [f"<|channel|>{channel}<|message|>{text}" for channel, text in spoken]
    if call is not None:
        parts.append("".join(call))
    text = "<|end|><|start|>assistant".join(parts) + ("<|call|>" if call else "<|return|>") * bool(parts)
    ids = ALL["gpt-oss"].ids(text)
    theirs = encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT) if ids else []
    delta = streamed(ALL["gpt-oss"].tokenizer, ids, HarmonyParser(), special=True)

    def joined(*channels):
        found = [m for m in theirs if m.recipient is None and m.channel in channels]
        return "\n".join(filter(None, (m.content[0].text for m in found)))

    assert (delta.reasoning, delta.content) == (joined("analysis"), joined("commentary", "final"))
    calls = [m for m in theirs if m.recipient is not None]
    assert [f"functions.{c.name}" for c in delta.tool_calls] == [m.recipient for m in calls]
    assert [json.loads(c.arguments) for c in delta.tool_calls] == [
        json.loads(m.content[0].text) for m in calls
    ]
    assert len(calls) == (call is not None)


@pytest.mark.parametrize("size", range(1, 60))
def test_an_answer_that_is_cut_anywhere_is_a_beginning_of_the_whole(encoding, size):
    text = (
        "<|channel|>analysis<|message|>Rain? 🦅 naïve.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        "<|channel|>final<|message|>It rains in 東京.<|return|>"
    )
    ids = ALL["gpt-oss"].ids(text)[:size]
    parser = harmony.StreamableParser(encoding, Role.ASSISTANT)
    for token in ids:
        parser.process(token)
    told = [(m.channel, m.content[0].text) for m in parser.messages]
    if parser.current_content:
        told.append((parser.current_channel, parser.current_content))
    delta = streamed(ALL["gpt-oss"].tokenizer, ids, HarmonyParser(), special=True)
    # Ours shows what is there of a character, as decoding at once does.
    assert delta.reasoning.removesuffix("\ufffd") == "".join(
        text for channel, text in told if channel == "analysis"
    )
    assert delta.content.removesuffix("\ufffd") == "\n".join(
        text for channel, text in told if channel != "analysis"
    )
