"""A head's first weights, from the target's own last layers or at random."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.block import BlockParams
from peagle_jax.models.stack import TargetParams, layer_of
from peagle_jax.train.recipe import TrainError

RANDOM_SCALE = 0.02


def target_rows(params: TargetParams, ids: np.ndarray | None) -> Array:
    """The target's vocabulary rows (Vd, D) at the draft ids; None keeps them all."""
    table = params.embed if params.lm_head is None else params.lm_head
    return table if ids is None else table[jnp.asarray(ids)]


def _narrowed(layer: BlockParams, width: int) -> BlockParams:
    """The layer with its ``width`` strongest ffn units (by the product of their weights' norms)."""
    strength = (
        jnp.linalg.norm(layer.w_gate, axis=1)
        * jnp.linalg.norm(layer.w_up, axis=1)
        * jnp.linalg.norm(layer.w_down, axis=0)
    )
    chosen = jnp.sort(jnp.argsort(-strength)[:width])

    def bias(b: Array | None) -> Array | None:
        return None if b is None else b[chosen]

    return layer.replace(
        w_gate=layer.w_gate[chosen],
        w_up=layer.w_up[chosen],
        w_down=layer.w_down[:, chosen],
        b_gate=bias(layer.b_gate),
        b_up=bias(layer.b_up),
    )


def _check_shapes(cfg: DrafterConfig, target: TargetConfig) -> None:
    if target.block.moe is not None:
        raise TrainError(
            "a start from the target's layers needs dense ones, this target's are mixtures of experts; set "
            "init.source: random"
        )
    names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim")
    for name in names:
        found, expected = getattr(cfg.block, name), getattr(target.block, name)
        if found != expected:
            raise TrainError(
                f"a start from the target's layers needs head.{name} {expected}, found {found}; "
                "leave it 0 or set init.source: random"
            )
    if cfg.block.intermediate_size > target.block.intermediate_size:
        raise TrainError(
            f"a start from the target's layers allows head.intermediate_size up to "
            f"{target.block.intermediate_size}, found {cfg.block.intermediate_size}"
        )
    if cfg.num_layers > target.num_layers:
        raise TrainError(f"head.num_layers {cfg.num_layers} exceeds the target's {target.num_layers} layers")


def from_target(
    cfg: DrafterConfig,
    target: TargetConfig,
    params: TargetParams,
    draft_ids: np.ndarray | None,
    mean_feature: np.ndarray,
    noise: float = 0.0,
    seed: int = 0,
) -> DrafterParams:
    """Float32 weights of a head that starts as the target's last N layers over the last tap.

    Layer 0's q, k and v read the feature half as the target's layer reads its stream; the embedding
    half is zero, or normal of scale ``noise``. fc passes the last tap through. ``mask_hidden`` is
    ``mean_feature`` (C,). ``embed`` and ``draft_to_target`` are None: they are not trained.

    Raises TrainError: the head's shape is not the target's.
    """
    _check_shapes(cfg, target)
    d, first = cfg.hidden_size, target.num_layers - cfg.num_layers
    layers = [layer_of(params, first + i) for i in range(cfg.num_layers)]
    layers = [jax.tree.map(lambda w: w.astype(jnp.float32), layer) for layer in layers]
    if cfg.block.intermediate_size < target.block.intermediate_size:
        layers = [_narrowed(layer, cfg.block.intermediate_size) for layer in layers]
    keys = iter(jax.random.split(jax.random.key(seed), 3))

    def widened(w: Array) -> Array:
        return jnp.concatenate([jax.random.normal(next(keys), w.shape) * noise, w], axis=1)

    hidden_norm = layers[0].attn_norm
    layers[0] = layers[0].replace(
        attn_norm=jnp.ones((d,)),
        wq=widened(layers[0].wq),
        wk=widened(layers[0].wk),
        wv=widened(layers[0].wv),
    )
    fc = jnp.zeros((d, cfg.feature_size)).at[:, -d:].set(jnp.eye(d))
    return DrafterParams(
        embed=None,  # pyright: ignore[reportArgumentType]
        fc=fc,
        hidden_norm=hidden_norm,
        layers=tuple(layers),
        final_norm=params.final_norm.astype(jnp.float32),
        lm_head=target_rows(params, draft_ids).astype(jnp.float32),
        mask_hidden=jnp.asarray(mean_feature, jnp.float32) if cfg.method == "peagle" else None,
        input_norm=jnp.ones((cfg.feature_size,)) if cfg.norm_before_fc else None,
    )


def at_random(
    cfg: DrafterConfig, params: TargetParams, draft_ids: np.ndarray | None, seed: int = 0
) -> DrafterParams:
    """Float32 weights: normal matrices, norms of one, the output rows from the target.

    ``mask_hidden`` is standard normal, as in the peers' trainers.
    """
    d, block = cfg.hidden_size, cfg.block
    keys = iter(jax.random.split(jax.random.key(seed), 7 * cfg.num_layers + 2))

    def matrix(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape) * RANDOM_SCALE

    def layer(inputs: int) -> BlockParams:
        return BlockParams(
            attn_norm=jnp.ones((d,)),
            wq=matrix(block.num_heads * block.head_dim, inputs),
            wk=matrix(block.num_kv_heads * block.head_dim, inputs),
            wv=matrix(block.num_kv_heads * block.head_dim, inputs),
            wo=matrix(d, block.num_heads * block.head_dim),
            mlp_norm=jnp.ones((d,)),
            w_gate=matrix(block.intermediate_size, d),
            w_up=matrix(block.intermediate_size, d),
            w_down=matrix(d, block.intermediate_size),
        )

    return DrafterParams(
        embed=None,  # pyright: ignore[reportArgumentType]
        fc=matrix(d, cfg.feature_size),
        hidden_norm=jnp.ones((d,)),
        layers=tuple(layer(2 * d if i == 0 else d) for i in range(cfg.num_layers)),
        final_norm=jnp.ones((d,)),
        lm_head=target_rows(params, draft_ids).astype(jnp.float32),
        mask_hidden=jax.random.normal(next(keys), (cfg.feature_size,)) if cfg.method == "peagle" else None,
        input_norm=jnp.ones((cfg.feature_size,)) if cfg.norm_before_fc else None,
    )
