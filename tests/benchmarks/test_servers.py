"""Servers as processes, and the figures on their metrics page."""

from __future__ import annotations

import subprocess
import sys

import pytest
import servers

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 2.0
vllm:spec_decode_num_drafts_total{engine="1"} 1.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 9.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 5.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 1.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} 16.0
"""


def test_acceptance_is_what_the_counters_say():
    counted = servers.read_metrics(PAGE)
    # Three rounds of three drafts that accepted 0, 2 and 3: 8 of 16 tokens.
    assert servers.acceptance(counted) == {
        "mean_acceptance_length": 1 + 5 / 3,
        "acceptance_per_position": [2 / 3, 2 / 3, 1 / 3],
        "mean_draft_length": 3,
        "share_of_tokens_from_drafting_rounds": 0.5,
    }
    none = servers.change(counted, counted)
    assert servers.acceptance(none) == servers.acceptance({}) == {}
    assert servers.change({}, counted) == counted


def script(text: str) -> servers.Launch:
    return servers.Launch("double", (sys.executable, "-c", text), ())


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
    assert state.strip() in ("", "Z")


def test_a_result_names_files_without_their_folders():
    flags = ("--model", "/home/me/model", "--x=./a/b", '{"model": "./heads/a", "x": [1, 2]}', "http://h:1/")
    described = servers.Launch("x", ("/opt/python", "-m", "y"), flags, {"A": "1"}).described()
    words = ["python", "-m", "y", "--model", "model", "--x=b", '{"model": "a", "x": [1, 2]}', "h:1/"]
    assert described == {"command": words, "environment": {"A": "1"}}
