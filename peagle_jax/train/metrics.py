"""What a run measures, and its two logs: JSON lines and TensorBoard event files."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from peagle_jax.train.errors import TrainError
from peagle_jax.train.step import StepReport

SUMS = ("loss_sum", "correct", "count")


def ratios(total: Any, count: Any) -> list[float | None]:
    """total / count by depth; None where nothing was counted."""
    return [
        float(t) / float(c) if c > 0 else None
        for t, c in zip(np.asarray(total), np.asarray(count), strict=True)
    ]


def acceptance_lengths(accuracy: list[float | None]) -> list[float]:
    """Estimated tokens a round for K = 1, 2, ...: 1 + sum over j of the product of accuracies to j.

    It takes the depths as independent, given that the earlier drafts were right.
    """
    out, product, length = [], 1.0, 1.0
    for value in accuracy:
        product *= value or 0.0
        length += product
        out.append(length)
    return out


def shown(values: list[float | None]) -> str:
    """Numbers as a console line prints them."""
    return " ".join("n/a" if v is None else f"{v:.3f}" for v in values)


def peak_memory() -> dict[str, int]:
    """The most bytes this process has held (resident), and the most on one device that counts them."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in statistics if "peak_bytes_in_use" in s]
    return found | ({"peak_device_bytes": max(peaks)} if peaks else {})


@dataclasses.dataclass
class Window:
    """Sums since the last line of the log. Time that is not training is added to ``started``."""

    started: float = dataclasses.field(default_factory=time.monotonic)
    steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    loss_sum: Any = 0.0
    correct: Any = 0.0
    count: Any = 0.0

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Window:
        """The window that ``saved`` came from, going on now."""
        if not saved:
            return cls()
        sums = {name: np.asarray(saved[name], np.float64) for name in SUMS}
        started = time.monotonic() - saved["seconds"]
        return cls(started, saved["steps"], saved["tokens"], saved["loss"], **sums)

    def saved(self) -> dict[str, Any]:
        """The window as JSON data, so that a resumed run writes the line that it would have written."""
        seconds = time.monotonic() - self.started
        sums = {name: np.asarray(getattr(self, name)).tolist() for name in SUMS}
        return {"seconds": seconds, "steps": self.steps, "tokens": self.tokens, "loss": self.loss, **sums}

    def add(self, report: StepReport, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.loss += float(report.loss)
        for name in SUMS:
            setattr(self, name, getattr(self, name) + np.asarray(getattr(report.metrics, name), np.float64))

    def record(self, step: int, rate: float) -> dict[str, Any]:
        """One line of the log. Lists are by depth (``acceptance_length`` by K), from the first."""
        seconds = time.monotonic() - self.started
        accuracy = ratios(self.correct, self.count)
        return {
            "step": step,
            "loss": self.loss / self.steps,
            "learning_rate": rate,
            "tokens_per_second": self.tokens / seconds,
            "step_seconds": seconds / self.steps,
            "accuracy": accuracy,
            "acceptance_length": acceptance_lengths(accuracy),
            "depth_loss": ratios(self.loss_sum, self.count),
            "count": [int(c) for c in np.asarray(self.count)],
            **peak_memory(),
        }


def open_board(folder: Path, step: int) -> Any:
    """A TensorBoard writer, or None where its package is not installed.

    TensorBoard drops what was written past ``step`` by a run that died after its last checkpoint.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    # Names hold the second only: without the suffix a quick restart would overwrite the file.
    return SummaryWriter(str(folder), purge_step=step + 1, filename_suffix=f".after-{step}")


def read_lines(path: Path) -> list[str]:
    """Lines of a log, if there is one. Raises TrainError: it is not text."""
    try:
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except UnicodeDecodeError as error:
        raise TrainError(
            f"{path} is not UTF-8 text at byte {error.start}, so it is no log of a run; move it away or "
            "choose another output"
        ) from error


def _kept(path: Path, step: int) -> list[str]:
    """Whole lines of steps up to ``step``; a line that a dying process cut is not one."""
    lines = []
    for line in read_lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        found = record.get("step") if isinstance(record, dict) else None
        if isinstance(found, int) and found <= step:
            lines.append(line)
    return lines


def scalars(record: dict[str, Any], group: str) -> Iterator[tuple[str, float]]:
    """A record's numbers by tag: ``group/key``, or ``group/key/i`` for the i-th of a list, from 1.
    A key that starts with the group's name loses it."""
    for key, value in record.items():
        if key == "step":
            continue
        tag = f"{group}/{key.removeprefix(group + '_')}"
        pairs = enumerate(value, 1) if isinstance(value, list) else [("", value)]
        for index, number in pairs:
            if number is not None:
                yield (f"{tag}/{index}" if index else tag), number


class MetricsLog:
    """JSON lines, and scalars on ``board`` (a SummaryWriter) if there is one.

    Lines past ``step`` (of a run that died after its last checkpoint) are dropped. Without a path nothing
    is written: another process does it.
    """

    def __init__(self, path: Path | None, step: int, board: Any = None):
        self.path, self.board = path, board
        if path is None:
            return
        part = path.with_name(path.name + ".part")
        part.write_text("".join(line + "\n" for line in _kept(path, step)))
        os.replace(part, path)

    def write(self, record: dict[str, Any], group: str = "train") -> None:
        """One record with its ``step``."""
        if self.path is None:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self.board is not None:
            for tag, number in scalars(record, group):
                self.board.add_scalar(tag, number, record["step"])

    def flush(self) -> None:
        """Brings to disk what the board still holds."""
        if self.board is not None:
            self.board.flush()

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
