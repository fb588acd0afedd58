"""Contiguous key/value cache. Everything that knows its layout is in this file.

Slots at or past a sequence's committed length hold scratch: they are masked when read and
overwritten when written, so a rejected draft costs nothing to undo.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class KVCache:
    """Keys and values, each (B, G, S, H) a layer.

    Layers lie on a leading axis (``stacked``, for a scanned target) or are a tuple of arrays
    (for an unrolled one): XLA:CPU copies every slice of a stacked array, which doubles a step.
    """

    k: Array | tuple[Array, ...]
    v: Array | tuple[Array, ...]

    @property
    def slots(self) -> int:
        return (self.k[0] if isinstance(self.k, tuple) else self.k).shape[-2]


def create_cache(
    num_layers: int,
    batch: int,
    num_kv_heads: int,
    slots: int,
    head_dim: int,
    dtype: jnp.dtype,
    stacked: bool,
) -> KVCache:
    """A zeroed cache."""
    shape = (batch, num_kv_heads, slots, head_dim)
    if stacked:
        return KVCache(jnp.zeros((num_layers, *shape), dtype), jnp.zeros((num_layers, *shape), dtype))
    return KVCache(*(tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in "kv"))


def _write(cache: Array, rows: Array, starts: Int[Array, " b"]) -> Array:
    """Writes rows (B, T, G, H) at slot ``starts[b]`` of each sequence of cache (B, G, S, H)."""
    rows = rows.astype(cache.dtype).swapaxes(-3, -2)
    if cache.shape[0] == 1:
        return jax.lax.dynamic_update_slice(cache, rows, (0, 0, starts[0], 0))
    return jax.vmap(lambda c, r, s: jax.lax.dynamic_update_slice(c, r, (0, s, 0)))(cache, rows, starts)


def write(
    cache: KVCache,
    k: Array | tuple[Array, ...],
    v: Array | tuple[Array, ...],
    starts: Int[Array, " b"],
    hidden: Float[Array, "b t d"],
) -> KVCache:
    """Writes a step's rows (B, T, G, H a layer) from slot ``starts[b]`` on.

    The caller keeps ``starts + T <= S``; a cache has room for the longest scratch past its limit.
    ``hidden`` is the last layer's output: tying the write to it holds it back until every layer has
    read the cache. Without that XLA may write early, and copies the whole cache to be safe.
    """
    starts = starts + jnp.isnan(hidden[:, 0, 0])  # adds 0 to every sequence that is not lost anyway
    if isinstance(cache.k, tuple):
        return KVCache(
            tuple(_write(c, r, starts) for c, r in zip(cache.k, k, strict=True)),
            tuple(_write(c, r, starts) for c, r in zip(cache.v, v, strict=True)),
        )
    over_layers = jax.vmap(_write, in_axes=(0, 0, None))
    return KVCache(over_layers(cache.k, k, starts), over_layers(cache.v, v, starts))


def with_slots(cache: KVCache, slots: int) -> KVCache:
    """The same cache with room for more slots."""

    def grow(x: Array) -> Array:
        pad = [(0, 0)] * x.ndim
        pad[-2] = (0, slots - x.shape[-2])
        return jnp.pad(x, pad)

    return jax.tree.map(grow, cache)
