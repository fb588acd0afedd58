"""Named arrays as an Orbax checkpoint: bit for bit, and restored by shapes that the folder states itself.

The shapes come from ``orbax.json``, never from saved shardings, so what many devices wrote one device
can read. ``orbax.json`` is written last: a folder without it was never finished. Beside the arrays
lies the ``config.json`` that the same tensors have as safetensors, so heads and targets load alike.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.folder import read_json
from peagle_jax.checkpoint.tensors import Shape

FORMAT_VERSION = 1
HEADER = "orbax.json"
ARRAYS = "arrays"

Placement = Callable[[str, Shape], jax.sharding.Sharding]
"""(name, shape) -> where an array is to lie."""


def save_arrays(into: Path, arrays: Mapping[str, np.ndarray | jax.Array]) -> None:
    """Writes the arrays and then the header into a new folder (see ``replace_folder``).

    Raises:
        CheckpointError: an array has no values, which Orbax does not store; or the disk refuses.
    """
    empty = [name for name, value in arrays.items() if value.size == 0]
    if empty:
        raise CheckpointError(
            f"tensor {empty[0]} of shape {list(arrays[empty[0]].shape)} has no values; "
            "Orbax stores none such; leave it out"
        )
    shapes = {name: [list(value.shape), np.dtype(value.dtype).name] for name, value in arrays.items()}
    try:
        with _interrupts_wait(), ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((into / ARRAYS).absolute(), dict(arrays))
    except (OSError, RuntimeError, ValueError) as error:  # what its writers raise of a full disk, and wrap
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"cannot write {into / ARRAYS}: {reason[:200]}") from error
    header = {"format_version": FORMAT_VERSION, "arrays": shapes}
    (into / HEADER).write_text(json.dumps(header, indent=2) + "\n")


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end of the block: Orbax's threads go on writing whatever becomes
    of the caller, and would leave a part of it behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mine = {number: handler for number, handler in before.items() if handler is not None}  # else not Python's
    for number in mine:
        signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        for number, handler in mine.items():
            signal.signal(number, handler)
    for number in caught[:1]:
        signal.raise_signal(number)


def read_shapes(folder: Path) -> dict[str, tuple[Shape, np.dtype]]:
    """Shape and dtype of every array, from the header alone.

    Raises:
        CheckpointError: there is no header, or it is not one of this version.
    """
    header = read_json(folder / HEADER)
    version = header.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{folder / HEADER} has format_version {version}; expected {FORMAT_VERSION}")
    try:
        return {
            name: (tuple(int(n) for n in shape), np.dtype(jnp.dtype(dtype)))
            for name, (shape, dtype) in header["arrays"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / HEADER} does not describe arrays: {error!r}") from error


def restore_arrays(folder: Path, placement: Placement | None = None) -> dict[str, Any]:
    """All arrays, as NumPy arrays in the host's memory, or each where ``placement`` puts it.

    A placed array has the dtype that JAX gives it: 64 bits become 32 unless they are enabled.

    Raises:
        CheckpointError: not such a checkpoint, another version, or damaged.
    """
    wanted: dict[str, Any] = {}
    for name, (shape, dtype) in read_shapes(folder).items():
        if placement is None:
            wanted[name] = np.broadcast_to(np.zeros((), dtype), shape)  # its shape and dtype, no memory
        else:
            narrow = jax.dtypes.canonicalize_dtype(dtype)
            wanted[name] = jax.ShapeDtypeStruct(shape, narrow, sharding=placement(name, shape))
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore((folder / ARRAYS).absolute(), wanted)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{folder / ARRAYS} cannot be restored: {reason}") from error


class OrbaxTensors:
    """The arrays of an Orbax folder by name. A TensorSource.

    Shapes come from the header; the first read restores all of them into the host's memory.

    Raises:
        CheckpointError: see ``restore_arrays``.
    """

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._folder, self._shapes = folder, read_shapes(folder)
        self._arrays: dict[str, np.ndarray] | None = None

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> Shape:
        return self._shapes[name][0]

    def read(self, name: str) -> np.ndarray:
        if self._arrays is None:
            self._arrays = restore_arrays(self._folder)
        return self._arrays[name]
