"""Qwen3, dense: norms of q and k over the head dimension, before RoPE."""

from peagle_jax.models.family import QK_NORMS, QKV_BIASES, Family

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    gguf_architectures=("qwen3",),
    always=QK_NORMS,
    by_flag=(("attention_bias", (*QKV_BIASES, "bo")),),
)
