"""Where a decoder's arrays lie: replicas over the mesh's ``data`` axis, each of them over ``tensor``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle_jax.config import ConfigError, DrafterConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.models.stack import TargetParams
from peagle_jax.parallel.mesh import decoding_mesh
from peagle_jax.parallel.replicate import AXIS, Backend, replicate
from peagle_jax.parallel.rules import spec, weight_shardings
from peagle_jax.parallel.tensor import check_split, check_units, spread, spread_weights
from peagle_jax.speculative.cache import AXES
from peagle_jax.speculative.state import DecodeState

Params = tuple[TargetParams, DrafterParams | None]
Configs = tuple[TargetConfig, DrafterConfig | None]


@dataclasses.dataclass(frozen=True)
class Placement:
    """A decoding mesh, how replicas are mapped over it, and whether the head is split as the target is."""

    mesh: Mesh
    backend: Backend = "pmap"
    split_head: bool = True

    @property
    def replicas(self) -> int:
        return self.mesh.shape["data"]

    @property
    def tensor(self) -> int:
        return self.mesh.shape["tensor"]

    @classmethod
    def on(
        cls,
        devices: Sequence[Any],
        tensor: int = 1,
        backend: Backend | None = None,
        draft_tensor: int | None = None,
    ) -> Placement:
        """On these devices, ``tensor`` neighbours a replica. The backend is pmap by default, and shard_map
        where pmap cannot be. The head is split over ``draft_tensor`` devices: a replica's (the default) or 1.

        Raises:
            ConfigError: another ``draft_tensor``, or pmap where it cannot be.
            MeshError: ``tensor`` does not divide the devices.
        """
        mesh = decoding_mesh(devices, tensor)
        if draft_tensor not in (None, 1, tensor):
            expected = "1" if tensor == 1 else f"1 or {tensor}, the target's"
            raise ConfigError(f"draft_tensor_parallel_size must be {expected}, found {draft_tensor}")
        beyond = tensor > 1 or mesh.is_multi_process
        if backend == "pmap" and beyond:
            raise ConfigError(
                "pmap holds neither a tensor axis nor several hosts; leave the choice out, or take shard_map"
            )
        backend = backend or ("shard_map" if beyond else "pmap")
        return cls(mesh, backend, tensor > 1 and draft_tensor != 1)

    @property
    def several_hosts(self) -> bool:
        return self.mesh.is_multi_process

    def split(self, configs: Configs, params: Params) -> tuple[Configs, Params]:
        """Models with as many kv heads as devices read.

        Raises:
            ConfigError: a dimension does not divide.
        """
        (target, head), (target_params, head_params) = configs, params
        check_split(target, self.tensor)
        check_units(target, target_params, self.tensor)
        target_params = spread_weights(target, target_params, self.tensor)
        if head is not None and self.split_head:
            check_split(head, self.tensor, target)
            head_params = spread_weights(head, head_params, self.tensor)
            head = spread(head, self.tensor)
        return (spread(target, self.tensor), head), (target_params, head_params)

    def _over_data(self) -> NamedSharding:
        mesh = Mesh(self.mesh.devices[:, 0], (AXIS,)) if self.backend == "pmap" else self.mesh
        return NamedSharding(mesh, PartitionSpec(AXIS))

    def weights(self, params: Params) -> Params:
        """The weights where they belong; those that are there already stay."""
        target, head = params
        of_target, of_head = self.places(params)
        placed = jax.tree.map(self._put, target, of_target)
        if head is None:
            return placed, None
        shared = {id(x): y for x, y in zip(jax.tree.leaves(target), jax.tree.leaves(placed), strict=True)}

        def put(x: Any, where: Any) -> jax.Array:
            # What a head shares with its target lies as the target's.
            return shared[id(x)] if id(x) in shared else self._put(x, where)

        return placed, jax.tree.map(put, head, of_head)

    def places(self, params: Params) -> tuple[Any, Any]:
        """Where weights (or shapes of them) belong: shardings, and formats of what is read row by row."""
        target, head = params
        of_target, of_head = weight_shardings(target, self.mesh), None
        if head is not None:
            whole = NamedSharding(self.mesh, PartitionSpec())
            of_head = jax.tree.map(lambda _: whole, head)
            of_head = weight_shardings(head, self.mesh) if self.split_head else of_head
        if self.mesh.devices.flat[0].platform == "tpu":
            # Its own choice for a width that is no multiple of 128 puts columns together, and each step
            # would copy the table to read a few rows of it.
            rows = Layout(major_to_minor=(0, 1))
            by_row = lambda tree: tree.replace(embed=jax.tree.map(partial(Format, rows), tree.embed))  # noqa: E731
            of_target, of_head = by_row(of_target), of_head and by_row(of_head)
        return of_target, of_head

    def _put(self, x: Any, where: Any) -> jax.Array:
        if self.tensor == self.replicas == 1 and not self.several_hosts and isinstance(where, NamedSharding):
            return jax.device_put(x, self.mesh.devices.flat[0])
        return jax.device_put(x, where)

    def state(self, state: DecodeState) -> DecodeState:
        """Shardings of a state whose leaves have a leading replica axis: of the caches by kv heads."""
        over_data = self._over_data()

        def by_heads(x: Any) -> NamedSharding:
            names = (*(None,) * (x.ndim - len(AXES) - 1), *AXES)
            return NamedSharding(self.mesh, PartitionSpec(AXIS, *spec(names, {"tensor": self.tensor})))

        where = jax.tree.map(lambda _: over_data, state)
        if self.tensor > 1:
            where = where.replace(target_cache=jax.tree.map(by_heads, state.target_cache))
            if self.split_head:
                where = where.replace(drafter_cache=jax.tree.map(by_heads, state.drafter_cache))
        return where

    def inputs(self, tree: Any) -> Any:
        """NumPy inputs, the same in every process, as a program takes them."""
        if not self.several_hosts:
            return tree
        where = self._over_data()

        def everywhere(x: Any) -> jax.Array:
            return jax.make_array_from_callback(np.shape(x), where, lambda index: np.asarray(x)[index])

        return jax.tree.map(everywhere, tree)

    def program(self, step: Callable[..., Any], state: DecodeState, donate: bool) -> Callable[..., Any]:
        """``step`` over the replicas; see ``replicate``. It leaves its state by the shardings ``state``, and
        what it tells the host over the replicas, or whole where one host has not all of them."""
        told = PartitionSpec() if self.several_hosts else PartitionSpec(AXIS)
        return replicate(step, self.mesh, self.backend, donate, (state, NamedSharding(self.mesh, told)))
