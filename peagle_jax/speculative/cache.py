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

AXES = (None, "kv_heads", None, None)
"""Names of a layer's axes for ``parallel.rules``."""


@struct.dataclass
class KVCache:
    """Keys and values, each (slots, G, positions, H) a layer; uint16 holds the bits of bfloat16, Int8Rows
    have a scale for each head and position.

    Layers lie on a leading axis (``stacked``, for a scanned target; one array for each layer of its cycle)
    or are a tuple of arrays (for an unrolled one): XLA:CPU copies every slice of a stacked array, which
    doubles a step.

    ``rings`` are, for each array of ``k``, the most positions that it holds: position p of a layer with a
    sliding window lies at p % that. 0 or none: it holds them all.
    """

    k: Any  # an array or Int8Rows, or a tuple of them
    v: Any
    rings: tuple[int, ...] = struct.field(pytree_node=False, default=())

    @property
    def positions(self) -> int:
        return max(x.shape[-2] for x in jax.tree.leaves(self.k))

    def map(self, change: Callable[..., Array], *others: Any) -> KVCache:
        """``change(array, ring, *parts)`` of every array; ``others`` are (k, v) pairs of the same form."""

        def one(mine: Any, *theirs: Any) -> Any:
            layers, tree = jax.tree.flatten(mine, is_leaf=_is_layer)
            rings = self.rings or (0,) * len(layers)
            parts = [jax.tree.leaves(other, is_leaf=_is_layer) for other in theirs]
            found = [
                jax.tree.map(lambda x, *rest, ring=ring: change(x, ring, *rest), layer, *rest)
                for ring, layer, *rest in zip(rings, layers, *parts, strict=True)
            ]
            return jax.tree.unflatten(tree, found)

        return self.replace(
            k=one(self.k, *(other[0] for other in others)), v=one(self.v, *(other[1] for other in others))
        )


def _is_layer(x: Any) -> bool:
    return isinstance(x, Int8Rows)


def ring_room(window: int, most_rows: int) -> int:
    """Positions that a ring needs: those that a window sees, and those that a step may write past them."""
    return -(-(window + most_rows) // BLOCK) * BLOCK


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """How a cache of ``dtype`` is stored. XLA:CPU would widen and narrow a whole bfloat16 array to change
    one row of it, so there it is its bits."""
    return jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 and platform == "cpu" else dtype


def row_bytes(head_dim: int, dtype: jnp.dtype, int8: bool = False) -> int:
    """Bytes that a head's key (or value) of one position takes."""
    return head_dim + SCALE_BYTES if int8 else head_dim * dtype.itemsize


def create_cache(
    num_layers: int,
    slots: int,
    num_kv_heads: int,
    positions: int,
    head_dim: int,
    dtype: jnp.dtype,
    stacked: bool,
    rings: tuple[int, ...] = (),
    int8: bool = False,
) -> KVCache:
    """A zeroed cache of ``dtype``, or of ``int8`` rows that are read in it. ``rings`` bound the layers of a
    cycle, see ``KVCache``."""
    cycle = rings or (0,)
    rooms = [min(positions, ring or positions) for ring in cycle]

    def zeros(room: int, *lead: int) -> Any:
        shape = (*lead, slots, num_kv_heads, room)
        if not int8:
            return jnp.zeros((*shape, head_dim), dtype)
        operands = jnp.dtype(jnp.bfloat16) if dtype == jnp.uint16 else dtype
        return Int8Rows(
            jnp.zeros((*shape, head_dim), jnp.int8), jnp.zeros((*shape, 1), jnp.float32), operands
        )

    if stacked:
        each = num_layers // len(cycle)
        k, v = (tuple(zeros(room, each) for room in rooms) for _ in "kv")
        return KVCache(*((k, v) if rings else (k[0], v[0])), rings)
    k, v = (tuple(zeros(rooms[i % len(cycle)]) for i in range(num_layers)) for _ in "kv")
    return KVCache(k, v, rings * (num_layers // len(cycle)))


def _stored(rows: Array, cache: Array | Int8Rows) -> Array | Int8Rows:
    """New rows (..., T, G, H) as the cache holds them, (..., G, T, H)."""
    if isinstance(cache, Int8Rows):
        return quantize_rows(rows, cache.dtype).swapaxes(-3, -2)
    return narrowed(rows.swapaxes(-3, -2), cache.dtype)


def _put(cache: Array, rows: Array, slot: Array | int, start: Array) -> Array:
    """Writes rows (..., 1, G, T, H) of one sequence at a position of its slot, in place."""
    index = (slot, 0, start, 0)
    return jax.lax.dynamic_update_slice(cache, rows, (0,) * (cache.ndim - 4) + index)


def _slot_rows(cache: Array, slot: Array | int, start: Array | int, count: int) -> Array:
    """``count`` positions (..., 1, G, count, H) of one slot."""
    lead = cache.ndim - 4
    shape = (*cache.shape[:lead], 1, cache.shape[-3], count, cache.shape[-1])
    return jax.lax.dynamic_slice(cache, (*(0,) * lead, slot, 0, start, 0), shape)


def _put_in_ring(cache: Array, rows: Array, slot: Array | int, start: Array) -> Array:
    """Writes rows as ``_put`` does, past the end of the ring from its beginning on."""
    room, t = cache.shape[-2], rows.shape[-2]
    if t == 1:
        return _put(cache, rows, slot, start % room)

    def part(cache: Array, first: Array | int) -> Array:
        # Two fixed windows, since a slice cannot wrap: what is not written stays as it was.
        row = (first + jnp.arange(t) - start) % room
        there = jnp.take(rows, jnp.minimum(row, t - 1), axis=-2)
        old = _slot_rows(cache, slot, first, t)
        return _put(cache, jnp.where((row < t)[:, None], there, old), slot, first)

    return part(part(cache, jnp.minimum(start % room, room - t)), 0)


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
    caches = (cache.k, cache.v)
    rows = jax.tree.map(lambda c, r: _stored(r, c), caches, (k, v), is_leaf=_is_layer)

    def one(b: Array | int, cache: KVCache) -> KVCache:
        def put(c: Array, ring: int, r: Array) -> Array:
            mine = jax.lax.dynamic_slice_in_dim(r, b, 1, r.ndim - 4)
            return (_put_in_ring if ring else _put)(c, mine, slot + b, starts[b])

        return cache.map(put, rows)

    count = starts.shape[0]
    # A loop of slices, because XLA:CPU runs a batched write (a scatter) element by element.
    return one(0, cache) if count == 1 else jax.lax.fori_loop(0, count, one, cache)


def copy_slot(cache: KVCache, source: Array, target: Array, count: Array) -> KVCache:
    """The cache with (at least) the first ``count`` positions of slot ``source`` in ``target`` too; of a
    ring, all that it holds."""
    size = min(BLOCK, cache.positions)

    def block(j: Array, cache: KVCache) -> KVCache:
        start = jnp.minimum(j * size, cache.positions - size)

        def move(x: Array, ring: int) -> Array:
            return x if ring else _put(x, _slot_rows(x, source, start, size), target, start)

        return cache.map(move)

    def move_ring(x: Array, ring: int) -> Array:
        return _put(x, _slot_rows(x, source, 0, x.shape[-2]), target, jnp.int32(0)) if ring else x

    return jax.lax.fori_loop(0, (count + size - 1) // size, block, cache.map(move_ring))


def reshaped(cache: KVCache, order: Int[Array, " slots"], positions: int) -> KVCache:
    """A cache of other dimensions: slot i is the old ``order[i]``, with the positions that fit.

    A ring that was shorter than its bound held all positions so far, and one that becomes shorter holds
    all that there are.
    """

    def move(x: Array, ring: int) -> Array:
        room = min(positions, ring or positions)
        taken = jax.lax.slice_in_dim(x, 0, min(room, x.shape[-2]), axis=-2)
        taken = jnp.take(taken, order, axis=x.ndim - 4, mode="clip")
        pad = [(0, 0)] * x.ndim
        pad[-2] = (0, max(room - x.shape[-2], 0))
        return jnp.pad(taken, pad)

    return cache.map(move)
