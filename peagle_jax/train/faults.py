"""A step whose loss or weights are not finite: which step, which weight, which rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.train.recipe import TrainError
from peagle_jax.train.step import StepReport


def row_names(rows: Iterable[int], starts: np.ndarray) -> str:
    """Rows of a split with their places: ``starts`` are the first rows of its shards, counted over all
    feature folders in the recipe's order."""
    names = []
    for row in rows:
        shard = int(np.searchsorted(starts, row, "right")) - 1
        names.append(f"{row} (shard {shard}, its row {row - int(starts[shard])})")
    return ", ".join(names)


def check_finite(report: StepReport, params: Any, step: int, batch_rows: Callable[[int], str]) -> None:
    """Raises TrainError naming the step, the first weight whose gradient is not finite, and the rows of
    the batch: ``batch_rows(step)`` names them.
    """
    squares = np.asarray(report.squares)
    if math.isfinite(float(report.loss)) and np.isfinite(squares).all():
        return
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    bad = next((path for path, s in zip(paths, squares, strict=True) if not np.isfinite(s)), None)
    where = f"first in the gradient of {bad}" if bad else "in the loss alone"
    raise TrainError(
        f"step {step}: loss {float(report.loss)} is not finite, {where}; the batch was training rows "
        f"{batch_rows(step)}; the last checkpoint is kept. Lower optimizer.learning_rate, or set "
        "head.norm_before_fc"
    )


@jax.jit
def _all_finite(weights: list[jax.Array]) -> jax.Array:
    return jnp.array([jnp.isfinite(w).all() for w in weights])


def not_finite(params: Any) -> str | None:
    """The first weight that holds a value that is not finite; None if there is none."""
    found = jax.tree_util.tree_leaves_with_path(params)
    sound = np.asarray(_all_finite([w for _, w in found]))
    paths = [jax.tree_util.keystr(path) for path, _ in found]
    return next((path for path, fine in zip(paths, sound, strict=True) if not fine), None)


def check_weights(params: Any, step: int) -> None:
    """Raises TrainError naming the first weight that the update of ``step`` has made infinite or NaN."""
    bad = not_finite(params)
    if bad is not None:
        raise TrainError(
            f"step {step}: {bad} is not finite after its update; the last checkpoint is kept. Lower "
            "optimizer.learning_rate or optimizer.weight_decay"
        )
