"""A server, in a process of its own or there before: its command, start and end, and what it tells."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from peagle_jax.arguments import CommandError
from peagle_jax.bench.clients import CHAT, COMPLETIONS, Talk, headers
from peagle_jax.bench.datasets import Conversation
from peagle_jax.bench.machine import recorded, without_folders, without_secrets

STOP_WITHIN = 40.0
"""Seconds that a server gets to end after a signal; ours gives running requests 25 of them."""

SETTLE = 0.25
"""Seconds between two looks at counters that should stand still."""

SETTLE_WITHIN = 10.0
"""Seconds that they get to do so."""

LOG_LINES = 15
"""Of a server that has failed, shown in the error."""


class ServerError(RuntimeError):
    """A server that did not start, has ended or answers wrongly; one line, and the end of its log."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a server is started. ``{port}`` in its command is where it listens; without it, host and port are
    added as flags."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """For a result file: no folders, no secrets."""
        told = {name: without_secrets(f"{name}={value}") for name, value in self.environment.items()}
        return {
            "command": recorded(self.command),
            "environment": {n: without_folders(text.removeprefix(f"{n}=")) for n, text in told.items()},
        }

    def words(self, port: int) -> list[str]:
        """The command at a port."""
        words = [word.replace("{port}", str(port)) for word in self.command]
        here = ["--host", "127.0.0.1", "--port", str(port)]
        return words if words != list(self.command) else [*words, *here]


def ours(name: str, flags: Sequence[str], environment: Mapping[str, str] | None = None) -> Launch:
    """This package's server."""
    command = (sys.executable, "-m", "peagle_jax.serve", "--json", *flags)
    return Launch(name, command, environment or {})


def parse_launch(text: str) -> Launch:
    """``--start``: ``NAME=[VARIABLE=value ...] command``; the command ``ours`` is this package's server.

    Raises:
        CommandError: there is no name or no command, or a quote is not closed.
    """
    match = re.fullmatch(r"([\w.-]+)=(.*)", text, re.DOTALL)
    name, command = (match[1], match[2]) if match else ("ours", text)
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CommandError(
            f"--start {name}: {error}; quote the command's words as a shell wants them"
        ) from error
    environment: dict[str, str] = {}
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        variable, _, value = words.pop(0).partition("=")
        environment[variable] = value
    if words[:1] == ["ours"]:
        return ours(name, words[1:], environment)
    if match is None or not words:
        raise CommandError(f"--start {text[:60]!r}: expected NAME=command, or ours and its flags")
    return Launch(name, tuple(words), environment)


def parse_endpoint(text: str) -> Server:
    """``--endpoint``: ``NAME=URL``, with ``#MODEL`` where the first model that it lists is not meant.

    Raises:
        CommandError: anything else.
    """
    match = re.fullmatch(r"([\w.-]+)=(https?://[^#]+?)/*(?:/v1/*)?(?:#(.+))?", text)
    if match is None:
        raise CommandError(f"--endpoint {text[:80]!r}: expected NAME=http://HOST:PORT, and perhaps #MODEL")
    try:
        server = Server(match[1], match[2])
    except httpx.InvalidURL as error:
        raise CommandError(f"--endpoint {text[:80]!r}: {error}; expected NAME=http://HOST:PORT") from error
    if match[3]:
        server.model = match[3]
    return server


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
        self.http = httpx.Client(base_url=url, timeout=60, headers=headers())

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
            with contextlib.suppress(httpx.HTTPError):
                # An endpoint that is not vLLM's may have no /health.
                if any(self.http.get(path).status_code == 200 for path in ("/health", "/v1/models")):
                    return time.monotonic() - began
            time.sleep(0.2)
        raise ServerError(f"{self.name} was not ready after {within:.0f} s{self.last_words()}")

    def last_words(self) -> str:
        """The end of its log, for an error."""
        lines = self.log_text().splitlines()[-LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines) if lines else " (and has logged nothing)"

    def log_text(self) -> str:
        return "" if self.log is None else self.log.read_text(encoding="utf-8", errors="replace")

    @contextlib.contextmanager
    def _expected(self, path: str) -> Iterator[None]:
        """What goes wrong within, a question to ``path`` and the reading of its answer, is a ServerError."""
        try:
            yield
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            ended = "" if self.running else self.last_words()
            raise ServerError(
                f"{self.name} does not answer {path} as expected ({reason[:200]}){ended}"
            ) from error

    @functools.cached_property
    def model(self) -> str:
        """The name that requests give. Raises ServerError, as all that asks does."""
        with self._expected("/v1/models"):
            return self.http.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def version(self) -> str | None:
        """None of an endpoint that does not tell."""
        with self._expected("/version"):
            found = self.http.get("/version")
            return found.json().get("version") if found.status_code == 200 else None

    def metrics(self) -> dict[str, float]:
        """What its counters say; nothing of an endpoint without a metrics page."""
        with self._expected("/metrics"):
            found = self.http.get("/metrics")
            return read_metrics(found.text) if found.status_code == 200 else {}

    def settled_metrics(self) -> dict[str, float]:
        """Its counters when they stand still: a server may count an answer after it has sent it.

        Raises:
            ServerError: they do not, as others use the server too; or it does not answer.
        """
        now, deadline = self.metrics(), time.monotonic() + SETTLE_WITHIN
        while time.monotonic() < deadline:
            time.sleep(SETTLE)
            before, now = now, self.metrics()
            if all(before.get(name) == value for name, value in now.items() if name.startswith(COUNTED)):
                return now
        raise ServerError(
            f"the counters of {self.name} do not stand still within {SETTLE_WITHIN:g} s; "
            f"measure it while nobody else uses it"
        )

    def chat_tokens(self, text: str) -> list[int]:
        """Token ids of one user message in the model's chat template."""
        found = self.tokens_of([{"role": "user", "content": text}])
        if found is None:
            raise ServerError(f"{self.name} has no /tokenize")
        return found

    def tokens_of(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """Token ids of messages in the model's chat template; None of an endpoint that does not tokenise."""
        body = {"model": self.model, "messages": messages, "add_generation_prompt": True}
        with self._expected("/tokenize"):
            found = self.http.post("/tokenize", json=body)
            return None if found.status_code in (404, 405) else found.raise_for_status().json()["tokens"]

    def talk(
        self,
        conversation: Conversation,
        max_tokens: int,
        *,
        ignore_eos: bool,
        follow: bool,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Talk:
        """A conversation as requests; only its first turn unless ``follow``.

        A single turn goes as token ids where the server tokenises, so that all servers read the same. Greedy
        requests have no seed, which a server may refuse.
        """
        messages = conversation.opening
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": temperature}
        body |= {"seed": seed} if temperature else {}
        later = conversation.turns[1:] if follow else ()
        ids = self.tokens_of(messages)
        if ids is not None and ignore_eos:
            body["ignore_eos"] = True  # vLLM's word: another endpoint would refuse it
        if ids is not None and not later:
            return Talk(COMPLETIONS, body | {"prompt": ids})
        return Talk(CHAT, body | {"messages": messages}, later)

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
    with log.open("wb") as file:
        process = subprocess.Popen(
            launch.words(port),
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


COMPILED = "peagle:compilations_total"
COUNTED = ("vllm:spec_decode", "vllm:generation_tokens")


def change(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What counters have counted in between."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
