"""The HTTP contract, read through the official client where it can say it."""

from __future__ import annotations

import json
import threading
import time

import httpx
import openai
import pytest

from peagle_jax.serve.serving import SamplingDefaults
from tests.serve.conftest import CONTEXT, running
from tests.serve.doubles import EOS, ScriptedDecoder, byte_tokenizer

TOKENIZER = byte_tokenizer()
END = TOKENIZER.convert_tokens_to_ids(EOS)
ANSWER = "naïve 🦅 the thing END of <it>"


def says(text: str, **options) -> ScriptedDecoder:
    return ScriptedDecoder(lambda prompt: [*TOKENIZER.encode(text), END], **options)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server():
    with running(says(ANSWER)) as server:
        yield server


def chat(server, **changes):
    return server.openai.chat.completions.create(**({"model": "tiny", "messages": user("hi")} | changes))


def complete(server, **changes):
    return server.openai.completions.create(**({"model": "tiny", "prompt": "hi"} | changes))


# -- answers


def test_chat_renders_the_template_and_answers(server):
    answer = chat(server)
    choice = answer.choices[0]
    prompt = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert server.decoder.seen[-1][0] == TOKENIZER.encode(prompt)
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        ANSWER,
        "stop",
    )
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(prompt))
    assert answer.usage.completion_tokens == len(TOKENIZER.encode(ANSWER)) + 1  # the stop token counts
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_text_parts_are_joined(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat(server, messages=[{"role": "user", "content": parts}])
    assert "user\na\nb<|end|>" in TOKENIZER.decode(server.decoder.seen[-1][0])


def test_chat_may_fill_the_context_and_completions_have_the_usual_default(server):
    chat(server)
    assert len(server.decoder.seen[-1][0]) + server.decoder.seen[-1][2] == CONTEXT
    complete(server)
    assert server.decoder.seen[-1][2] == 16


@pytest.mark.parametrize("prompt", ["hi", ["hi"], TOKENIZER.encode("hi"), [TOKENIZER.encode("hi")]])
def test_completions_take_text_and_ids(server, prompt):
    answer = complete(server, prompt=prompt, max_tokens=100)
    assert server.decoder.seen[-1][0] == TOKENIZER.encode("hi")
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        ANSWER,
        "stop",
    )


@pytest.mark.parametrize("limit", range(1, 9))
def test_exactly_max_tokens_come_and_are_counted(server, limit):
    answer = complete(server, max_tokens=limit)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == limit
    assert answer.choices[0].text == TOKENIZER.decode(TOKENIZER.encode(ANSWER)[:limit])


def test_max_completion_tokens_goes_before_max_tokens(server):
    assert chat(server, max_tokens=9, max_completion_tokens=3).usage.completion_tokens == 3


def test_ignore_eos_and_stop_token_ids_choose_what_stops(server):
    letter = TOKENIZER.encode("v")[0]
    complete(server, extra_body={"ignore_eos": True, "stop_token_ids": [letter]})
    assert server.decoder.seen[-1][3] == {letter}
    answer = complete(server, extra_body={"stop_token_ids": [letter]})
    assert server.decoder.seen[-1][3] == {letter, END}
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("naï", 5)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("END", "naïve 🦅 the thing "),
        (["END", "thing"], "naïve 🦅 the "),
        ("hing END o", "naïve 🦅 the t"),  # over token borders
        ("🦅", "naïve "),
        ("absent", ANSWER),
        ("<it", "naïve 🦅 the thing END of "),
    ],
)
def test_stop_strings_cut_the_text(server, stop, text):
    answer = complete(server, stop=stop, max_tokens=100)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")
    streamed = list(complete(server, stop=stop, max_tokens=100, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == text


def test_sampling_parameters_reach_the_decoder(server):
    complete(server, temperature=0.7, top_p=0.9, seed=-5, extra_body={"top_k": 4, "min_p": 0.1})
    sampling = server.decoder.seen[-1][1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.7,
        0.9,
        4,
        0.1,
        -5,
    )


def test_absent_parameters_take_the_models_defaults(serve):
    server = serve(
        says("x"), defaults=SamplingDefaults.from_generation_config({"temperature": 0.6, "top_k": 20})
    )
    complete(server)
    first = server.decoder.seen[-1][1]
    complete(server, temperature=0)
    second = server.decoder.seen[-1][1]
    assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 1.0)
    assert (second.temperature, second.top_k) == (0.0, 20)
    assert first.seed != second.seed


def test_neutral_values_of_unserved_fields_are_accepted(server):
    chat(
        server,
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logprobs=False,
        logit_bias={},
        response_format={"type": "text"},
        user="me",
        store=False,
        metadata={"a": "b"},
        extra_body={"min_tokens": 0, "repetition_penalty": 1.0, "echo": False, "tools": None, "zzz": 1},
    )


def test_either_served_name_is_the_model_and_so_is_none(server):
    assert chat(server, model="alias").model == "tiny"
    assert server.post("/v1/chat/completions", messages=user("hi")).status_code == 200


# -- streams


def events(response: httpx.Response) -> list[str]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def test_a_chat_stream_has_role_deltas_finish_usage_and_done(server):
    response = server.post(
        "/v1/chat/completions", messages=user("hi"), stream=True, stream_options={"include_usage": True}
    )
    *raw, done = events(response)
    chunks = [json.loads(line) for line in raw]
    assert done == "[DONE]"
    first, *deltas, finish, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in deltas) == ANSWER
    assert all(c["choices"][0]["finish_reason"] is None for c in [first, *deltas])
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(TOKENIZER.encode(ANSWER)) + 1
    assert all(c["usage"] is None for c in chunks[:-1])
    assert {(c["id"], c["object"], c["model"]) for c in chunks} == {
        (first["id"], "chat.completion.chunk", "tiny")
    }


def test_a_stream_has_no_usage_unless_asked(server):
    response = server.post("/v1/completions", prompt="hi", stream=True)
    assert all("usage" not in json.loads(line) for line in events(response)[:-1])


@pytest.mark.parametrize("width", [1, 2, 3, 5, 16])
def test_a_stream_says_what_the_whole_answer_says(serve, width):
    server = serve(says(ANSWER, width=width), k=15)
    for limit in (1, 4, 5, 6, 9, 100):
        whole = chat(server, max_tokens=limit)
        chunks = list(chat(server, max_tokens=limit, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].usage == whole.usage


def test_no_chunk_holds_half_a_character(server):
    chunks = [c.choices[0].delta.content or "" for c in chat(server, stream=True)]
    assert not any("\ufffd" in text for text in chunks)


def test_a_character_cut_by_the_limit_is_shown_alike_in_both_forms(server):
    limit = len(TOKENIZER.encode("naïve ")) + 2
    whole = complete(server, max_tokens=limit).choices[0].text
    streamed = "".join(c.choices[0].text for c in complete(server, max_tokens=limit, stream=True))
    assert whole == streamed
    assert whole.startswith("naïve \ufffd")


def test_text_streams_while_it_is_decoded(serve):
    server = serve(says("x" * 40, width=1, pause=0.01))
    times = []
    for _ in chat(server, stream=True):
        times.append(time.monotonic())
    assert times[-1] - times[0] > 0.2


# -- what else there is


def test_models_health_and_version(server):
    cards = server.openai.models.list().data
    assert [card.id for card in cards] == ["tiny", "alias"]
    assert cards[0].model_extra["max_model_len"] == CONTEXT
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/version").json()["version"]


def test_health_is_503_until_the_engine_is_warm(serve):
    gate = threading.Event()
    server = serve(says("x", warm_up=lambda: gate.wait(10) and None), wait=False)
    response = server.http.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "warming"})
    gate.set()
    deadline = time.monotonic() + 5
    while server.http.get("/health").status_code != 200:
        assert time.monotonic() < deadline


# -- errors


def refused(response: httpx.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert "Traceback" not in response.text
    return error


UNSERVED_CHAT = {
    "n": 2,
    "best_of": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "response_format": {"type": "json_object"},
    "min_tokens": 3,
    "echo": True,
    "modalities": ["text", "audio"],
    "bad_words": ["x"],
    "structured_outputs": {"regex": "a"},
    "continue_final_message": True,
}


@pytest.mark.parametrize("field", UNSERVED_CHAT)
def test_known_fields_that_are_not_served_are_refused_by_name(server, field):
    error = refused(server.post("/v1/chat/completions", messages=user("hi"), **{field: UNSERVED_CHAT[field]}))
    assert error["message"].startswith(f"{field} is not supported here")
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"), [("logprobs", 0), ("suffix", "x"), ("echo", True), ("n", True), ("best_of", 2)]
)
def test_completions_refuse_their_own(server, field, value):
    assert refused(server.post("/v1/completions", prompt="hi", **{field: value}))["param"] == field


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "greater than or equal to 0, found -1"),
        ({"temperature": "hot"}, "temperature", "valid number, found 'hot'"),
        ({"temperature": 1e6}, "temperature", "less than or equal to 100"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"top_k": 1.5}, "top_k", "valid integer"),
        ({"min_p": 2}, "min_p", "less than or equal to 1"),
        ({"seed": 2**70}, "seed", "less than or equal to"),
        ({"seed": "x"}, "seed", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4 stop strings, found 5"),
        ({"stop": [""]}, "stop", "must not be empty"),
        ({"stop": 5}, "stop", "a string or a list of strings"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids", "token id 1000000000 is not in the vocabulary"),
        ({"stop_token_ids": list(range(20))}, "stop_token_ids", "at most 16 are possible, found 21"),
        ({"stop_token_ids": "a"}, "stop_token_ids", "valid list"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream: true"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            None,
            "continuous_usage_stats",
        ),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "field required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role", "at least 1 character"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
            "type 'image_url' are not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content", "parts like"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages", "nobody may not speak"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}]},
            "messages.0.tool_calls",
            "tool_calls is not supported",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content", "valid Unicode"),
    ],
)
def test_wrong_values_are_refused_by_name(server, body, param, words):
    sent = json.dumps({"messages": user("hi")} | body)
    response = server.http.post(
        "/v1/chat/completions", content=sent, headers={"content-type": "application/json"}
    )
    error = refused(response)
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    if param:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([[]], "the prompt is empty"),
        (["a", "b"], "expected one prompt, found 2"),
        ([[1], [2]], "expected one prompt, found 2"),
        ([1, "a"], "a string, a list of token ids"),
        ([1.5], "a string, a list of token ids"),
        ([True], "a string, a list of token ids"),
        ({"a": 1}, "a string, a list of token ids"),
        (None, "a string, a list of token ids"),
        ([-1], "token id -1 is not in the vocabulary"),
        ([10**30], "is not in the vocabulary"),
        ("a\udc80", "expected valid Unicode"),
    ],
)
def test_wrong_prompts_are_refused(server, prompt, words):
    headers = {"content-type": "application/json"}
    error = refused(
        server.http.post("/v1/completions", content=json.dumps({"prompt": prompt}), headers=headers)
    )
    assert words in error["message"]
    assert error["param"] == "prompt"


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(server):
    error = refused(server.post("/v1/completions", prompt="x" * 500))
    assert "500 tokens" in error["message"]
    assert str(CONTEXT) in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_a_prompt_that_leaves_no_room_is_refused_and_one_less_gives_one_token(server):
    assert server.post("/v1/completions", prompt="x" * CONTEXT).status_code == 400
    answer = complete(server, prompt="x" * (CONTEXT - 1), max_tokens=1)
    assert answer.usage.completion_tokens == 1


def test_more_tokens_than_the_context_has_left_are_refused_with_what_is_possible(server):
    error = refused(server.post("/v1/completions", prompt="x" * 50, max_tokens=CONTEXT))
    assert f"at most {CONTEXT - 50}" in error["message"]
    assert refused(server.post("/v1/completions", prompt="x", max_tokens=10**30))["param"] == "max_tokens"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "max_tokens", "seed", "n", "presence_penalty"])
def test_numbers_that_are_not_finite_are_refused(server, field, number):
    response = server.http.post(
        "/v1/completions",
        content=f'{{"prompt": "hi", "{field}": {number}}}',
        headers={"content-type": "application/json"},
    )
    assert refused(response)["param"] == field


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[]",
        b"5",
        b"null",
        b'"text"',
        b'{"prompt": "hi"',
        b"\xff\xfe",
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"prompt": "hi", "temperature": 1' + b"0" * 5000 + b"}",
    ],
)
def test_bodies_that_are_not_a_json_object_are_refused(server, content):
    headers = {"content-type": "application/json"}
    refused(server.http.post("/v1/completions", content=content, headers=headers))


def test_broken_json_is_called_so(server):
    response = server.http.post(
        "/v1/completions", content=b'{"prompt" "hi"}', headers={"content-type": "application/json"}
    )
    error = refused(response)
    assert "not valid JSON" in error["message"]
    assert error["code"] == "invalid_json"


def test_a_body_without_its_content_type_says_which(server):
    response = server.http.post("/v1/completions", content=b'{"prompt": "hi"}')
    assert "Content-Type: application/json" in refused(response)["message"]


def test_another_model_is_404(server):
    error = refused(server.post("/v1/completions", prompt="hi", model="gpt-9"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        chat(server, model="gpt-9")


def test_other_routes_and_methods_have_the_shape_too(server):
    refused(server.http.get("/v1/nothing"), 404)
    refused(server.http.get("/v1/completions"), 405)


def test_a_model_without_a_chat_template_refuses_chat_only(serve):
    server = serve(says("x"), tokenizer=byte_tokenizer(template=None))
    assert "chat template" in refused(server.post("/v1/chat/completions", messages=user("hi")))["message"]
    assert complete(server).choices[0].text == "x"


def test_a_failing_engine_is_a_500_in_shape_and_an_event_in_a_stream(serve):
    server = serve(ScriptedDecoder(lambda p: p * 2, fail=lambda prompt: len(prompt) == 3))
    error = refused(server.post("/v1/completions", prompt="bad"), 500)
    assert error["message"] == "RuntimeError: the accelerator is on fire"
    with pytest.raises(openai.APIError, match="on fire"):
        list(complete(server, prompt="bad", stream=True))
    assert complete(server, prompt="good").choices[0].text == "goodgood"


def test_a_fault_of_the_server_itself_is_a_500_without_a_traceback(serve, monkeypatch):
    server = serve(says("x"))
    monkeypatch.setattr(type(server.engine), "check", lambda self: 1 / 0)
    refused(server.post("/v1/completions", prompt="x"), 500)
    monkeypatch.undo()
    assert complete(server).choices[0].text == "x"


def test_a_stopped_engine_is_503(serve):
    server = serve(says("x"))
    server.engine.stop()
    refused(server.post("/v1/completions", prompt="x"), 503)
    assert server.http.get("/health").status_code == 503


# -- clients that leave


def wait_until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(serve, stream):
    decoder = ScriptedDecoder(lambda p: [65] * 150 if len(p) == 4 else p, width=1, pause=0.02)
    server = serve(decoder)
    client = httpx.Client(base_url=server.url, timeout=0.5)
    with pytest.raises(httpx.ReadTimeout):
        if stream:
            body = {"prompt": "long", "max_tokens": 150, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_raw())
                raise httpx.ReadTimeout("enough")
        client.post("/v1/completions", json={"prompt": "long", "max_tokens": 150})
    client.close()
    wait_until(lambda: decoder.closed)
    assert decoder.closed == [True]
    assert decoder.rounds < 100
    assert complete(server, prompt="ok").choices[0].text == "ok"


def test_requests_that_come_together_are_all_answered(serve):
    server = serve(ScriptedDecoder(lambda p: [*p, END], pause=0.001))
    texts: dict[int, str] = {}

    def ask(i: int) -> None:
        texts[i] = complete(server, prompt=f"prompt {i}", max_tokens=30).choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert texts == {i: f"prompt {i}" for i in range(12)}


def test_the_server_has_lived_through_all_this(server):
    assert server.engine.state == "ready"
    assert chat(server).choices[0].message.content == ANSWER
