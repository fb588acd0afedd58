"""What a result was measured on, and where it goes. Standard library and installed package metadata only."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def describe_machine(packages: tuple[str, ...]) -> dict[str, object]:
    """Processor, cores, system, versions, commit and command line, for the head of a result file."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        flags = next(line for line in lines if line.startswith("flags")).split()
        processor += " with amx_bf16" if "amx_bf16" in flags else ""
    except (OSError, StopIteration):
        pass
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "commit": commit,
        "command": " ".join(["python", sys.argv[0], *map(without_folders, sys.argv[1:])]),
    }


def without_folders(word: str) -> str:
    """A word of a command, JSON too, whose files are named without their folders: those mean nothing
    elsewhere."""
    return re.sub(r"[^\s\"',=]*/(?=[^/\s\"',])", "", word)


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


def vllm_environment() -> dict[str, str]:
    """Variables with which vLLM takes all of this machine's cores; those that are set stay as they are."""
    wanted = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_WAIT_POLICY": "passive",  # or one other busy process stalls every barrier
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
