"""Every wrong request gets a 400 (or 404, 405, 503, 500) in OpenAI's shape, and the server lives on."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.serve.conftest import CONTEXT, chat, complete, running, user
from tests.serve.doubles import byte_tokenizer
from tests.serve.engine_double import ScriptedEngine, says

ANSWER = "an answer"


@pytest.fixture(scope="module")
def server():
    with running(says(ANSWER)) as server:
        yield server


def refused(response: httpx.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert "Traceback" not in response.text
    return error


UNSERVED_CHAT = {
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "bad_words": ["x"],
    "store": True,
    "use_beam_search": True,
    "thinking_token_budget": 50,
    "return_hidden_states": True,
    "best_of": 3,
    "cache_salt": "mine",
    "logits_processors": ["x"],
    "suffix": "x",
}


@pytest.mark.parametrize("field", UNSERVED_CHAT)
def test_known_fields_that_are_not_served_are_refused_by_name(server, field):
    error = refused(server.post("/v1/chat/completions", messages=user("hi"), **{field: UNSERVED_CHAT[field]}))
    assert error["message"].startswith(f"{field} is not supported here")
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_refusals_spell_values_as_json_does(server):
    assert refused(server.post("/v1/completions", prompt="hi", use_beam_search=True))["message"] == (
        "use_beam_search is not supported here; leave it out or send false"
    )
    error = refused(server.post("/v1/chat/completions", messages=user("hi"), modalities=3))
    assert error["message"].endswith('send ["text"]')
    assert "found null" in refused(server.post("/v1/completions", prompt=None))["message"]


@pytest.mark.parametrize(
    ("field", "value"), [("suffix", "x"), ("n", True), ("best_of", 2), ("logprobs", True)]
)
def test_completions_refuse_their_own(server, field, value):
    assert refused(server.post("/v1/completions", prompt="hi", **{field: value}))["param"] == field


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "greater than or equal to 0, found -1"),
        ({"temperature": "hot"}, "temperature", 'valid number, found "hot"'),
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
        ({"stop": ["ab", "c\ud800"]}, "stop", "expected valid Unicode"),
        ({"stop": 5}, "stop", "a string or a list of strings"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids", "token id 1000000000 is not in the vocabulary"),
        ({"stop_token_ids": list(range(20))}, "stop_token_ids", "at most 16 are possible, found 21"),
        ({"stop_token_ids": "a"}, "stop_token_ids", "valid list"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream: true"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0, found 0"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids as keys, found 'x'"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "token ids as keys"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "token id 99999 is not in the vocabulary"),
        ({"logit_bias": [1]}, "logit_bias", "valid dictionary"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "token id -1"),
        ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "not be more than max_tokens"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20, found 21"),
        ({"logprobs": 3}, "logprobs", "valid boolean"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
        ({"priority": "high"}, "priority", "valid integer"),
        ({"request_id": "a\nb"}, "request_id", "pattern"),
        ({"request_id": "ü"}, "request_id", "pattern"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "field required",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "names no constraint"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "not permitted"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "2 constraints"),
        ({"min_tokens": 10**6}, "min_tokens", "expected at most"),
        ({"min_tokens": 2**70}, "min_tokens", "less than or equal"),
        (
            {"min_tokens": 2, "stop_token_ids": [3], "allowed_token_ids": [3]},
            "allowed_token_ids",
            "all of them end",
        ),
        ({"documents": [json.loads('{"a":' * 101 + "1" + "}" * 101)]}, "documents", "at most 100 levels"),
        ({"structured_outputs": {"json": json.loads("[" * 101 + "]" * 101)}}, None, "at most 100 levels"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "both constrain"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": "5"}, "guided_json", "expected a JSON schema, found '5'"),
        ({"guided_choice": []}, "guided_choice", "not empty"),
        ({"guided_regex": ""}, "guided_regex", "is empty"),
        ({"tools": [1]}, "tools.0", "valid dictionary"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "not among the tools",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "this model calls none"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "must not set tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set messages"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude each other",
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
        (
            {"messages": [{"role": "user", "content": [{"type": [["x"]]}]}]},
            "messages.0.content",
            "type list are not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content", "parts like"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages", "nobody may not speak"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}]},
            "messages.0.tool_calls.0.function",
            "field required",
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
        (["a", ""], "the prompt is empty"),
        (["a", [1]], "a string, a list of token ids"),
        ([[1], [2, True]], "a string, a list of token ids"),
        (["a"] * 2049, "at most 2048 prompts, found 2049"),
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


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(server):
    most = CONTEXT * len("<|start|>")
    assert "1800 tokens" in refused(server.post("/v1/completions", prompt="x" * most))["message"]
    for path, body, param in (
        ("/v1/completions", {"prompt": "x" * (most + 1)}, "prompt"),
        ("/v1/chat/completions", {"messages": user("x" * most)}, "messages"),
    ):
        error = refused(server.post(path, **body))
        assert (
            f"characters; this model's context of {CONTEXT} tokens takes at most {most}" in error["message"]
        )
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    ids = refused(server.post("/v1/completions", prompt=[10**9] * CONTEXT))  # counted before they are read
    assert ids["code"] == "context_length_exceeded"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_every_prompt_is_413_and_the_connection_lives_on(server, chunked):
    body = json.dumps({"prompt": "hi", "user": "x" * 1_100_000}).encode()
    content = (body[i : i + 100_000] for i in range(0, len(body), 100_000)) if chunked else body
    headers = {"content-type": "application/json"}
    error = refused(server.http.post("/v1/completions", content=content, headers=headers), 413)
    assert "the body has more than 1070176 bytes" in error["message"]
    assert error["type"] == "invalid_request_error"
    assert server.post("/v1/completions", prompt="hi").status_code == 200


def test_what_a_client_sends_is_not_echoed_at_length(server):
    long = "x" * 9000
    for response, status in (
        (server.post("/v1/completions", prompt="hi", model=long), 404),
        (server.http.get(f"/v1/models/{long}"), 404),
        (server.http.get(f"/{long}"), 404),
        (server.http.request("BREW" * 50, "/v1/completions"), 405),
        (server.post("/v1/completions", prompt="hi", temperature=long), 400),
        (server.post("/v1/chat/completions", messages=[{"role": long, "content": 5}]), 400),
        (server.post("/v1/chat/completions", messages=[{"role": "user", "content": [{"type": long}]}]), 400),
        (server.post("/v1/completions", prompt="hi", stop_token_ids=[10**2000]), 400),
    ):
        assert len(refused(response, status)["message"]) < 250


def test_a_prompt_that_leaves_no_room_is_refused_and_one_less_gives_one_token(server):
    assert server.post("/v1/completions", prompt="x" * CONTEXT).status_code == 400
    answer = complete(server, prompt="x" * (CONTEXT - 1), max_tokens=1)
    assert answer.usage.completion_tokens == 1


def test_more_tokens_than_the_context_has_left_are_refused_with_what_is_possible(server):
    error = refused(server.post("/v1/completions", prompt="x" * 50, max_tokens=CONTEXT))
    assert f"at most {CONTEXT - 50}" in error["message"]
    assert refused(server.post("/v1/completions", prompt="x", max_tokens=10**30))["param"] == "max_tokens"


def test_min_tokens_must_fit_after_every_prompt(server):
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"prompt": [[1], [1] * 10], "max_tokens": None, "min_tokens": limit - 5}
    error = refused(server.post("/v1/completions", **body))
    assert error["param"] == "min_tokens" and f"expected at most {limit - 10}, " in error["message"]


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


def test_a_tokenizer_of_another_model_is_told_of_its_first_foreign_token(serve):
    server = serve(says("x"), vocab_size=200)
    error = refused(server.post("/v1/completions", prompt=" the"))
    assert "is not in the vocabulary of 200" in error["message"]


def test_a_model_without_a_chat_template_refuses_chat_only(serve):
    server = serve(says("x"), tokenizer=byte_tokenizer(template=None))
    assert "chat template" in refused(server.post("/v1/chat/completions", messages=user("hi")))["message"]
    assert complete(server).choices[0].text == "x"


def test_a_failing_engine_is_a_500_in_shape_and_an_event_in_a_stream(serve):
    server = serve(ScriptedEngine(lambda r: r.prompt_ids * 2, fail=lambda r: len(r.prompt_ids) == 3))
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


def test_the_server_has_lived_through_all_this(server):
    assert server.engine.state == "ready"
    assert chat(server).choices[0].message.content == ANSWER


def test_prompts_times_answers_have_a_limit(server):
    error = refused(server.post("/v1/completions", prompt=["a"] * 17, n=128))
    assert (error["param"], error["message"]) == ("n", "n times the prompts must be at most 2048")
