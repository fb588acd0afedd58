"""Tools and reasoning through a format of the tests' own: what clients get of the pieces of an answer."""

from __future__ import annotations

import json

import pytest

from tests.serve.conftest import chat, running, user
from tests.serve.doubles import END, TOKENIZER, byte_tokenizer
from tests.serve.engine_double import ScriptedEngine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    },
    {"type": "function", "function": {"name": "time"}},
]


CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
)
SAID = {
    "both": f"<think>thinking hard</think>\nok sure {CALLS}",
    "plain": "just text",
    "thought": "<think>thinking and thinking",
}
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture(scope="module")
def server():
    engine = ScriptedEngine(
        lambda r: [
            *TOKENIZER.encode(SAID[TOKENIZER.decode(r.prompt_ids).split("user\n")[-1].split("<")[0]]),
            END,
        ],
        width=5,
    )
    with running(engine, **PARSERS, max_model_len=600) as server:
        yield server


def test_calls_reasoning_and_content_come_apart(server):
    answer = chat(server, messages=user("both"), tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "ok sure"
    assert choice.message.reasoning_content == "thinking hard"
    calls = choice.message.tool_calls
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("weather", {"city": "Paris"}),
        ("time", {}),
    ]
    assert len({c.id for c in calls}) == 2
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens <= answer.usage.completion_tokens


def test_a_stream_puts_together_to_the_whole(server):
    whole = chat(server, messages=user("both"), tools=TOOLS).choices[0].message
    content, reasoning, calls, finish = "", "", {}, None
    for chunk in chat(server, messages=user("both"), tools=TOOLS, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
        for call in choice.delta.tool_calls or []:
            known = calls.setdefault(call.index, {"name": "", "arguments": "", "id": None})
            known["id"] = call.id or known["id"]
            known["name"] += call.function.name or ""
            known["arguments"] += call.function.arguments or ""
        finish = choice.finish_reason
    assert (content, reasoning, finish) == (whole.content, whole.reasoning_content, "tool_calls")
    assert [(c["name"], c["arguments"]) for c in calls.values()] == [
        (c.function.name, c.function.arguments) for c in whole.tool_calls
    ]
    assert all(c["id"] for c in calls.values())


def test_the_clients_own_stream_helper_reads_it(server):
    with server.openai.chat.completions.stream(model="tiny", messages=user("both"), tools=TOOLS) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.content == "ok sure"
    assert message.tool_calls[0].function.name == "weather"


def test_one_call_at_a_time_if_the_client_says_so(server):
    choice = chat(server, messages=user("both"), tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert [c.function.name for c in choice.message.tool_calls] == ["weather"]


def test_reasoning_is_left_out_if_the_client_says_so(server):
    message = (
        chat(server, messages=user("both"), tools=TOOLS, extra_body={"include_reasoning": False})
        .choices[0]
        .message
    )
    assert message.content == "ok sure"
    assert not hasattr(message, "reasoning_content")


def test_an_answer_that_is_all_reasoning_counts_as_such(server):
    answer = chat(server, messages=user("thought"), max_tokens=20)
    assert answer.choices[0].message.content is None
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 20


def test_a_forced_call_is_a_grammar_and_ends_as_openai_says(server):
    def tags():
        spec = server.engine.seen[-1].structured
        return spec.kind, spec.value.count('"begin": "<tool_call>')

    chat(server, messages=user("plain"), tools=TOOLS, tool_choice="required")
    assert tags() == ("structural_tag", 2)
    named = {"type": "function", "function": {"name": "time"}}
    answer = chat(server, messages=user("both"), tools=TOOLS, tool_choice=named)
    assert tags() == ("structural_tag", 1)
    assert answer.choices[0].finish_reason == "stop"
    chat(server, messages=user("plain"), tools=TOOLS)
    assert server.engine.seen[-1].structured is None
    both = server.post(
        "/v1/chat/completions",
        messages=user("plain"),
        tools=TOOLS,
        tool_choice="required",
        response_format={"type": "json_object"},
    )
    assert (both.status_code, both.json()["error"]["param"]) == (400, "response_format")


def test_calls_stay_text_where_the_client_wants_none(server):
    answer = chat(server, messages=user("both"), tools=TOOLS, tool_choice="none").choices[0]
    assert answer.message.tool_calls is None
    assert answer.finish_reason == "stop"
    assert answer.message.content == f"ok sure {CALLS}"


@pytest.mark.parametrize("width", [1, 2, 3, 7, 100])
def test_rounds_of_any_width_give_the_same_parts_and_counts(serve, width):
    engine = ScriptedEngine(lambda r: [*TOKENIZER.encode(SAID["both"]), END], width=width)
    answer = chat(serve(engine, **PARSERS, max_model_len=600), tools=TOOLS)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("ok sure", "thinking hard")
    assert len(message.tool_calls) == 2
    reasoning = TOKENIZER.encode("<think>thinking hard</think>\n")
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(reasoning)


def test_templates_see_tools_calls_and_results(serve):
    template = "{{ tools | tojson }}|{% for m in messages %}{{ m | tojson }};{% endfor %}|{{ mood }}"
    server = serve(
        ScriptedEngine(lambda r: [END]),
        tokenizer=byte_tokenizer(template),
        **PARSERS,
        max_model_len=2000,
        chat_template_kwargs={"mood": "calm"},
    )
    call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": '{"zone": 1}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]
    chat(server, messages=messages, tools=TOOLS)
    tools, seen, mood = TOKENIZER.decode(server.engine.seen[-1].prompt_ids).split("|")
    first, second = (json.loads(m) for m in seen.split(";")[:-1])
    assert json.loads(tools) == TOOLS
    assert first["tool_calls"][0]["function"] == {"name": "time", "arguments": {"zone": 1}}
    assert second == {"role": "tool", "content": "noon", "tool_call_id": "c1"}
    assert mood == "calm"
    chat(server, messages=messages, tools=TOOLS, extra_body={"chat_template_kwargs": {"mood": "grave"}})
    assert TOKENIZER.decode(server.engine.seen[-1].prompt_ids).endswith("|grave")


def test_broken_arguments_of_an_earlier_call_are_refused(server):
    call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": "{"}}
    response = server.post("/v1/chat/completions", messages=[{"role": "assistant", "tool_calls": [call]}])
    assert response.status_code == 400
    assert "expected a JSON object as text" in response.json()["error"]["message"]


def test_a_final_message_can_be_continued(serve):
    server = serve(ScriptedEngine(lambda r: [*TOKENIZER.encode(" more"), END]))
    messages = [*user("hi"), {"role": "assistant", "content": "Once"}]
    options = {"continue_final_message": True, "echo": True}
    answer = chat(server, messages=messages, extra_body=options)
    assert TOKENIZER.decode(server.engine.seen[-1].prompt_ids).endswith("<|start|>assistant\nOnce")
    assert answer.choices[0].message.content == "Once more"
    streamed = chat(server, messages=messages, extra_body=options, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == "Once more"


def test_a_template_of_the_request_needs_the_servers_trust(serve):
    server = serve(ScriptedEngine(lambda r: [END]), trust_request_chat_template=True)
    chat(server, extra_body={"chat_template": "T{{ messages[0].content }}"})
    assert TOKENIZER.decode(server.engine.seen[-1].prompt_ids) == "Thi"
