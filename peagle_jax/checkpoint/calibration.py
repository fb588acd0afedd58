"""``calibration.json``: what a head's own probabilities are worth, kept beside its weights.

For each depth a slope and an offset on the log-odds of the head's probability (``tree.calibrated``), and the
reliability that they were fitted to. ``python -m peagle_jax.bench calibrate`` writes it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.folder import resolve

CALIBRATION = "calibration.json"


def read_calibration(head: str) -> np.ndarray | None:
    """A head's calibration, float32 (depths, 2); None where it has none. ``head`` is a folder or hub id.

    Raises:
        CheckpointError: the file is there and is no calibration.
    """
    path = resolve(head) / CALIBRATION
    if not path.is_file():
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["calibration"]
        values = [[float(x) for x in row] for row in rows]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        values = []
    good = values and all(len(row) == 2 and all(map(math.isfinite, row)) and row[0] > 0 for row in values)
    if not good:
        raise CheckpointError(
            f'{path} is no calibration; expected a "calibration" of [slope above 0, offset] a depth; '
            f"delete it, or measure it again (python -m peagle_jax.bench calibrate)"
        )
    return np.asarray(values, np.float32)


def for_depths(calibration: np.ndarray, depths: int) -> np.ndarray:
    """The rows of so many depths; past the last measured one it stands in."""
    return calibration[np.minimum(np.arange(depths), len(calibration) - 1)]


def write_calibration(folder: Path, calibration: np.ndarray, **facts: Any) -> Path:
    """Writes a head's calibration, with ``facts`` of how it was measured; returns the file."""
    path = folder / CALIBRATION
    content = {"calibration": [[round(float(x), 4) for x in row] for row in calibration], **facts}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
