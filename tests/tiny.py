"""Tiny random models in which every dimension differs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from peagle_jax.checkpoint.tensors import layer_shapes
from peagle_jax.config import BlockConfig, DrafterConfig, MoeConfig, RopeConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.block import BlockParams
from peagle_jax.layers.moe import Experts
from peagle_jax.models.gpt_oss import GPT_OSS as GPT_OSS_FAMILY
from peagle_jax.models.stack import TargetParams

VOCAB = 53
TARGET = TargetConfig(
    family="llama",
    block=BlockConfig(12, 20, 4, 2, 6, 1e-5, RopeConfig(theta=1000.0)),
    vocab_size=VOCAB,
    num_layers=5,
    max_position=256,
    eos_token_ids=(VOCAB - 1,),
)

WIDE = TargetConfig(
    family="llama",
    block=BlockConfig(64, 192, 8, 2, 16, 1e-5, RopeConfig(theta=1000.0)),
    vocab_size=VOCAB,
    num_layers=3,
    max_position=256,
    eos_token_ids=(VOCAB - 1,),
)
"""Of inputs that four-bit weights can have."""
GPT_OSS = TargetConfig(
    family="gpt_oss",
    block=BlockConfig(12, 10, 4, 2, 6, 1e-5, RopeConfig(theta=1000.0), MoeConfig(7, 3), 1.5),
    vocab_size=VOCAB,
    num_layers=6,
    max_position=1024,
    eos_token_ids=(VOCAB - 1,),
    windows=(8, 0) * 3,
)
"""Everything that a block can have: experts, sinks, biases, windows."""


def head_config(
    method: str = "peagle", num_layers: int = 2, draft_vocab: int = 31, **changes
) -> DrafterConfig:
    values = dict(
        method=method,
        block=BlockConfig(10, 14, 6, 3, 4, 1e-5, RopeConfig(theta=500.0)),
        num_layers=num_layers,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        target_hidden_size=12,
        taps=(1, 3, 5),
        max_position=256,
        num_depths=8 if method == "peagle" else 1,
        mask_token_id=51 if method == "peagle" else None,
    )
    return DrafterConfig(**(values | changes))


def _matrices(seed: int, scale: float = 0.5):
    rng = np.random.default_rng(seed)  # jax.random would compile a program for every shape
    return lambda *shape: jnp.array(rng.normal(size=shape) * scale, jnp.float32)


def block(make, cfg: BlockConfig, inputs: int | None = None) -> BlockParams:
    d, f, h = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    i = inputs or d
    if cfg.moe is not None:
        shapes = layer_shapes(cfg)
        fields = GPT_OSS_FAMILY.layer_fields({})
        count = cfg.moe.num_experts
        own = {field: make(*shapes[field]) + ("norm" in field) for field in fields}
        experts = Experts(
            make(count, f, d),
            make(count, f, d),
            make(count, d, f),
            make(count, f),
            make(count, f),
            make(count, d),
        )
        return BlockParams(**own, w_gate=None, w_up=None, w_down=None, experts=experts)
    return BlockParams(
        attn_norm=1 + make(d) * 0.2,
        wq=make(i, cfg.num_heads * h).T,
        wk=make(i, cfg.num_kv_heads * h).T,
        wv=make(i, cfg.num_kv_heads * h).T,
        wo=make(cfg.num_heads * h, d).T,
        mlp_norm=1 + make(d) * 0.2,
        w_gate=make(d, f).T,
        w_up=make(d, f).T,
        w_down=make(f, d).T,
    )


def target_params(cfg: TargetConfig = TARGET, seed: int = 0) -> TargetParams:
    make = _matrices(seed)
    return TargetParams(
        embed=make(cfg.vocab_size, cfg.hidden_size),
        layers=tuple(block(make, cfg.block) for _ in range(cfg.num_layers)),
        final_norm=1 + make(cfg.hidden_size) * 0.2,
        lm_head=make(cfg.vocab_size, cfg.hidden_size) * 2,
    )


def head_params(cfg: DrafterConfig, seed: int = 1) -> DrafterParams:
    make = _matrices(seed)
    d = cfg.hidden_size
    reduced = cfg.draft_vocab_size < cfg.vocab_size
    chosen = np.sort(np.random.default_rng(seed).permutation(cfg.vocab_size)[: cfg.draft_vocab_size])
    return DrafterParams(
        embed=make(cfg.vocab_size, d),
        fc=make(cfg.feature_size, d).T,
        hidden_norm=1 + make(d) * 0.2,
        layers=tuple(block(make, cfg.block, 2 * d if i == 0 else None) for i in range(cfg.num_layers)),
        final_norm=1 + make(d) * 0.2,
        lm_head=make(cfg.draft_vocab_size, d),
        mask_hidden=make(cfg.feature_size) * 2 if cfg.method == "peagle" else None,
        input_norm=1 + make(cfg.feature_size) * 0.2 if cfg.norm_before_fc else None,
        draft_to_target=jnp.array(chosen, jnp.int32) if reduced else None,
    )
