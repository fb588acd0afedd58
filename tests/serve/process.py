"""The serve command in a process of its own."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A running server and the lines that it prints; ``devices`` are XLA's, made out of the host."""

    def __init__(self, *argv: str, devices: int = 4) -> None:
        flags = os.environ["XLA_FLAGS"].replace("device_count=4", f"device_count={devices}")
        more = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "XLA_FLAGS": flags}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "peagle_jax.serve", *argv],
            env=os.environ | more,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._arrived: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._arrived.put(line)
        self._arrived.put(None)

    def wait_for(self, word: str) -> str:
        """The first line with ``word``."""
        while True:
            line = self._arrived.get(timeout=600)
            assert line is not None, "".join(self.lines)
            self.lines.append(line)
            if word in line:
                return line

    def url(self) -> str:
        """Its address, once it is ready."""
        return self.wait_for("ready: ").split()[1].removesuffix("/v1/chat/completions")

    def end(self, seconds: float = 600) -> str:
        """Everything printed, once the process has ended."""
        self.process.wait(seconds)
        while (line := self._arrived.get(timeout=60)) is not None:
            self.lines.append(line)
        return "".join(self.lines)
