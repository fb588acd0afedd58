"""The endpoints beside the two that answer."""

from __future__ import annotations

import pytest

from peagle_jax.serve.answers import AnswerOptions
from peagle_jax.serve.app import AppOptions
from tests.serve.conftest import CONTEXT, complete, running, user
from tests.serve.doubles import TOKENIZER
from tests.serve.engine_double import says


@pytest.fixture(scope="module")
def server():
    with running(says("x")) as server:
        yield server


def test_a_text_is_tokenised_and_read_back(server):
    found = server.post("/tokenize", prompt="the 🦅", return_token_strs=True).json()
    ids = TOKENIZER.encode("the 🦅")
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), CONTEXT)
    assert found["token_strs"][0] == "the"
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": "the 🦅"}


def test_a_conversation_is_tokenised_in_its_template(server):
    found = server.post("/tokenize", messages=user("hi")).json()
    assert TOKENIZER.decode(found["tokens"]) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    ending = server.post("/tokenize", messages=user("hi"), add_generation_prompt=False).json()
    assert TOKENIZER.decode(ending["tokens"]).endswith("hi<|end|>\n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/invocations", {}, None),
        ("/invocations", {"prompt": "x", "temperature": -1}, "temperature"),
        ("/invocations", {"messages": [{"role": "user"}]}, "messages.0.content"),
    ],
)
def test_wrong_bodies_are_refused_in_shape(server, path, body, param):
    response = server.post(path, **body)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param
    assert "<" not in response.json()["error"]["message"]


def test_invocations_are_either_of_the_two(server):
    assert server.post("/invocations", messages=user("hi")).json()["object"] == "chat.completion"
    assert server.post("/invocations", prompt="hi").json()["object"] == "text_completion"
    streamed = server.post("/invocations", prompt="hi", stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_invocations_are_json(server):
    response = server.http.post("/invocations", content=b"a,b", headers={"content-type": "text/csv"})
    assert response.status_code == 415
    assert "found text/csv" in response.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_is_health(server, method):
    assert server.http.request(method, "/ping").status_code == 200


def test_load_is_what_waits_and_runs(server):
    assert server.http.get("/load").json() == {"server_load": 0}


def test_cached_tokens_are_told_if_the_server_says_so(serve):
    options = AppOptions(answers=AnswerOptions(prompt_tokens_details=True))
    server = serve(says("x", cached_tokens=3), options=options)
    assert complete(server, prompt="abcd", n=2).usage.prompt_tokens_details.cached_tokens == 3


def test_the_playground_is_one_page_that_loads_nothing_from_elsewhere(server):
    response = server.http.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "http://" not in response.text
    assert "https://" not in response.text


@pytest.mark.parametrize(
    ("level", "steps"),
    [("summary", None), ("detailed", {"per_step_accepted": [3, 1], "per_step_drafted": [3, 3]})],
)
def test_acceptance_of_a_request_is_told_if_the_server_says_so(serve, level, steps):
    options = AppOptions(answers=AnswerOptions(num_spec_tokens=3, spec_metrics=level))
    server = serve(says("abcdef", width=4), options=options)  # rounds of 1, 4 and 2 tokens
    body = {"prompt": "x", "max_tokens": 100}
    expected = {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 4 / 6,
        "acceptance_histogram": [0, 1, 0, 1],
        "acceptance_histogram_by_draft_length": {"3": [0, 1, 0, 1]},
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 6,
        "num_spec_tokens": 3,
    } | (steps or {})
    assert server.post("/v1/completions", **body).json()["metrics"] == {"speculative_decoding": expected}
    chunks = list(
        complete(server, prompt="x", max_tokens=100, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].model_extra["metrics"] == {"speculative_decoding": expected}
    assert server.post("/v1/completions", **body, n=2).json()["metrics"] is None
