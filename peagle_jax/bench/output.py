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
        report.write_result(result, args.out)
        write_page(result, args.out / report.RESULT, console)
    return int(bool(failures(result)))


def failures(result: dict[str, Any]) -> list[str]:
    """What went wrong, of each server."""
    runs = result.get("runs", {}).values()
    points = [point for entry in runs for point in entry.get("points", ())]
    return [entry["error"] for entry in runs if "error" in entry] + [
        error for point in points for error in point.get("errors", ())
    ]


def read(path: Path) -> dict[str, Any]:
    """A result of an earlier run, from its file.

    Raises:
        CommandError: there is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} is no result ({error}); name a folder that --out has written") from error
    if not isinstance(found, dict) or found.get("benchmark") not in BENCHMARKS:
        raise CommandError(f"{path} is no result of peagle_jax.bench; name a folder that --out has written")
    return found


def plot(path: Path, console: Console) -> None:
    """Writes the page of an earlier result again.

    Raises:
        CommandError: there is none, or it lacks a part.
    """
    file = path / report.RESULT if path.is_dir() else path
    result = read(file)
    try:
        write_page(result, file, console)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CommandError(
            f"{file} is no whole result of bench {result['benchmark']} ({type(error).__name__}: {error}); "
            f"name what --out has written"
        ) from error


def write_page(result: dict[str, Any], file: Path, console: Console) -> None:
    """Writes plots, and the Markdown that shows them, beside a result's JSON; named after it unless that has
    its usual name."""
    usual = file.name == report.RESULT
    kind = BENCHMARKS[result["benchmark"]]
    tables, notes = kind.tables(result), kind.notes(result)
    drawn = plots.draw(result, file.parent, "" if usual else f"{file.stem}-")
    if drawn is None:
        console.print("no plots: there is no matplotlib; pip install 'peagle_jax[bench]', then bench plot")
    page = report.markdown(result, tables, notes, drawn or [])
    (file.parent / (report.TEXT if usual else f"{file.stem}.md")).write_text(page, encoding="utf-8")
