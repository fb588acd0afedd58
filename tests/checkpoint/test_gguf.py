"""GGUF targets hold the same weights and config as the Hugging Face folder that they came from."""

from __future__ import annotations

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.gguf import GGUFFile, load_params, read_config, read_sampling
from peagle_jax.checkpoint.huggingface import load_folder
from peagle_jax.config import BlockConfig, RopeConfig, TargetConfig
from peagle_jax.layers.rope import inverse_frequencies
from tests.checkpoint.files import (
    MISSING,
    GGUFOptions,
    target_json,
    target_tensors,
    with_fields,
    write_folder,
    write_gguf,
)
from tests.tiny import target_params

Q = gguf.GGMLQuantizationType
CONFIG = TargetConfig(
    family="llama",
    block=BlockConfig(32, 96, 4, 2, 64, 1e-5, RopeConfig(theta=50000.0)),
    vocab_size=257,
    num_layers=3,
    max_position=512,
    eos_token_ids=(7,),
)
PARAMS = target_params(CONFIG)
EXTRAS = {"llama": (), "qwen2": ("bq", "bk", "bv"), "qwen3": ("q_norm", "k_norm")}


def family(name: str) -> tuple[TargetConfig, object]:
    cfg = dataclasses.replace(CONFIG, family=name)
    return cfg, with_fields(PARAMS, cfg, EXTRAS[name])


def load(path, dtype=jnp.float32, stacked=False):
    file = GGUFFile(path)
    cfg = read_config(file)
    return cfg, load_params(file, cfg, dtype, stacked)


def assert_same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def error_of(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_float32_file_equals_the_folder_of_the_same_weights(tmp_path, name):
    cfg, params = family(name)
    ours = load(write_gguf(tmp_path / "m.gguf", cfg, params))
    folder = load_folder(write_folder(tmp_path / "hf", target_json(cfg), target_tensors(params)))
    assert ours[0] == folder[0] == cfg
    assert_same(ours[1], folder[1])
    assert_same(ours[1], params)


def test_llama_biases_are_found_and_put_back_in_order(tmp_path):
    fields = ("bq", "bk", "bv", "bo", "b_gate", "b_up", "b_down")
    params = with_fields(PARAMS, CONFIG, fields)
    _, loaded = load(write_gguf(tmp_path / "m.gguf", CONFIG, params))
    assert_same(loaded, params)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_1, Q.F16, Q.BF16], ids=lambda kind: kind.name)
def test_other_types_are_decoded_as_the_gguf_package_decodes_them(tmp_path, kind):
    matrices = (
        "_q.weight",
        "_k.weight",
        "_v.weight",
        "_output.weight",
        "_gate.weight",
        "_down.weight",
        "embd.weight",
    )
    path = write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, GGUFOptions(kinds=dict.fromkeys(matrices, kind)))
    _, loaded = load(path)

    def rounded(weight):
        stored = np.ascontiguousarray(weight)
        return gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind).reshape(stored.shape)

    for found, original in zip(loaded.layers, PARAMS.layers, strict=True):
        for field in ("wq", "wk", "wv", "wo", "w_gate", "w_down"):
            np.testing.assert_array_equal(getattr(found, field), rounded(getattr(original, field)))
        np.testing.assert_array_equal(found.w_up, original.w_up)
    np.testing.assert_array_equal(loaded.embed, rounded(PARAMS.embed))


def test_stacked_layers_hold_the_same_weights_in_the_asked_dtype(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS)
    _, stacked = load(path, jnp.bfloat16, stacked=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(stacked)} == {jnp.dtype(jnp.bfloat16)}
    expected = jax.tree.map(lambda *w: jnp.stack(w).astype(jnp.bfloat16), *PARAMS.layers)
    assert_same(stacked.layers, expected)


def test_a_file_without_an_output_table_is_tied(tmp_path):
    cfg, params = load(write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, GGUFOptions(drop=("output.weight",))))
    assert cfg.tie_word_embeddings
    assert params.lm_head is None


def test_head_width_and_kv_heads_have_defaults(tmp_path):
    cfg = dataclasses.replace(CONFIG, block=BlockConfig(32, 96, 4, 4, 8, 1e-6, CONFIG.block.rope))
    absent = (
        "attention.key_length",
        "attention.value_length",
        "attention.head_count_kv",
        "rope.dimension_count",
    )
    options = GGUFOptions(extra={f"llama.{key}": MISSING for key in absent})
    assert load(write_gguf(tmp_path / "m.gguf", cfg, target_params(cfg), options))[0] == cfg


def test_eos_ids_are_those_of_every_end_token(tmp_path):
    extra = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.bos_token_id": 3}
    cfg, _ = load(write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, GGUFOptions(extra=extra)))
    assert cfg.eos_token_ids == (7, 9)
    assert cfg.bos_token_id == 3


def test_sampling_defaults_take_hugging_face_names(tmp_path):
    extra = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, GGUFOptions(extra=extra))
    assert read_sampling(GGUFFile(path)) == {"temperature": 0.7, "top_k": 20}


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path):
    rope = RopeConfig(50000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    plain, head_dim = CONFIG.block.rope, CONFIG.block.head_dim
    divisors = inverse_frequencies(plain, head_dim) / inverse_frequencies(rope, head_dim)
    options = GGUFOptions(extra_tensors={"rope_freqs.weight": divisors})
    assert load(write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, options))[0].block.rope == rope
    options = GGUFOptions(extra_tensors={"rope_freqs.weight": divisors**2})
    assert "rope_freqs.weight" in error_of(write_gguf(tmp_path / "other.gguf", CONFIG, PARAMS, options))


def test_yarn_comes_from_the_metadata(tmp_path):
    extra = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    cfg, _ = load(write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, GGUFOptions(extra=extra)))
    assert cfg.block.rope == RopeConfig(50000.0, "yarn", 4.0, original_max_position=128)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.sliding_window": 64}, "sliding-window"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count is 32; expected the head width 64"),
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            "'longrope' is not supported",
        ),
        ({"llama.attention.head_count_kv": 3}, "must be a multiple"),
        ({"llama.feed_forward_length": MISSING}, "no metadata key llama.feed_forward_length"),
        ({"llama.feed_forward_length": 95}, "blk.0.ffn_gate.weight has shape [96, 32]; expected [95, 32]"),
        ({"llama.block_count": 2}, "no place for tensor blk.2.attn_k.weight"),
        ({"llama.block_count": 4}, "no tensor blk.3.attn_norm.weight"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_is_not_supported_is_one_line(tmp_path, extra, said):
    assert said in error_of(write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, GGUFOptions(extra=extra)))


def test_an_unknown_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((3, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "GGUF architecture 'rwkv7' is not supported" in error_of(tmp_path / "m.gguf")
