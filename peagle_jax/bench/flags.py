"""Flags that benchmarks share, and types of arguments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from peagle_jax import commands, precision
from peagle_jax.arguments import Parser, add_model, named
from peagle_jax.bench import datasets, methods
from peagle_jax.serve.arguments import whole
from peagle_jax.speculative.lookup import Lookup


def numbers(least: int = 1) -> Any:
    """An argument's type: different whole numbers with commas."""
    one = whole(least)

    def parse(text: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(one(part.strip()) for part in text.split(",")))

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


def add_output(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write results.json, RESULTS.md and plots there"
    )


def add_prompts(
    parser: Parser, *, max_tokens: int, stop_at_eos: bool = False, later_turns: bool = True
) -> None:
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
    if later_turns:
        add(
            "--turns",
            choices=("first", "all"),
            default="first",
            help="of a conversation; later ones follow the model's own answers (default: %(default)s)",
        )
    else:
        parser.set_defaults(turns="first")
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


def add_target(parser: Parser) -> Any:
    """The target in this process, its P-EAGLE head and how it is sampled; returns the group's
    ``add_argument``."""
    group = parser.add_argument_group("in this process")
    add = group.add_argument
    add_model(group)
    add("--head", type=named, help="a P-EAGLE head, folder or hub id (default: the embedded model's own)")
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
    return add


def add_methods(parser: Parser, default: str) -> None:
    """The target, and the methods that are compared."""
    add = add_target(parser)
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


def add_servers(parser: Parser) -> None:
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
