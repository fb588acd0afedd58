"""Orbax checkpoints of a run: weights, moments, step, how far it has come, and what the run is."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from peagle_jax.train.faults import not_finite
from peagle_jax.train.recipe import TrainError
from peagle_jax.train.step import TrainState


def _plain(value: Any) -> Any:
    """As JSON would give it back."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


@jax.jit
def _checksums(state: Any) -> list[jax.Array]:
    def of(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        return jnp.sum(bits, dtype=jnp.uint32)

    return [of(x) for x in jax.tree.leaves(state)]


def checksums(state: Any) -> list[int]:
    """A sum of the bits of each array of numbers, made on the devices that hold it: one changed bit changes
    it."""
    return [int(x) for x in jax.device_get(_checksums(state))]


def _differences(found: Any, expected: Any, name: str) -> str:
    """Where two values differ, by the keys that lead there."""
    if not (isinstance(found, dict) and isinstance(expected, dict)):
        return f"{name} {str(found)[:100]}, not {str(expected)[:100]}"
    keys = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
    parts = [_differences(found.get(key), expected.get(key), f"{name}.{key}") for key in keys[:3]]
    return "; ".join(parts) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


@dataclasses.dataclass
class Progress:
    """What a run knows besides its state. ``worse`` counts validations since the best one; ``results``
    are the last validation's; ``window`` is the part of a log line that is not written yet;
    ``position`` is the loader's."""

    best_step: int | None = None
    best_loss: float | None = None
    worse: int = 0
    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    window: dict[str, Any] = dataclasses.field(default_factory=dict)
    position: dict[str, Any] = dataclasses.field(default_factory=dict)

    def validated(self, step: int, results: dict[str, Any]) -> bool:
        """Takes in a validation of ``step``; returns whether its loss is the lowest so far."""
        self.results = {"validation_step": step, **results}
        loss = results["validation_loss"]
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_step, self.best_loss, self.worse = step, loss, 0
            return True
        self.worse += 1
        return False


class _LatestAndBest(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the last ``keep`` checkpoints, and that of step ``best``."""

    def __init__(self, keep: int):
        self.keep, self.best = keep, None

    def should_preserve(
        self,
        checkpoints: Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: ocp.checkpoint_managers.PreservationContext,
    ) -> Sequence[bool]:
        first = len(checkpoints) - self.keep
        return [i >= first or info.step == self.best for i, info in enumerate(checkpoints)]


def _not_raised(record: logging.LogRecord) -> bool:
    """False for errors that Orbax logs, several times and whole, before it raises them in ``_writing``."""
    return not (record.exc_info and "orbax" in record.pathname)


class Checkpoints:
    """The last ``keep`` checkpoints in a folder, and the best one with ``keep_best``.

    ``identity`` is what a resumed run must have in common with the one that was stopped.
    """

    def __init__(self, folder: str | Path, keep: int, identity: dict[str, Any], keep_best: bool = False):
        self.folder = Path(folder).resolve()
        self.identity = _plain(identity)
        self.keep_best = keep_best
        self._policy = _LatestAndBest(keep)
        options = ocp.CheckpointManagerOptions(preservation_policy=self._policy)
        logging.getLogger("absl").addFilter(_not_raised)  # once, however often
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def latest(self) -> int | None:
        return self.manager.latest_step()

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of ``step``."""
        return step in self.manager.all_steps()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            if system := re.search(r"\[os_error_code='(\d+)'\]", str(error)):  # after two long paths
                reason = os.strerror(int(system[1]))
            raise TrainError(
                f"a checkpoint in {self.folder} cannot be written: {reason}; the ones before it are kept"
            ) from error

    def save(self, step: int, state: TrainState, progress: Progress) -> None:
        """Copies ``state`` off the devices and has it written while training goes on; an earlier write
        that is not finished is waited for. Nothing happens where ``step`` is saved already.

        Raises TrainError: this or the earlier one cannot be written.
        """
        if step == self.latest:
            return
        if self.keep_best:
            self._policy.best = progress.best_step
        run = {**self.identity, "progress": dataclasses.asdict(progress)}
        run["checksums"] = checksums(state)
        with self._writing():
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    run=ocp.args.JsonSave(run),
                ),
            )

    def wait(self) -> None:
        """Until every checkpoint is on disk. Raises TrainError as ``save`` does."""
        with self._writing():
            self.manager.wait_until_finished()

    def restore(self, like: Any, step: int | None = None) -> tuple[TrainState, Progress]:
        """The state of ``step`` (None: the latest), with the structure, shapes and sharding of ``like``,
        a TrainState of arrays or of their ShapeDtypeStructs; and the progress saved with it.

        Raises TrainError: the checkpoint is of another run, or cannot be read.
        """
        step = self.latest if step is None else step
        if step is None:
            raise TrainError(f"{self.folder} holds no checkpoint")
        try:
            found = self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        except Exception as error:
            raise self._unreadable(step, error) from error
        if not isinstance(found, dict):
            raise self._unreadable(step, f"its run is {type(found).__name__}, expected an object")
        for key, value in self.identity.items():
            if found.get(key) != value:
                raise TrainError(
                    f"{self.folder} holds another run: {_differences(found.get(key), value, key)}; "
                    "choose another output or delete it"
                )
        progress = found.get("progress", {})
        if "position" not in progress:
            raise TrainError(
                f"checkpoint {step} in {self.folder} holds no position in the data: an earlier version with "
                "another order of rows wrote it; choose another output, or init.head to go on from its head"
            )
        try:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            state = self.manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            )["state"]
            progress = Progress(**progress)
        except Exception as error:  # damaged files end in errors of every kind, bare Exception among them
            raise self._unreadable(step, error) from error
        if (saved := found.get("checksums")) and saved != checksums(state):
            raise self._unreadable(step, "its arrays are not those that were saved")
        bad = not_finite(state.params)
        if bad is not None:
            raise self._unreadable(step, f"{bad} is not finite in it")
        return state, progress

    def _unreadable(self, step: int, reason: object) -> TrainError:
        words = " ".join(str(reason).split())[:200]
        return TrainError(
            f"checkpoint {step} in {self.folder} cannot be read: {words}; delete its folder to go on from "
            "the one before"
        )

    def close(self) -> None:
        """Waits for what is being written."""
        self.manager.close()
