"""The depth-0 rows of a training pass: an ordinary causal pass that leaves each layer's keys and values.

Short rows, and rows that a mesh holds in parts, go layer by layer. Long ones go chunk by chunk through all
layers, as in chunked prefill: keys and values are all that a later chunk needs of an earlier one. The
reverse pass takes the chunks from the last to the first and computes each once more from its features, so
that nothing but keys, values and their cotangents grows with the row.
"""

from __future__ import annotations

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


def _chunk_rows(
    cfg: DrafterConfig,
    segment_ids: Array,
    params: DrafterParams,
    context: Context,
    embedded: Array,
    inputs: Positions,
    start: Array,
) -> tuple[Array, Context]:
    """Hidden states (B, chunk, D) and own keys and values of one chunk, over the context before it."""
    b, c = inputs.tokens.shape
    dtype = params.fc.dtype
    index = start + jnp.arange(c)
    own: Context = []

    def attend_for(layer: int):
        def attend(q: Array, k: Array, v: Array) -> Array:
            new = k.astype(dtype), v.astype(dtype)
            own.append(new)
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(old, x, start, 1)
                for old, x in zip(context[layer], new, strict=True)
            )
            return packed_attention(q, keys, values, segment_ids, dtype, queries=(inputs.segment_ids, index))

        return attend

    table = params.replace(embed=embedded.reshape(b * c, -1))
    tokens = jnp.arange(b * c).reshape(b, c)
    g = fuse(params, cfg, inputs.features)
    attends = [attend_for(i) for i in range(cfg.num_layers)]
    hidden, _ = run_head(table, cfg, tokens, g, inputs.positions, attends)
    return hidden, own


def _split(x: Array, chunk: int) -> Array:
    """(B, n, ...) -> (chunks, B, chunk, ...)."""
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)


def _joined(x: Array) -> Array:
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _starts(inputs: Positions, chunk: int) -> Array:
    return jnp.arange(0, inputs.tokens.shape[1], chunk)


def _at(context: Context, rows: Context, start: Array) -> Context:
    return jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, start, 1), context, rows)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(
    cfg: DrafterConfig, chunk: int, params: DrafterParams, table: Array, inputs: Positions
) -> tuple[Array, Context]:
    """Hidden states (B, n, D) and context; ``table`` (V, D) embeds. Features get no gradient."""
    b, n = inputs.tokens.shape
    shape = (b, n, cfg.block.num_kv_heads, cfg.block.head_dim)
    empty = [(jnp.zeros(shape, params.fc.dtype),) * 2 for _ in range(cfg.num_layers)]

    def step(context: Context, xs: tuple[Positions, Array]) -> tuple[Context, Array]:
        rows = table_rows(table, xs[0].tokens)
        hidden, own = _chunk_rows(cfg, inputs.segment_ids, params, context, rows, *xs)
        return _at(context, own, xs[1]), hidden

    xs = jax.tree.map(partial(_split, chunk=chunk), inputs), _starts(inputs, chunk)
    context, hidden = jax.lax.scan(step, empty, xs)
    return _joined(hidden), context


def _forward(cfg: DrafterConfig, chunk: int, params: Any, table: Any, inputs: Any) -> tuple[Any, Any]:
    learned = learned_of(params), learned_of(table)
    params, table, inputs = values_of((params, table, inputs))
    out = cast(tuple[Array, Context], _chunked(cfg, chunk, params, table, inputs))
    return out, (learned, params, table, inputs, out[1])


def _backward(cfg: DrafterConfig, chunk: int, residual: Any, cotangents: Any) -> tuple[Any, Any, Any]:
    (learned, embeds), params, table, inputs, context = cast(
        tuple[tuple[Learned, Learned], DrafterParams, Array, Positions, Context], residual
    )
    d_hidden, d_context = materialised(cotangents)
    some = learned.pick(params)

    def step(carry: tuple, xs: tuple) -> tuple[tuple, Array | None]:
        d_some, d_context = carry
        d_hidden, own_inputs, start = xs

        def rows(some: Any, context: Context, embedded: Array) -> tuple[Array, Context]:
            whole = learned.put(some, params)
            return _chunk_rows(cfg, inputs.segment_ids, whole, context, embedded, own_inputs, start)

        own = jax.tree.map(
            lambda d, k: jax.lax.dynamic_slice_in_dim(d, start, chunk, 1).astype(k.dtype), d_context, context
        )
        _, pull = jax.vjp(rows, some, context, table_rows(table, own_inputs.tokens))
        more_some, more_context, d_rows = pull((d_hidden, own))
        add = partial(jax.tree.map, lambda total, d: total + d.astype(total.dtype))
        # A table's gradient in every chunk would be a table for each, so its rows wait for the end.
        return (add(d_some, more_some), add(d_context, more_context)), d_rows if any(embeds.flags) else None

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)

    xs = jax.tree.map(partial(_split, chunk=chunk), (d_hidden, inputs))
    start = zeros(some), jax.tree.map(lambda d: d.astype(jnp.float32), d_context)
    (d_some, _), d_rows = jax.lax.scan(step, start, (*xs, _starts(inputs, chunk)), reverse=True)
    d_table = None
    if d_rows is not None:
        d_table = jax.vjp(lambda t: table_rows(t, inputs.tokens), table)[1](_joined(d_rows))[0]
    gradient = jax.tree.map(lambda d, w: d.astype(w.dtype), d_some, some)
    return learned.put(gradient, None), d_table, None


_chunked.defvjp(_forward, _backward, symbolic_zeros=True)
