"""A server in a process of its own: its command, its start and end, and what it tells from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from machine import vllm_environment, without_folders
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[1]
SHIPPED_HEAD = ROOT / "heads" / "smollm2-135m-instruct-p-eagle"

STOP_WITHIN = 40.0
"""Seconds that a server gets to end after a signal; ours gives running requests 25 of them."""

LOG_LINES = 15
"""Of a server that has failed, shown in the error."""


class ServerError(RuntimeError):
    """A server that did not start, or has ended; one line, and where its log is."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a server is started. ``flags`` follow the command; host and port are added to them."""

    name: str
    command: tuple[str, ...]
    flags: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """For a result file."""
        words = [*self.command, *self.flags]
        return {"command": [*map(without_folders, words)], "environment": dict(self.environment)}


def ours(name: str, flags: list[str], environment: Mapping[str, str] | None = None) -> Launch:
    """This package's server."""
    command = (sys.executable, "-m", "peagle_jax.serve")
    return Launch(name, command, ("--json", *flags), environment or {})


def vllm(name: str, python: str, target: str, flags: list[str]) -> Launch:
    """vLLM's server on this machine's CPU, in the environment of ``python``."""
    usage = "VLLM_NO_USAGE_STATS"
    environment = vllm_environment() | {usage: os.environ.get(usage, "1")}
    # vLLM's own command asks for a distribution of the name vllm, which its CPU build does not have.
    command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", target)
    return Launch(name, command, ("--enforce-eager", *flags), environment)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """A server that answers at ``url``; ``process`` is None for one that was there before."""

    def __init__(
        self, name: str, url: str, process: subprocess.Popen[bytes] | None = None, log: Path | None = None
    ) -> None:
        self.name, self.url, self.process, self.log = name, url, process, log
        self.http = httpx.Client(base_url=url, timeout=60)

    @property
    def running(self) -> bool:
        return self.process is None or self.process.poll() is None

    def wait_until_ready(self, within: float) -> float:
        """Waits for /health; returns the seconds that it took.

        Raises:
            ServerError: the process has ended, or it took longer than ``within`` seconds.
        """
        began = time.monotonic()
        while time.monotonic() - began < within:
            if not self.running:
                raise ServerError(f"{self.name} ended before it was ready{self.last_words()}")
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health").status_code == 200:
                    return time.monotonic() - began
            time.sleep(0.2)
        raise ServerError(f"{self.name} was not ready after {within:.0f} s{self.last_words()}")

    def last_words(self) -> str:
        """The end of its log, for an error."""
        lines = self.log_text().splitlines()[-LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines) if lines else " (and has logged nothing)"

    def log_text(self) -> str:
        return "" if self.log is None else self.log.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str) -> httpx.Response:
        """Raises httpx.HTTPError if there is no answer, or a bad one."""
        return self.http.get(path).raise_for_status()

    @functools.cached_property
    def model(self) -> str:
        """The name that requests give."""
        return self.get("/v1/models").json()["data"][0]["id"]

    def version(self) -> str:
        return self.get("/version").json()["version"]

    def metrics(self) -> dict[str, float]:
        return read_metrics(self.get("/metrics").text)

    def chat_tokens(self, text: str) -> list[int]:
        """Token ids of one user message in the model's chat template."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        body |= {"add_generation_prompt": True}
        return self.http.post("/tokenize", json=body).raise_for_status().json()["tokens"]

    def start_up_report(self) -> dict[str, Any]:
        """What our server says that it has loaded; nothing from another one."""
        for line in self.log_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line) if line.startswith("{") else {}
                if event.get("event") == "loaded":
                    wanted = ("model", "head", "K", "dtype", "max_model_len", "max_num_seqs")
                    return {key: event[key] for key in wanted if key in event}
        return {}

    def stop(self) -> None:
        """Ends the process and all that it has started."""
        self.http.close()
        process = self.process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_WITHIN)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its group, which may have outlived it
        process.wait()


@contextlib.contextmanager
def started(launch: Launch, logs: Path) -> Iterator[Server]:
    """Starts a server on a free port, at ``server.url``, and stops it in the end. Its log is in ``logs``."""
    port = free_port()
    log = logs / f"{launch.name}.log"
    command = [*launch.command, *launch.flags, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | launch.environment | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # a group, to be ended with all that it starts
        )
    server = Server(launch.name, f"http://127.0.0.1:{port}", process, log)
    try:
        yield server
    finally:
        server.stop()


def end_on_sigterm() -> None:
    """A benchmark that is told to end stops its servers first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def read_metrics(text: str) -> dict[str, float]:
    """A Prometheus page: each sample's name with the sum of its values, whatever its labels. Accepted drafts
    by position are ``NAME/POSITION``."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            position = sample.labels.get("position")
            name = sample.name if position is None else f"{sample.name}/{position}"
            found[name] = found.get(name, 0.0) + sample.value
    return found


DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total/"
GENERATED = "vllm:generation_tokens_total"
COMPILED = "peagle:compilations_total"


def change(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What counters have counted in between."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def acceptance(counted: Mapping[str, float]) -> dict[str, Any]:
    """Of the rounds that drafted: the mean length with the target's own token, the share that accepts each
    position, and how many of all tokens came from them. Nothing if there were none."""
    drafts = counted.get(DRAFTS, 0.0)
    if not drafts:
        return {}
    places = sorted((int(name.rsplit("/", 1)[1]), name) for name in counted if name.startswith(PER_POSITION))
    made = drafts + counted[ACCEPTED]
    return {
        "mean_acceptance_length": 1 + counted[ACCEPTED] / drafts,
        "acceptance_per_position": [counted[name] / drafts for _, name in places],
        "mean_draft_length": counted[DRAFTED] / drafts,
        "share_of_tokens_from_drafting_rounds": min(1.0, made / max(counted.get(GENERATED, 0.0), made)),
    }
