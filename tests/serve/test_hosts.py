"""Two real processes of four CPU devices each serve one model, as one process does."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import signal
import socket
from pathlib import Path

import httpx
import pytest

from peagle_jax.checkpoint.head import save_head
from tests.checkpoint.files import target_json, target_tensors, write_folder
from tests.serve.doubles import byte_tokenizer
from tests.serve.process import Process
from tests.serve.tiny_model import CONFIG, tiny_head
from tests.tiny import head_params, target_params

ROOT = Path(__file__).parents[2]
VOCAB = 264  # 4 divides it


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    cfg = dataclasses.replace(CONFIG, vocab_size=VOCAB)
    model = write_folder(folder / "model", target_json(cfg), target_tensors(target_params(cfg)))
    byte_tokenizer().save_pretrained(model)
    head = tiny_head(vocab_size=VOCAB, draft_vocab_size=92)
    save_head(folder / "head", head, head_params(head), target=cfg, share_embed=False)
    config = {"model": str(folder / "head"), "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}
    config["num_speculative_tokens_per_batch_size"] = [[1, 99, 2]]  # fewer programs
    return [
        *(str(model), "--port", "0", "--dtype", "float32", "--max-model-len", "200", "--max-num-seqs", "2"),
        *("--served-model-name", "tiny", "--speculative-config", json.dumps(config)),
    ]


def two(flags: list[str]) -> list[Process]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    mesh = ["--data-parallel-size", "2", "--tensor-parallel-size", "4"]
    others = ["--distributed", "--coordinator-address", address, "--num-processes", "2", "--process-id"]
    return [Process(*flags, *mesh, *others, str(i)) for i in range(2)]


def answers(url: str) -> list:
    """Twenty requests of several kinds, eight at a time."""

    def ask(i: int) -> list:
        body = {"prompt": f"tell me {i} things", "max_tokens": 10 + i, "ignore_eos": True, "logprobs": 2}
        sampling = [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "top_p": 0.8}][i % 3]
        body |= sampling | {"seed": i}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600).json()
        return answer["choices"][0]["logprobs"]["tokens"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, range(20)))


@pytest.mark.timeout(1800)  # two processes compile at once
def test_two_processes_answer_as_one_and_end_together(flags):
    alone = Process(*flags)
    servers: list[Process] = []
    try:
        expected = answers(alone.url())
        alone.process.send_signal(signal.SIGTERM)
        servers = two(flags)
        url = servers[0].url()
        assert "data 2 x tensor 4: 8 devices, 2 processes, replicated by shard_map" in "".join(
            servers[0].lines
        )
        assert answers(url) == expected
        assert [len(tokens) for tokens in expected] == [10 + i for i in range(20)]
        servers[0].process.send_signal(signal.SIGTERM)
        printed = [server.end() for server in servers]
        assert [server.process.returncode for server in servers] == [0, 0], printed
        assert printed[1] == "" or "error" not in printed[1]
    finally:
        for server in [alone, *servers]:
            server.process.kill()


@pytest.mark.timeout(1800)
def test_a_process_that_dies_ends_the_server_with_one_line(flags):
    servers = two(flags)
    try:
        servers[0].wait_for("loaded in")
        servers[1].process.kill()
        printed = servers[0].end()
        assert servers[0].process.returncode == 1
        errors = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert errors == ["error: process 1 has given no sign of life for 20 s; start all of them again"]
    finally:
        for server in servers:
            server.process.kill()
