"""``bench calibrate``: how far a head's own probabilities can be trusted, and what corrects them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import Progress

from peagle_jax.arguments import CommandError
from peagle_jax.bench import prompts, reliability
from peagle_jax.bench.methods import Method, Models
from peagle_jax.bench.reliability import Drafts
from peagle_jax.bench.report import Table, number
from peagle_jax.bench.runner import Asking
from peagle_jax.checkpoint.calibration import write_calibration
from peagle_jax.serve.speculative_config import SpeculativeOptions
from peagle_jax.speculation import Arrangement
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.request import PromptChunk, Request

Part = dict[str, Any]


def run(args: argparse.Namespace, result: Part, progress: Progress) -> None:
    """Fills the result, and writes ``calibration.json`` where the flags say.

    Raises:
        CommandError: nothing was drafted, the head is no folder that can be written to, or a tree of too few
            nodes.
    """
    if args.num_speculative_tokens is not None:
        _nodes(args.num_speculative_tokens, args.num_speculative_nodes)
    asking, sets, models = Asking.of(args), prompts.sets_of(args), Models(args)
    loaded = models.with_head(models.peagle_head(), args.num_speculative_tokens, "peagle")
    assert loaded.head is not None
    k = loaded.num_speculative_tokens
    nodes = _nodes(k, args.num_speculative_nodes)
    folder = Path(loaded.head.source)
    if args.write and not folder.is_dir():
        raise CommandError(f"--write is for a head in a folder, found {loaded.head.source}; use --out")
    result |= prompts.described(sets, args)
    result |= prompts.models([Method("peagle", "peagle", loaded, SpeculativeOptions())])
    result |= {"head": folder.name, "num_speculative_tokens": k, "num_speculative_nodes": nodes}
    decoder = loaded.decoder(models.max_model_len, arrangement=Arrangement(nodes))
    decoder.calibration = np.tile(np.float32([1, 0]), (k, 1))
    conversations = [c for one in sets for c in one.conversations]
    task = progress.add_task("calibrating", total=len(conversations), note="")
    stops = asking.stops(loaded.target)
    halves: list[list[Drafts]] = [[], []]
    for i, conversation in enumerate(conversations):
        progress.update(task, advance=1, note=conversation.category)
        ids = asking.prompt_ids(loaded.target, conversation.opening, models.max_model_len)
        if ids is not None:
            halves[i % 2] += watched(decoder, Request(ids, asking.sampling, asking.max_tokens, stops), k)
    first, second = (_joined(half) for half in halves)
    every = _joined([first, second])
    if not every.accepted.any() or not len(first.depths) or not len(second.depths):
        raise CommandError("no draft was accepted in one half of the prompts; give more of them")
    calibration = reliability.fit(every, k)
    # Each half is judged by what the other one says.
    judged = _joined(
        [
            reliability.apply(first, reliability.fit(second, k)),
            reliability.apply(second, reliability.fit(first, k)),
        ]
    )
    result["calibration"] = [[round(float(x), 4) for x in row] for row in calibration]
    result["depths"] = [
        {
            "drafts": len(raw.depths),
            "accepted": float(raw.accepted.mean()) if len(raw.depths) else None,
            "error": reliability.calibration_error(raw),
            "error_calibrated": reliability.calibration_error(judged.where(judged.depths == depth)),
            "reliability": reliability.table(raw),
        }
        for depth in range(1, k + 1)
        for raw in [every.where(every.depths == depth)]
    ]
    result["error"] = reliability.calibration_error(every)
    result["error_calibrated"] = reliability.calibration_error(judged)
    told = {name: result[name] for name in ("depths", "error", "error_calibrated", "command", "temperature")}
    told["datasets"] = [{key: one[key] for key in ("name", "prompts")} for one in result["datasets"]]
    for where in [folder] * args.write + [args.out] * (args.out is not None):
        write_calibration(where, calibration, **told)


def _nodes(k: int, wanted: int | None) -> int:
    """Of the tree. Raises CommandError for fewer than a chain has."""
    if wanted is not None and wanted < k:
        raise CommandError(
            f"--num-speculative-nodes {wanted} is less than the {k} depths that are measured; "
            f"ask for {k} or more, or for a smaller --num-speculative-tokens"
        )
    return 2 * k if wanted is None else wanted


def _joined(parts: Sequence[Drafts]) -> Drafts:
    empty = Drafts(np.zeros(0, int), np.zeros(0), np.zeros(0, bool))
    return Drafts(*(np.concatenate(columns) for columns in zip(empty, *parts, strict=True)))


def watched(decoder: Decoder, request: Request, k: int) -> Iterator[Drafts]:
    """Decodes one request; of each round the nodes that were verified after an accepted parent.

    Raises:
        CommandError: a request that cannot be decoded.
    """
    try:
        decoder.check(request)
    except ValueError as error:
        raise CommandError(str(error)) from error
    size = decoder.sizes.chunks[-1]
    for start in range(0, len(request.prompt), size):
        count = min(size, len(request.prompt) - start)
        flight = decoder.prefill([PromptChunk(0, request, request.prompt, start, count)])
    ended = any(r.finish_reason for found in decoder.results(flight) for r in found.values())
    while not ended:
        flight = decoder.round([0], k)
        report = jax.tree.map(lambda x: np.asarray(x)[0, 0, 0], flight.output.drafts)
        yield Drafts(report.depths, report.confidence, report.accepted).where(report.reached)
        ended = any(r.finish_reason for found in decoder.results(flight) for r in found.values())


def tables(result: Part) -> list[Table]:
    rows = [
        [
            str(depth),
            f"{row['drafts']:,}",
            number(row["accepted"]),
            number(row["error"], 3),
            number(row["error_calibrated"], 3),
            *(number(x) for x in calibration),
        ]
        for depth, (row, calibration) in enumerate(
            zip(result["depths"], result["calibration"], strict=True), start=1
        )
    ]
    columns = ("depth", "drafts", "accepted", "error", "calibrated", "slope", "offset")
    bins = [
        [number(row["confidence"]), number(row["accepted"]), f"{row['drafts']:,}"]
        for row in result["depths"][0]["reliability"]
    ]
    return [
        Table(f"calibration of {result['head']}, K = {result['num_speculative_tokens']}", columns, rows),
        Table(
            "reliability at the first position", ("the head's probability", "share accepted", "drafts"), bins
        ),
    ]


def notes(result: Part) -> list[str]:
    return [
        f"Expected calibration error of all drafts: {result['error']:.3f}, calibrated "
        f"{result['error_calibrated']:.3f} (each half of the prompts by the other's fit)."
    ]
