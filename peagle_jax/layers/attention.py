"""Attention of new rows over a cache and over each other.

Scores over the committed cache and over the step's own rows are parts of one softmax, so the
layers only read the cache. The step's own keys are written once, after the last layer. The own
part takes any T x T mask: causal for a chain, a tree mask for a tree.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from peagle_jax.layers.quantized_rows import Int8Rows, quantize_rows, widened

NEGATIVE = -1e30  # finite, so that a fully masked row never yields NaN

BLOCK = 128
"""Cache positions that are read at once. On CPU a block of keys stays in the cores' own memory."""

GROUP = 8
"""Sequences that a CPU's cores read a block of at once, where there are more: each group reads as many blocks
as its own longest sequence has. An accelerator reads all at once."""

SCORES = 2**26
"""Scores that a block of queries may have against all keys: 256 MB of float32."""


def rows_at_once(heads: int, keys: int) -> int:
    """Queries of a block whose scores stay within SCORES; at least 16, fewer would waste the matrix unit."""
    return max(16, SCORES // (heads * keys))


def grouped(q: Float[Array, "b t n h"], num_kv_heads: int) -> Float[Array, "b g rt h"]:
    """Query heads as rows of their kv head: (B, T, N, H) -> (B, G, N/G * T, H)."""
    b, t, n, h = q.shape
    q = q.reshape(b, t, num_kv_heads, n // num_kv_heads, h)
    return q.transpose(0, 2, 3, 1, 4).reshape(b, num_kv_heads, -1, h)


def ungrouped(out: Float[Array, "b g rt h"], t: int) -> Float[Array, "b t nh"]:
    """Inverse of ``grouped`` with heads flattened: (B, G, N/G * T, H) -> (B, T, N * H)."""
    b, g, rows, h = out.shape
    return out.reshape(b, g, rows // t, t, h).transpose(0, 3, 1, 2, 4).reshape(b, t, -1)


def narrowed(x: Array, storage: jnp.dtype) -> Array:
    """x in a cache's storage dtype; uint16 holds the bits of bfloat16."""
    if storage == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(storage)


def ring_positions(slots: Int[Array, " s"], lengths: Int[Array, " b"], room: int) -> Int[Array, "b s"]:
    """The position that each slot of a ring holds, of those before ``lengths``; negative: none yet.

    Position p lies in slot p % room, and scratch past the length in the slots of the oldest positions.
    """
    last = lengths[:, None] - 1
    return slots + room * ((last - slots) // room)


def _operand(x: Array, cache: Array | Int8Rows, dtype: jnp.dtype) -> Array:
    """New rows as they would be read from the cache, so that a step's width changes nothing."""
    return widened(quantize_rows(x, dtype)) if isinstance(cache, Int8Rows) else x.astype(dtype)


def _block(cache: Array | Int8Rows, slot: Array | int, start: Array, w: int, size: int) -> Array:
    """Positions ``start``.. of sequences ``slot``.. as operands: (w, G, size, H)."""

    def read(x: Array) -> Array:
        return jax.lax.dynamic_slice(x, (slot, 0, start, 0), (w, x.shape[1], size, x.shape[3]))

    x = jax.tree.map(read, cache)
    if isinstance(x, Int8Rows):
        return widened(x)
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def cached_attention(
    q: Float[Array, "b t n h"],
    k_new: Float[Array, "b t g h"],
    v_new: Float[Array, "b t g h"],
    k_cache: Shaped[Array, "slots g s h"] | Int8Rows,
    v_cache: Shaped[Array, "slots g s h"] | Int8Rows,
    lengths: Int[Array, " b"],
    own_mask: Bool[Array, "b t t"],
    slot: Int[Array, ""] | int = 0,
    since: Int[Array, "b t"] | None = None,
    sinks: Float[Array, " n"] | None = None,
) -> Float[Array, "b t nh"]:
    """Softmax attention over cache positions < ``lengths`` and over own rows by ``own_mask``.

    The sequences are rows ``slot``.. of the cache. ``own_mask[b, i, j]``: row i sees row j, itself
    always. Returns float32 (B, T, N*H).

    With ``since`` (a sliding window) a row sees cache positions from there on, and the cache is a ring
    (``ring_positions``) that holds at least those. ``sinks`` are a score a query head that takes its share
    of the softmax and adds nothing (gpt-oss).

    The cache is read in blocks, joined by a running maximum: the cost follows what is stored, not the room
    for it. A block that is past a sequence's length changes no bit of it, so neither batch mates nor
    the room do.
    """
    (w, t), g, room = q.shape[:2], k_new.shape[2], k_cache.shape[2]
    size = min(BLOCK, room)
    dtype = jnp.dtype(jnp.bfloat16) if k_cache.dtype == jnp.uint16 else k_cache.dtype
    rows = grouped(q * q.shape[-1] ** -0.5, g).astype(dtype)
    k_new, v_new = _operand(k_new, k_cache, dtype), _operand(v_new, v_cache, dtype)
    own = jnp.einsum("bgth,bsgh->bgts", rows, k_new, preferred_element_type=jnp.float32)
    shape = own.shape
    own = jnp.where(own_mask[:, None, None], own.reshape(w, g, -1, t, t), NEGATIVE).reshape(shape)
    top = own.max(-1)
    sunk = None if sinks is None else jnp.repeat(sinks.astype(jnp.float32).reshape(g, -1), t, axis=1)
    if sunk is not None:
        top = jnp.maximum(top, sunk)
    # A row sees itself, so ``top`` is a real score and a masked one becomes exactly 0.
    p = jnp.exp(own - top[..., None])
    out = jnp.einsum("bgts,bsgh->bgth", p.astype(dtype), v_new, preferred_element_type=jnp.float32)

    def block(j: Array, first: Array | int, count: int, part: tuple[Any, ...]) -> tuple[Array, Array, Array]:
        """Block j of ``count`` sequences from ``first`` on: ``part`` is their rows, lengths and state."""
        rows, lengths, since, top, total, out = part
        start = jnp.minimum(j * size, room - size)  # the last block may overlap the one before it
        place = start + jnp.arange(size)
        if since is None:
            visible = ((place >= j * size) & (place < lengths[:, None]))[:, None, None]
        else:
            position = ring_positions(place, lengths, room)[:, None]
            seen = (place >= j * size) & (position >= jnp.maximum(since, 0)[..., None])
            visible = jnp.tile(seen, (1, rows.shape[2] // t, 1))[:, None]
        k, v = (_block(c, slot + first, start, count, size) for c in (k_cache, v_cache))
        scores = jnp.einsum("bgth,bgsh->bgts", rows, k, preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores, NEGATIVE)
        higher = jnp.maximum(top, scores.max(-1))
        scale, p = jnp.exp(top - higher), jnp.exp(scores - higher[..., None])
        new = jnp.einsum("bgts,bgsh->bgth", p.astype(dtype), v, preferred_element_type=jnp.float32)
        return higher, total * scale + p.sum(-1), out * scale[..., None] + new

    def together(*state: Array) -> tuple[Array, Array, Array]:
        def body(j: Array, joined: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            return block(j, 0, w, (rows, lengths, since, *joined))

        return jax.lax.fori_loop(0, -(-stored.max() // size), body, state)

    def in_groups(*state: Array) -> tuple[Array, Array, Array]:
        count = next(c for c in range(min(GROUP, w), 0, -1) if w % c == 0)
        blocks = -(-stored.reshape(-1, count).max(1) // size)
        ends = jnp.cumsum(blocks)

        def body(i: Array, joined: tuple[Array, ...]) -> tuple[Array, ...]:
            at = jnp.sum(ends <= i)
            first = at * count
            part = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), (rows, lengths, since, *joined)
            )
            new = block(i - (ends[at] - blocks[at]), first, count, part)
            put = jax.lax.dynamic_update_slice_in_dim
            return tuple(put(x, n, first, 0) for x, n in zip(joined, new, strict=True))

        return jax.lax.fori_loop(0, ends[-1], body, state)

    stored = lengths if since is None else jnp.minimum(lengths, room)
    total = p.sum(-1) if sunk is None else p.sum(-1) + jnp.exp(sunk - top)
    state = (top, total, out)
    with jax.named_scope("cache"):
        if w <= GROUP:
            _, total, out = together(*state)
        else:
            _, total, out = jax.lax.platform_dependent(*state, cpu=in_groups, default=together)
    return ungrouped(out / total[..., None], t)


def packed_attention(
    q: Float[Array, "b n q h"],
    k: Float[Array, "b n g h"],
    v: Float[Array, "b n g h"],
    segment_ids: Int[Array, "b n"],
    dtype: jnp.dtype | None = None,
    block: int = 128,
    unrolled: int = 16,
    queries: tuple[Int[Array, "b t"], Int[Array, " t"]] | None = None,
    window: int = 0,
    sinks: Float[Array, " n"] | None = None,
) -> Float[Array, "b n qh"]:
    """Causal attention of whole rows in which documents (equal ``segment_ids``) stand apart.

    ``dtype`` is the operands' (float32 by default; accumulation is float32). Queries go in blocks
    of ``block`` that read keys up to their own end only, which skips most of the masked half. Rows
    of more than ``unrolled`` blocks read all keys, a block (or less of very long rows) at a time,
    recomputed in the reverse pass, so that no n x n array lives. So do ``queries``, a part of a row: q is
    (B, T, N, H) then, at positions with these segment ids and these indices within the row.

    ``window`` (0: none) is how many positions back a row sees, its own included; ``sinks`` as in
    ``cached_attention``.
    """
    b, count, heads, h = q.shape
    n, g = k.shape[1:3]
    dtype = jnp.dtype(jnp.float32) if dtype is None else dtype
    q, k, v = (q * h**-0.5).astype(dtype), k.astype(dtype).swapaxes(1, 2), v.astype(dtype).swapaxes(1, 2)

    def rows(q: Array, ids: Array, index: Array, end: int) -> Array:
        t = q.shape[1]
        back = index[:, None] - jnp.arange(end)
        seen = (back >= 0) & (segment_ids[:, None, :end] == ids[..., None])
        if window:
            seen &= back < window
        scores = jnp.einsum(
            "bgth,bgsh->bgts", grouped(q, g), k[:, :, :end], preferred_element_type=jnp.float32
        )
        scores = jnp.where(seen[:, None, None], scores.reshape(b, g, -1, t, end), NEGATIVE)
        top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        if sinks is not None:
            sunk = sinks.astype(jnp.float32).reshape(g, -1, 1, 1)
            top = jnp.maximum(top, jax.lax.stop_gradient(sunk))
        p = jnp.exp(scores - top)
        total = p.sum(-1) if sinks is None else p.sum(-1) + jnp.exp(sunk - top)[..., 0]
        total = total.reshape(b, g, -1, 1)
        p = p.astype(dtype).reshape(b, g, -1, end)
        out = jnp.einsum("bgts,bgsh->bgth", p, v[:, :, :end], preferred_element_type=jnp.float32)
        return ungrouped(out / total, t)

    if queries is None and n <= block * unrolled:
        ends = [min(start + block, n) for start in range(0, n, block)]
        parts = [
            rows(q[:, s:end], segment_ids[:, s:end], jnp.arange(s, end), end)
            for s, end in zip(range(0, n, block), ends, strict=True)
        ]
        return jnp.concatenate(parts, axis=1)
    ids, index = (segment_ids, jnp.arange(n)) if queries is None else queries
    block = min(block, count, rows_at_once(heads * b, n))
    pad = -count % block
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, -1, block, heads, h).swapaxes(0, 1)
    ids = jnp.pad(ids, ((0, 0), (0, pad))).reshape(b, -1, block).swapaxes(0, 1)
    index = jnp.pad(index, (0, pad)).reshape(-1, block)
    out = jax.lax.map(lambda xs: jax.checkpoint(partial(rows, end=n))(*xs), (q, ids, index))
    return out.swapaxes(0, 1).reshape(b, count + pad, heads * h)[:, :count]


def causal_mask(b: int, t: int) -> Bool[Array, "b t t"]:
    """Own-row mask of a chain: row i sees rows 0..i."""
    return jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
