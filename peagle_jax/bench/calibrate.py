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
from peagle_jax.bench import prompts, reliability, runner
from peagle_jax.bench.methods import Method, Models
from peagle_jax.bench.reliability import Drafts
from peagle_jax.bench.report import Table, number
from peagle_jax.checkpoint.calibration import write_calibration
from peagle_jax.serve.speculative_config import SpeculativeOptions
from peagle_jax.speculation import Arrangement
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.request import PromptChunk, Request
from peagle_jax.speculative.sampling import SamplingParams

Part = dict[str, Any]


def run(args: argparse.Namespace, result: Part, progress: Progress) -> None:
    """Fills the result, and writes ``calibration.json`` where the flags say.

    Raises:
        CommandError: nothing was drafted, or the head is no folder that can be written to.
    """
    sets, models = prompts.sets_of(args), Models(args)
    (k,), (nodes,) = args.num_speculative_tokens[:1], args.num_speculative_nodes[:1]
    loaded = models.with_head(models.peagle_head(), k, "peagle")
    assert loaded.head is not None
    folder = Path(loaded.head.source)
    if args.write and not folder.is_dir():
        raise CommandError(f"--write is for a head in a folder, found {loaded.head.source}; use --out")
    result |= prompts.described(sets, args)
    result |= prompts.models([Method("peagle", "peagle", loaded, SpeculativeOptions())])
    result |= {"head": folder.name, "num_speculative_tokens": k, "num_speculative_nodes": nodes}
    decoder = loaded.decoder(models.max_model_len, arrangement=Arrangement(max(nodes, k)))
    decoder.calibration = np.tile(np.float32([1, 0]), (k, 1))
    conversations = [c for one in sets for c in one.conversations]
    task = progress.add_task("calibrating", total=len(conversations), note="")
    sampling = SamplingParams(temperature=args.temperature, seed=args.seed)
    halves: list[list[Drafts]] = [[], []]
    for i, conversation in enumerate(conversations):
        progress.update(task, advance=1, note=conversation.category)
        messages = [{"role": "user", "content": conversation.turns[0]}]
        ids = runner.prompt_ids(loaded.target.tokenizer, messages, raw=args.raw)
        if len(ids) + args.max_tokens <= models.max_model_len:
            request = Request(ids, sampling, args.max_tokens, frozenset(loaded.target.config.eos_token_ids))
            halves[i % 2] += watched(decoder, request, k)
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


def _joined(parts: Sequence[Drafts]) -> Drafts:
    empty = Drafts(np.zeros(0, int), np.zeros(0), np.zeros(0, bool))
    return Drafts(*(np.concatenate(columns) for columns in zip(empty, *parts, strict=True)))


def watched(decoder: Decoder, request: Request, k: int) -> Iterator[Drafts]:
    """Decodes one request; of each round the nodes that were verified after an accepted parent."""
    decoder.check(request)
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
