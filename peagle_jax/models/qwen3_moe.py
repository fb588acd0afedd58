"""Qwen3 with a mixture of experts in every layer (Qwen3-Coder-30B-A3B, Qwen3-30B-A3B)."""

from peagle_jax.models.family import QK_NORMS, QKV_BIASES, Family

QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    gguf_architectures=("qwen3moe",),
    always=(*QK_NORMS, "w_router"),
    by_flag=(("attention_bias", (*QKV_BIASES, "bo")),),
    experts="each",
)
