"""Our configs as ``config.json`` keys: the inverse of ``config_reader``."""

from __future__ import annotations

from typing import Any

from peagle_jax.config import BlockConfig, RopeConfig


def block_json(block: BlockConfig) -> dict[str, Any]:
    """A decoder block's keys. ``read_block`` gives the same config back."""
    return {
        "hidden_act": "silu",
        "hidden_size": block.hidden_size,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "intermediate_size": block.intermediate_size,
        "rms_norm_eps": block.rms_norm_eps,
        "rope_theta": block.rope.theta,
        "rope_scaling": rope_section(block.rope),
    }


def rope_section(rope: RopeConfig) -> dict[str, Any] | None:
    """``rope_scaling`` of a config, None for plain RoPE. ``read_rope`` gives the same config back."""
    if rope.variant == "default":
        return None
    section: dict[str, Any] = {"rope_type": rope.variant, "factor": rope.factor}
    if rope.variant in ("llama3", "yarn"):
        section["original_max_position_embeddings"] = rope.original_max_position
    if rope.variant == "llama3":
        section |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.variant == "yarn":
        section |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        stated = {key: getattr(rope, key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        section |= {key: value for key, value in stated.items() if value is not None}
    return section
