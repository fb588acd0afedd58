"""gpt-oss: sinks, alternating sliding windows, biases everywhere, and experts with a clamped SwiGLU."""

from peagle_jax.models.family import QKV_BIASES, Family, Names

GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    gguf_architectures=("gpt-oss",),
    always=(*QKV_BIASES, "bo", "sinks", "w_router", "b_router"),
    default_rope_theta=150000.0,
    default_rms_norm_eps=1e-5,
    experts="gpt_oss",
    alternates=True,
    renamed=(
        ("mlp_norm", Names("post_attention_layernorm.weight", "post_attention_norm.weight")),
        ("w_router", Names("mlp.router.weight", "ffn_gate_inp.weight")),
        ("b_router", Names("mlp.router.bias", "ffn_gate_inp.bias")),
    ),
)
