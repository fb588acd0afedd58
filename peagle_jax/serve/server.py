"""The process around the application: its socket, and its end on a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import ssl
import stat
import threading
from typing import Any

import uvicorn
from fastapi import FastAPI

from peagle_jax.arguments import CommandError

log = logging.getLogger(__name__)

FINISH_WITHIN = 25.0
"""Seconds that running requests get after a signal; container platforms kill after 30."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. What connects before the server runs waits for it.

    A port that is bound, but not listened to, could be bound by a second server too.

    Raises:
        CommandError: the address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen()
    except (OSError, OverflowError, UnicodeError) as error:
        raise CommandError(
            f"cannot listen on {host}:{port}: {error}; choose another --host or --port"
        ) from error
    return sock


def bind_unix(path: str) -> socket.socket:
    """A Unix domain socket that listens; what an earlier server left at ``path`` is replaced.

    Raises:
        CommandError: the path cannot be had.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode):
                os.unlink(path)
        sock.bind(path)
        sock.listen()
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot listen on {path}: {error}; choose another --uds") from error
    return sock


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """The server's address, with the brackets that an IPv6 one needs."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclasses.dataclass(frozen=True)
class Tls:
    """vLLM's ``--ssl-*`` flags; no key file means no TLS."""

    keyfile: str | None = None
    certfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0
    """ssl.CERT_NONE, CERT_OPTIONAL or CERT_REQUIRED, of clients' certificates."""

    def check(self) -> None:
        """Raises CommandError for files that are missing, are no certificates, or do not belong together."""
        if (self.keyfile is None) != (self.certfile is None):
            raise CommandError("--ssl-keyfile and --ssl-certfile belong together; give both or neither")
        for flag in ("keyfile", "certfile", "ca_certs"):
            path = getattr(self, flag)
            if path is not None and not os.path.isfile(path):
                raise CommandError(f"--ssl-{flag.replace('_', '-')}: there is no file {path[:200]}")
        context, flags = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "--ssl-keyfile and --ssl-certfile"
        try:
            if self.keyfile is not None and self.certfile is not None:
                context.load_cert_chain(self.certfile, self.keyfile)
            flags = "--ssl-ca-certs"
            if self.ca_certs is not None:
                context.load_verify_locations(self.ca_certs)
        except (OSError, ValueError) as error:  # ssl.SSLError among them
            raise CommandError(f"{flags} cannot be used: {error}; expected PEM files that match") from error

    @property
    def options(self) -> dict[str, Any]:
        """uvicorn's settings."""
        if self.keyfile is None:
            return {}
        return {f"ssl_{name}": value for name, value in dataclasses.asdict(self).items() if value is not None}


class Server(uvicorn.Server):
    """A server that, told to stop, lets running requests finish for ``finish_within`` seconds and then
    ends those that are left with an error of their own. The engine refuses new ones meanwhile, and /health
    says so."""

    def __init__(
        self,
        app: FastAPI,
        engine: Any,
        finish_within: float = FINISH_WITHIN,
        *,
        tls: Tls | None = None,
        log_level: str = "warning",
        access_log: bool = False,
        root_path: str = "",
    ) -> None:
        # uvicorn's own limit cuts connections; it is only for clients that do not read.
        limit = math.ceil(finish_within) + 3
        config = uvicorn.Config(
            app,
            log_level=log_level,
            access_log=access_log,
            root_path=root_path,
            timeout_graceful_shutdown=limit,
            **(tls or Tls()).options,
        )
        super().__init__(config)
        self._engine, self._finish_within = engine, finish_within

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("stopping: running requests have %g s to finish", self._finish_within)
        threading.Thread(target=self._engine.stop, args=(self._finish_within,), daemon=True).start()
        await super().shutdown(sockets)
        log.info("stopped")


def set_up_log(level: str = "INFO") -> None:
    """One line an event, with the time."""
    logging.basicConfig(level=level, format="%(asctime)s %(message)s")
    for noisy in ("jax", "httpx", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def run_server(server: uvicorn.Server, sock: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT. uvicorn raises the signal again when it is done; that is the
    good end of a server, so it is not passed on."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[sock])
