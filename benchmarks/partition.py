"""The training pass against the paper's partition and the flat masked pass: rows, time, memory.

    python benchmarks/partition.py --json --lengths 1024,2048 --out partition.json

One sequence of n tokens with COD-dropped rollouts (K = 8, r = 0.8 as in the paper) is trained three
ways on the same rows: ours (depth-0 rows once, a scan over segments of rollouts), the paper's
partition (each of S segments carries the whole depth-0 prefix again) and the flat pass over all
rows. The two rivals get an attention that reads keys a block of queries at a time and is recomputed
in the reverse pass, so that no rows x rows array lives there either. Each of their passes is a
program, and temporary bytes are XLA's own analysis of the largest. Times are the best of
``--repeats`` runs in one process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from machine import describe_machine, save, tell
from rich.console import Console
from rich.table import Table

from peagle_jax.arguments import CommandError, run_command
from peagle_jax.config import BlockConfig, DrafterConfig
from peagle_jax.drafter.head import DrafterParams, fuse, run_head
from peagle_jax.layers.attention import NEGATIVE, grouped, ungrouped
from peagle_jax.models.stack import TargetParams
from peagle_jax.train.cod import CodOptions, depth_counts, sample_rollouts, supervised_positions
from peagle_jax.train.partition import Batch, peagle_loss, row_losses, shifted, supervised
from peagle_jax.train.warm_start import at_random

CONSOLE = Console(stderr=True)
QUERY_BLOCK = 128


class Rows(NamedTuple):
    """Elements of one pass: anchor and depth of each row, and whether this pass charges its loss."""

    anchor: np.ndarray | Array
    depth: np.ndarray | Array
    owned: np.ndarray | Array


def rollout_rows(anchors: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All mask rows (anchor, depth) of a sampling, depth-major."""
    flat_a, flat_l = anchors.ravel(), lengths.ravel()
    pairs = [(flat_a[flat_l >= d], d) for d in range(1, int(flat_l.max(initial=0)) + 1)]
    anchor = np.concatenate([a for a, _ in pairs])
    return anchor, np.concatenate([np.full(len(a), d) for a, d in pairs])


def paper_segments(n: int, anchor: np.ndarray, depth: np.ndarray, segments: int) -> list[Rows]:
    """The paper's assignment (p-eagle-spec 3.6): rollouts by anchor + 1, depth-0 rows by position, and
    every depth-0 row before the segment's end as context."""
    passes = []
    for s in range(segments):
        low, high = s * n // segments, (s + 1) * n // segments
        mine = (anchor + 1 >= low) & (anchor + 1 < high)
        prefix = np.arange(high)
        passes.append(
            Rows(
                np.concatenate([prefix, anchor[mine]]),
                np.concatenate([np.zeros(high, int), depth[mine]]),
                np.concatenate([prefix >= low, np.ones(mine.sum(), bool)]),
            )
        )
    return passes


def masked_attention(q: Array, k: Array, v: Array, anchor: Array, depth: Array, dtype: Any) -> Array:
    """Rows (1, R, heads, H) over all rows by the rule of p-eagle-spec 3.3, a block of queries at a time."""
    groups, rows = k.shape[2], q.shape[1]
    q, k, v = (
        (q * q.shape[-1] ** -0.5).astype(dtype),
        k.astype(dtype).swapaxes(1, 2),
        v.astype(dtype).swapaxes(1, 2),
    )
    pad = -rows % QUERY_BLOCK

    def blocks(x: Array) -> Array:
        x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, QUERY_BLOCK, *x.shape[1:])

    @jax.checkpoint
    def one(xs: tuple[Array, Array, Array]) -> Array:
        q_block, a, d = xs
        seen = (depth == 0) & (anchor <= a[:, None]) | (anchor == a[:, None]) & (depth <= d[:, None])
        scores = jnp.einsum(
            "bgth,bgsh->bgts", grouped(q_block[None], groups), k, preferred_element_type=jnp.float32
        )
        scores = jnp.where(seen, scores.reshape(1, groups, -1, QUERY_BLOCK, rows), NEGATIVE)
        p = jax.nn.softmax(scores, axis=-1).astype(dtype).reshape(1, groups, -1, rows)
        out = jnp.einsum("bgts,bgsh->bgth", p, v, preferred_element_type=jnp.float32)
        return ungrouped(out, QUERY_BLOCK)[0]

    out = jax.lax.map(one, (blocks(q[0]), blocks(anchor), blocks(depth)))
    return out.reshape(1, rows + pad, -1)[:, :rows]


def masked_loss(
    params: DrafterParams, cfg: DrafterConfig, target_head: Array, batch: Batch, rows: Rows, dense: int
) -> Array:
    """Summed KL of the owned, supervised rows of one masked pass; the first ``dense`` have depth 0."""
    anchor, depth = rows.anchor, rows.depth
    g = fuse(params, cfg, batch.features[0, :dense])
    mask_g = fuse(params, cfg, jnp.reshape(cast(Array, params.mask_hidden), (1, -1)))
    g = jnp.concatenate([g, jnp.broadcast_to(mask_g, (len(anchor) - dense, g.shape[1]))])
    tokens = jnp.where(depth == 0, shifted(batch.tokens, 1)[0, anchor], cfg.mask_token_id)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return masked_attention(q, k, v, anchor, depth, params.fc.dtype)

    positions = (anchor + depth)[None]
    hidden, _ = run_head(params, cfg, tokens[None], g[None], positions, [attend] * cfg.num_layers)
    at = jnp.minimum(anchor + depth + 1, batch.tokens.shape[1] - 1)
    kl, _ = row_losses(params, cfg, target_head, hidden, batch.target_hidden[:, at])
    charged = jnp.where(depth == 0, supervised(batch)[0, anchor], True) & rows.owned
    return jnp.sum(jnp.where(charged, kl[0], 0.0))


def masked_step(cfg: DrafterConfig, dense: int, count: int) -> Callable:
    """One pass: its loss and gradient, added to those of passes before it. ``dense`` rows have depth 0."""

    def step(
        params: DrafterParams, target_head: Array, batch: Batch, rows: Rows, before: tuple
    ) -> tuple[Array, DrafterParams]:
        fixed = params.embed

        def loss(p: DrafterParams) -> Array:
            return masked_loss(p.replace(embed=fixed), cfg, target_head, batch, rows, dense) / count

        found = jax.value_and_grad(loss)(params.replace(embed=None))
        return jax.tree.map(jnp.add, before, found)

    return step


def our_step(cfg: DrafterConfig, counts: tuple[int, ...]) -> Callable:
    def step(params: DrafterParams, target_head: Array, batch: Batch) -> tuple[Array, DrafterParams]:
        fixed = params.embed

        def loss(p: DrafterParams) -> Array:
            return peagle_loss(p.replace(embed=fixed), cfg, target_head, batch, counts)[0]

        return jax.value_and_grad(loss)(params.replace(embed=None))

    return step


def make_config(args: argparse.Namespace) -> DrafterConfig:
    block = BlockConfig(args.hidden, args.intermediate, args.heads, args.kv_heads, args.head_dim)
    taps = tuple(range(3))
    return DrafterConfig(
        "peagle", block, args.layers, args.vocab, args.draft_vocab, args.hidden, taps, 2**20, args.depths, 0
    )


def make_params(cfg: DrafterConfig, dtype: Any) -> tuple[DrafterParams, Array]:
    """Random weights and target rows: what is measured does not depend on them."""
    table = 0.02 * jax.random.normal(jax.random.key(0), (cfg.vocab_size, cfg.hidden_size))
    target = TargetParams(table, (), jnp.ones((cfg.hidden_size,)), None)
    params = at_random(cfg, target, np.arange(cfg.draft_vocab_size)).replace(embed=table)
    params = jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, params)
    return params, table[: cfg.draft_vocab_size].astype(dtype)


def make_batch(cfg: DrafterConfig, n: int, options: CodOptions, dtype: Any) -> Batch:
    """One supervised document of n tokens and its sampled rollouts."""
    rng = np.random.default_rng(n)
    document, flags = np.zeros(n, np.int32), np.ones(n, bool)
    valid = supervised_positions(flags, document)
    anchors, lengths = sample_rollouts(valid, document, (n,), options)

    def states(width: int) -> Array:
        return jax.random.normal(jax.random.key(n + width), (1, n, width)).astype(dtype)

    return Batch(
        tokens=jnp.asarray(rng.integers(1, cfg.vocab_size, (1, n))),
        segment_ids=jnp.asarray(document[None]),
        positions=jnp.arange(n)[None],
        loss_flags=jnp.asarray(flags[None]),
        features=states(cfg.feature_size),
        target_hidden=states(cfg.target_hidden_size),
        anchors=jnp.asarray(anchors[:, None]),
        lengths=jnp.asarray(lengths[:, None]),
    )


def sampling(n: int, args: argparse.Namespace) -> CodOptions:
    """COD with as many segments as hold about ``--segment-rows`` mask rows each."""
    masks = sum(depth_counts(n, CodOptions(args.depths, args.ratio)))
    return CodOptions(args.depths, args.ratio, segments=max(1, round(masks / args.segment_rows)))


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


def measure_length(n: int, cfg: DrafterConfig, params: tuple, args: argparse.Namespace) -> dict[str, Any]:
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

    CONSOLE.print(f"n = {n}: ours")
    ours = measure_ours(our_step(cfg, depth_counts(n, options)), arguments, repeats)
    measured = [("ours", total, ours)]
    for name, passes in rivals.items():
        CONSOLE.print(f"n = {n}: {name}")
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


def show(report: dict[str, Any]) -> None:
    """The report as a table."""
    table = Table(
        "n", "way", "rows", "seconds", "ours / it", "temporary MiB", "ours / it", "gradients part by"
    )
    for n, result in report["lengths"].items():
        for name, e in result["ways"].items():
            timed = "seconds" in e
            table.add_row(
                str(n),
                name,
                f"{e['rows']:.2f}",
                f"{e['seconds']:.2f}" if timed else "",
                f"{e['time_of_ours']:.2f}" if timed else "",
                f"{e['temporary_bytes'] / 2**20:,.0f}",
                f"{e['memory_of_ours']:.2f}",
                f"{e['gradient_difference']:.1e}" if timed else "",
            )
    Console().print(table)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=numbers, default=[1024, 2048, 4096], help="tokens of a sequence")
    add("--segments", type=numbers, default=[2, 4, 8], help="S of the paper's partition")
    add("--time-up-to", type=int, default=4096, help="longer sequences are compiled for their memory only")
    add("--flat-up-to", type=int, default=4096, help="longer sequences have no flat pass")
    add("--segment-rows", type=int, default=1024, help="about how many mask rows a segment of ours holds")
    add("--repeats", type=int, default=3)
    add("--depths", type=int, default=8, help="K")
    add("--ratio", type=float, default=0.8, help="r")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    shape = {"layers": 4, "hidden": 576, "intermediate": 1536, "heads": 9, "kv-heads": 3, "head-dim": 64}
    for name, value in {**shape, "vocab": 49152, "draft-vocab": 6656}.items():
        add(f"--{name}", type=int, default=value)
    add("--json", action="store_true", help="print the report, not a table")
    add("--out", type=Path, help="write the report here too")
    args = parser.parse_args()

    cfg = make_config(args)
    params = make_params(cfg, jnp.dtype(args.dtype))
    report: dict[str, Any] = {**describe_machine(("jax", "jaxlib", "numpy")), "dtype": args.dtype}
    report |= {"head": {name: getattr(args, name.replace("-", "_")) for name in (*shape, "draft-vocab")}}
    report |= {"K": args.depths, "r": args.ratio, "lengths": {}}
    for n in args.lengths:
        report["lengths"][n] = measure_length(n, cfg, params, args)
        save(report, args.out)
    tell(report, args.json, show)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
