"""Our training step compiled for a TPU that is not there: temporary memory at long sequences.

    pip install libtpu
    python benchmarks/partition_tpu.py --lengths 8192,131072 --out partition-tpu.json

The head is gpt-oss-20b's by default. Loss and gradients of one sequence are compiled ahead of time
for one chip of ``--topology``; bytes are XLA's own analysis of the program. Nothing runs, so no time
is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from peagle_jax.arguments import run_command
from peagle_jax.bench.arguments import numbers
from peagle_jax.bench.machine import describe_machine, save
from peagle_jax.bench.partition import make_config, our_step, sampling
from peagle_jax.bench.train import memory_of
from peagle_jax.config import DrafterConfig
from peagle_jax.models.stack import TargetParams
from peagle_jax.train.cod import CodOptions, depth_counts
from peagle_jax.train.partition import Batch
from peagle_jax.train.warm_start import at_random

DTYPE = jnp.bfloat16


def abstract_arguments(cfg: DrafterConfig, n: int, options: CodOptions, device: Any) -> tuple[Any, ...]:
    """Shapes of the head, the target's rows and one sequence with its rollouts, on ``device``."""
    place = jax.sharding.SingleDeviceSharding(device)

    def array(*shape: int, dtype: Any = DTYPE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    table = array(cfg.vocab_size, cfg.hidden_size)
    target = TargetParams(table, (), array(cfg.hidden_size), None)
    params = jax.eval_shape(lambda t: at_random(cfg, t, None), target)
    params = jax.tree.map(lambda w: array(*w.shape, dtype=DTYPE if w.ndim > 1 else w.dtype), params).replace(
        embed=table
    )
    width = depth_counts(n, options)[0]
    batch = Batch(
        **{name: array(1, n, dtype=jnp.int32) for name in ("tokens", "segment_ids", "positions")},
        loss_flags=array(1, n, dtype=bool),
        features=array(1, n, cfg.feature_size),
        target_hidden=array(1, n, cfg.target_hidden_size),
        **{name: array(options.segments, 1, width, dtype=jnp.int32) for name in ("anchors", "lengths")},
    )
    return params, table, batch


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=numbers(), default=[8192, 32768, 131072], help="tokens of a sequence")
    add("--topology", default="v5e:2x2", help="libtpu's name; one chip of it is compiled for")
    add("--segment-rows", type=int, default=512, help="about how many mask rows a segment holds")
    add("--depths", type=int, default=8, help="K")
    add("--ratio", type=float, default=0.8, help="r")
    shape = {"layers": 4, "hidden": 2880, "intermediate": 14336, "heads": 64, "kv-heads": 8, "head-dim": 64}
    for name, value in {**shape, "vocab": 201088, "draft-vocab": 201088}.items():
        add(f"--{name}", type=int, default=value)
    add("--out", type=Path, help="write the JSON here too")
    args = parser.parse_args()

    cfg = make_config(args)
    device = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices[0]
    report: dict[str, Any] = {**describe_machine(("jax", "jaxlib", "libtpu")), "compiled_for": args.topology}
    report |= {"K": args.depths, "r": args.ratio, "dtype": "bfloat16", "lengths": {}}
    for n in args.lengths:
        options = sampling(n, args)
        step = jax.jit(our_step(cfg, depth_counts(n, options)))
        began = time.perf_counter()
        memory = memory_of(step.lower(*abstract_arguments(cfg, n, options, device)).compile())
        report["lengths"][n] = {
            "segments": options.segments,
            "temporary_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "compile_seconds": time.perf_counter() - began,
        }
        gib = memory.temp_size_in_bytes / 2**30
        print(f"n = {n}: {options.segments} segments, {gib:.2f} GiB of temporaries", file=sys.stderr)
        save(report, args.out)
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
