"""What each flag may be, and which of vLLM's are refused."""

from __future__ import annotations

import pytest

from peagle_jax.arguments import CommandError
from peagle_jax.serve import arguments


def parsed(*argv):
    return arguments.build_parser().parse_args(argv)


@pytest.mark.parametrize(("text", "number"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1M", 2**20)])
def test_lengths_are_spelled_as_in_vllm(text, number):
    assert parsed("--max-model-len", text).max_model_len == number


@pytest.mark.parametrize(
    "argv",
    [
        ("--max-model-len", "1"),
        ("--max-num-seqs", "0"),
        ("--port", "-1"),
        ("--port", "65536"),
        ("--max-num-seqs", "1.5"),
        ("--gpu-memory-utilization", "0"),
        ("--gpu-memory-utilization", "1.1"),
        ("--gpu-memory-utilization", "nan"),
        ("--allowed-origins", "*"),
        ("--allowed-origins", "[1]"),
        ("--default-chat-template-kwargs", "[]"),
        ("--default-chat-template-kwargs", "{"),
        ("--kv-cache-dtype", "fp8"),
        ("--quantization", "awq"),
        ("--per-request-spec-decode-metrics", "all"),
    ],
)
def test_wrong_values_are_one_line(capsys, argv):
    with pytest.raises(SystemExit):
        parsed(*argv)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--no-enable-chunked-prefill",), "--no-enable-chunked-prefill: it cannot be switched off"),
        (("--generation-config", "folder"), "must be auto or vllm"),
        (("--compilation-cache-dir", "/proc/x"), "--compilation-cache-dir: /proc/x cannot be written"),
        (("--compilation-cache-dir", __file__), "cannot be written .File exists"),
    ],
)
def test_what_vllm_can_and_this_server_cannot_is_refused(argv, words):
    with pytest.raises(CommandError, match=words):
        arguments.check(parsed(*argv))


def test_vllms_reference_command_is_read():
    args = parsed(
        *("openai/gpt-oss-20b", "-tp", "1", "--max-num-seqs", "128", "--max-model-len", "8192"),
        *(
            "--async-scheduling",
            "--stream-interval=20",
            "--no-enable-prefix-caching",
            "--gpu-memory-utilization",
            "0.9",
            "--port",
            "8050",
        ),
    )
    arguments.check(args)
    assert arguments.model_of(args) == "openai/gpt-oss-20b"
    options = arguments.EngineOptions.of(args)
    assert (options.max_num_seqs, options.gpu_memory_utilization, options.enable_prefix_caching) == (
        128,
        0.9,
        False,
    )


def test_the_utilization_has_the_tpus_name_too():
    assert parsed("--hbm-utilization", "0.5").gpu_memory_utilization == 0.5


def test_keys_come_from_the_flag_or_the_environment(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert arguments.api_keys(parsed()) == ()
    monkeypatch.setenv("VLLM_API_KEY", "env")
    assert arguments.api_keys(parsed()) == ("env",)
    assert arguments.api_keys(parsed("--api-key", "a", "b")) == ("a", "b")
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert arguments.api_keys(parsed()) == ()


def test_a_template_is_a_file_or_the_text_itself(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert arguments.chat_template(parsed("--chat-template", str(file))) == "{{ messages }}"
    assert arguments.chat_template(parsed("--chat-template", "{{ x }}")) == "{{ x }}"
    assert arguments.chat_template(parsed()) is None
    with pytest.raises(CommandError, match="--chat-template: /nowhere cannot be read"):
        arguments.chat_template(parsed("--chat-template", "/nowhere"))
