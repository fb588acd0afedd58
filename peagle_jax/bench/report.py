"""A result as tables, for a terminal and as Markdown, and the folder that ``--out`` names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

RESULT, TEXT = "results.json", "RESULTS.md"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of texts; the first column is what they are about."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> RichTable:
        found = RichTable(box=None, header_style="bold")
        for i, name in enumerate(self.columns):
            found.add_column(name, justify="right" if i else "left", no_wrap=True)
        for row in self.rows:
            found.add_row(*row)
        return found

    def markdown(self) -> str:
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        body = "\n".join(
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines
        )
        return f"### {self.title}\n\n{body}\n"


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and 99th percentile; None of nothing."""
    of = {"mean": np.mean, "median": np.median, "std": np.std, "p99": lambda x: np.percentile(x, 99)}
    return {kind: float(f(values)) if len(values) else None for kind, f in of.items()}


def number(value: float | None, digits: int = 2) -> str:
    """A cell; empty where nothing was measured."""
    return "" if value is None else f"{value:,.{digits}f}"


def numbers(values: Iterable[float], digits: int = 2) -> str:
    return " ".join(number(value, digits) for value in values)


def machine_line(result: dict[str, Any]) -> str:
    """What it was measured on."""
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    device = f", {result['device']}" if result.get("device") else ""
    return (
        f"{result['processor']}, {result['cores']} cores{device}; Python {result['python']}, {packages}; "
        f"commit {result['commit'] or 'unknown'}"
    )


def show(tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Prints a result for people."""
    console = Console(highlight=False)
    for table in tables:
        drawn = table.rich()
        # A row that a narrow terminal wraps still tells more than cells that are cut.
        console.width = max(
            console.width, console.measure(drawn, options=console.options.update(width=400)).maximum
        )
        console.print(table.title, style="italic", markup=False, soft_wrap=True)
        console.print(drawn, end="\n\n" if table is not tables[-1] else "\n")
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)


def markdown(
    result: dict[str, Any], tables: Sequence[Table], notes: Sequence[str], plots: Sequence[str]
) -> str:
    """A result as a page."""
    parts = [f"## {result['benchmark']}", f"    {result['command']}", machine_line(result)]
    parts += [table.markdown().rstrip() for table in tables]
    parts += list(notes)
    parts += [f"![{Path(plot).stem}]({plot})" for plot in plots]
    return "\n\n".join(parts) + "\n"


def write_result(result: dict[str, Any], folder: Path | None) -> None:
    """The JSON, after every step of a long run."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{RESULT}.part"
        part.write_text(json.dumps(result, indent=2) + "\n")
        part.replace(folder / RESULT)
