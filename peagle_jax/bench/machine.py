"""What a result was measured on, and where it goes. Standard library and installed package metadata only."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def describe_machine(packages: tuple[str, ...], command: Sequence[str] | None = None) -> dict[str, Any]:
    """Processor, cores, system, versions, commit and command line (default: this script's), for the head of a
    result file; of the command as ``recorded`` tells it."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        flags = next(line for line in lines if line.startswith("flags")).split()
        processor += " with amx_bf16" if "amx_bf16" in flags else ""
    except (OSError, StopIteration):
        pass
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "commit": _commit(),
        "command": recorded(command or ["python", *sys.argv]),
    }


def _commit() -> str:
    """Of the checkout that this file lies in; empty where there is none."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
    except OSError:  # no git
        return ""


def without_folders(word: str) -> str:
    """A word of a command, JSON too, whose files are named without their folders: those mean nothing
    elsewhere."""
    return re.sub(r"[^\s\"',=]*/(?=[^/\s\"',])", "", word)


MASK = "MASKED"
_KEY = r"[\w-]*(?:token|keys?|secrets?|passwords?)(?![\w-])"
_VALUE = r"""('[^']*'|"[^"]*"|[^\s"',}]+)"""
_KEY_OF_VALUE = re.compile(rf"""({_KEY}["']?\s*[=:]\s*|--{_KEY}\s+){_VALUE}""", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """A text in which values are masked whose names look like those of keys (NAME=, --name, "name":), and
    what stands before the host in an address."""
    return re.sub(r"//[^/@\s]+@", f"//{MASK}@", _KEY_OF_VALUE.sub(rf"\1{MASK}", text))


def recorded(words: Sequence[str]) -> str:
    """A command line for a result: no folders, no secrets."""
    told: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        hidden = re.fullmatch(f"--{_KEY}", before, re.IGNORECASE)
        told.append(MASK if hidden else without_folders(without_secrets(word)))
    return shlex.join(told)


def save(report: dict[str, Any], out: Path | None) -> None:
    """Writes a result to ``--out``, if that was given."""
    if out:
        out.write_text(json.dumps(report, indent=2) + "\n")


def tell(report: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Prints a result: as ``--json`` asks for it, or as people read it."""
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
