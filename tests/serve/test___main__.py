"""``python -m peagle_jax.serve``: flags, the start-up report, and the end on a signal."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import httpx
import pytest

from peagle_jax import commands
from peagle_jax.arguments import run_command
from peagle_jax.serve import __main__ as command
from tests.serve.process import Process
from tests.serve.tiny_model import write_head, write_model

ROOT = Path(__file__).parents[2]


def refused(argv: list[str], capsys) -> str:
    """The one line that a wrong command line gets."""
    try:
        status = run_command(lambda: command.main(argv))
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tensor-paralel-size=2"], "unrecognized arguments: --tensor-paralel-size=2; see"),
        (
            ["serve", "--tensor-parallel-size", "5"],
            "asks for 5 devices, but there are 4 devices; ask for 1 to 4",
        ),
        (["--process-id", "1"], "--num-processes and --process-id belong to --distributed"),
        (["--ssl-keyfile", "/nowhere"], "belong together"),
        (["--chat-template", "/nowhere"], "cannot be read"),
        (["--max-model", "9"], "unrecognized arguments"),  # abbreviations are not guessed
        (["--port", "x"], "must be a whole number from 0 to 65535, found 'x'"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["a", "--model", "b"], "MODEL is 'a' but --model is 'b'"),
        (["--speculative-config", "{"], "is not JSON"),
        (["--speculative-config", '{"tokens": 3}'], "unknown key 'tokens'; valid keys are"),
        (["--speculative-config", '{"num_speculative_tokens": -2}'], "found -2"),
        (["/nowhere", "--port", "0"], "/nowhere does not exist"),
        (
            ["/nowhere", "--port", "0", "--speculative-config", '{"num_speculative_tokens": 2}'],
            "there is no head",
        ),
        (["--port", "0", "--host", "x" * 64 + ".org"], "choose another --host or --port"),
        (["--speculative-config", "[" * 100_000], "is not JSON"),
        (["--port", "99999"], "must be a whole number from 0 to 65535, found '99999'"),
        ([""], "MODEL: is empty; name one, or leave it out"),
        (["--model", ""], "--model: is empty"),
        (["--tokenizer", " "], "--tokenizer: is empty"),
        (["--revision", ""], "--revision: is empty"),
        (["--host", ""], "--host: is empty"),
        (["--served-model-name", "a", ""], "--served-model-name: is empty"),
        (["--served-model-name", "caf\udce9"], "--served-model-name: is not UTF-8 text at character 3"),
        (["", "--model", "b"], "MODEL: is empty"),
        (["--speculative-config", '{"model": ""}'], "model is empty"),
        (["--port", "0", "--revision", "main"], "but the model is the embedded model"),
        (["--port", "0", "/tmp", "--revision", "main"], "but the model is /tmp, which is on this machine"),
        (["--port", "0", "x/y", "--speculative-config", '{"method": "eagle3"}'], "there is no head for x/y"),
        (["--port", "0", "/" + "x" * 5000], "no path that can be opened: File name too long"),
        (["--port", "0", "~nobody-here/x"], "is no path that can be opened"),
    ],
)
def test_wrong_command_lines_are_one_line_and_status_2(capsys, argv, words):
    assert words in refused(argv, capsys)


def test_a_busy_port_is_told_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(commands, "load_target", lambda *_, **__: pytest.fail("loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refused(["--port", str(port)], capsys)


def test_the_report_is_lines_for_people_and_objects_for_programs(capsys):
    values = [("served as", "tiny"), ("K", 3)]
    command.Report(as_json=False).show("loaded", "peagle_jax 1", values)
    command.Report(as_json=False).ready("http://x", 2.04)
    assert capsys.readouterr().out.splitlines() == [
        "peagle_jax 1",
        "  served as      tiny",
        "  K              3",
        "  compiled in    2.0 s",
        "ready: http://x/v1/chat/completions",
    ]
    command.Report(as_json=True).show("loaded", "peagle_jax 1", values)
    command.Report(as_json=True).ready("http://x", 2.04)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"event": "loaded", "served_as": "tiny", "K": 3},
        {"event": "ready", "url": "http://x", "compiled_in_s": 2.0},
    ]


def test_help_teaches_the_json_keys(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("num_speculative_tokens", "parallel_drafting", "--max-model-len", "--served-model-name"):
        assert word in text


@pytest.mark.timeout(1200)  # a busy machine compiles slowly
def test_it_serves_a_folder_with_a_head_and_ends_in_peace(tmp_path):
    model, head = write_model(tmp_path / "model"), write_head(tmp_path / "head")
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2, "parallel_drafting": True}
    server = Process(
        *(str(model), "--port", "0", "--dtype", "float32", "--max-model-len", "600"),
        *("--served-model-name", "tiny", "--speculative-config", json.dumps(config)),
    )
    try:
        url = server.url()
        report = "".join(server.lines)
        for line in (
            "P-EAGLE, 1 layers",
            "0, 1, 2 of boundaries 0..2",
            "K              2",
            "max_model_len  600",
        ):
            assert line in report
        assert httpx.get(f"{url}/health").status_code == 200
        assert "vllm:spec_decode_num_drafts_total{" in httpx.get(f"{url}/metrics").text
        body = {"prompt": "the cat", "max_tokens": 590, "ignore_eos": True, "stream": True}
        events = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
            for line in response.iter_lines():
                if line and not events:
                    server.process.send_signal(signal.SIGTERM)  # amid the answer
                events += [line] if line else []
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        printed = server.end()
        assert server.process.returncode == 0, printed
        assert "Traceback" not in printed
        assert "590 tokens in" in printed
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    finally:
        server.process.kill()
