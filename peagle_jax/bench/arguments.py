"""The flags of the benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path

from peagle_jax.arguments import Parser
from peagle_jax.bench.flags import (
    add_methods,
    add_output,
    add_prompts,
    add_servers,
    add_target,
    goodput,
    numbers,
    rate,
)
from peagle_jax.serve.arguments import fraction, whole

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
Decodes the first turn of prompts with a tree of drafts, K deep and of M nodes, and compares the head's
probability of each with how often the target agreed, depth by depth. The slope and offset that correct it are
written to calibration.json, with --write beside the head, where the server and bench find it: how many nodes
a round verifies is chosen by them.

  python -m peagle_jax.bench calibrate --dataset-path prompts.jsonl --head my-head --write
"""

_LATENCY = """\
One request at a time, through the serving engine in this process: every prompt is answered by every method
before the next one, in an order that changes, --repeats times over, so that a machine whose speed varies
treats them alike. tokens/s counts the tokens after the first round's and their time; of the repeats it is the
median, beside the least and the most, and ratios are to the first method within each repeat.

A last pass waits for every prefill and round, and makes a round's drafts once more alone before it, to tell
where the time goes: prefill, draft, verify (the round without its drafts; a tree is built from them in it),
and the host between them.
"""

_PLOT = """\
Draws the plots and the page of tables of a result again, beside it. Of a file that is not results.json they
are named after it.
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
    add_prompts(acceptance, max_tokens=128)
    add_methods(acceptance, "peagle")
    add_servers(acceptance)
    calibrate = command("calibrate", "what a head's own probabilities are worth", _CALIBRATE)
    add_prompts(calibrate, max_tokens=128, later_turns=False)
    add = add_target(calibrate)
    add(
        "--num-speculative-tokens",
        type=whole(1),
        metavar="K",
        help="depths that are measured (default: what the head was trained for)",
    )
    add(
        "--num-speculative-nodes",
        type=whole(1),
        metavar="M",
        help="of the tree that is verified, K or more (default: twice K)",
    )
    calibrate.add_argument("--write", action="store_true", help="keep calibration.json beside the head")
    latency = command("latency", "one request at a time, methods interleaved", _LATENCY)
    add_prompts(latency, max_tokens=128)
    add_methods(latency, "none,peagle,adaptive")
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
    add_prompts(serve, max_tokens=128, stop_at_eos=True)
    add_servers(serve)
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
        add_output(one)
    plot = command("plot", "draw and write a result again", _PLOT)
    plot.add_argument("folder", type=Path, help="that --out named, or a result's JSON file")
    return parser


def _add_train(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--lengths",
        type=numbers(3),
        default=(1024, 2048, 4096),
        metavar="N,...",
        help="tokens of a sequence, 3 or more (default: 1024,2048,4096)",
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
        type=fraction,
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
