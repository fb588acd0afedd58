"""Targets from Hugging Face folders: every tensor has a place, and every place a tensor."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.huggingface import load_folder, load_tokenizer, read_generation
from peagle_jax.models.stack import stack_layers
from tests.checkpoint.files import (
    MISSING,
    target_json,
    target_tensors,
    with_fields,
    write_folder,
    write_json,
    write_shards,
    write_tokenizer,
)
from tests.checkpoint.heads import assert_same
from tests.tiny import TARGET, target_params

PARAMS = target_params()
TENSORS = target_tensors(PARAMS)
QKV = ("bq", "bk", "bv")
MLP = ("b_gate", "b_up", "b_down")
CASES = {
    "llama": ((), {}),
    "llama with biases": ((*QKV, "bo", *MLP), {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (QKV, {}),
    "qwen3": (("q_norm", "k_norm"), {}),
    "qwen3 with biases": (("q_norm", "k_norm", *QKV, "bo"), {"attention_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("write", [write_folder, write_shards])
def test_every_family_loads_as_it_was_written(tmp_path, case, write):
    fields, flags = CASES[case]
    cfg = dataclasses.replace(TARGET, family=case.split()[0])
    params = with_fields(PARAMS, cfg, fields)
    found, loaded = load_folder(write(tmp_path, target_json(cfg, **flags), target_tensors(params)))
    assert found == cfg
    assert_same(loaded, params)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_take_the_asked_dtype_and_form(tmp_path, stored):
    tensors = {name: array.astype(stored) for name, array in TENSORS.items()}
    write_folder(tmp_path, target_json(TARGET), tensors)
    _, loaded = load_folder(tmp_path, jnp.bfloat16, stacked=True)
    expected = jax.tree.map(lambda w: w.astype(stored).astype(jnp.bfloat16), PARAMS)
    assert_same(loaded, stack_layers(expected))


def fails(tmp_path, tensors=TENSORS, **changes) -> str:
    write_folder(tmp_path, target_json(TARGET, **changes), tensors)
    with pytest.raises(CheckpointError) as caught:
        load_folder(tmp_path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.4.mlp.up_proj.weight", "lm_head.weight"]
)
def test_a_missing_tensor_is_named_with_its_shape(tmp_path, name):
    message = fails(tmp_path, {n: a for n, a in TENSORS.items() if n != name})
    assert f"has no tensor {name}; expected one of shape {list(TENSORS[name].shape)}" in message


def test_a_wrong_shape_is_named_with_both(tmp_path):
    name = "model.layers.2.self_attn.k_proj.weight"
    message = fails(tmp_path, TENSORS | {name: np.zeros((11, 12), np.float32)})
    assert f"tensor {name} has shape [11, 12]; expected [12, 12] from the config" in message


def test_a_tensor_without_a_place_is_named(tmp_path):
    odd = {f"model.layers.{i}.mlp.router.weight": np.zeros(2, np.float32) for i in range(5)}
    message = fails(tmp_path, TENSORS | odd)
    assert "no place for tensor model.layers.0.mlp.router.weight, model.layers.1" in message
    assert "and 2 more" in message


def test_biases_that_the_config_does_not_announce_have_no_place(tmp_path):
    message = fails(tmp_path, target_tensors(with_fields(PARAMS, TARGET, ("bq",))))
    assert "no place for tensor model.layers.0.self_attn.q_proj.bias" in message


def test_a_quantised_weight_is_refused(tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    assert "is int8, a quantised weight" in fails(tmp_path, TENSORS | {name: TENSORS[name].astype(np.int8)})
    narrow = TENSORS[name].astype(ml_dtypes.float8_e4m3fn)
    assert "a quantised weight" in fails(tmp_path, TENSORS | {name: narrow})


def test_saved_rotary_frequencies_are_ignored(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32)}
    assert load_folder(write_folder(tmp_path, target_json(TARGET), TENSORS | extra))[0] == TARGET


def test_a_tied_model_has_no_output_table(tmp_path):
    tied = {name: array for name, array in TENSORS.items() if name != "lm_head.weight"}
    cfg, params = load_folder(write_folder(tmp_path, target_json(TARGET, tie_word_embeddings=True), tied))
    assert cfg.tie_word_embeddings
    assert params.lm_head is None


def test_an_output_table_is_tied_only_when_it_equals_the_embedding(tmp_path, caplog):
    config = target_json(TARGET, tie_word_embeddings=True)
    same = TENSORS | {"lm_head.weight": TENSORS["model.embed_tokens.weight"].copy()}
    assert load_folder(write_folder(tmp_path / "same", config, same))[1].lm_head is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        cfg, params = load_folder(write_folder(tmp_path / "own", config, TENSORS))
    assert not cfg.tie_word_embeddings
    np.testing.assert_array_equal(params.lm_head, PARAMS.lm_head)
    assert "using lm_head.weight" in caplog.text


def test_generation_defaults_are_read_and_optional(tmp_path):
    assert read_generation(tmp_path) == {}
    values = {"eos_token_id": [3, 4], "temperature": 0.7, "top_k": 20}
    write_json(tmp_path / "generation_config.json", values)
    assert read_generation(tmp_path) == values
    write_folder(tmp_path, target_json(TARGET, eos_token_id=MISSING), TENSORS)
    assert load_folder(tmp_path)[0].eos_token_ids == (3, 4)


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path):
    assert load_tokenizer(write_tokenizer(tmp_path / "has")).vocab_size == 3
    write_json(tmp_path / "lacks" / "config.json", target_json(TARGET))
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path / "lacks")
    assert "has no tokenizer that loads" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["false", 0, []], ids=repr)
def test_a_bias_flag_is_true_or_false(tmp_path, value):
    folder = write_folder(tmp_path, target_json(TARGET, attention_bias=value), TENSORS)
    with pytest.raises(CheckpointError, match="attention_bias is .*; expected true or false"):
        load_folder(folder)
