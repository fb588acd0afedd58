"""Paths that a user names: whether they can be paths at all, and whether a command may write there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from peagle_jax.train.errors import TrainError

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes
SHOWN = 60  # characters of a path that is none


def _fault(path: str) -> str | None:
    if not path.strip():
        return "is empty"
    if "\0" in path:
        return "holds a NUL character"
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:
        return "is not valid Unicode"
    long = len(raw) > LONGEST_PATH or max(map(len, raw.split(b"/"))) > LONGEST_NAME
    return "is too long" if long else None


def check_path(name: str, path: str) -> None:
    """Raises TrainError unless ``path``, the value of ``name``, could be the path of something."""
    fault = _fault(path)
    if fault:
        shown = path if len(path) <= SHOWN else f"{path[: SHOWN // 2]}...{path[-SHOWN // 2 :]}"
        raise TrainError(f"{name} {fault}: found {shown!r}, expected the path of a file or a folder")


def existing(path: Path) -> Path:
    """The path, or the nearest one above it that exists."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if os.path.lexists(p))


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    return "a file" if path.is_file() else "neither a file nor a folder"


def check_writable(name: str, path: Path, wanted: str) -> None:
    """Raises TrainError unless ``path``, named by ``name``, is or can become what is ``wanted``: "a file"
    or "a folder". Nothing is left there."""
    there = existing(path)
    if there == path.absolute():
        if _kind(path) != wanted:
            raise TrainError(
                f"{path} is {_kind(path)}, expected {wanted}; move it away or choose another {name}"
            )
        refused = None if os.access(path, os.W_OK) else "it is write-protected"
        if not refused and wanted == "a file":
            return
    else:
        refused = None if there.is_dir() else f"{there} is {_kind(there)}"
    if not refused:
        try:
            with tempfile.TemporaryFile(dir=there):
                return
        except OSError as error:
            refused = error.strerror or str(error)
    raise TrainError(f"{path} cannot be written: {refused}; choose another {name}")
