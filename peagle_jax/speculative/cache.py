"""Contiguous key/value cache. Everything that knows its layout is in this file.

A sequence has a slot, and positions in it. Positions at or past a sequence's committed length hold
scratch: they are masked when read and overwritten when written, so a rejected draft costs
nothing to undo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from peagle_jax.layers.attention import BLOCK, narrowed
from peagle_jax.layers.quantized_rows import SCALE_BYTES, Int8Rows, quantize_rows


@struct.dataclass
class KVCache:
    """Keys and values, each (slots, G, positions, H) a layer; uint16 holds the bits of bfloat16, Int8Rows
    have a scale for each head and position.

    Layers lie on a leading axis (``stacked``, for a scanned target) or are a tuple of arrays
    (for an unrolled one): XLA:CPU copies every slice of a stacked array, which doubles a step.
    """

    k: Any  # an array or Int8Rows, or a tuple of them
    v: Any

    @property
    def positions(self) -> int:
        return jax.tree.leaves(self.k)[0].shape[-2]


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """How a cache of ``dtype`` is stored. XLA:CPU would widen and narrow a whole bfloat16 array to change
    one row of it, so there it is its bits."""
    return jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 and platform == "cpu" else dtype


def position_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype, int8: bool) -> int:
    """Bytes that the keys and values of one position take."""
    return 2 * num_layers * num_kv_heads * (head_dim + SCALE_BYTES if int8 else head_dim * dtype.itemsize)


def create_cache(
    num_layers: int,
    slots: int,
    num_kv_heads: int,
    positions: int,
    head_dim: int,
    dtype: jnp.dtype,
    stacked: bool,
    int8: bool = False,
) -> KVCache:
    """A zeroed cache of ``dtype``, or of ``int8`` rows that are read in it."""
    shape = (slots, num_kv_heads, positions, head_dim)

    def zeros(*lead: int) -> Any:
        if not int8:
            return jnp.zeros((*lead, *shape), dtype)
        operands = jnp.dtype(jnp.bfloat16) if dtype == jnp.uint16 else dtype
        scale = jnp.zeros((*lead, *shape[:-1], 1), jnp.float32)
        return Int8Rows(jnp.zeros((*lead, *shape), jnp.int8), scale, operands)

    if stacked:
        return KVCache(zeros(num_layers), zeros(num_layers))
    return KVCache(*(tuple(zeros() for _ in range(num_layers)) for _ in "kv"))


def _stored(rows: Array, cache: Array | Int8Rows) -> Array | Int8Rows:
    """New rows (..., T, G, H) as the cache holds them, (..., G, T, H)."""
    if isinstance(cache, Int8Rows):
        return quantize_rows(rows, cache.dtype).swapaxes(-3, -2)
    return narrowed(rows.swapaxes(-3, -2), cache.dtype)


def _put(cache: Array, rows: Array, slot: Array | int, start: Array) -> Array:
    """Writes rows (..., 1, G, T, H) of one sequence at a position of its slot, in place."""
    index = (slot, 0, start, 0)
    return jax.lax.dynamic_update_slice(cache, rows, (0,) * (cache.ndim - 4) + index)


def write(
    cache: KVCache,
    k: Array | tuple[Array, ...],
    v: Array | tuple[Array, ...],
    starts: Int[Array, " b"],
    hidden: Float[Array, "b t d"],
    slot: Int[Array, ""] | int = 0,
) -> KVCache:
    """Writes a step's rows (B, T, G, H a layer) from position ``starts[b]`` of slot ``slot + b`` on.

    The caller keeps ``starts + T <= positions``; a cache has room for the longest scratch past its
    limit. ``hidden`` is the last layer's output: tying the write to it holds it back until every layer
    has read the cache. Without that XLA may write early, and copies the whole cache to be safe.
    """
    starts = starts + jnp.isnan(hidden[:, 0, 0])  # adds 0 to every sequence that is not lost anyway
    caches, rows = (cache.k, cache.v), (k, v)
    rows = jax.tree.map(lambda c, r: _stored(r, c), caches, rows, is_leaf=lambda x: isinstance(x, Int8Rows))

    def one(b: Array | int, caches: tuple) -> tuple:
        mine = jax.tree.map(lambda r: jax.lax.dynamic_slice_in_dim(r, b, 1, r.ndim - 4), rows)
        return jax.tree.map(lambda c, r: _put(c, r, slot + b, starts[b]), caches, mine)

    count = starts.shape[0]
    # A loop of slices, because XLA:CPU runs a batched write (a scatter) element by element.
    return KVCache(*(one(0, caches) if count == 1 else jax.lax.fori_loop(0, count, one, caches)))


def copy_slot(cache: KVCache, source: Array, target: Array, count: Array) -> KVCache:
    """The cache with (at least) the first ``count`` positions of slot ``source`` in ``target`` too."""
    size = min(BLOCK, cache.positions)

    def block(j: Array, arrays: tuple) -> tuple:
        start = jnp.minimum(j * size, cache.positions - size)

        def move(x: Array) -> Array:
            lead = (0,) * (x.ndim - 4)
            shape = (*x.shape[: x.ndim - 4], 1, x.shape[-3], size, x.shape[-1])
            rows = jax.lax.dynamic_slice(x, (*lead, source, 0, start, 0), shape)
            return _put(x, rows, target, start)

        return jax.tree.map(move, arrays)

    return KVCache(*jax.lax.fori_loop(0, (count + size - 1) // size, block, (cache.k, cache.v)))


def reshaped(cache: KVCache, order: Int[Array, " slots"], positions: int) -> KVCache:
    """A cache of other dimensions: slot i is the old ``order[i]``, with the positions that fit."""
    kept = min(positions, cache.positions)

    def move(x: Array) -> Array:
        axis = x.ndim - 4
        taken = jnp.take(jax.lax.slice_in_dim(x, 0, kept, axis=-2), order, axis=axis, mode="clip")
        pad = [(0, 0)] * x.ndim
        pad[-2] = (0, positions - kept)
        return jnp.pad(taken, pad)

    map_: Callable = jax.tree.map
    return map_(move, cache)
