"""Clients that leave free the engine, and clients that come together are all answered."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from tests.serve.conftest import complete
from tests.serve.doubles import END
from tests.serve.engine_double import ScriptedEngine


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(serve, stream):
    engine = ScriptedEngine(
        lambda r: [65] * 150 if len(r.prompt_ids) == 4 else r.prompt_ids, width=1, pause=0.1
    )
    server = serve(engine)
    client = httpx.Client(base_url=server.url, timeout=0.5)
    body = {"prompt": "long", "max_tokens": 150, "stream": stream}
    if stream:
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_raw())
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body)
    client.close()
    wait_until(lambda: engine.closed)
    assert engine.closed == [True]
    assert engine.rounds < 100
    assert complete(server, prompt="ok").choices[0].text == "ok"


def test_requests_that_come_together_are_all_answered(serve):
    server = serve(ScriptedEngine(lambda r: [*r.prompt_ids, END], pause=0.001))
    texts: dict[int, str] = {}

    def ask(i: int) -> None:
        texts[i] = complete(server, prompt=f"prompt {i}", max_tokens=30).choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert texts == {i: f"prompt {i}" for i in range(12)}
