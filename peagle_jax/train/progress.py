"""The progress bar of the long commands."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def progress_bar(console: Console, unit: str) -> Progress:
    """A bar with counts, time and a free ``note`` field; nothing where the console is no terminal.

    With a note of 36 characters and counts of five digits it fits 100 columns.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn(unit + " {task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=2,
        disable=not (console.is_terminal or console.is_jupyter),
    )
