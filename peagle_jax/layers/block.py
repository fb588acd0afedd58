"""The pre-norm decoder block that targets and heads share."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import struct
from jaxtyping import Array, Float

from peagle_jax.config import BlockConfig
from peagle_jax.layers.linear import product
from peagle_jax.layers.norm import rms_norm
from peagle_jax.layers.rope import apply_rope
from peagle_jax.parallel.rules import joined

Attend = Callable[[Array, Array, Array], Array]
"""(q (..., T, N, H), k (..., T, G, H), v (..., T, G, H)) -> (..., T, N*H), all float32."""


@struct.dataclass
class BlockParams:
    """Weights of one block, stored (out, in); biases and q/k norms may be None.

    ``I`` below is the input width of q, k and v: D, or 2D in a head's first block. With a leading
    L axis on every leaf this is a stack of blocks.
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


def _affine(x: Array, w: Array, b: Array | None) -> Array:
    y = product(x, w)
    return y if b is None else y + b


def project_qkv(
    p: BlockParams, cfg: BlockConfig, x: Float[Array, "... t i"], tables: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """Rotated q (..., T, N, H) and k, and v (..., T, G, H), from the normed input."""
    q = _affine(x, p.wq, p.bq).reshape(*x.shape[:-1], cfg.num_heads, cfg.head_dim)
    k = _affine(x, p.wk, p.bk).reshape(*x.shape[:-1], cfg.num_kv_heads, cfg.head_dim)
    v = _affine(x, p.wv, p.bv).reshape(*x.shape[:-1], cfg.num_kv_heads, cfg.head_dim)
    if p.q_norm is not None and p.k_norm is not None:
        q = rms_norm(q, p.q_norm, cfg.rms_norm_eps)
        k = rms_norm(k, p.k_norm, cfg.rms_norm_eps)
    return apply_rope(q, tables), apply_rope(k, tables), v


def mlp(p: BlockParams, cfg: BlockConfig, h: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """SwiGLU of the normed residual stream."""
    x = rms_norm(h, p.mlp_norm, cfg.rms_norm_eps)
    gate = jax.nn.silu(_affine(x, p.w_gate, p.b_gate))
    return _affine(gate * _affine(x, p.w_up, p.b_up), p.w_down, p.b_down)


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
    h = joined(residual + _affine(attend(q, k, v), p.wo, p.bo))
    return joined(h + mlp(p, cfg, h)), (k, v)
