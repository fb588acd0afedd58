"""Mixture of experts: each token's chosen experts, and products that read only the experts chosen by any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from peagle_jax.config import MoeConfig

MOST_ROWS = 128
"""Rows of one expert that are multiplied at once, at most: a matrix unit's height."""

Expert = Callable[[Array, Array], Array]
"""(index of an expert, rows (r, D)) -> (r, D) float32."""


@struct.dataclass
class LayerOf:
    """A layer of stacked weights (L, E, ...), by its index.

    A scan over layers would cut the whole layer out of the stack before any expert of it is read.
    """

    stack: Any
    layer: Array


def expert_of(weights: Any, index: Array) -> Any:
    """One expert's weights, from leaves (E, ...), or from a ``LayerOf`` of leaves (L, E, ...)."""
    if isinstance(weights, LayerOf):
        layer = weights.layer

        def cut(w: Array) -> Array:
            start = (layer, index, *(0,) * (w.ndim - 2))
            return jax.lax.dynamic_slice(w, start, (1, 1, *w.shape[2:]))[0, 0]

        return jax.tree.map(cut, weights.stack)
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, index, 0, keepdims=False), weights)


def route(
    logits: Float[Array, "rows e"], cfg: MoeConfig
) -> tuple[Int[Array, "rows k"], Float[Array, "rows k"]]:
    """Each row's experts, in ascending order, and their weights. Equal logits: the lower index wins."""
    top, chosen = jax.lax.top_k(logits, cfg.top_k)
    shares = jax.nn.softmax(top, axis=-1) if cfg.norm_topk_prob else None
    if shares is None:
        shares = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), chosen, axis=-1)
    # An ascending order makes the sum over experts the same for a token wherever it stands.
    order = jnp.argsort(chosen, axis=-1)
    return jnp.take_along_axis(chosen, order, -1), jnp.take_along_axis(shares, order, -1)


def rows_of_a_block(rows: int, cfg: MoeConfig) -> int:
    """Rows of an expert that go together: about twice an expert's share, as a power of two."""
    share = 2 * rows * cfg.top_k // cfg.num_experts
    return min(rows, MOST_ROWS, max(8, 1 << max(share - 1, 0).bit_length()))


def mixture(
    x: Float[Array, "rows d"], logits: Float[Array, "rows e"], cfg: MoeConfig, expert: Expert
) -> Float[Array, "rows d"]:
    """The weighted sum of each row's experts. Returns float32.

    (row, expert) pairs are sorted by expert and multiplied in blocks of one expert's rows, so that an
    expert's weights are read once a block and those of an expert that nobody chose never.
    """
    rows, k = x.shape[0], cfg.top_k
    size = rows_of_a_block(rows, cfg)
    chosen, shares = route(logits, cfg)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    inputs = jnp.pad(x[order // k], ((0, size), (0, 0)))
    counts = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(cfg.num_experts), axis=0)
    starts = jnp.cumsum(counts) - counts
    blocks = -(-counts // size)
    ends = jnp.cumsum(blocks)

    def body(i: Array, out: Array) -> Array:
        e = jnp.sum(ends <= i)
        start = starts[e] + (i - (ends[e] - blocks[e])) * size
        found = expert(e, jax.lax.dynamic_slice_in_dim(inputs, start, size))
        # What goes past the expert's own rows belongs to later ones, which overwrite it.
        return jax.lax.dynamic_update_slice_in_dim(out, found, start, 0)

    out = jax.lax.fori_loop(0, ends[-1], body, jnp.zeros(inputs.shape, jnp.float32))
    out = out[jnp.argsort(order)].reshape(rows, k, -1)
    return jnp.sum(out * shares[..., None], axis=1)
