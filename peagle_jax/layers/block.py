"""The pre-norm decoder block that targets and heads share."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from peagle_jax.config import BlockConfig
from peagle_jax.layers.linear import product
from peagle_jax.layers.moe import Experts, LayerOf, mixture
from peagle_jax.layers.norm import rms_norm
from peagle_jax.layers.rope import apply_rope
from peagle_jax.parallel.rules import joined

Attend = Callable[[Array, Array, Array], Array]
"""(q (..., T, N, H), k (..., T, G, H), v (..., T, G, H)) -> (..., T, N*H), all float32."""

SWIGLU_ALPHA = 1.702
"""Slope of the sigmoid in gpt-oss's SwiGLU (openai/gpt-oss, torch/model.py)."""


@struct.dataclass
class BlockParams:
    """Weights of one block, stored (out, in); biases and q/k norms may be None.

    ``I`` below is the input width of q, k and v: D, or 2D in a head's first block. With a leading
    L axis on every leaf this is a stack of blocks. A block with ``experts`` has None for the MLP's own
    weights.
    """

    attn_norm: Array  # (D,)
    wq: Array  # (N*H, I)
    wk: Array  # (G*H, I)
    wv: Array  # (G*H, I)
    wo: Array  # (D, N*H)
    mlp_norm: Array  # (D,)
    w_gate: Array  # (F, D)
    w_up: Array  # (F, D)
    w_down: Array  # (D, F)
    bq: Array | None = None
    bk: Array | None = None
    bv: Array | None = None
    bo: Array | None = None
    b_gate: Array | None = None
    b_up: Array | None = None
    b_down: Array | None = None
    q_norm: Array | None = None  # (H,), before RoPE (Qwen3)
    k_norm: Array | None = None
    w_router: Array | None = None  # (E, D), with a mixture of experts
    b_router: Array | None = None  # (E,)
    experts: Experts | LayerOf | None = None
    sinks: Array | None = None  # (N,), a logit beside each query head's scores (gpt-oss)


def _affine(x: Array, p: BlockParams | Experts, field: str, bias: str) -> Array:
    y, b = product(x, getattr(p, field), field), getattr(p, bias)
    return y if b is None else y + b


def project_qkv(
    p: BlockParams, cfg: BlockConfig, x: Float[Array, "... t i"], tables: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """Rotated q (..., T, N, H) and k, and v (..., T, G, H), from the normed input."""
    q = _affine(x, p, "wq", "bq").reshape(*x.shape[:-1], cfg.num_heads, cfg.head_dim)
    k = _affine(x, p, "wk", "bk").reshape(*x.shape[:-1], cfg.num_kv_heads, cfg.head_dim)
    v = _affine(x, p, "wv", "bv").reshape(*x.shape[:-1], cfg.num_kv_heads, cfg.head_dim)
    if p.q_norm is not None and p.k_norm is not None:
        q = rms_norm(q, p.q_norm, cfg.rms_norm_eps)
        k = rms_norm(k, p.k_norm, cfg.rms_norm_eps)
    return apply_rope(q, tables), apply_rope(k, tables), v


def _swiglu(gate: Array, up: Array, limit: float | None) -> Array:
    """The gated activation; with a limit it is gpt-oss's, clamped and with a linear branch of up + 1."""
    if limit is None:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def mlp(p: BlockParams, cfg: BlockConfig, h: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """SwiGLU of the normed residual stream, or the mixture of experts of a block that has one."""
    x, limit = rms_norm(h, p.mlp_norm, cfg.rms_norm_eps), cfg.swiglu_limit
    if cfg.moe is None:
        gated = _swiglu(_affine(x, p, "w_gate", "b_gate"), _affine(x, p, "w_up", "b_up"), limit)
        return _affine(gated, p, "w_down", "b_down")

    def expert(one: Experts, rows: Array) -> Array:
        gated = _swiglu(_affine(rows, one, "gate", "gate_bias"), _affine(rows, one, "up", "up_bias"), limit)
        return _affine(gated, one, "down", "down_bias")

    assert p.experts is not None
    rows = x.reshape(-1, x.shape[-1])
    # Which experts are chosen hangs on small differences, so the router's product is not a narrow one.
    table = cast(Array, p.w_router).astype(jnp.float32)
    logits = jnp.einsum("rd,ed->re", rows, table, precision=jax.lax.Precision.HIGHEST)
    logits = logits if p.b_router is None else logits + p.b_router
    return mixture(rows, logits, cfg.moe, p.experts, expert).reshape(x.shape)


def run_block(
    p: BlockParams,
    cfg: BlockConfig,
    residual: Float[Array, "... t d"],
    tables: tuple[Array, Array],
    attend: Attend,
    attention_input: Float[Array, "... t i"] | None = None,
) -> tuple[Float[Array, "... t d"], tuple[Array, Array]]:
    """One block. Returns the new residual stream and the block's own rotated (k, v).

    ``attention_input`` replaces the normed residual as the input of q, k and v (a head's first
    block, which reads the normed embedding beside the normed feature).
    """
    x = attention_input
    if x is None:
        x = rms_norm(residual, p.attn_norm, cfg.rms_norm_eps)
    q, k, v = project_qkv(p, cfg, x, tables)
    h = joined(residual + _affine(attend(q, k, v), p, "wo", "bo"))
    return joined(h + mlp(p, cfg, h)), (k, v)
