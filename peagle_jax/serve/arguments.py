"""The server's flags: vLLM's names, and what each may be."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, get_args

from peagle_jax import commands, precision
from peagle_jax.arguments import (
    CommandError,
    Parser,
    add_model,
    add_processes,
    add_tensor_parallel_size,
    check_processes,
    named,
    utf8,
)
from peagle_jax.serve.acceptance import LEVELS
from peagle_jax.serve.chat_parser import ReasoningParser, ToolParser
from peagle_jax.speculative.sampling import MAX_LOGPROBS

_EPILOG = """\
examples:
  python -m peagle_jax.serve
      the embedded model with its P-EAGLE head
  python -m peagle_jax.serve ./my-model \\
      --speculative-config '{"method": "peagle", "model": "./my-head", "num_speculative_tokens": 5}'

keys of --speculative-config (all optional; null switches speculation off):
  method                  peagle, p_eagle or eagle3 (default: what the head is), or ngram: no head, but what
                          followed the last tokens where they stood before
  model                   the head, a folder or a hub id (default: the embedded model's own head)
  num_speculative_tokens  drafted a round (default: 5, or what the head was trained for; 0: off)
  prompt_lookup_max, prompt_lookup_min
                          of ngram: how many last tokens, at most and at least (default: 5, or the other)
  parallel_drafting       true: P-EAGLE, false: EAGLE-3 (eagle3 with true is how vLLM writes P-EAGLE)
  parallel_drafting_spec  the same as parallel_drafting, or {"depth": K, "num_trees": candidates for the
                          first position, each with a chain of the likeliest behind it}
  num_speculative_nodes   M: verify the M likeliest nodes of a tree, K deep (default: 0, a chain)
  speculative_token_tree  a fixed tree: its paths of ranks, as "[(0,), (1,), (0, 0)]" or lists
  draft_tensor_parallel_size
                          1: the head whole on every device; or --tensor-parallel-size (default)
  num_speculative_tokens_per_batch_size
                          [[from, to, K], ...] fixes K by hand (default: chosen from measured times)
  synthetic_acceptance_rates
                          [0.8, 0.6, ...] accepts drafts by chance, each position's in that share of the
                          rounds: for benchmarks only, since answers are no longer the model's

word before the flags:
  serve                   as container platforms start an image: port 8080 (SAGEMAKER_BIND_TO_PORT), all
                          interfaces, the model in /opt/ml/model, SM_VLLM_NAME=value for --name value
"""


def whole(least: int) -> Any:
    """An argument's type: a whole number of at least ``least``; 4k is 4000 and 4K 4096, as in vLLM."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"(-?\d{1,12})([kmKM]?)", text)
        factor = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
        if match is None or int(match[1]) * factor[match[2]] < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {least}, found {text[:40]!r}"
            )
        return int(match[1]) * factor[match[2]]

    return parse


def port(text: str) -> int:
    """An argument's type: a port, 0 for any."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 65535, found {text[:40]!r}")
    return int(text)


def fraction(text: str) -> float:
    """An argument's type: a number in (0, 1]."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and at most 1, found {text[:40]!r}")
    return value


def _json(text: str) -> Any:
    """What JSON text says; None, as for null, where it is none."""
    try:
        return json.loads(utf8(text))
    except (ValueError, RecursionError):
        return None


def json_object(text: str) -> dict[str, Any]:
    """An argument's type: a JSON object."""
    value = _json(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, found {text[:40]!r}")
    return value


def json_strings(text: str) -> tuple[str, ...]:
    """An argument's type: a JSON list of strings."""
    value = _json(text)
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise argparse.ArgumentTypeError(f'must be a JSON list like ["*"], found {text[:40]!r}')
    return tuple(value)


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m peagle_jax.serve",
        description="Serve a model over OpenAI's HTTP API, with speculative decoding. Flags as in vLLM.",
        epilog=_EPILOG,
    )
    parser.add_argument("model_tag", nargs="?", type=named, metavar="MODEL", help="same as --model")
    add_model(parser)
    _add_model_flags(parser.add_argument_group("model"))
    _add_engine_flags(parser.add_argument_group("engine"))
    _add_answer_flags(parser.add_argument_group("answers"))
    _add_http_flags(parser.add_argument_group("HTTP"))
    return parser


def _add_model_flags(group: Any) -> None:
    add = group.add_argument
    add("--speculative-config", type=utf8, metavar="JSON", help="the head and how it drafts; see below")
    add("--dtype", choices=commands.DTYPES, default="auto", help="of the weights (default: auto)")
    precision.add_quantization(add)
    add(
        "--max-model-len",
        type=whole(2),
        metavar="N",
        help="prompt and answer together (default: the model's; on CPU at most 2048)",
    )
    add(
        "--served-model-name",
        nargs="+",
        type=named,
        metavar="NAME",
        help="names that requests may use (default: the model's)",
    )
    add("--seed", type=int, help="makes requests without a seed repeatable from start to start")
    add(
        "--generation-config",
        type=named,
        default="auto",
        help="auto: the model's sampling defaults; vllm: none of them (default: %(default)s)",
    )
    add(
        "--override-generation-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="sampling defaults that go before the model's",
    )


def _add_engine_flags(group: Any) -> None:
    add = group.add_argument
    add(
        "--max-num-seqs",
        type=whole(1),
        metavar="N",
        help="requests that run at once, on each replica (default: 64, on CPU 8)",
    )
    add(
        "--max-num-batched-tokens",
        type=whole(1),
        metavar="N",
        help="rows of a dispatch: prompt tokens, and 1 + the drafts of each running request",
    )
    add(
        "--gpu-memory-utilization",
        "--hbm-utilization",
        type=fraction,
        metavar="F",
        help="part of the memory that weights and cache may take (default: 0.9)",
    )
    precision.add_kv_cache_dtype(add)
    add_tensor_parallel_size(add)
    add(
        "--data-parallel-size",
        "-dp",
        type=whole(1),
        default=1,
        metavar="N",
        help="replicas, each on so many devices (default: %(default)s)",
    )
    add(
        "--replicate",
        choices=["pmap", "shard_map"],
        help="how replicas are mapped over devices (default: pmap, but shard_map for split models and hosts)",
    )
    add_processes(add)
    switch = argparse.BooleanOptionalAction
    add("--enable-prefix-caching", action=switch, help="reuse the cache of earlier prompts (default: on)")
    add("--enable-chunked-prefill", action=switch, default=True, help="always on")
    add("--async-scheduling", action=switch, default=True, help="always on: the host reads one dispatch late")
    add("--stream-interval", type=whole(1), metavar="N", help="accepted; a chunk holds what a round gave")
    add("--rounds-per-dispatch", type=whole(1), metavar="R", help="rounds in one program")
    add(
        "--compilation-cache-dir",
        type=named,
        metavar="DIR",
        help="keeps compiled programs from start to start",
    )


def _add_answer_flags(group: Any) -> None:
    add = group.add_argument
    add("--chat-template", type=named, metavar="FILE", help="a Jinja file, or the template itself")
    add("--default-chat-template-kwargs", type=json_object, default={}, metavar="JSON", help="for every chat")
    add("--trust-request-chat-template", action="store_true", help="requests may bring their own template")
    add("--enable-auto-tool-choice", action="store_true", help="accepted; a parser for tools is enough")
    add("--tool-call-parser", choices=get_args(ToolParser), help="(default: what the template shows)")
    add("--reasoning-parser", choices=get_args(ReasoningParser), help="(default: what the template shows)")
    add(
        "--max-logprobs",
        type=whole(0),
        default=MAX_LOGPROBS,
        metavar="N",
        help="most that a request may ask for (default: %(default)s)",
    )
    add(
        "--per-request-spec-decode-metrics",
        choices=LEVELS,
        default="none",
        help="tells each answer's acceptance in its metrics (default: %(default)s)",
    )
    add("--enable-prompt-tokens-details", action="store_true", help="tells cached tokens in usage")


def _add_http_flags(group: Any) -> None:
    add = group.add_argument
    add(
        "--host", type=named, default="127.0.0.1", help="0.0.0.0 serves other machines (default: %(default)s)"
    )
    add("--port", type=port, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--uds", type=named, metavar="PATH", help="a Unix domain socket instead of host and port")
    add("--root-path", type=utf8, default="", help="prefix that a proxy in front takes away")
    add(
        "--api-key",
        nargs="+",
        type=named,
        metavar="KEY",
        help="what clients must send (default: VLLM_API_KEY, else no key is asked for)",
    )
    add("--allowed-origins", type=json_strings, default=(), metavar="JSON", help="of browsers elsewhere")
    add("--allowed-methods", type=json_strings, default=("*",), metavar="JSON", help="of browsers elsewhere")
    add("--allowed-headers", type=json_strings, default=("*",), metavar="JSON", help="of browsers elsewhere")
    add("--allow-credentials", action="store_true", help="of browsers elsewhere")
    add("--ssl-keyfile", type=named, metavar="FILE")
    add("--ssl-certfile", type=named, metavar="FILE")
    add("--ssl-ca-certs", type=named, metavar="FILE", help="that sign clients' certificates")
    add("--ssl-cert-reqs", type=int, choices=(0, 1, 2), default=0, help="2: clients need a certificate")
    add(
        "--max-num-queued-reqs",
        type=whole(0),
        metavar="N",
        help="requests that may wait or run; more are 503 (default: no limit)",
    )
    add(
        "--max-num-queued-tokens",
        type=whole(0),
        metavar="N",
        help="prompt tokens that may wait for their answer; more are 503 (default: no limit)",
    )
    add(
        "--sse-keep-alive-interval",
        type=whole(0),
        default=15,
        metavar="S",
        help="seconds of silence until a stream says that it lives; 0: never (default: %(default)s)",
    )
    levels = ["critical", "error", "warning", "info", "debug", "trace"]
    add("--uvicorn-log-level", choices=levels, default="warning", help="(default: %(default)s)")
    add("--enable-access-log", action="store_true", help="a line for every HTTP request")
    add("--disable-uvicorn-access-log", action="store_true", help="accepted; it is off")
    add("--disable-log-requests", "--no-enable-log-requests", action="store_true", help="no line a request")
    add("--disable-log-stats", action="store_true", help="no line every ten seconds")
    add("--json", action="store_true", help="the start-up report as JSON, an object a line")


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What the flags ask of the engine; None leaves it to the engine."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    replicate: str | None = None
    enable_prefix_caching: bool | None = None
    rounds_per_dispatch: int | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> EngineOptions:
        return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})


def model_of(args: argparse.Namespace) -> str | None:
    """The model that was named either way; None is the embedded one.

    Raises:
        CommandError: two different ones.
    """
    model = args.model_tag if args.model is None else args.model
    if args.model_tag is not None and args.model_tag != model:
        raise CommandError(f"MODEL is {args.model_tag!r} but --model is {args.model!r}; give one of them")
    return model


def check(args: argparse.Namespace) -> None:
    """Raises CommandError for what vLLM can do and this server cannot, and for a cache that has no place."""
    check_processes(args)
    for flag in ("enable_chunked_prefill", "async_scheduling"):
        if not getattr(args, flag):
            raise CommandError(f"--no-{flag.replace('_', '-')}: it cannot be switched off; leave it out")
    if args.generation_config not in ("auto", "vllm"):
        raise CommandError(
            f"--generation-config must be auto or vllm, found {args.generation_config[:60]!r}; "
            f"single values go into --override-generation-config"
        )
    cache = args.compilation_cache_dir
    if cache is not None and "://" not in cache:  # jax only warns, with every program
        try:
            os.makedirs(cache, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache):
                pass
        except OSError as error:
            raise CommandError(
                f"--compilation-cache-dir: {cache[:200]} cannot be written ({error.strerror}); name another"
            ) from error


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys that open the server; none if it is open."""
    if args.api_key is not None:
        return tuple(args.api_key)
    return tuple(key for key in [os.environ.get("VLLM_API_KEY", "")] if key)


def chat_template(args: argparse.Namespace) -> str | None:
    """The template of --chat-template: the file's text, or the value itself if it looks like one.

    Raises:
        CommandError: there is no such file.
    """
    value = args.chat_template
    if value is None:
        return None
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" in value:
            return value
        raise CommandError(
            f"--chat-template: {value[:200]} cannot be read ({error}); name a Jinja file"
        ) from error
