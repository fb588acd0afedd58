"""Where weights go as they are read: each tensor straight to its devices; no host ever holds a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.parallel.rules import weight_shardings
from peagle_jax.parallel.tensor import check_split, check_units, kv_copies, spread, with_copies


class Places:
    """Places of one model's weights.

    Args:
        mesh: a decoding mesh; None is the first device.
        cfg: as the checkpoint has it; ``config`` is that of the weights as they are placed (``spread``).
        split: over the tensor axis; if false every device has all.
        target: a head's, as it is placed.

    Raises:
        ConfigError: a dimension does not divide, or (when it is put) the groups of a quantised weight.
    """

    def __init__(
        self,
        mesh: Mesh | None,
        cfg: TargetConfig | DrafterConfig,
        split: bool = True,
        target: TargetConfig | None = None,
    ) -> None:
        self._mesh, self._split, self._cfg = mesh, split, cfg
        self._tensor = mesh.shape["tensor"] if mesh is not None and split else 1
        check_split(cfg, self._tensor, target)
        self._copies = kv_copies(cfg.block, self._tensor)
        self.config: Any = spread(cfg, self._tensor)

    def _sharding(self, field: str, x: Any) -> Any:
        """Of ``field``, an array or a tree of them."""
        assert self._mesh is not None
        if self._split:
            return weight_shardings({field: x}, self._mesh)[field]
        whole = NamedSharding(self._mesh, PartitionSpec())
        return jax.tree.map(lambda _: whole, x)

    def _copied(self, field: str, array: Any) -> Any:
        if self._tensor > 1:
            check_units(self._cfg, {field: array}, self._tensor)
        return jax.tree.map(lambda x: with_copies(field, x, self._cfg.block, self._copies), array)

    def put(self, field: str, array: Any) -> Any:
        """A weight (NumPy) on its devices."""
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, array)
        array = self._copied(field, array)
        return jax.tree.map(_put, array, self._sharding(field, array))

    def fill(self, stack: Any, field: str, array: Any, index: int, count: int) -> Any:
        """The stack of ``count`` layers' weights (None: not begun) with that of layer ``index``, in place."""
        array = self._copied(field, array)
        if stack is None:
            stack = self._empty(field, array, count)

        def one(stack: jax.Array, x: np.ndarray) -> jax.Array:
            return _filler(None if self._mesh is None else stack.sharding)(stack, x, index)

        return jax.tree.map(one, stack, array)

    def _empty(self, field: str, array: Any, count: int) -> Any:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), array)
        if self._mesh is None:
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.tree.map(_zeros, shapes, self._sharding(field, shapes))


class Nowhere(Places):
    """Weights are let go: what reading a model checks is checked, and nothing kept."""

    def put(self, field: str, array: Any) -> Any:
        return None

    def fill(self, stack: Any, field: str, array: Any, index: int, count: int) -> Any:
        return None


def _put(array: np.ndarray, where: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def _zeros(shape: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=where)()


@functools.cache
def _filler(where: Any) -> Callable[[jax.Array, np.ndarray, int], jax.Array]:
    def fill(stack: jax.Array, array: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, array, index, 0)

    return jax.jit(fill, donate_argnums=0, out_shardings=where)


def same_array(own: np.ndarray, placed: jax.Array) -> bool:
    """Whether an array on devices, in the dtype of ``own``, equals it as a whole: all parts on all hosts."""
    equal = own.shape == placed.shape and all(
        np.array_equal(own[part.index], np.asarray(part.data).astype(own.dtype))
        for part in {repr(part.index): part for part in placed.addressable_shards}.values()
    )
    if placed.is_fully_addressable:
        return equal
    return bool(multihost_utils.process_allgather(np.array([equal])).all())
