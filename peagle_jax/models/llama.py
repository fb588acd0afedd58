"""Llama 2 and 3, and the models that share its architecture (SmolLM2, TinyLlama)."""

from peagle_jax.models.family import MLP_BIASES, QKV_BIASES, Family

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    gguf_architectures=("llama",),
    by_flag=(("attention_bias", (*QKV_BIASES, "bo")), ("mlp_bias", MLP_BIASES)),
    gguf_permutes_qk=True,
)
