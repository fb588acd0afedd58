"""Runs a benchmark under a progress bar, and puts its result where the flags say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from peagle_jax.arguments import CommandError
from peagle_jax.bench import acceptance, calibrate, latency, plots, report, serve, train
from peagle_jax.bench.machine import describe_machine
from peagle_jax.bench.servers import end_on_sigterm
from peagle_jax.train.progress import progress_bar

BENCHMARKS: dict[str, Any] = {
    "acceptance": acceptance,
    "calibrate": calibrate,
    "latency": latency,
    "serve": serve,
    "train": train,
}
"""By name: ``run(args, result, progress)`` fills a result, of which ``tables`` and ``notes`` are shown."""


def measure(args: argparse.Namespace, command: list[str], console: Console) -> int:
    """Runs what was asked for; the exit status is 1 if a part of it failed.

    Raises:
        CommandError: and whatever else loading raises.
    """
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    end_on_sigterm()
    machine = describe_machine(("jax", "jaxlib", "numpy"), command)
    result: dict[str, Any] = {"benchmark": args.benchmark, **machine}
    with progress_bar(console, "") as progress:
        BENCHMARKS[args.benchmark].run(args, result, progress)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        kind = BENCHMARKS[args.benchmark]
        report.show(kind.tables(result), kind.notes(result))
    if args.out is not None:
        finish(result, args.out, console)
    return int(bool(failures(result)))


def failures(result: dict[str, Any]) -> list[str]:
    """What went wrong, of each server."""
    runs = result.get("runs", {}).values()
    points = [point for entry in runs for point in entry.get("points", ())]
    return [entry["error"] for entry in runs if "error" in entry] + [
        error for point in points for error in point.get("errors", ())
    ]


def read(folder: Path) -> dict[str, Any]:
    """A result of an earlier run.

    Raises:
        CommandError: there is none.
    """
    path = folder / report.RESULT if folder.is_dir() else folder
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} is no result ({error}); name a folder that --out has written") from error
    if not isinstance(found, dict) or found.get("benchmark") not in BENCHMARKS:
        raise CommandError(f"{path} is no result of peagle_jax.bench; name a folder that --out has written")
    return found


def finish(result: dict[str, Any], folder: Path, console: Console) -> None:
    """Writes the JSON, the plots, and the Markdown that shows them."""
    folder = folder if folder.is_dir() else folder.parent
    report.write_result(result, folder)
    drawn = plots.draw(result, folder)
    if drawn is None:
        console.print("no plots: there is no matplotlib; pip install 'peagle_jax[bench]', then bench plot")
    kind = BENCHMARKS[result["benchmark"]]
    page = report.markdown(result, kind.tables(result), kind.notes(result), drawn or [])
    (folder / report.TEXT).write_text(page, encoding="utf-8")
