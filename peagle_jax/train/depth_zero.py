"""The depth-0 rows of a training pass: an ordinary causal pass that leaves each layer's keys and values.

Short rows, and rows that a mesh holds in parts, go layer by layer. Long ones go chunk by chunk through all
layers, as in chunked prefill: keys and values are all that a later chunk needs of an earlier one. The
reverse pass takes the chunks from the last to the first and computes each once more from its features, so
that nothing but keys, values and their cotangents grows with the row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from peagle_jax.config import DrafterConfig
from peagle_jax.drafter.head import DrafterParams, fuse, run_head
from peagle_jax.layers.attention import packed_attention
from peagle_jax.layers.linear import table_rows
from peagle_jax.parallel.sequence import WHOLE, SequenceParts
from peagle_jax.train.accumulation import Learned, learned_of, materialised, values_of

LONG = 2**25
"""Entries of one layer's intermediate state above which rows go in chunks: 128 MB of float32."""

Context = list[tuple[Array, Array]]
"""Each layer's keys and values, (B, n, G, H)."""


@struct.dataclass
class Positions:
    """What the pass reads of a batch, all (B, n, ...)."""

    tokens: Array  # int32, the token after each position
    segment_ids: Array  # int32
    positions: Array  # int32
    features: Array  # (B, n, C)


def chunk_length(cfg: DrafterConfig, rows: int, n: int) -> int:
    """Positions of a chunk: ``n`` itself where the whole row is small enough, else a power of two."""
    width = rows * max(cfg.block.intermediate_size, cfg.feature_size)
    if n * width <= LONG:
        return n
    return min(n, 1 << (max(LONG // width, 256).bit_length() - 1))


def depth_zero(
    params: DrafterParams,
    cfg: DrafterConfig,
    inputs: Positions,
    parts: SequenceParts = WHOLE,
    chunk: int | None = None,
) -> tuple[Float[Array, "b n d"], Context]:
    """Hidden states and context, both as ``parts`` splits them. ``chunk`` None chooses the length."""
    b, n = inputs.tokens.shape
    chunk = chunk_length(cfg, b, n) if chunk is None else chunk
    if parts.count == 1 and chunk < n:
        return _in_chunks(params, cfg, inputs, chunk)
    all_ids, dtype = inputs.segment_ids, params.fc.dtype

    def part(rows: Positions, index: Array) -> tuple[Array, Context]:
        queries = None if parts.count == 1 else (rows.segment_ids, index)

        def attend(q: Array, k: Array, v: Array) -> Array:
            k, v = (parts.whole(x) for x in (k, v))
            return packed_attention(q, k, v, all_ids, dtype, queries=queries)

        g = fuse(params, cfg, rows.features)
        return run_head(params, cfg, rows.tokens, g, rows.positions, [attend] * cfg.num_layers)

    split = jax.tree.map(parts.split, inputs)
    return cast(tuple[Array, Context], parts.map(part, split, parts.positions(n)))


def _in_chunks(
    params: DrafterParams, cfg: DrafterConfig, inputs: Positions, chunk: int
) -> tuple[Array, Context]:
    n = inputs.tokens.shape[1]
    pad = -n % chunk

    def padded(x: Array, value: int = 0) -> Array:
        return jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2), constant_values=value)

    ids = padded(inputs.segment_ids, -1)
    inputs = jax.tree.map(padded, inputs).replace(segment_ids=ids)
    unused = dict.fromkeys(("lm_head", "final_norm", "mask_hidden"))
    found = _chunked(cfg, chunk, params.replace(embed=None, **unused), params.embed, inputs)
    hidden, context = cast(tuple[Array, Context], found)
    return hidden[:, :n], [(k[:, :n], v[:, :n]) for k, v in context]


def _cut(tree: Any, start: Array, length: int) -> Any:
    """``length`` positions of (B, n, ...) arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length, 1), tree)


def _put(tree: Any, rows: Any, start: Array) -> Any:
    return jax.tree.map(lambda x, r: jax.lax.dynamic_update_slice_in_dim(x, r, start, 1), tree, rows)


Hold = Callable[[int, tuple[Array, Array]], tuple[Array, Array]]
"""(layer, a chunk's own keys and values (B, chunk, G, H)) -> those of the whole row, (B, n, G, H)."""


def _chunk_rows(
    cfg: DrafterConfig,
    segment_ids: Array,
    params: DrafterParams,
    embedded: Array,
    inputs: Positions,
    start: Array,
    hold: Hold,
) -> Array:
    """Hidden states (B, chunk, D) of the chunk at ``start``."""
    b, c = inputs.tokens.shape
    dtype = params.fc.dtype
    queries = inputs.segment_ids, start + jnp.arange(c)

    def attend_for(layer: int):
        def attend(q: Array, k: Array, v: Array) -> Array:
            whole = hold(layer, (k.astype(dtype), v.astype(dtype)))
            return packed_attention(q, *whole, segment_ids, dtype, queries=queries)

        return attend

    table = params.replace(embed=embedded.reshape(b * c, -1))
    tokens = jnp.arange(b * c).reshape(b, c)
    g = fuse(params, cfg, inputs.features)
    attends = [attend_for(i) for i in range(cfg.num_layers)]
    return run_head(table, cfg, tokens, g, inputs.positions, attends)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(
    cfg: DrafterConfig, chunk: int, params: DrafterParams, table: Array, inputs: Positions
) -> tuple[Array, Context]:
    """Hidden states (B, n, D) and context; ``table`` (V, D) embeds. Features get no gradient."""
    b, n = inputs.tokens.shape
    shape = (b, n, cfg.block.num_kv_heads, cfg.block.head_dim)
    empty = [(jnp.zeros(shape, params.fc.dtype),) * 2 for _ in range(cfg.num_layers)]

    def step(carry: tuple[Array, Context], start: Array) -> tuple[tuple[Array, Context], None]:
        hidden, context = carry[0], list(carry[1])
        own = _cut(inputs, start, chunk)

        def hold(layer: int, new: tuple[Array, Array]) -> tuple[Array, Array]:
            context[layer] = _put(context[layer], new, start)
            return context[layer]

        rows = _chunk_rows(cfg, inputs.segment_ids, params, table_rows(table, own.tokens), own, start, hold)
        return (_put(hidden, rows, start), context), None

    states = jnp.zeros((b, n, cfg.hidden_size), jnp.float32)
    found, _ = jax.lax.scan(step, (states, empty), jnp.arange(0, n, chunk))
    return cast(tuple[Array, Context], found)


def _forward(cfg: DrafterConfig, chunk: int, params: Any, table: Any, inputs: Any) -> tuple[Any, Any]:
    learned = learned_of(params), learned_of(table)
    params, table, inputs = values_of((params, table, inputs))
    out = cast(tuple[Array, Context], _chunked(cfg, chunk, params, table, inputs))
    return out, (learned, params, table, inputs, out[1])


@jax.custom_vjp
def _held(context: Array, total: Array, new: Array, start: Array) -> Array:
    """``context``, which holds ``new`` already. The gradient of ``total`` is ``total`` with that of the
    result added, and so complete at the rows of ``new`` once all later chunks have added theirs."""
    del total, new, start
    return context


def _hold(context: Array, total: Array, new: Array, start: Array) -> tuple[Array, tuple]:
    return context, (total, new, start)


def _add_held(saved: tuple[Array, Array, Array], d: Array) -> tuple[None, Array, Array, None]:
    total, new, start = saved
    total = total + d.astype(total.dtype)
    return None, total, _cut(total, start, new.shape[1]).astype(new.dtype), None


_held.defvjp(_hold, _add_held)


def _backward(cfg: DrafterConfig, chunk: int, residual: Any, cotangents: Any) -> tuple[Any, Any, Any]:
    (learned, embeds), params, table, inputs, context = cast(
        tuple[tuple[Learned, Learned], DrafterParams, Array, Positions, Context], residual
    )
    d_hidden, d_context = materialised(cotangents)
    # What the compiler makes of the table for its reader shall not live between the two passes.
    table, d_hidden = jax.lax.optimization_barrier((table, d_hidden))
    some = learned.pick(params)

    def step(carry: tuple, start: Array) -> tuple[tuple, None]:
        d_some, d_context, d_rows = carry
        own = _cut(inputs, start, chunk)

        def rows(some: Any, totals: Context, embedded: Array) -> Array:
            def hold(layer: int, new: tuple[Array, Array]) -> tuple[Array, Array]:
                return jax.tree.map(lambda *xs: _held(*xs, start), context[layer], totals[layer], new)

            whole = learned.put(some, params)
            return _chunk_rows(cfg, inputs.segment_ids, whole, embedded, own, start, hold)

        _, pull = jax.vjp(rows, some, d_context, table_rows(table, own.tokens))
        more_some, d_context, more_rows = pull(_cut(d_hidden, start, chunk))
        d_some = jax.tree.map(lambda total, d: total + d.astype(total.dtype), d_some, more_some)
        # A table's gradient in every chunk would be a table for each, so its rows wait for the end.
        return (d_some, d_context, None if d_rows is None else _put(d_rows, more_rows, start)), None

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)

    wide = jax.tree.map(lambda d: d.astype(jnp.float32), d_context)
    carry = zeros(some), wide, zeros(d_hidden) if any(embeds.flags) else None
    starts = jnp.arange(0, inputs.tokens.shape[1], chunk)
    (d_some, _, d_rows), _ = jax.lax.scan(step, carry, starts, reverse=True)
    d_table = None
    if d_rows is not None:
        d_table = jax.vjp(lambda t: table_rows(t, inputs.tokens), table)[1](d_rows)[0]
    gradient = jax.tree.map(lambda d, w: d.astype(w.dtype), d_some, some)
    return learned.put(gradient, None), d_table, None


_chunked.defvjp(_forward, _backward, symbolic_zeros=True)
