"""A decode round at its real size on this machine's accelerator, with random weights: time against bytes.

    python benchmarks/gpu_round.py --json --target gpt-oss-20b --sequences 1,8 --out gpu-round.json

What is drafted is accepted by chance at the rates that ``--acceptance`` names, so that the speed of a round
does not hang on a trained head. For each number of sequences the same target decodes with K drafts a round
and with none. *round* is the time of one in a row of dispatches that nobody reads until the end; *reading
each* is that of the engine's own way, which reads every round one dispatch late: the host gap is what that
adds. *bandwidth* is the time that the bytes which must move take at the memory's rated speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from real_sizes import DTYPE, TARGETS, Load, head_of, head_weights, target_weights
from rich.console import Console
from rich.table import Table

from peagle_jax.arguments import CommandError, run_command
from peagle_jax.bench.machine import describe_machine, save, tell
from peagle_jax.config import SpecConfig, TargetConfig
from peagle_jax.models.stack import check_taps
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.request import PromptChunk, Request

CONSOLE = Console(stderr=True)
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "B200": 8e12, "A100": 2.04e12, "L4": 0.3e12}
"""Bytes a second, as NVIDIA states them, by a part of the device's name."""


def random_weights(shapes: Any) -> Any:
    """Arrays of these shapes: small normal numbers, norms and packed values of any kind."""

    def one(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        key = jax.random.key(abs(hash(jax.tree_util.keystr(path))) % 2**31)
        if x.dtype == jnp.uint8:
            low, high = (118, 122) if "scales" in jax.tree_util.keystr(path) else (0, 256)
            return jax.random.randint(key, x.shape, low, high, jnp.uint8)
        return (0.02 * jax.random.normal(key, x.shape, jnp.float32)).astype(x.dtype)

    # One array at a time: a float32 copy of all would not fit.
    return jax.tree_util.tree_map_with_path(lambda p, x: jax.jit(lambda: one(p, x))(), shapes)


def shortened(target: TargetConfig, layers: int | None, vocabulary: int | None) -> TargetConfig:
    """The target with fewer layers and tokens, to try the script where it does not fit."""
    if layers is not None:
        target = dataclasses.replace(target, num_layers=layers, windows=target.windows[:layers])
    return target if vocabulary is None else dataclasses.replace(target, vocab_size=vocabulary)


def seconds_a_round(decoder: Decoder, slots: set[int], k: int, rounds: int, read: bool) -> float:
    """Of ``rounds`` rounds in a row; with ``read`` each is read while the next one runs."""

    def run() -> None:
        waiting: list[Any] = []
        for _ in range(rounds):
            waiting.append(decoder.round(slots, k))
            if read and len(waiting) > 1:
                decoder.results(waiting.pop(0))
        decoder.results(waiting[-1])

    run()
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) / rounds


def filled(decoder: Decoder, sequences: int, prompt: int, room: int) -> set[int]:
    """Starts requests that go on for ever; the slots that they are in."""
    rng = np.random.default_rng(0)
    for slot in range(sequences):
        tokens = rng.integers(0, decoder.target.vocab_size - 2, prompt).tolist()
        request = Request(tokens, max_tokens=room - prompt)
        step = decoder.sizes.chunks[-1]
        for start in range(0, prompt, step):
            count = min(step, prompt - start)
            jax.block_until_ready(decoder.prefill([PromptChunk(slot, request, tokens, start, count)]).output)
    return set(range(sequences))


def measure(target: TargetConfig, sequences: int, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds with K drafts and with none, one after the other for ``--repeats`` times; the fastest count."""
    head = head_of(target, args.taps)
    params = random_weights(target_weights(target)), random_weights(head_weights(head))
    rates = tuple(args.acceptance ** (i + 1) for i in range(args.k))
    decoder = Decoder(
        target,
        params[0],
        head,
        params[1],
        SpecConfig(args.k, "peagle"),
        max_model_len=args.positions,
        batch=sequences,
        widths=(sequences,),
        draft_lengths={0, args.k},
        synthetic_rates=rates,
    )
    times: dict[str, float] = {}
    for _ in range(args.repeats):
        for k in (args.k, 0):
            for read in (False, True):
                decoder.start_over(decoder.sizes.pools[0])
                slots = filled(decoder, sequences, args.prompt, args.positions)
                found = seconds_a_round(decoder, slots, k, args.rounds, read)
                name = f"K = {k}, {'reading each' if read else 'in a row'}"
                times[name] = min(found, times.get(name, found))
    state = decoder._programs.state
    load = Load(args.k, sequences, args.prompt)
    share = args.prompt / state.target_cache.positions  # of the cache that is read
    caches = (state.target_cache, state.drafter_cache)
    must = load.must_move(target, params, caches)
    must["keys and values"] *= share
    device = jax.devices()[0].device_kind
    rate = next((speed for name, speed in BANDWIDTH.items() if name in device), None)
    bound = None if rate is None else sum(must.values()) / rate
    fast, plain = times[f"K = {args.k}, in a row"], times["K = 0, in a row"]
    tokens = 1 + sum(rates)
    return {
        "sequences": sequences,
        "seconds": times,
        "bytes_that_must_move": must,
        "seconds_at_bandwidth": bound,
        "time_to_bandwidth": None if bound is None else fast / bound,
        "host_gap_seconds": times[f"K = {args.k}, reading each"] - fast,
        "acceptance_length": tokens,
        "speed_to_K_0": tokens * plain / fast,
    }


def show(report: dict[str, Any]) -> None:
    table = Table("sequences", "round, ms", "K = 0, ms", "bandwidth, ms", "host gap, ms", "tokens/s to K = 0")
    for e in report["loads"]:
        ms: Callable[[float | None], str] = lambda x: "" if x is None else f"{1e3 * x:.2f}"  # noqa: E731
        first, _, plain, _ = e["seconds"].values()
        bound, gap = ms(e["seconds_at_bandwidth"]), ms(e["host_gap_seconds"])
        table.add_row(str(e["sequences"]), ms(first), ms(plain), bound, gap, f"{e['speed_to_K_0']:.2f}")
    Console().print(table)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", choices=list(TARGETS), default="gpt-oss-20b")
    add("--sequences", type=numbers, default=[1, 8], help="at once, such as 1,8")
    add("--k", type=int, default=7)
    add("--acceptance", type=float, default=0.7, help="of a draft whose predecessors were right")
    add("--positions", type=int, default=4096, help="room of a sequence")
    add("--prompt", type=int, default=2048, help="tokens of a sequence when rounds begin")
    add("--rounds", type=int, default=50, help="timed in a row")
    add("--repeats", type=int, default=3)
    add("--layers", type=int, help="of the target, to try the script with (default: its own)")
    add("--vocabulary", type=int, help="of both, to try the script with")
    add("--taps", type=lambda text: tuple(numbers(text)), help="for a target of few layers")
    add("--json", action="store_true", help="print the report, not a table")
    add("--out", type=Path, help="write the report here too, after each load")
    args = parser.parse_args()
    if args.prompt + 2 * args.rounds * (args.k + 1) > args.positions:
        raise CommandError(
            f"--prompt {args.prompt} and twice --rounds {args.rounds} of up to {args.k + 1} tokens do not "
            f"fit --positions {args.positions}; ask for fewer rounds"
        )

    if min(args.sequences) < 1 or args.k < 1 or not 0 <= args.acceptance <= 1:
        raise CommandError(
            f"--sequences {min(args.sequences)}, --k {args.k} and --acceptance {args.acceptance} must be at "
            "least 1, at least 1, and a share from 0 to 1"
        )
    if args.out and not args.out.parent.is_dir():
        raise CommandError(f"--out {args.out} is in no folder that exists; make it first")
    target = shortened(TARGETS[args.target][0], args.layers, args.vocabulary)
    try:
        check_taps(target, head_of(target, args.taps).taps)  # before minutes of making weights
    except ValueError as error:
        raise CommandError(f"{error} (--taps)") from error
    device = jax.devices()[0]
    report: dict[str, Any] = {**describe_machine(("jax", "jaxlib")), "device": device.device_kind}
    report |= {"target": args.target, "K": args.k, "dtype": DTYPE.name, "loads": []}
    for sequences in args.sequences:
        CONSOLE.print(f"{args.target}, {sequences} sequences on {device.device_kind}")
        report["loads"].append(measure(target, sequences, args))
        save(report, args.out)
    tell(report, args.json, show)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
