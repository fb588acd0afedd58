"""The decoder stack of every target: pure functions over parameters, tokens and a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.config import TargetConfig
from peagle_jax.layers.attention import cached_attention
from peagle_jax.layers.block import Attend, BlockParams, run_block
from peagle_jax.layers.linear import product, table_rows
from peagle_jax.layers.moe import LayerOf
from peagle_jax.layers.norm import rms_norm
from peagle_jax.layers.rope import rope_tables
from peagle_jax.parallel.rules import gathered, joined

AttendFor = Callable[..., Attend]
"""(a layer's window, its sinks, its keys and values in the cache if there is one) -> its attention."""


@struct.dataclass
class TargetParams:
    """Weights of a target. ``lm_head`` is None when it is tied to ``embed``.

    ``layers`` is stacked (scanned; the form for accelerators): a BlockParams with a leading L axis, or one
    for each layer of a cycle, (L/p, ...), where layers differ by their windows. Or it is unrolled: a tuple
    of L BlockParams (the form for CPU, where slicing a stack copies it).
    """

    embed: Array  # (V, D)
    layers: BlockParams | tuple[BlockParams, ...]
    final_norm: Array  # (D,)
    lm_head: Array | None = None  # (V, D)

    @property
    def is_stacked(self) -> bool:
        if isinstance(self.layers, tuple):
            return bool(self.layers) and self.layers[0].attn_norm.ndim == 2
        return True


@struct.dataclass
class TargetOutput:
    """``hidden`` (B, T, D) is the last boundary, before the final norm; ``features`` (B, T, C)
    concatenates the taps; ``k`` and ``v`` are the step's own rows, (B, T, G, H) a layer."""

    hidden: Array
    features: Array
    k: Array | tuple[Array, ...]
    v: Array | tuple[Array, ...]


def stacks_of(params: TargetParams) -> tuple[BlockParams, ...]:
    """The stacks of a stacked target, one for each layer of its cycle."""
    assert params.is_stacked
    return params.layers if isinstance(params.layers, tuple) else (params.layers,)


def layer_of(params: TargetParams, index: int) -> BlockParams:
    """One layer's weights, of either form."""
    if isinstance(params.layers, tuple) and not params.is_stacked:
        return params.layers[index]
    stacks = stacks_of(params)
    at = index // len(stacks)
    return jax.tree.map(lambda w: w[at], stacks[index % len(stacks)])


def unstack_layers(params: TargetParams) -> TargetParams:
    """The unrolled form of a stacked target."""
    if not params.is_stacked:
        return params
    stacks = stacks_of(params)
    count = len(stacks) * stacks[0].attn_norm.shape[0]
    return params.replace(layers=tuple(layer_of(params, i) for i in range(count)))


def stack_layers(params: TargetParams, cycle: int = 1) -> TargetParams:
    """The scanned form of an unrolled target; ``cycle`` is its config's."""
    if params.is_stacked:
        return params
    layers = cast(tuple[BlockParams, ...], params.layers)
    stacks = tuple(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers[first::cycle]) for first in range(cycle)
    )
    return params.replace(layers=stacks if cycle > 1 else stacks[0])


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
    attend_for: AttendFor,
    cache: tuple | None,
) -> TargetOutput:
    windows = cfg.layer_windows
    if not params.is_stacked:
        boundaries, rows = {0: h}, []
        for i, layer in enumerate(cast(tuple[BlockParams, ...], params.layers)):
            own = () if cache is None else (cache[0][i], cache[1][i])
            attend = attend_for(windows[i], layer.sinks, *own)
            whole = gathered(layer.replace(experts=None)).replace(experts=layer.experts)
            h, kv = run_block(whole, cfg.block, h, tables, attend)
            boundaries[i + 1] = h
            rows.append(kv)
        features = jnp.concatenate([boundaries[t] for t in taps], -1) if taps else h[..., :0]
        return TargetOutput(h, joined(features), tuple(k for k, _ in rows), tuple(v for _, v in rows))

    wanted = jnp.array(taps, jnp.int32).reshape(-1, *(1,) * h.ndim)
    collected = jnp.where(wanted == 0, h, jnp.zeros((len(taps), *h.shape), h.dtype))
    stacks = stacks_of(params)
    cycle = len(stacks)
    scanned = tuple(stack.replace(experts=None) for stack in stacks)
    caches = ((),) * cycle
    if cache is not None:
        caches = tuple(zip(*cache, strict=True)) if isinstance(cache[0], tuple) else (cache,)

    def step(carry: tuple, xs: tuple) -> tuple:
        h, collected = carry
        index, layers, caches = xs
        rows = []
        for j, (layer, own) in enumerate(zip(layers, caches, strict=True)):
            layer, experts = gathered(layer), stacks[j].experts
            if experts is not None:
                layer = layer.replace(experts=LayerOf(experts, index))
            h, kv = run_block(layer, cfg.block, h, tables, attend_for(windows[j], layer.sinks, *own))
            collected = jnp.where(wanted == index * cycle + j + 1, h, collected)
            rows.append(kv)
        return (h, collected), rows

    steps = jnp.arange(cfg.num_layers // cycle)
    (h, collected), rows = jax.lax.scan(step, (h, collected), (steps, scanned, caches))
    features = jnp.concatenate(list(collected), -1) if taps else h[..., :0]
    k, v = zip(*rows, strict=True)
    return TargetOutput(h, joined(features), *((k, v) if isinstance(params.layers, tuple) else (k[0], v[0])))


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

    back = positions[:, :, None] - positions[:, None, :]

    def attend_for(window: int, sinks: Array | None, k_cache: Array, v_cache: Array) -> Attend:
        mask, since = own_mask, None
        if window:
            mask, since = own_mask & (back < window), positions - window + 1
        return lambda q, k, v: cached_attention(q, k, v, k_cache, v_cache, lengths, mask, slot, since, sinks)

    tables = rope_tables(cfg.block.rope, cfg.block.head_dim, positions)
    h = table_rows(params.embed, tokens)
    return _run_layers(params, cfg, h, tables, taps, attend_for, (cache_k, cache_v))


def forward_packed(
    params: TargetParams,
    cfg: TargetConfig,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    attend: Callable[..., Array],
    taps: tuple[int, ...] = (),
) -> TargetOutput:
    """Runs whole sequences without a cache; ``attend`` holds the mask (training, features).

    A layer with a window or sinks calls it with ``window`` and ``sinks``, as ``packed_attention`` takes them.
    """
    check_taps(cfg, taps)

    def attend_for(window: int, sinks: Array | None) -> Attend:
        special = {"window": window} if window else {}
        if sinks is not None:
            special["sinks"] = sinks
        return partial(attend, **special) if special else attend

    tables = rope_tables(cfg.block.rope, cfg.block.head_dim, positions)
    h = table_rows(params.embed, tokens)
    return _run_layers(params, cfg, h, tables, taps, attend_for, None)


def final_hidden(params: TargetParams, cfg: TargetConfig, hidden: Array) -> Float[Array, "... d"]:
    """The normed last state, the input of the product with the vocabulary table."""
    return rms_norm(hidden, params.final_norm, cfg.block.rms_norm_eps)


def logits(params: TargetParams, cfg: TargetConfig, hidden: Array) -> Float[Array, "... v"]:
    """Next-token logits (float32) of last-boundary states."""
    table = params.embed if params.lm_head is None else params.lm_head
    return product(final_hidden(params, cfg, hidden), table, "lm_head")
