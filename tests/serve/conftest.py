"""A server in a thread, on a free port, for the tests that speak HTTP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from peagle_jax.serve.app import AppOptions, create_app
from peagle_jax.serve.metrics import Metrics
from peagle_jax.serve.server import Server as PeagleServer
from peagle_jax.serve.server import bind
from peagle_jax.serve.serving import SamplingDefaults, ServedModel
from tests.serve.doubles import EOS, byte_tokenizer

CONTEXT = 200


class Server:
    """What a test needs of a running server."""

    def __init__(self, url: str, engine: Any, tokenizer: Any, metrics: Metrics) -> None:
        self.url, self.engine, self.tokenizer, self.metrics = url, engine, tokenizer, metrics
        self.stop: Callable[[], None] = lambda: None
        self.http = httpx.Client(base_url=url, timeout=120)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def chat(server, **changes):
    return server.openai.chat.completions.create(**({"model": "tiny", "messages": user("hi")} | changes))


def complete(server, **changes):
    return server.openai.completions.create(**({"model": "tiny", "prompt": "hi"} | changes))


@contextlib.contextmanager
def running(
    engine: Any,
    *,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    defaults: SamplingDefaults | None = None,
    max_model_len: int = CONTEXT,
    wait: bool = True,
    finish_within: float = 1.0,
    sock: socket.socket | None = None,
    options: AppOptions | None = None,
    root_path: str = "",
    **served: Any,
) -> Iterator[Server]:
    """A server over an engine; ``served`` are more of ServedModel's fields."""
    tokenizer = tokenizer or byte_tokenizer()
    eos = tokenizer.get_vocab()[EOS]
    vocab_size = vocab_size or len(tokenizer)
    model = ServedModel(
        ["tiny", "alias"],
        tokenizer,
        max_model_len,
        vocab_size,
        (eos,),
        defaults or SamplingDefaults(),
        **served,
    )
    metrics = Metrics("tiny", max_model_len)
    if getattr(engine, "on_finish", False) is None:
        engine.on_finish = metrics.on_finish
    sock = sock or bind("127.0.0.1", 0)
    server = PeagleServer(
        create_app(engine, model, options, metrics), engine, finish_within, root_path=root_path
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started, "the server did not start"
    deadline = time.monotonic() + 1000
    while wait and engine.state == "warming" and time.monotonic() < deadline:
        time.sleep(0.01)
    handle = Server(f"http://127.0.0.1:{sock.getsockname()[1]}", engine, tokenizer, metrics)
    handle.stop = lambda: setattr(server, "should_exit", True)
    try:
        yield handle
    finally:
        handle.http.close()
        handle.openai.close()
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts servers that end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(running(*args, **kwargs))
