"""The decoder stack of every target: pure functions over parameters, tokens and a cache."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.config import TargetConfig
from peagle_jax.layers.attention import cached_attention
from peagle_jax.layers.block import Attend, BlockParams, run_block
from peagle_jax.layers.linear import product, table_rows
from peagle_jax.layers.norm import rms_norm
from peagle_jax.layers.rope import rope_tables
from peagle_jax.parallel.rules import gathered, joined


@struct.dataclass
class TargetParams:
    """Weights of a target. ``lm_head`` is None when it is tied to ``embed``.

    ``layers`` is a BlockParams with a leading L axis (scanned; the form for accelerators), or a
    tuple of L BlockParams (unrolled; the form for CPU, where slicing a stack copies it).
    """

    embed: Array  # (V, D)
    layers: BlockParams | tuple[BlockParams, ...]
    final_norm: Array  # (D,)
    lm_head: Array | None = None  # (V, D)

    @property
    def is_stacked(self) -> bool:
        return not isinstance(self.layers, tuple)


@struct.dataclass
class TargetOutput:
    """``hidden`` (B, T, D) is the last boundary, before the final norm; ``features`` (B, T, C)
    concatenates the taps; ``k`` and ``v`` are the step's own rows, (B, T, G, H) a layer."""

    hidden: Array
    features: Array
    k: Array | tuple[Array, ...]
    v: Array | tuple[Array, ...]


def unstack_layers(params: TargetParams) -> TargetParams:
    """The unrolled form of a stacked target."""
    if isinstance(params.layers, tuple):
        return params
    count = params.layers.attn_norm.shape[0]
    layers = tuple(jax.tree.map(lambda w, i=i: w[i], params.layers) for i in range(count))
    return params.replace(layers=layers)


def stack_layers(params: TargetParams) -> TargetParams:
    """The scanned form of an unrolled target."""
    if not isinstance(params.layers, tuple):
        return params
    return params.replace(layers=jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.layers))


def check_taps(cfg: TargetConfig, taps: tuple[int, ...]) -> None:
    """Raises ValueError unless every tap is a boundary 0..L."""
    wrong = [t for t in taps if not 0 <= t <= cfg.num_layers]
    if wrong:
        raise ValueError(
            f"taps {wrong} are not layer boundaries of this target; expected 0..{cfg.num_layers}"
        )


def _run_layers(
    params: TargetParams,
    cfg: TargetConfig,
    h: Array,
    tables: tuple[Array, Array],
    taps: tuple[int, ...],
    attend_for: Callable[..., Attend],
    cache: tuple | None,
) -> TargetOutput:
    if isinstance(params.layers, tuple):
        boundaries, rows = {0: h}, []
        for i, layer in enumerate(params.layers):
            own = () if cache is None else (cache[0][i], cache[1][i])
            h, kv = run_block(gathered(layer), cfg.block, h, tables, attend_for(*own))
            boundaries[i + 1] = h
            rows.append(kv)
        features = jnp.concatenate([boundaries[t] for t in taps], -1) if taps else h[..., :0]
        return TargetOutput(h, joined(features), tuple(k for k, _ in rows), tuple(v for _, v in rows))

    wanted = jnp.array(taps, jnp.int32).reshape(-1, *(1,) * h.ndim)
    collected = jnp.where(wanted == 0, h, jnp.zeros((len(taps), *h.shape), h.dtype))

    def step(carry: tuple, xs: tuple) -> tuple:
        h, collected = carry
        index, layer, own = xs
        h, kv = run_block(gathered(layer), cfg.block, h, tables, attend_for(*own))
        return (h, jnp.where(wanted == index + 1, h, collected)), kv

    (h, collected), (k, v) = jax.lax.scan(
        step, (h, collected), (jnp.arange(cfg.num_layers), params.layers, cache or ())
    )
    features = jnp.concatenate(list(collected), -1) if taps else h[..., :0]
    return TargetOutput(h, joined(features), k, v)


def forward(
    params: TargetParams,
    cfg: TargetConfig,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    cache_k: Array | tuple[Array, ...],
    cache_v: Array | tuple[Array, ...],
    lengths: Int[Array, " b"],
    own_mask: Bool[Array, "b t t"],
    taps: tuple[int, ...] = (),
    slot: Int[Array, ""] | int = 0,
) -> TargetOutput:
    """Runs T new rows a sequence over ``lengths`` committed positions of the cache's slots ``slot``...

    The cache is only read; the rows' keys and values come back for the caller to write.
    """
    check_taps(cfg, taps)

    def attend_for(k_cache: Array, v_cache: Array) -> Attend:
        return lambda q, k, v: cached_attention(q, k, v, k_cache, v_cache, lengths, own_mask, slot)

    tables = rope_tables(cfg.block.rope, cfg.block.head_dim, positions)
    h = table_rows(params.embed, tokens)
    return _run_layers(params, cfg, h, tables, taps, attend_for, (cache_k, cache_v))


def forward_packed(
    params: TargetParams,
    cfg: TargetConfig,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    attend: Attend,
    taps: tuple[int, ...] = (),
) -> TargetOutput:
    """Runs whole sequences without a cache; ``attend`` holds the mask (training, features)."""
    check_taps(cfg, taps)
    tables = rope_tables(cfg.block.rope, cfg.block.head_dim, positions)
    h = table_rows(params.embed, tokens)
    return _run_layers(params, cfg, h, tables, taps, lambda: attend, None)


def final_hidden(params: TargetParams, cfg: TargetConfig, hidden: Array) -> Float[Array, "... d"]:
    """The normed last state, the input of the product with the vocabulary table."""
    return rms_norm(hidden, params.final_norm, cfg.block.rms_norm_eps)


def logits(params: TargetParams, cfg: TargetConfig, hidden: Array) -> Float[Array, "... v"]:
    """Next-token logits (float32) of last-boundary states."""
    table = params.embed if params.lm_head is None else params.lm_head
    return product(final_hidden(params, cfg, hidden), table)
