"""Where a run's arrays live: batches by rows over the local devices, everything else on each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle_jax.train.partition import Batch


def row_mesh(micro: int) -> Mesh | None:
    """A mesh of all local devices where ``micro`` rows spread over them evenly, else None: one device."""
    devices = jax.local_devices()
    return Mesh(np.array(devices), ("data",)) if len(devices) > 1 and micro % len(devices) == 0 else None


def place_batches(micro: int) -> Callable[[Batch], Batch]:
    """Splits a host batch into micro-batches of ``micro`` rows and puts it on the devices.

    Rows spread over all local devices where their number divides; the step then runs data-parallel.
    """
    mesh = row_mesh(micro)
    if mesh is not None:
        rows = NamedSharding(mesh, PartitionSpec(None, "data"))
        rollouts = NamedSharding(mesh, PartitionSpec(None, None, "data"))
    else:
        rows = rollouts = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def split(x: np.ndarray, axis: int) -> np.ndarray:
        x = x.reshape(*x.shape[:axis], x.shape[axis] // micro, micro, *x.shape[axis + 1 :])
        return np.moveaxis(x, axis, 0)

    def place(batch: Batch) -> Batch:
        values = {}
        for field in dataclasses.fields(batch):
            on_rollouts = field.name in ("anchors", "lengths")
            value = split(np.asarray(getattr(batch, field.name)), 1 if on_rollouts else 0)
            values[field.name] = jax.device_put(value, rollouts if on_rollouts else rows)
        return Batch(**values)

    return place


def replicated(tree: Any, micro: int) -> Any:
    """The tree on every device that ``place_batches`` uses."""
    mesh = row_mesh(micro)
    shared = jax.local_devices()[0] if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.device_put(tree, shared)
