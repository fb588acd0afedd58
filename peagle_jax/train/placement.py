"""Where a run's arrays live: rows of a batch, positions of a row and weights, by the recipe's mesh."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from peagle_jax.parallel.mesh import MeshError, MeshShape, mesh_shape, training_mesh
from peagle_jax.parallel.rules import spec, weight_shardings
from peagle_jax.parallel.sequence import SequenceParts
from peagle_jax.train.errors import TrainError
from peagle_jax.train.partition import Batch
from peagle_jax.train.recipe import Recipe

ONE = MeshShape()
ROLLOUTS = ("anchors", "lengths")  # (segments, B, M); every other leaf of a batch is (B, n, ...)


@dataclasses.dataclass(frozen=True)
class Placement:
    """``micro`` rows at a time on ``mesh``, or on one device without one.

    Weights are split by the rules of ``parallel.rules``; a process holds the rows that its devices need.
    """

    mesh: Mesh | None = None
    shape: MeshShape = ONE
    micro: int = 1

    @property
    def sequence(self) -> SequenceParts:
        return SequenceParts(self.shape.sequence)

    def rows(self, count: int) -> int:
        """``count`` rows and as many empty ones as make them spread evenly."""
        return count + -count % self.shape.row_parts

    def own_rows(self, rows: int) -> np.ndarray:
        """Which of ``rows`` rows at a time this process reads, ascending."""
        if self.mesh is None:
            return np.arange(rows)
        split = NamedSharding(self.mesh, spec(("batch",), self.mesh.shape))
        held = split.addressable_devices_indices_map((rows,)).values()
        return np.unique(np.concatenate([np.arange(rows)[index] for index in held if index is not None]))

    def own_batch_rows(self, batch_rows: int) -> np.ndarray:
        """Which rows of a whole batch this process reads, micro-batch by micro-batch."""
        starts = np.arange(0, batch_rows, self.micro)
        return (starts[:, None] + self.own_rows(self.micro)).reshape(-1)

    def place_batch(self, batch: Batch) -> Batch:
        """The own rows of a whole batch, on the devices as micro-batches: leading axis A of every leaf."""
        own = len(self.own_rows(self.micro))

        def split(x: np.ndarray, axis: int) -> np.ndarray:
            x = x.reshape(*x.shape[:axis], x.shape[axis] // own, own, *x.shape[axis + 1 :])
            return np.moveaxis(x, axis, 0)

        return self._placed(batch, self.micro, split, leading=1)

    def place_rows(self, batch: Batch, rows: int) -> Batch:
        """The own ones of ``rows`` rows at a time, on the devices."""
        return self._placed(batch, rows, lambda x, axis: x, leading=0)

    def _placed(self, batch: Batch, rows: int, split: Callable[..., np.ndarray], leading: int) -> Batch:
        values = {}
        for field in dataclasses.fields(batch):
            rollouts = field.name in ROLLOUTS
            value = split(np.asarray(getattr(batch, field.name)), 1 if rollouts else 0)
            names = (None,) * leading + ((None, "batch") if rollouts else ("batch", "sequence"))
            whole = (*value.shape[: names.index("batch")], rows, *value.shape[names.index("batch") + 1 :])
            values[field.name] = self._put_rows(value, names, whole)
        return Batch(**values)

    def _put_rows(self, value: np.ndarray, names: tuple[str | None, ...], whole: tuple[int, ...]) -> Any:
        if self.mesh is None:
            return jax.device_put(value, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
        sharding = NamedSharding(self.mesh, spec(names, self.mesh.shape))
        if jax.process_count() == 1:
            return jax.device_put(value, sharding)
        return jax.make_array_from_process_local_data(sharding, value, whole)

    def assembling(self) -> contextlib.AbstractContextManager[Any]:
        """While whole weights are made that will be split: they stay in the host's memory."""
        if self.shape.data_only or jax.default_backend() == "cpu":
            return contextlib.nullcontext()
        return jax.default_device(jax.local_devices(backend="cpu")[0])

    def place(self, tree: Any) -> Any:
        """Weights, their moments and counters, equal in every process, split by the rules.

        Raises TrainError: no axis of a weight divides.
        """
        if self.mesh is None:
            return jax.device_put(tree, jax.local_devices()[0])
        try:
            shardings = weight_shardings(tree, self.mesh)
        except MeshError as error:
            raise TrainError(str(error)) from error
        if jax.process_count() == 1:
            return jax.device_put(tree, shardings)

        def shared(x: Any, sharding: Sharding) -> Any:
            host = np.asarray(x)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(shared, tree, shardings)

    def whole(self, tree: Any) -> Any:
        """The tree with every array whole in the host's memory, of a mesh one after the other. Where some lie
        in other processes, all of these must ask."""
        if self.mesh is None:
            return tree
        gather = jax.jit(lambda x: x, out_shardings=self.everywhere)

        def host(x: jax.Array) -> np.ndarray:
            here = x.is_fully_addressable or x.is_fully_replicated
            return np.asarray(x if here else gather(x))

        return jax.tree.map(host, tree)

    @property
    def everywhere(self) -> Sharding | None:
        """The sharding of what every device holds whole."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def compile(self, function: Callable[..., Any], outputs: Any, donate: tuple[int, ...] = ()) -> Any:
        """The jitted function; ``outputs`` are the shardings of its results, used where there is a mesh.

        The compiler alone splits data-parallel programs. Others are traced with the mesh in sight, so that
        the names in models and losses mean something.
        """
        if self.mesh is None:
            return jax.jit(function, donate_argnums=donate)
        compiled = jax.jit(function, donate_argnums=donate, out_shardings=outputs)
        mesh = None if self.shape.data_only else self.mesh

        def run(*arguments: Any) -> Any:
            with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
                return compiled(*arguments)

        return run

    def line(self) -> str | None:
        """What a run says about its devices, if it has several."""
        if self.mesh is None:
            return None
        there, hosts = jax.device_count(), jax.process_count()
        rest = there - self.shape.size
        return (
            f"mesh {self.shape}: {self.shape.size} devices"
            + (f" of {there}, {rest} stay idle" if rest else "")
            + (f", in {hosts} processes" if hosts > 1 else "")
        )


ONE_DEVICE = Placement()


def make_placement(recipe: Recipe) -> Placement:
    """The recipe's mesh over the devices there are. Where it leaves all to the program (data 0 and nothing
    else) rows that do not divide by the devices run on one of them.

    Raises TrainError: the mesh does not fit the devices, the rows or the processes.
    """
    asked, micro = recipe.mesh, recipe.optimizer.micro_rows or recipe.optimizer.batch_rows
    devices, processes = jax.devices(), jax.process_count()
    try:
        shape = mesh_shape(asked.data, asked.fsdp, asked.sequence, len(devices))
    except MeshError as error:
        raise TrainError(str(error)) from error
    if processes > 1 and shape.size != len(devices):
        raise TrainError(
            f"mesh {shape} has {shape.size} devices, but the {processes} processes have {len(devices)}, and "
            "all must take part; set mesh.data to 0"
        )
    free = processes == 1 and not asked.data and shape.data_only
    if micro % shape.row_parts:
        if free:
            return Placement(micro=micro)
        raise TrainError(
            f"mesh {shape} splits rows into {shape.row_parts} parts, but {micro} rows run at once "
            "(optimizer.micro_rows, or all of optimizer.batch_rows); make them a multiple"
        )
    if shape.size == 1:
        return Placement(micro=micro)
    return Placement(training_mesh(shape, devices), shape, micro)


def check_length(recipe: Recipe, row_length: int) -> SequenceParts:
    """The parts that the recipe's mesh splits a row into. Raises TrainError: they are not equally long."""
    parts = recipe.mesh.sequence
    if row_length % parts:
        raise TrainError(
            f"mesh.sequence {parts} must divide the rows' {row_length} positions; change it, or "
            "features.row_length"
        )
    return SequenceParts(parts)
