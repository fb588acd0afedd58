"""The meshes: of a training run (data, fsdp, sequence) and of a decoder (data, tensor)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "sequence")
DECODING_AXES = ("data", "tensor")


class MeshError(ValueError):
    """A mesh that these devices or arrays do not fit."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each axis. Rows of a batch are split over ``data`` and ``fsdp``, weights over ``fsdp``,
    the positions of a row over ``sequence``."""

    data: int = 1
    fsdp: int = 1
    sequence: int = 1

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.sequence

    @property
    def row_parts(self) -> int:
        """Parts that a batch's rows are split into."""
        return self.data * self.fsdp

    @property
    def data_only(self) -> bool:
        return self.fsdp == self.sequence == 1

    def __str__(self) -> str:
        return " x ".join(f"{name} {getattr(self, name)}" for name in AXES)


def mesh_shape(data: int, fsdp: int, sequence: int, devices: int) -> MeshShape:
    """The shape for so many devices; ``data`` 0 takes all that the other axes leave.

    Raises:
        MeshError: the product does not divide the number of devices.
    """
    asked = MeshShape(data or 1, fsdp, sequence)
    if devices % asked.size:
        found = f"data {data} x " if data else ""
        raise MeshError(
            f"mesh {found}fsdp {fsdp} x sequence {sequence} needs a multiple of {asked.size} devices, found "
            f"{devices}; choose numbers whose product divides that"
        )
    return asked if data else MeshShape(devices // asked.size, fsdp, sequence)


def training_mesh(shape: MeshShape, devices: Sequence[Any]) -> Mesh:
    """A mesh of the first ``shape.size`` devices. All of them are laid out by their topology where they have
    one; a part of them is taken in order."""
    sizes = (shape.data, shape.fsdp, shape.sequence)
    if shape.size == len(devices):
        return jax.make_mesh(sizes, AXES, (AxisType.Auto,) * len(AXES), devices=list(devices))
    return Mesh(np.array(devices[: shape.size]).reshape(sizes), AXES)


def decoding_mesh(devices: Sequence[Any], tensor: int = 1) -> Mesh:
    """A mesh of these devices with ``tensor`` of them to a replica; the rest of the axes is ``data``.

    Neighbours in ``devices`` share a replica, so that a replica stays within a host where it can.

    Raises:
        MeshError: ``tensor`` does not divide their number.
    """
    if len(devices) % tensor:
        raise MeshError(
            f"a tensor parallel size of {tensor} needs a multiple of {tensor} devices, found {len(devices)}; "
            "choose a divisor of that"
        )
    return Mesh(np.array(devices, object).reshape(-1, tensor), DECODING_AXES)
