"""Who may ask, from where, and how many at once."""

from __future__ import annotations

import threading
import time

import httpx
import openai
import pytest

from peagle_jax.serve.app import AppOptions
from peagle_jax.serve.generation import KEEP_ALIVE
from tests.serve.conftest import complete, running, user
from tests.serve.engine_double import says


@pytest.fixture(scope="module")
def locked():
    with running(says("x"), options=AppOptions(api_keys=("one", "zwei-ü"))) as server:
        yield server


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/completions", "/tokenize", "/invocations", "/docs", "/nowhere"]
)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer two"}, {"Authorization": "Basic one"}])
def test_without_the_key_everything_that_reaches_the_model_is_401(locked, path, headers):
    response = locked.http.post(path, json={"prompt": "x"}, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/version", "/metrics", "/load"])
def test_operators_need_no_key(locked, path):
    assert locked.http.get(path).status_code == 200


def test_each_key_opens(locked):
    with pytest.raises(openai.AuthenticationError):
        complete(locked)
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="one")
    assert client.models.list().data
    client.close()
    other = {"Authorization": "bearer zwei-ü".encode()}
    assert locked.http.post("/v1/completions", json={"prompt": "x"}, headers=other).status_code == 200


def test_browsers_of_other_origins_come_only_if_allowed(serve):
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    closed = serve(says("x"))
    assert closed.http.options("/v1/completions", headers=asked).status_code == 405
    options = AppOptions(allowed_origins=("https://a.example",), api_keys=("k",))
    opened = serve(says("x"), options=options)
    response = opened.http.options("/v1/completions", headers=asked)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (
        200,
        "https://a.example",
    )
    refused = opened.http.post("/v1/completions", json={}, headers={"Origin": "https://a.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")


def test_more_requests_than_the_limit_are_told_to_come_again(serve):
    hold = threading.Event()
    server = serve(says("x", hold=hold), options=AppOptions(max_num_queued_reqs=2))
    got = []
    thread = threading.Thread(target=lambda: got.append(server.post("/v1/completions", prompt="a", n=2)))
    thread.start()
    deadline = time.monotonic() + 10
    while server.http.get("/load").json() != {"server_load": 2}:
        assert time.monotonic() < deadline
    for stream in (False, True):
        response = server.post("/v1/completions", prompt="b", stream=stream)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "overloaded"
    assert (
        'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="max_num_queued_reqs"} 2.0'
        in (server.http.get("/metrics").text)
    )
    hold.set()
    thread.join(10)
    assert got[0].status_code == 200
    assert complete(server).choices[0].text == "x"
    assert server.http.get("/load").json() == {"server_load": 0}


def test_more_prompt_tokens_than_the_limit_wait_elsewhere_but_one_prompt_may_always_come(serve):
    hold = threading.Event()
    server = serve(says("x", hold=hold), options=AppOptions(max_num_queued_tokens=5))
    thread = threading.Thread(target=lambda: server.post("/v1/completions", prompt="abcdefgh"))
    thread.start()
    deadline = time.monotonic() + 10
    while server.http.get("/load").json() != {"server_load": 1}:
        assert time.monotonic() < deadline
    assert server.post("/v1/completions", prompt="b").status_code == 503
    hold.set()
    thread.join(10)
    assert server.post("/v1/completions", prompt="b").status_code == 200


@pytest.mark.parametrize("interval", [0.05, 0])
def test_a_silent_stream_says_that_it_lives(serve, interval):
    server = serve(says("xyz", width=1, pause=0.2), options=AppOptions(sse_keep_alive_interval=interval))
    response = server.post("/v1/chat/completions", messages=user("x"), stream=True)
    assert (KEEP_ALIVE in response.text) == (interval > 0)
    assert "".join(c.choices[0].text for c in complete(server, stream=True)) == "xyz"


def test_a_client_that_leaves_a_silent_stream_frees_the_engine(serve):
    hold = threading.Event()
    engine = says("x" * 100, width=1, pause=0.01, hold=hold)
    server = serve(engine, options=AppOptions(sse_keep_alive_interval=0.05))
    with httpx.Client(base_url=server.url) as client:
        body = {"prompt": "x", "stream": True, "max_tokens": 90}
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert next(response.iter_raw()) == KEEP_ALIVE.encode()
    time.sleep(0.3)
    hold.set()
    deadline = time.monotonic() + 10
    while not engine.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engine.closed == [True]
    assert server.http.get("/load").json() == {"server_load": 0}


def test_the_page_and_paths_work_behind_a_prefix(serve):
    server = serve(says("x"), options=AppOptions(api_keys=("k",)), root_path="/llm")
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/v1/models").status_code == 401
