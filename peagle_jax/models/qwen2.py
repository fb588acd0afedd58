"""Qwen2 and Qwen2.5: biases on q, k and v."""

from peagle_jax.models.family import QKV_BIASES, Family

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    gguf_architectures=("qwen2",),
    always=QKV_BIASES,
)
