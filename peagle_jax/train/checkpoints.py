"""Orbax checkpoints of a run: weights, moments, step and what the run is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from peagle_jax.train.recipe import TrainError
from peagle_jax.train.step import TrainState


def _plain(value: Any) -> Any:
    """As JSON would give it back."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


class Checkpoints:
    """The last ``keep`` checkpoints in a folder. The data position is the step itself.

    ``identity`` is what a resumed run must have in common with the one that was stopped.
    """

    def __init__(self, folder: str | Path, keep: int, identity: dict[str, Any]):
        self.folder = Path(folder).resolve()
        self.identity = _plain(identity)
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False),
        )

    @property
    def latest(self) -> int | None:
        return self.manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Saves ``state`` as that of ``step``; nothing happens where it is saved already."""
        if step == self.latest:
            return
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                run=ocp.args.JsonSave(self.identity),
            ),
        )
        self.manager.wait_until_finished()

    def restore(self, like: TrainState) -> TrainState:
        """The latest state, with the structure, shapes and sharding of ``like``.

        Raises TrainError: the checkpoint is of another run, or cannot be read.
        """
        step = self.latest
        if step is None:
            raise TrainError(f"{self.folder} holds no checkpoint")
        found = self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        for key, value in self.identity.items():
            if found.get(key) != value:
                raise TrainError(
                    f"{self.folder} holds a run with another {key}: {found.get(key)}, not {value}; "
                    "choose another output or delete it"
                )
        try:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            return self.manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            )["state"]
        except (ValueError, OSError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise TrainError(f"checkpoint {step} in {self.folder} cannot be read: {reason}") from error

    def close(self) -> None:
        self.manager.close()
