"""A decode round at its real size, compiled for TPUs that are not there: memory, bytes moved, collectives.

    pip install libtpu
    python benchmarks/tpu_aot.py --json --target gpt-oss-20b --topology v5e:2x2 --out tpu-aot.json

A round (P-EAGLE, K = 7, 8 sequences of 4096 positions, bfloat16; experts of gpt-oss packed as published) is
compiled ahead of time for all chips of the topology as one replica. Memory is the compiler's own analysis, a
chip. Bytes are those of its program, with every loop counted as often as it runs (``hlo_bytes``), against
what must move: weights of the experts that a round of so many tokens touches (expected, uniform routing) and
all others, the stored keys and values, the head. Nothing runs, so no time is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import hlo_text
import jax
import jax.numpy as jnp
from hlo_bytes import Program
from jax.experimental import topologies
from real_sizes import DTYPE, MEMORY, TARGETS, Load, head_of, head_weights, shape, target_weights
from rich.console import Console
from rich.table import Table

from peagle_jax.arguments import CommandError, run_command
from peagle_jax.bench.machine import describe_machine, save, tell
from peagle_jax.bench.train import memory_of
from peagle_jax.config import SpecConfig, TargetConfig
from peagle_jax.layers.attention import BLOCK
from peagle_jax.parallel.tensor import check_split, spread, spread_weights
from peagle_jax.speculative import round as steps
from peagle_jax.speculative.placement import Placement
from peagle_jax.speculative.request import Request, settings_of
from peagle_jax.speculative.sizes import PREFILL_CHUNK, backlog_of, rings_of, scratch_of
from peagle_jax.speculative.state import Models, Turn, empty_state

CONSOLE = Console(stderr=True)
LOAD = Load(k=7, sequences=8, positions=4096)


def spread_shapes(cfg: Any, params: Any, tensor: int) -> Any:
    check_split(cfg, tensor)
    return jax.eval_shape(lambda p: spread_weights(cfg, p, tensor), params)


def placed(tree: Any, where: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where)


def compile_round(target: TargetConfig, topology: str) -> dict[str, Any]:
    """The round's program, and what its analysis says of a chip."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    head, tensor = head_of(target), len(devices)
    placement = Placement.on(devices, tensor)
    params = (target_weights(target), head_weights(head))
    params = tuple(spread_shapes(c, p, tensor) for c, p in zip((target, head), params, strict=True))
    params = tuple(placed(p, where) for p, where in zip(params, placement.places(params), strict=True))
    target, head = spread(target, tensor), spread(head, tensor)
    spec = SpecConfig(LOAD.k, "peagle")

    def create() -> Any:
        state = empty_state(
            target,
            head,
            slots=LOAD.sequences,
            positions=LOAD.positions + scratch_of(PREFILL_CHUNK, spec),
            backlog=backlog_of(spec),
            settings=settings_of(Request([0]), LOAD.positions, target.vocab_size),
            dtype=DTYPE,
            stacked=True,
            rings=rings_of(target, PREFILL_CHUNK, spec),
        )
        return jax.tree.map(lambda x: x[None], state)

    state = jax.eval_shape(create)
    shardings = placement.state(state)
    state = placed(state, shardings)
    flags = shape(1, LOAD.sequences, dtype=bool)
    turn = Turn(flags, flags, shape(1, 1, dtype=jnp.float32), shape(1, LOAD.k, 2, dtype=jnp.float32))

    def run_rounds(params: Any, state: Any, turn: Any) -> Any:
        models = Models(target, head, spec)
        return steps.run_rounds(params, state, turn, models=models, width=LOAD.sequences, k=LOAD.k, rounds=1)

    began = time.perf_counter()
    compiled = placement.program(run_rounds, shardings, True).lower(params, state, turn).compile()
    seconds = time.perf_counter() - began
    memory = memory_of(compiled)
    program = Program(hlo_text.latest(), lambda scope: turns(scope, target, tensor))
    must = LOAD.must_move(target, params, (state.target_cache, state.drafter_cache))
    moved = program.bytes_moved
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    held += memory.output_size_in_bytes - memory.alias_size_in_bytes
    limit = MEMORY[topology.split(":")[0]] * 10**9
    return {
        "chips": tensor,
        "compile_seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "bytes_held": held,
        "chip_memory": limit,
        "fits": held <= limit,
        "bytes_moved": moved,
        "bytes_that_must_move": must,
        "moved_to_must": moved / sum(must.values()),
        "collectives": program.collectives(),
        "loops": [list(loop) for loop in program.loops()],
        "programs_a_round": 1,
    }


def turns(scope: str, target: TargetConfig, tensor: int) -> float:
    """How often a loop runs whose count only the data knows."""
    if "/experts/" in scope and target.block.moe is not None:
        return LOAD.touched(target) * target.block.moe.num_experts / tensor
    if "/cache/" in scope:
        return LOAD.positions / BLOCK
    if "/cond/" in scope:  # of requests with rules: not in the cheapest branch
        return 1
    raise CommandError(f"a loop of unknown count in {scope}; name it in turns()")


def show(report: dict[str, Any]) -> None:
    names = (
        "target",
        "topology",
        "held, GB",
        "of",
        "temporaries",
        "moved, GB",
        "must",
        "ratio",
        "collectives",
    )
    table = Table(*names)
    for e in report["rounds"]:
        gb = {name: f"{e[name] / 1e9:.2f}" for name in ("bytes_held", "temporary_bytes", "bytes_moved")}
        table.add_row(
            e["target"],
            e["topology"],
            gb["bytes_held"],
            f"{e['chip_memory'] / 1e9:.0f}",
            gb["temporary_bytes"],
            gb["bytes_moved"],
            f"{sum(e['bytes_that_must_move'].values()) / 1e9:.2f}",
            f"{e['moved_to_must']:.2f}",
            ", ".join(f"{n} {kind}" for kind, n in e["collectives"].items()),
        )
    Console(width=200).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", choices=list(TARGETS), help="default: all of them")
    add("--topology", help="libtpu's name, such as v5e:2x2 (default: those that the target is meant for)")
    add("--json", action="store_true", help="print the report, not a table")
    add("--out", type=Path, help="write the report here, after each round; rounds that it has already stay")
    args = parser.parse_args()

    if importlib.util.find_spec("libtpu") is None:
        raise CommandError("libtpu is not installed, which compiles for TPUs; pip install libtpu")
    report: dict[str, Any] = {**describe_machine(("jax", "jaxlib", "libtpu"))}
    report |= {"load": dataclasses.asdict(LOAD), "dtype": DTYPE.name, "rounds": []}
    for name in [args.target] if args.target else TARGETS:
        target, topologies_ = TARGETS[name]
        for topology in [args.topology] if args.topology else topologies_:
            CONSOLE.print(f"{name} on {topology}")
            report["rounds"].append({"target": name, "topology": topology} | compile_round(target, topology))
            save(report, args.out)
    tell(report, args.json, show)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
