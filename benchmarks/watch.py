"""Watches a server from a process of its own, so that nothing but the server and the machine delays it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np

MEMORY_EVERY = 1.0
"""Seconds."""


@dataclasses.dataclass
class Sight:
    """What was seen: seconds that /health took, how late the watcher itself was woken (the machine's part of
    such a time), what went wrong, and (seconds since the start, bytes of resident memory)."""

    health: list[float] = dataclasses.field(default_factory=list)
    late: list[float] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    memory: list[tuple[float, int]] = dataclasses.field(default_factory=list)


def resident_bytes(pid: int) -> int | None:
    """VmRSS of a process on Linux; None if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)


def watch(url: str, pid: int | None, every: float, end: Connection) -> None:
    """Body of the process: says through ``end`` that it has begun, looks every so many seconds until
    something comes from there, and sends a ``Sight``."""
    sight, began = Sight(), time.monotonic()
    due, memory_due = began, began
    with httpx.Client(base_url=url, timeout=30) as http:
        end.send("begun")
        while not end.poll(max(0.0, due - time.monotonic())):
            asked = time.monotonic()
            sight.late.append(max(0.0, asked - due))
            try:
                status = http.get("/health").status_code
                if status != 200:
                    sight.failures.append(f"status {status} after {asked - began:.0f} s")
            except httpx.HTTPError as error:
                sight.failures.append(f"{type(error).__name__} after {asked - began:.0f} s")
            now = time.monotonic()
            sight.health.append(now - asked)
            if pid is not None and now >= memory_due and (size := resident_bytes(pid)) is not None:
                sight.memory.append((now - began, size))
                memory_due = now + MEMORY_EVERY
            due = max(due + every, now)
    end.send(sight)


class Watcher:
    """A process that watches from now on, until it is asked what it has seen."""

    def __init__(self, url: str, pid: int | None, every: float = 0.2) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, end = context.Pipe()
        self._process = context.Process(target=watch, args=(url, pid, every, end), daemon=True)
        self._process.start()
        self._end.recv()

    def seen(self) -> Sight:
        """Ends it."""
        self._end.send(None)
        sight = self._end.recv()
        self._process.join()
        return sight


def in_milliseconds(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    if not seconds:
        return {}
    values = np.asarray(seconds) * 1000
    median, p99 = np.percentile(values, [50, 99])
    return {"median": float(median), "p99": float(p99), "max": float(values.max())}


def memory_report(memory: list[tuple[float, int]], settled: float) -> dict[str, Any]:
    """MiB at the start, each minute and the end; ``growth`` between the medians of the first tenth after
    ``settled`` seconds and of the last tenth. Nothing if nothing was seen."""
    if not memory:
        return {}
    times, sizes = np.asarray([t for t, _ in memory]), np.asarray([size for _, size in memory]) / 2**20
    length = times[-1]
    minutes = [float(sizes[int(np.searchsorted(times, 60 * m))]) for m in range(int(length // 60) + 1)]
    start = min(settled, length * 0.2)
    early = sizes[(times >= start) & (times <= start + length / 10)]
    late = sizes[times >= length * 0.9]
    found = {"start": float(sizes[0]), "minutes": minutes, "end": float(sizes[-1])}
    growth = float(np.median(late) - np.median(early)) if len(early) and len(late) else 0.0
    return found | {"growth": growth, "growth_counted_from_s": float(start)}
