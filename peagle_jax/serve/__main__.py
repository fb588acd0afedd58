"""``python -m peagle_jax.serve``: an OpenAI-compatible server for one model and its head."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

import uvicorn
from fastapi import FastAPI

from peagle_jax import commands
from peagle_jax.arguments import CommandError, Parser, add_model, named, run_command, utf8
from peagle_jax.serve.app import create_app, version
from peagle_jax.serve.engine import Engine
from peagle_jax.serve.serving import SamplingDefaults, ServedModel, unserved_defaults
from peagle_jax.serve.speculative_config import SpeculativeOptions, parse_speculative_config

log = logging.getLogger(__name__)

FINISH_WITHIN = 25
"""Seconds that running requests get after a signal; container platforms kill after 30."""

_EPILOG = """\
examples:
  python -m peagle_jax.serve
      the embedded model with its P-EAGLE head
  python -m peagle_jax.serve ./my-model \\
      --speculative-config '{"method": "peagle", "model": "./my-head", "num_speculative_tokens": 5}'

keys of --speculative-config (all optional; null switches speculation off):
  method                  peagle, p_eagle or eagle3 (default: what the head is)
  model                   the head, a folder or a hub id (default: the embedded model's own head)
  num_speculative_tokens  drafted a round (default: 5, or what the head was trained for; 0: off)
  parallel_drafting       true: P-EAGLE, false: EAGLE-3 (eagle3 with true is how vLLM writes P-EAGLE)
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m peagle_jax.serve",
        description="Serve a model over OpenAI's HTTP API, with speculative decoding. Flags as in vLLM.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("model_tag", nargs="?", type=named, metavar="MODEL", help="same as --model")
    add_model(parser)
    add("--revision", type=named, help="of the model's hub id")
    add("--speculative-config", type=utf8, metavar="JSON", help="the head and how it drafts; see below")
    add(
        "--host",
        type=named,
        default="127.0.0.1",
        help="0.0.0.0 serves other machines (default: %(default)s)",
    )
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="prompt and answer together (default: the model's; on CPU at most 2048)",
    )
    add("--dtype", choices=commands.DTYPES, default="auto", help="of the weights (default: auto)")
    add(
        "--served-model-name",
        nargs="+",
        type=named,
        metavar="NAME",
        help="names that requests may use (default: the model's)",
    )
    add("--seed", type=int, help="makes requests without a seed repeatable from start to start")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    model = args.model_tag if args.model is None else args.model
    if args.model_tag is not None and args.model_tag != model:
        raise CommandError(f"MODEL is {args.model_tag!r} but --model is {args.model!r}; give one of them")
    options = SpeculativeOptions()
    if args.speculative_config is not None:
        options = parse_speculative_config(args.speculative_config)
    sock = bind(args.host, args.port)  # before minutes of loading, so that a busy port is told at once

    began = time.perf_counter()
    loaded = commands.load(
        model,
        options.model,
        options.num_speculative_tokens,
        method=options.method,
        speculate=options.speculate,
        dtype=args.dtype,
        revision=args.revision,
        tokenizer=args.tokenizer,
    )
    max_model_len = commands.context_limit(loaded.target, args.max_model_len)
    defaults = SamplingDefaults.from_generation_config(loaded.target.generation)
    not_applied = unserved_defaults(loaded.target.generation)
    names = args.served_model_name or [loaded.target.name if model is None else model]
    print(f"peagle_jax {version()}", flush=True)
    lines = [
        *commands.describe(loaded, max_model_len),
        ("sampling", f"{defaults.describe()} unless a request says otherwise"),
        *([("not applied", f"the generation config's {', '.join(not_applied)}")] if not_applied else []),
        ("served as", ", ".join(names)),
        ("loaded in", f"{time.perf_counter() - began:.1f} s; compiling now, requests wait until it is ready"),
    ]
    for name, value in lines:
        print(f"  {name:<14} {value}", flush=True)

    url = url_of(args.host, sock.getsockname()[1])
    failure: list[Exception] = []

    def on_warm(outcome: float | Exception) -> None:
        if isinstance(outcome, Exception):
            failure.append(outcome)
            server.should_exit = True
        else:
            with contextlib.suppress(OSError):  # this is the engine's thread, and needs no reader of stdout
                print(f"  {'compiled in':<14} {outcome:.1f} s\nready: {url}/v1/chat/completions", flush=True)

    engine = Engine(
        loaded.decoder(max_model_len),
        copy.deepcopy(loaded.target.tokenizer),
        loaded.num_speculative_tokens,
        on_warm,
    )
    served = ServedModel(
        names,
        loaded.target.tokenizer,
        max_model_len,
        loaded.target.config.vocab_size,
        loaded.target.config.eos_token_ids,
        defaults,
        args.seed,
    )
    server = Server(create_app(engine, served), engine)
    set_up_log()
    run_server(server, sock)
    if failure:
        print(f"error: the model could not be compiled: {failure[0]}", file=sys.stderr)
        return 1
    return 0


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


def url_of(host: str, port: int) -> str:
    """The server's address, with the brackets that an IPv6 one needs."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """A server that, told to stop, lets running requests finish for ``finish_within`` seconds and then
    ends those that are left with an error of their own."""

    def __init__(self, app: FastAPI, engine: Engine, finish_within: float = FINISH_WITHIN) -> None:
        # uvicorn's own limit cuts connections; it is only for clients that do not read.
        limit = math.ceil(finish_within) + 3
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=limit))
        self._engine, self._finish_within = engine, finish_within

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("stopping: running requests have %g s to finish", self._finish_within)
        threading.Thread(target=self._engine.stop, args=(self._finish_within,), daemon=True).start()
        await super().shutdown(sockets)
        log.info("stopped")


def set_up_log() -> None:
    """One line an event, with the time."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for noisy in ("jax", "httpx", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def run_server(server: uvicorn.Server, sock: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT. uvicorn raises the signal again when it is done; that is the
    good end of a server, so it is not passed on."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[sock])


if __name__ == "__main__":
    status = run_command(main)
    # A compilation cannot be interrupted, and an interpreter that ends under one may crash.
    os._exit(status)
