"""The flags of the benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from peagle_jax import commands, precision
from peagle_jax.arguments import Parser, add_model, named
from peagle_jax.bench import datasets, methods
from peagle_jax.serve.arguments import whole
from peagle_jax.speculative.lookup import Lookup

_EPILOG = """\
examples:
  python -m peagle_jax.bench acceptance --dataset mt_bench --num-speculative-tokens 3,5,7
  python -m peagle_jax.bench latency --dataset mt_bench --dataset humaneval --num-prompts 16 --out latency
  python -m peagle_jax.bench serve --dataset mt_bench --start ours --endpoint vllm=http://localhost:8000
  python -m peagle_jax.bench train --lengths 1024,2048,4096 --out train
  python -m peagle_jax.bench plot latency

Each has a --help of its own, with --json for the result on stdout and --out for a folder of results.json,
RESULTS.md and plots.
"""

_ACCEPTANCE = """\
The acceptance length counts the token that the target adds itself: 1 is no help, K + 1 the most. By position
is the share of drafting rounds that accept at least so many; "their tokens" are the part of all tokens that
came from such rounds (n-gram lookup and adaptive drafting make others too). Servers are judged by their own
counters (vllm:spec_decode_num_drafts and the like, before and after), so that one command compares both.

  python -m peagle_jax.bench acceptance --dataset mt_bench --num-prompts 16 --methods peagle \\
      --num-speculative-tokens 3 --start 'vllm=VLLM_CPU_OMP_THREADS_BIND=0-1 .venv-vllm/bin/python
          -m vllm.entrypoints.openai.api_server --model ./smollm2 --enforce-eager --port {port}
          --speculative-config {"method":"eagle3",...}'
"""

_CALIBRATE = """\
Decodes prompts with a tree of drafts (the first K and M that are named) and compares the head's probability
of each with how often the target agreed, depth by depth. The slope and offset that correct it are written to
calibration.json, with --write beside the head, where the server and bench find it: how many nodes a round
verifies is chosen by them.

  python -m peagle_jax.bench calibrate --dataset-path prompts.jsonl --head my-head --write
"""

_LATENCY = """\
One request at a time, through the serving engine in this process: every prompt is answered by every method
before the next one, in an order that changes, --repeats times over, so that a machine whose speed varies
treats them alike. tokens/s counts the tokens after the first round's and their time; of the repeats it is the
median, beside the least and the most, and ratios are to the first method within each repeat.

A last pass waits for every prefill and round, and makes a round's drafts once more alone before it, to tell
where the time goes: prefill, draft, verify (the round without its drafts), and the host between them.
"""

_SERVE = """\
Clients of OpenAI endpoints at rising concurrency: a client sends its next request when the last one is
answered (or --request-rate a second begin). Servers take turns at each level. Names and definitions of the
results are those of `vllm bench serve`; steady_output_throughput is what came while all clients were at work.

  python -m peagle_jax.bench serve --dataset mt_bench --dataset humaneval --max-concurrency 1,2,4,8 \\
      --start 'off=ours --speculative-config null' --start 'adaptive=ours' \\
      --endpoint vllm=http://localhost:8000

--start takes any command, with variables before it as in a shell; {port} in it is a free port (else --host
and --port are added), and `ours` is python -m peagle_jax.serve. OPENAI_API_KEY is sent where it is set.
"""

_TRAIN = """\
Time and temporary memory of loss and gradients of one sequence against its length: the training pass of
peagle_jax.train, the flat masked pass over all rows, and the paper's partition into S segments.
"""


def numbers(least: int = 1) -> Any:
    """An argument's type: whole numbers with commas."""
    one = whole(least)

    def parse(text: str) -> tuple[int, ...]:
        return tuple(one(part.strip()) for part in text.split(","))

    return parse


def method_names(text: str) -> tuple[str, ...]:
    """An argument's type: names of methods with commas; ``-`` for none of them."""
    names = tuple(part.strip() for part in text.split(",")) if text != "-" else ()
    wrong = next((name for name in names if name not in methods.NAMES), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"{wrong[:40]!r} is none of {', '.join(methods.NAMES)}")
    return tuple(dict.fromkeys(names))


def goodput(text: str) -> tuple[str, float]:
    """An argument's type: vLLM's ``ttft:500``, the most milliseconds of a good request."""
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if name not in ("ttft", "tpot", "e2el") or limit <= 0:
        raise argparse.ArgumentTypeError(f"expected ttft:MS, tpot:MS or e2el:MS, found {text[:40]!r}")
    return name, limit


def rate(text: str) -> float:
    """An argument's type: a number above 0, or inf."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, or inf, found {text[:40]!r}")
    return value


def _add_output(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write results.json, RESULTS.md and plots there"
    )


def _add_prompts(parser: Parser, *, max_tokens: int, stop_at_eos: bool = False) -> None:
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    names = ", ".join(datasets.SOURCES)
    add(
        "--dataset",
        action="append",
        default=[],
        choices=datasets.SOURCES,
        metavar="NAME",
        help=f"{names}; repeat for more",
    )
    add(
        "--dataset-path",
        action="append",
        default=[],
        type=named,
        metavar="PATH",
        help="a file (or hub id) of the set instead of the published one; one for each --dataset",
    )
    add("--dataset-config", type=named, metavar="NAME", help="of a hub's set with several (throughput_1k)")
    add(
        "--num-prompts",
        type=whole(1),
        metavar="N",
        help="at most, evenly spread over each set (default: all)",
    )
    add("--category", action="append", default=[], help="only prompts of it; repeat for more")
    add(
        "--turns",
        choices=("first", "all"),
        default="first",
        help="of a conversation; later ones follow the model's own answers (default: %(default)s)",
    )
    add(
        "--max-tokens",
        type=whole(1),
        default=max_tokens,
        metavar="N",
        help="of an answer (default: %(default)s)",
    )
    if stop_at_eos:
        add("--stop-at-eos", dest="ignore_eos", action="store_false", help="an answer may be shorter")
    else:
        add("--ignore-eos", action="store_true", help="every answer has just so many tokens")


def _add_models(parser: Parser, default: str) -> None:
    group = parser.add_argument_group("in this process")
    add = group.add_argument
    add_model(group)
    names = ", ".join(methods.NAMES)
    add(
        "--methods",
        type=method_names,
        default=method_names(default),
        metavar="NAME,...",
        help=f"of {names}; - for none (default: {default})",
    )
    add(
        "--num-speculative-tokens",
        type=numbers(),
        default=(commands.DEFAULT_TOKENS,),
        metavar="K,...",
        help="drafted a round, each in turn (default: 5)",
    )
    add(
        "--num-speculative-nodes",
        type=numbers(),
        default=(8, 16, 32),
        metavar="M,...",
        help="of trees, each in turn where it is not below K (default: 8,16,32)",
    )
    add("--head", type=named, help="a P-EAGLE head, folder or hub id (default: the embedded model's own)")
    add("--eagle3-head", type=named, metavar="HEAD", help="an EAGLE-3 head, for the method eagle3")
    add(
        "--prompt-lookup-max",
        type=whole(1),
        default=Lookup().most,
        metavar="N",
        help="last tokens that ngram looks for, at most (default: %(default)s)",
    )
    add(
        "--prompt-lookup-min",
        type=whole(1),
        default=Lookup().least,
        metavar="N",
        help="and at least (default: %(default)s)",
    )
    add("--dtype", choices=commands.DTYPES, default="auto", help="of the weights (default: auto)")
    precision.add_quantization(add)
    precision.add_kv_cache_dtype(add)
    add(
        "--max-model-len",
        type=whole(2),
        metavar="N",
        help="prompt and answer (default: the model's, on CPU 2048)",
    )
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--seed", type=int, default=0, help="of sampling (default: 0)")
    add("--raw", action="store_true", help="prompts as they are, without the chat template")


def _add_servers(parser: Parser) -> None:
    group = parser.add_argument_group("servers")
    add = group.add_argument
    add(
        "--endpoint",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server that runs; repeat for more",
    )
    add(
        "--start",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="a server to start; repeat for more",
    )
    add("--start-within", type=float, default=1800, metavar="S", help="seconds until ready (default: 1800)")
    add("--one-by-one", action="store_true", help="each server runs alone instead of all side by side")
    add("--logs", type=Path, metavar="DIR", help="keeps the servers' logs (default: they are dropped)")


def parsers() -> dict[str, Parser]:
    """The parser of each benchmark, by its name."""
    choices = next(a.choices for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(choices)


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m peagle_jax.bench",
        description="Measure acceptance, latency, serving and training, and compare methods and servers.",
        epilog=_EPILOG,
    )
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")

    def command(name: str, what: str, text: str) -> Parser:
        return kinds.add_parser(name, help=what, description=text)

    acceptance = command("acceptance", "drafts accepted by position, category and K", _ACCEPTANCE)
    _add_prompts(acceptance, max_tokens=128)
    _add_models(acceptance, "peagle")
    _add_servers(acceptance)
    calibrate = command("calibrate", "what a head's own probabilities are worth", _CALIBRATE)
    _add_prompts(calibrate, max_tokens=128)
    _add_models(calibrate, "peagle")
    calibrate.set_defaults(turns="first")
    calibrate.add_argument("--write", action="store_true", help="keep calibration.json beside the head")
    latency = command("latency", "one request at a time, methods interleaved", _LATENCY)
    _add_prompts(latency, max_tokens=128)
    _add_models(latency, "none,peagle,adaptive")
    add = latency.add_argument
    add(
        "--repeats",
        type=whole(1),
        default=3,
        metavar="N",
        help="of every prompt by every method (default: 3)",
    )
    add(
        "--split-prompts",
        type=whole(0),
        default=4,
        metavar="N",
        help="of the pass that splits the time (default: 4)",
    )
    serve = command("serve", "servers over HTTP at rising concurrency", _SERVE)
    _add_prompts(serve, max_tokens=128, stop_at_eos=True)
    _add_servers(serve)
    add = serve.add_argument
    add(
        "--max-concurrency",
        type=numbers(),
        default=(1, 2, 4, 8, 16, 32, 64),
        metavar="N,...",
        help="clients at once (default: 1,2,4,8,16,32,64)",
    )
    add(
        "--request-rate",
        type=rate,
        default=float("inf"),
        metavar="R",
        help="requests that begin a second, at random (default: inf, a client asks when it is answered)",
    )
    add(
        "--requests-per-client", type=whole(1), default=2, metavar="N", help="at least (default: %(default)s)"
    )
    add(
        "--least-requests",
        type=whole(1),
        default=24,
        metavar="N",
        help="of all clients together (default: 24)",
    )
    add("--least-seconds", type=float, default=0.0, metavar="S", help="clients go on so long (default: 0)")
    add("--repeats", type=whole(1), default=1, metavar="N", help="runs at each concurrency (default: 1)")
    add(
        "--goodput",
        type=goodput,
        nargs="+",
        default=(),
        metavar="NAME:MS",
        help="ttft, tpot, e2el: what a good request takes at most",
    )
    add("--seed", type=int, default=0, help="of the times at which requests begin (default: 0)")
    train = command("train", "time and memory of the training pass by length", _TRAIN)
    _add_train(train)
    for one in (acceptance, calibrate, latency, serve, train):
        _add_output(one)
    plot = command("plot", "draw and write a result again", "Draws the plots and tables of a result again.")
    plot.add_argument("folder", type=Path, help="that --out named, or a results.json")
    return parser


def _add_train(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--lengths",
        type=numbers(),
        default=(1024, 2048, 4096),
        metavar="N,...",
        help="tokens of a sequence (default: 1024,2048,4096)",
    )
    add(
        "--segments",
        type=numbers(),
        default=(2, 4, 8),
        metavar="S,...",
        help="of the paper's partition (default: 2,4,8)",
    )
    add(
        "--time-up-to",
        type=whole(0),
        default=4096,
        metavar="N",
        help="longer sequences are compiled for their memory only",
    )
    add("--flat-up-to", type=whole(0), default=4096, metavar="N", help="longer sequences have no flat pass")
    add(
        "--segment-rows",
        type=whole(1),
        default=1024,
        metavar="N",
        help="about how many mask rows a segment of ours holds",
    )
    add("--repeats", type=whole(1), default=3, metavar="N", help="of which the fastest counts (default: 3)")
    add("--depths", type=whole(1), default=8, metavar="K", help="(default: 8)")
    add(
        "--ratio",
        type=float,
        default=0.8,
        metavar="R",
        help="of rollouts kept from depth to depth (default: 0.8)",
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    for name, value in HEAD_SHAPE.items():
        add(f"--{name}", type=whole(1), default=value, metavar="N", help="of the head (default: %(default)s)")


HEAD_SHAPE = {
    "layers": 4,
    "hidden": 576,
    "intermediate": 1536,
    "heads": 9,
    "kv-heads": 3,
    "head-dim": 64,
    "vocab": 49152,
    "draft-vocab": 6656,
}
"""Of the shipped head, for SmolLM2-135M."""
