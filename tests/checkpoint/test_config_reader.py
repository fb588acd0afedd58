"""Config keys in every place and spelling where published files keep them."""

from __future__ import annotations

import pytest

from peagle_jax.checkpoint.config_reader import (
    check_full_attention,
    read_block,
    read_rope,
    read_target_config,
)
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.config import MoeConfig, RopeConfig
from tests.checkpoint.files import MISSING, target_json
from tests.tiny import TARGET

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def fails(read, *arguments) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(*arguments)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json")
    return str(caught.value)


def target(generation=None, **changes):
    return read_target_config(target_json(TARGET, **changes), generation or {}, "config.json")


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_scaling": {"type": "default"}, "rope_theta": 1_000_000},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 1e6, "partial_rotary_factor": 1.0},
    ],
    ids=repr,
)
def test_theta_is_found_wherever_it_is(config):
    assert read_rope(config, "config.json") == RopeConfig(theta=1e6)


def test_without_any_key_theta_is_the_familys_default():
    assert read_rope({}, "config.json", default_theta=123.0) == RopeConfig(theta=123.0)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "llama3"}},
    ],
    ids=range(5),
)
def test_llama3_scaling_keeps_every_number(config):
    assert read_rope(config, "config.json") == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)


def test_yarn_keeps_every_number():
    config = {"rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 0.7}}
    expected = RopeConfig(150000.0, "yarn", 32.0, original_max_position=4096, truncate=False, mscale=0.7)
    assert read_rope(config, "config.json") == expected


def test_yarn_without_an_original_length_takes_the_models():
    config = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 640}
    config |= {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 6}
    assert read_block(config, "config.json").rope.original_max_position == 640


def test_linear_scaling():
    config = {"rope_scaling": {"type": "linear", "factor": 2.5}}
    assert read_rope(config, "config.json") == RopeConfig(10000.0, "linear", 2.5)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta = 10000.0 but rope_parameters.rope_theta = 1000000.0",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}},
            "rope_scaling.rope_type = 'yarn' but rope_scaling.type = 'linear'",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope_type 'mrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "RoPE of type linear needs factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            "RoPE of type llama3 needs original_max_position_embeddings",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differs from layer to layer"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; expected an object or null"),
    ],
    ids=range(10),
)
def test_rope_that_cannot_be_right_is_named(config, said):
    assert said in fails(read_rope, config, "config.json")


def test_a_whole_config_reads_as_it_was_written():
    assert target() == TARGET


def test_head_width_and_kv_heads_follow_from_the_heads():
    cfg = target(num_attention_heads=6, head_dim=MISSING, num_key_value_heads=None)
    assert (cfg.block.head_dim, cfg.block.num_kv_heads) == (2, 6)
    assert "no head_dim" in fails(lambda: target(head_dim=None, num_attention_heads=5, num_key_value_heads=5))


def test_eos_ids_are_the_generation_configs_and_the_models():
    assert target({"eos_token_id": [5, 9]}, eos_token_id=9).eos_token_ids == (5, 9)
    assert target(eos_token_id=[4, 2]).eos_token_ids == (4, 2)
    assert target(eos_token_id=None).eos_token_ids == ()
    assert target(bos_token_id=3).bos_token_id == 3


def test_the_language_models_own_section_comes_first():
    inner = target_json(
        TARGET, architectures=MISSING, max_position_embeddings=MISSING, tie_word_embeddings=False
    )
    outer = {"architectures": ["SomeVisionModel"], "tie_word_embeddings": True, "max_position_embeddings": 77}
    cfg = read_target_config({**outer, "text_config": inner}, {}, "config.json")
    assert not cfg.tie_word_embeddings
    assert cfg.max_position == 77
    assert cfg.block == TARGET.block


@pytest.mark.parametrize(
    "unused",
    [
        {"sliding_window": 64},
        {"sliding_window": 64, "use_sliding_window": False},
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 5},
        {"sliding_window": 64, "layer_types": ["full_attention"] * 5},
    ],
    ids=repr,
)
def test_a_window_that_no_layer_uses_does_not_matter(unused):
    assert target(**unused) == TARGET


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4},
        {"sliding_window": 64, "layer_types": ["full_attention"] * 4 + ["sliding_attention"]},
    ],
    ids=repr,
)
def test_a_sliding_window_is_read_layer_by_layer(changes):
    assert target(**changes).windows == (0, 0, 0, 0, 64)
    assert "asks for sliding_attention (window 64)" in fails(check_full_attention, changes, 5, "config.json")


QWEN_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 7, "num_experts_per_tok": 3}
QWEN_MOE |= {"moe_intermediate_size": 11, "intermediate_size": 99, "decoder_sparse_step": 1}
OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 7, "experts_per_token": 3}
OSS |= {"sliding_window": 8, "num_hidden_layers": 4, "swiglu_limit": 5.0}


def test_a_mixture_of_experts_is_read():
    block = target(**QWEN_MOE).block
    assert (block.moe, block.intermediate_size) == (MoeConfig(7, 3, False), 11)
    assert target(**QWEN_MOE, norm_topk_prob=True).block.moe == MoeConfig(7, 3)
    oss = target(**OSS, quantization_config={"quant_method": "mxfp4"})
    assert (oss.block.moe, oss.block.swiglu_limit) == (MoeConfig(7, 3), 5.0)
    assert (oss.windows, oss.cycle) == ((8, 0, 8, 0), 2)


def test_a_window_of_qwen3_moe_is_that_of_all_its_layers():
    windowed = QWEN_MOE | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 4}
    assert target(**windowed).windows == (6,) * 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (QWEN_MOE | {"num_experts": None}, "has no num_experts; expected the number of experts"),
        (QWEN_MOE | {"num_local_experts": 8}, "gives the number of experts twice"),
        (QWEN_MOE | {"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        (QWEN_MOE | {"num_experts_per_tok": 8}, "must be in 1..7 (num_experts), found 8"),
        (QWEN_MOE | {"mlp_only_layers": [1]}, "some layers are dense"),
        (QWEN_MOE | {"decoder_sparse_step": 2}, "some layers are dense"),
        (QWEN_MOE | {"moe_intermediate_size": None}, "has no moe_intermediate_size"),
        (QWEN_MOE | {"shared_expert_intermediate_size": 5}, "has a shared expert of width 5"),
        (QWEN_MOE | {"quantization_config": {"quant_method": "mxfp4"}}, "the weights are quantised (mxfp4)"),
        (OSS | {"quantization_config": {"quant_method": "fp8"}}, "the weights are quantised (fp8)"),
        (OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0; expected 1.702"),
        (OSS | {"swiglu_limit": -1.0}, "swiglu_limit must be positive"),
        (OSS | {"sliding_window": None}, "there is no sliding_window"),
        (OSS | {"sliding_window": 0}, "sliding_window is 0; expected at least 1"),
    ],
    ids=range(14),
)
def test_a_mixture_that_is_not_supported_is_one_line(changes, said):
    assert said in fails(lambda: target(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, "but there is no sliding_window"),
        ({"layer_types": ["linear_attention"] * 5}, "layer_types has linear_attention"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 4 for 5 layers"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types has 6 for 5 layers"),
        (OSS | {"attention_bias": False}, "attention_bias is false; expected true, gpt-oss's q, k, v and o"),
        ({"num_local_experts": 8}, "mixture of experts (num_local_experts 8)"),
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantised (gptq)"),
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' is not supported"),
        ({"architectures": None, "model_type": "gemma3"}, "model_type 'gemma3' is not supported"),
        ({"architectures": None, "model_type": None}, "neither architectures nor model_type"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        ({"hidden_size": MISSING}, "has no hidden_size"),
        ({"num_hidden_layers": "five"}, "num_hidden_layers is 'five'; expected a whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads (4) must be a multiple of num_key_value_heads (3)"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"vocab_size": 0}, "vocab_size must be positive"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; expected a list of token ids, or one"),
    ],
    ids=range(17),
)
def test_what_is_not_supported_is_one_line(changes, said):
    assert said in fails(lambda: target(**changes))


@pytest.mark.parametrize("absent", [0, None])
def test_zero_and_null_experts_mean_none(absent):
    assert target(num_experts=absent) == TARGET
