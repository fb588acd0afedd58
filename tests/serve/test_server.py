"""Sockets and certificates."""

from __future__ import annotations

import socket
import ssl
import threading
import time

import httpx
import pytest

from peagle_jax.arguments import CommandError
from peagle_jax.serve.app import create_app
from peagle_jax.serve.server import Server, Tls, bind, bind_unix, url_of
from peagle_jax.serve.serving import ServedModel
from tests.serve.conftest import running
from tests.serve.doubles import END, TOKENIZER
from tests.serve.engine_double import says


def test_a_unix_socket_serves_and_takes_the_place_of_a_dead_servers(tmp_path):
    path = str(tmp_path / "s.sock")
    bind_unix(path).close()  # its file stays
    engine = says("x")
    model = ServedModel(["tiny"], TOKENIZER, 100, len(TOKENIZER), (END,))
    server = Server(create_app(engine, model), engine, 0.1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bind_unix(path)]}, daemon=True)
    thread.start()
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as client:
        assert client.post("/v1/completions", json={"prompt": "hi"}).json()["choices"][0]["text"] == "x"
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    file = tmp_path / "precious"
    file.write_text("data")
    with pytest.raises(CommandError, match="choose another --uds"):
        bind_unix(str(file))
    assert file.read_text() == "data"


def test_an_address_is_one_that_clients_take():
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert url_of("::1", 80, "https") == "https://[::1]:80"


def test_two_servers_cannot_have_one_port_while_they_load():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(CommandError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another"):
            bind("127.0.0.1", port)


def test_a_request_that_comes_while_the_model_loads_is_answered_when_it_is_there():
    sock = bind("127.0.0.1", 0)
    with socket.create_connection(sock.getsockname(), timeout=60) as early:
        early.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with running(says("x"), sock=sock):
            answer = b""
            while part := early.recv(4096):
                answer += part
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("tls", "words"),
    [
        (Tls(keyfile="/nowhere"), "belong together"),
        (Tls(certfile="/nowhere"), "belong together"),
        (Tls("/nowhere/k", "/nowhere/c"), "--ssl-keyfile: there is no file /nowhere/k"),
        (Tls(__file__, __file__), "--ssl-keyfile and --ssl-certfile cannot be used: .*PEM"),
        (Tls(ca_certs=__file__), "--ssl-ca-certs cannot be used"),
    ],
)
def test_certificates_that_cannot_be_read_are_told_before_the_model_is_loaded(tls, words):
    with pytest.raises(CommandError, match=words):
        tls.check()


def test_no_certificate_means_no_settings():
    assert Tls().options == {}
    assert Tls("k", "c", None, int(ssl.CERT_REQUIRED)).options == {
        "ssl_keyfile": "k",
        "ssl_certfile": "c",
        "ssl_cert_reqs": 2,
    }


def test_health_says_so_while_running_requests_finish(serve):
    hold = threading.Event()
    server = serve(says("abc", hold=hold), finish_within=20)
    got = []
    ask = threading.Thread(target=lambda: got.append(server.post("/v1/completions", prompt="x")))
    ask.start()
    assert server.engine.busy.wait(10)
    with httpx.Client(base_url=server.url) as kept:
        assert kept.get("/health").status_code == 200
        server.engine.stop(0)  # what the server does first when it is told to stop
        assert kept.get("/ping").status_code == 503
        assert kept.post("/v1/completions", json={"prompt": "x"}).headers["retry-after"] == "1"
    hold.set()
    ask.join(10)
    time.sleep(0)
    assert got[0].status_code in (200, 503)
