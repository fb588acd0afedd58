"""``bench train``: time and temporary memory of the training pass against the length, ours and its rivals.

One sequence of n tokens with COD-dropped rollouts (K = 8, r = 0.8 as in the paper) is trained in several ways
on the same rows: ours (depth-0 rows once, a scan over segments of rollouts), the paper's partition and the
flat pass over all rows. Temporary bytes are XLA's own analysis of the largest program; times are the best of
``--repeats`` runs in one process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from peagle_jax.arguments import CommandError
from peagle_jax.bench import report
from peagle_jax.bench.arguments import HEAD_SHAPE
from peagle_jax.bench.partition import (
    Rows,
    make_batch,
    make_config,
    make_params,
    masked_step,
    our_step,
    paper_segments,
    rollout_rows,
    sampling,
)
from peagle_jax.bench.report import Table, number
from peagle_jax.config import DrafterConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.train.cod import depth_counts
from peagle_jax.train.partition import supervised


def memory_of(compiled: jax.stages.Compiled) -> Any:
    """XLA's analysis of a program's memory. Raises CommandError where it has none."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise CommandError("XLA has no memory analysis of this program; update jax")
    return analysis


class Measured(NamedTuple):
    """``seconds`` is None where only the memory was asked for."""

    temporary_bytes: int
    seconds: float | None
    loss: Any
    gradient: DrafterParams | None


def timed(run: Callable[[], Any], repeats: int) -> tuple[float | None, Any]:
    """The shortest time of ``repeats`` runs and the last result; None of none."""
    best, result = None, None
    for _ in range(repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(run())
        elapsed = time.perf_counter() - start
        best = elapsed if best is None else min(best, elapsed)
    return best, result


def measure_ours(step: Callable, arguments: tuple, repeats: int) -> Measured:
    """Compiles our step, and runs it ``repeats`` times (0: never)."""
    compiled = jax.jit(step).lower(*arguments).compile()
    seconds, result = timed(lambda: compiled(*arguments), repeats)
    return Measured(memory_of(compiled).temp_size_in_bytes, seconds, *(result or (None, None)))


def measure_passes(
    cfg: DrafterConfig, passes: list[Rows], count: int, arguments: tuple, repeats: int
) -> Measured:
    """Compiles a program a pass and runs them one after the other, gradients added up, as in the paper's
    accumulation: the largest pass decides the memory. Without runs only that one is compiled."""
    none = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), arguments[0].replace(embed=None)))
    if not repeats:
        passes = [max(passes, key=lambda rows: len(rows.anchor))]
    programs = []
    for rows in passes:
        step = jax.jit(masked_step(cfg, int((np.asarray(rows.depth) == 0).sum()), count), donate_argnums=4)
        programs.append(step.lower(*arguments, rows, none).compile())
    memory = max(memory_of(program).temp_size_in_bytes for program in programs)

    def run() -> Any:
        total = jax.tree.map(jnp.copy, none)
        for program, rows in zip(programs, passes, strict=True):
            total = program(*arguments, rows, total)
        return total

    seconds, result = timed(run, repeats)
    return Measured(memory, seconds, *(result or (None, None)))


def difference(a: DrafterParams, b: DrafterParams) -> float:
    """Largest difference of any gradient entry, relative to the largest entry of its array."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(
        float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1e-30).astype(jnp.float32))
        for x, y in pairs
    )


def measure_length(
    n: int, cfg: DrafterConfig, params: tuple, args: argparse.Namespace, note: Callable[[str], None]
) -> dict[str, Any]:
    """Every way at one length, with ratios to ours."""
    dtype = jnp.dtype(args.dtype)
    options = sampling(n, args)
    batch = make_batch(cfg, n, options, dtype)
    anchor, depth = rollout_rows(np.asarray(batch.anchors), np.asarray(batch.lengths))
    total = n + len(anchor)
    count = len(anchor) + int(supervised(batch).sum())
    repeats = args.repeats if n <= args.time_up_to else 0
    arguments = (*params, batch)

    rivals = {f"paper S={s}": paper_segments(n, anchor, depth, s) for s in args.segments}
    if n <= args.flat_up_to:
        rivals["flat"] = [
            Rows(np.r_[np.arange(n), anchor], np.r_[np.zeros(n, int), depth], np.ones(total, bool))
        ]

    note(f"{n} tokens, ours")
    ours = measure_ours(our_step(cfg, depth_counts(n, options)), arguments, repeats)
    measured = [("ours", total, ours)]
    for name, passes in rivals.items():
        note(f"{n} tokens, {name}")
        rows = sum(len(p.anchor) for p in passes)
        measured.append((name, rows, measure_passes(cfg, passes, count, arguments, repeats)))

    result: dict[str, Any] = {"rows": total, "segments": options.segments, "ways": {}}
    for name, rows, found in measured:
        entry: dict[str, Any] = {"rows": rows / total, "temporary_bytes": found.temporary_bytes}
        entry["memory_of_ours"] = ours.temporary_bytes / found.temporary_bytes
        if found.seconds is not None and ours.seconds is not None:
            entry |= {
                "seconds": found.seconds,
                "time_of_ours": ours.seconds / found.seconds,
                "loss": float(found.loss),
            }
            entry["gradient_difference"] = difference(ours.gradient, found.gradient)
        result["ways"][name] = entry
    return result


def run(args: argparse.Namespace, result: dict[str, Any], progress: Progress) -> None:
    """Fills the result, length by length."""
    cfg = make_config(args)
    params = make_params(cfg, jnp.dtype(args.dtype))
    shape = {name: getattr(args, name.replace("-", "_")) for name in HEAD_SHAPE}
    result |= {"device": jax.devices()[0].device_kind, "dtype": args.dtype, "head": shape}
    result |= {"K": args.depths, "r": args.ratio, "lengths": {}}
    task = progress.add_task("lengths", total=len(args.lengths), note="")
    for n in args.lengths:
        found = measure_length(n, cfg, params, args, lambda note: progress.update(task, note=note))
        result["lengths"][str(n)] = found
        progress.advance(task)
        report.write_result(result, args.out)


def tables(result: dict[str, Any]) -> list[Table]:
    rows = []
    for n, entry in result["lengths"].items():
        for name, e in entry["ways"].items():
            rows.append(
                [
                    f"{n}, {name}",
                    number(e["rows"]),
                    number(e.get("seconds")),
                    number(e.get("time_of_ours")),
                    number(e["temporary_bytes"] / 2**20, 0),
                    number(e["memory_of_ours"]),
                    f"{e['gradient_difference']:.1e}" if "gradient_difference" in e else "",
                ]
            )
    columns = (
        "tokens, way",
        "rows",
        "seconds",
        "ours / it",
        "temporary MiB",
        "ours / it",
        "gradients part by",
    )
    title = f"loss and gradients of one sequence, K = {result['K']}, r = {result['r']}, {result['dtype']}"
    return [Table(title, columns, rows)]


def notes(result: dict[str, Any]) -> list[str]:
    return []
