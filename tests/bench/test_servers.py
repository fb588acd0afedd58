"""Servers as processes, how they are named on the command line, and the requests that they get."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import httpx
import pytest

from peagle_jax.arguments import CommandError
from peagle_jax.bench import servers
from peagle_jax.bench.clients import CHAT, COMPLETIONS
from peagle_jax.bench.datasets import Conversation
from peagle_jax.bench.machine import recorded
from tests.serve.conftest import running
from tests.serve.engine_double import says


def script(text: str) -> servers.Launch:
    return servers.Launch("double", (sys.executable, "-c", text))


def test_a_server_that_ends_early_is_told_with_its_last_words(tmp_path):
    with servers.started(script("print('no such model'); exit(3)"), tmp_path) as server:
        with pytest.raises(servers.ServerError, match=r"double ended before it was ready\n  no such model"):
            server.wait_until_ready(60)
        assert not server.running


def test_a_server_that_is_not_ready_in_time_is_stopped_with_what_it_started(tmp_path):
    text = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; "
    text += "time.sleep(600)']); print(p.pid); time.sleep(600)"
    with servers.started(script(text), tmp_path) as server:
        with pytest.raises(servers.ServerError, match="was not ready after"):
            server.wait_until_ready(3)
        child = int(server.log_text())
    assert not server.running
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z")  # more letters tell its niceness


def test_a_result_names_files_without_their_folders():
    flags = ("--model", "/home/me/model", "--x=./a/b", '{"model": "./heads/a", "x": [1, 2]}', "http://h:1/")
    described = servers.Launch("x", ("/opt/python", "-m", "y", *flags), {"A": "1"}).described()
    command = """python -m y --model model --x=b '{"model": "a", "x": [1, 2]}' h:1/"""
    assert described == {"command": command, "environment": {"A": "1"}}


def test_a_result_holds_no_secrets():
    keys = "HF_TOKEN=abc HOME=/home/me python --api-key k1 --x-key=k2 --max-tokens 3"
    text = f"""vllm={keys} '{{"api_key": "k3", "speculative_token_tree": "[(0,)]"}}'"""
    launch = servers.parse_launch(text)
    described = launch.described()
    assert described["environment"] == {"HF_TOKEN": "MASKED", "HOME": "me"}
    masked = "python --api-key MASKED --x-key=MASKED --max-tokens 3"
    config = """{"api_key": MASKED, "speculative_token_tree": "[(0,)]"}"""
    assert described["command"] == f"{masked} '{config}'"
    told = recorded(["bench", "--start", text, "--endpoint", "a=http://me:pw@h:1"])
    assert not any(secret in told for secret in ("abc", "k1", "k2", "k3", "pw"))
    assert "HF_TOKEN=MASKED HOME=me python" in told
    assert launch.environment["HF_TOKEN"] == "abc" and launch.words(1)[2] == "k1"


def test_a_server_to_start_is_named_with_its_command():
    own = servers.parse_launch("ours")
    assert (own.name, own.command) == ("ours", (sys.executable, "-m", "peagle_jax.serve", "--json"))
    off = servers.parse_launch("off=ours --speculative-config null")
    assert (off.name, off.command[-2:]) == ("off", ("--speculative-config", "null"))
    text = """vllm=OMP_NUM_THREADS=2 A='x y' python -m vllm --speculative-config '{"k": 3}' --port {port}"""
    peer = servers.parse_launch(text)
    assert peer.environment == {"OMP_NUM_THREADS": "2", "A": "x y"}
    assert peer.words(8001) == ["python", "-m", "vllm", "--speculative-config", '{"k": 3}', "--port", "8001"]
    assert off.words(8002)[-4:] == ["--host", "127.0.0.1", "--port", "8002"]
    for wrong in ("theirs", "x=", "x=python 'y"):
        with pytest.raises(CommandError):
            servers.parse_launch(wrong)


def test_an_endpoint_is_a_name_and_a_url():
    assert servers.parse_endpoint("a=http://h:1/v1/").url == "http://h:1"
    chosen = servers.parse_endpoint("a-b=https://h/base/v1#org/model")
    assert (chosen.name, chosen.url, chosen.model) == ("a-b", "https://h/base", "org/model")
    for wrong in ("http://h:1", "a=h:1", "a b=http://h"):
        with pytest.raises(CommandError, match="expected NAME=http://HOST:PORT"):
            servers.parse_endpoint(wrong)


def test_a_single_turn_goes_as_tokens_and_a_conversation_as_messages():
    conversation = Conversation("1", "c", ("one", "two"), system="be")
    with running(says("abc")) as served:
        server = servers.Server("x", served.url)
        single = server.talk(conversation, 9, ignore_eos=True, follow=False)
        both = server.talk(conversation, 9, ignore_eos=False, follow=True)
        warm = server.talk(conversation, 9, ignore_eos=False, follow=True, temperature=0.8, seed=7)
        ids = served.tokenizer.encode(
            served.tokenizer.apply_chat_template(
                [{"role": "system", "content": "be"}, {"role": "user", "content": "one"}],
                tokenize=False,
                add_generation_prompt=True,
            )
        )
        assert server.tokens_of(both.body["messages"]) == ids
    assert (single.path, single.later) == (COMPLETIONS, ())
    common = {"model": "tiny", "max_tokens": 9, "temperature": 0.0}
    assert single.body == common | {"prompt": ids, "ignore_eos": True}
    assert (both.path, both.later) == (CHAT, ("two",))
    assert [m["content"] for m in both.body["messages"]] == ["be", "one"]
    assert both.body.keys() == {*common, "messages"}
    assert warm.body == {**both.body, "temperature": 0.8, "seed": 7}


def answering(**pages: object) -> servers.Server:
    """A server with these pages: a JSON each, or a text."""
    server = servers.Server("odd", "http://odd")

    def answer(request: httpx.Request) -> httpx.Response:
        page = pages[request.url.path.rsplit("/", 1)[-1]]
        return httpx.Response(200, text=page if isinstance(page, str) else json.dumps(page))

    server.http = httpx.Client(base_url=server.url, transport=httpx.MockTransport(answer))
    return server


@pytest.mark.parametrize(
    ("ask", "pages"),
    [
        (lambda s: s.model, {"models": {"data": []}}),
        (lambda s: s.model, {"models": []}),
        (servers.Server.version, {"version": "<html>"}),
        (servers.Server.version, {"version": ["1"]}),
        (servers.Server.metrics, {"metrics": "<html>\n"}),
        (lambda s: s.tokens_of([]), {"models": {"data": [{"id": "x"}]}, "tokenize": {}}),
    ],
)
def test_an_answer_of_another_form_is_a_server_error(ask, pages):
    with pytest.raises(servers.ServerError, match="^odd does not answer /.* as expected .*$"):
        ask(answering(**pages))


def test_counters_that_others_move_are_not_waited_for_for_ever(monkeypatch):
    counts = itertools.count()
    server = servers.Server("busy", "http://busy")
    monkeypatch.setattr(server, "metrics", lambda: {"vllm:generation_tokens_total": float(next(counts))})
    monkeypatch.setattr(servers, "SETTLE", 0.01)
    monkeypatch.setattr(servers, "SETTLE_WITHIN", 0.1)
    with pytest.raises(servers.ServerError, match="counters of busy do not stand still within 0.1 s"):
        server.settled_metrics()
