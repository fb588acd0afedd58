"""Loading heads of every layout, and one line about each that cannot be right."""

from __future__ import annotations

import dataclasses
import logging

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from peagle_jax.checkpoint.errors import CheckpointError
from tests.checkpoint.files import MISSING
from tests.checkpoint.heads import (
    SAME_WIDTH,
    TARGET_PARAMS,
    assert_same,
    rename,
    saved_head,
    to_aws,
    to_nemo,
    to_speculators,
    to_vllm_names,
    without_own_keys,
)
from tests.checkpoint.test_pickles import save as save_torch
from tests.tiny import TARGET

LAYOUTS = [without_own_keys, to_aws, to_nemo, to_speculators, to_vllm_names]


def fails(saved, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        saved.load(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("taps", [(0, 2, 5), (2, 3, 4, 5)])
def test_every_layout_is_the_same_head(tmp_path, layout, taps):
    saved = saved_head(tmp_path / "head", num_layers=3, taps=taps, num_depths=6).edit(layout)
    cfg, params = saved.load()
    assert cfg == saved.cfg
    assert_same(params, saved.params)


@pytest.mark.parametrize("shape", [(36,), (1, 36), (1, 1, 36)])
def test_mask_hidden_may_have_one_two_or_three_axes(tmp_path, shape):
    def change(config, tensors):
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(shape)

    saved = saved_head(tmp_path / "head").edit(change)
    np.testing.assert_array_equal(saved.load()[1].mask_hidden, saved.params.mask_hidden)


@pytest.mark.parametrize(
    "keys",
    [
        {"mask_token_id": 40},
        {"ptd_token_id": 40},
        {"pard_token": 40},
        {"unused_token_id": 40},
        {"dspark_noise_token_id": 40},
        {"dflash_config": {"mask_token_id": 40}},
        {"mask_token_id": 40, "pard_token": 40, "ptd_token_id": None},
    ],
    ids=repr,
)
def test_the_mask_token_has_many_names(tmp_path, keys):
    absent = dict.fromkeys(("mask_token_id", "ptd_token_id", "pard_token"), MISSING)
    assert saved_head(tmp_path / "head").edit(**(absent | keys)).load()[0].mask_token_id == 40


def test_a_mask_token_of_zero_is_a_token(tmp_path):
    keys = dict.fromkeys(("mask_token_id", "ptd_token_id", "pard_token"), 0)
    assert saved_head(tmp_path / "head").edit(**keys).load()[0].mask_token_id == 0


def test_a_head_without_mask_token_and_mask_hidden_is_eagle3(tmp_path):
    cfg, params = saved_head(tmp_path / "head", "eagle3").load()
    assert (cfg.method, cfg.num_depths, cfg.mask_token_id, params.mask_hidden) == ("eagle3", 1, None, None)


def test_zero_optional_counts_mean_none(tmp_path):
    saved = saved_head(tmp_path / "head").edit(num_nextn_predict_layers=0, num_aux_hidden_states=0)
    assert saved.load()[0] == saved.cfg


@pytest.mark.parametrize(
    ("ids", "options", "taps"),
    [
        ([2, 3, 4], {}, (2, 3, 4)),
        ([1, 2, 4], {}, (2, 3, 5)),
        ([1, 2, 4], {"convention": "boundary"}, (1, 2, 4)),
        ([0, 2, 4], {"convention": "output"}, (1, 3, 5)),
        ([0, 2, 4], {}, (0, 2, 4)),
        ([0, 2, 4], {"taps": (3, 4, 5)}, (3, 4, 5)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_layer_ids_become_boundaries(tmp_path, ids, options, taps, nested):
    flat, inner = (None, ids) if nested else (ids, None)
    keys = {
        "eagle_aux_hidden_state_layer_ids": flat,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": inner, "use_aux_hidden_state": True},
        "peagle_jax": MISSING,
    }
    assert saved_head(tmp_path / "head").edit(**keys).load(**options)[0].taps == taps


def test_our_own_taps_are_boundaries_whatever_they_start_with(tmp_path):
    assert saved_head(tmp_path / "head", taps=(1, 3, 5)).load()[0].taps == (1, 3, 5)
    assert saved_head(tmp_path / "head", taps=(1, 3, 5)).load(convention="output")[0].taps == (1, 3, 5)


def test_speculators_ids_are_boundaries_whatever_they_start_with(tmp_path):
    saved = saved_head(tmp_path / "head", taps=(1, 3, 5)).edit(to_speculators)
    assert saved.load()[0].taps == (1, 3, 5)


@pytest.mark.parametrize("ids", [None, [], MISSING])
def test_unnamed_taps_are_the_default_and_said(tmp_path, caplog, ids):
    deep = dataclasses.replace(TARGET, num_layers=9)
    saved = saved_head(tmp_path / "head", target=deep)
    saved.edit(eagle_aux_hidden_state_layer_ids=ids, eagle_config=None, peagle_jax=MISSING)
    with caplog.at_level(logging.WARNING):
        assert saved.load()[0].taps == (2, 4, 6)
    assert "names no tapped layers; using the default boundaries (2, 4, 6)" in caplog.text


def test_the_draft_vocabulary_is_inferred_from_the_weights(tmp_path):
    saved = saved_head(tmp_path / "head").edit(draft_vocab_size=MISSING)
    assert saved.load()[0].draft_vocab_size == 31


@pytest.mark.parametrize("offsets", [None, np.zeros(53, np.int64)], ids=["no map", "zeros"])
def test_a_full_vocabulary_needs_no_map(tmp_path, offsets):
    def change(config, tensors):
        if offsets is not None:
            tensors["d2t"], tensors["t2d"] = offsets, np.ones(53, bool)

    saved = saved_head(tmp_path / "head", draft_vocab=53).edit(change)
    assert saved.load()[1].draft_to_target is None


def test_an_equal_embedding_is_the_targets_own_array(tmp_path):
    saved = saved_head(tmp_path / "head", block=SAME_WIDTH)

    def stored(table):
        return lambda config, tensors: tensors.update({"embed_tokens.weight": table})

    embed = np.asarray(TARGET_PARAMS.embed)
    for same in (embed, embed.astype(ml_dtypes.bfloat16)):
        assert saved.edit(stored(same)).load()[1].embed is TARGET_PARAMS.embed
    different = saved.edit(stored(embed + np.float32(0.1))).load()[1].embed
    np.testing.assert_array_equal(different, embed + np.float32(0.1))


def test_a_heads_own_output_table_is_kept_and_an_absent_one_is_the_targets(tmp_path):
    saved = saved_head(tmp_path / "head", draft_vocab=53, block=SAME_WIDTH)
    np.testing.assert_array_equal(saved.load()[1].lm_head, saved.params.lm_head)
    saved.edit(lambda config, tensors: tensors.pop("lm_head.weight"))
    assert saved.load()[1].lm_head is TARGET_PARAMS.lm_head
    saved.target_params = TARGET_PARAMS.replace(lm_head=None)
    assert saved.load()[1].lm_head is TARGET_PARAMS.embed


def test_biases_are_decided_by_the_tensors(tmp_path):
    def change(config, tensors):
        tensors["fc.bias"] = np.arange(10, dtype=np.float32)
        tensors["layers.0.self_attn.q_proj.bias"] = np.arange(24, dtype=np.float32)
        del config["attention_bias"]

    params = saved_head(tmp_path / "head").edit(change).load()[1]
    np.testing.assert_array_equal(params.fc_bias, np.arange(10))
    np.testing.assert_array_equal(params.layers[0].bq, np.arange(24))
    assert params.layers[1].bq is None


def test_float_weights_take_the_asked_dtype(tmp_path):
    params = saved_head(tmp_path / "head").load(dtype=jnp.bfloat16)[1]
    assert {params.fc.dtype, params.mask_hidden.dtype, params.layers[1].w_up.dtype} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert params.draft_to_target.dtype == jnp.int32


def test_an_unstated_depth_is_the_papers_and_said(tmp_path, caplog):
    saved = saved_head(tmp_path / "head", num_depths=5).edit(num_depths=MISSING)
    assert saved.load()[0].num_depths == 8
    assert "does not say num_depths" in caplog.text


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.1.mlp.up_proj.weight", "norm.weight", "embed_tokens.weight"]
)
def test_a_missing_tensor_is_named_with_its_shape(tmp_path, name):
    message = fails(saved_head(tmp_path / "head").edit(lambda config, tensors: tensors.pop(name)))
    assert f"has no tensor {name}" in message


def test_a_renamed_layer_is_named_as_the_file_names_it(tmp_path):
    def change(config, tensors):
        to_aws(config, tensors)
        tensors["midlayer.self_attn.k_proj.weight"] = np.zeros((12, 19), np.float32)

    message = fails(saved_head(tmp_path / "head", taps=(0, 2, 5)).edit(change))
    assert "midlayer.self_attn.k_proj.weight has shape [12, 19]; expected [12, 20]" in message


TENSOR_CASES = {
    "one too many": (lambda t: t.update(odd=np.zeros(2)), "no place for tensor odd"),
    "a layer too many": (
        lambda t: t.update({"layers.2.input_layernorm.weight": np.zeros(10)}),
        "no place for tensor layers.2.input_layernorm.weight",
    ),
    "two spellings": (
        lambda t: t.update({"model.norm.weight": t["norm.weight"]}),
        "no place for tensor model.norm.weight",
    ),
    "an unannounced norm": (
        lambda t: t.update({"input_norm.weight": np.zeros(36)}),
        "norm_before_fc is False but input_norm.weight is there",
    ),
    "an int8 weight": (
        lambda t: t.update({"norm.weight": np.zeros(10, np.int8)}),
        "tensor norm.weight is int8, a quantised weight",
    ),
    "mask_hidden of the head's width": (
        lambda t: t.update(mask_hidden=np.zeros((1, 30), np.float32)),
        "mask_hidden has shape [1, 30]; expected [1, 1, 36]",
    ),
    "no mask_hidden": (
        lambda t: t.pop("mask_hidden"),
        "has no tensor mask_hidden, but its config is P-EAGLE's",
    ),
    "no map": (lambda t: t.pop("d2t"), "drafts 31 of 53 tokens but has no tensor d2t"),
    "another model's taps": (
        lambda t: t.update({"fc.weight": np.zeros((10, 39), np.float32)}),
        "fc.weight takes 39, no multiple of the target's width 12",
    ),
    "two taps": (
        lambda t: t.update({"fc.weight": np.zeros((10, 24), np.float32)}),
        "3 tapped layers [1, 3, 5], but fc.weight is as wide as 2",
    ),
    "fewer output rows": (
        lambda t: t.update({"lm_head.weight": np.zeros((30, 10), np.float32)}),
        "draft_vocab_size = 31 but the rows of lm_head.weight = 30",
    ),
}


@pytest.mark.parametrize("case", TENSOR_CASES)
def test_tensors_that_cannot_be_right_are_one_line(tmp_path, case):
    change, said = TENSOR_CASES[case]
    assert said in fails(saved_head(tmp_path / "head").edit(lambda config, tensors: change(tensors)))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"vocab_size": 64}, "vocab_size is 64 but the target has 53; the head is for another model"),
        ({"target_hidden_size": 16}, "target_hidden_size is 16 but the target has 12"),
        ({"pard_token": 3}, "mask_token_id = 51 but pard_token = 3"),
        ({"ptd_token_id": None, "pard_token": None, "mask_token_id": None}, "has no mask token id"),
        ({"ptd_token_id": 53, "pard_token": 53, "mask_token_id": 53}, "mask token id 53 is outside"),
        ({"draft_vocab_size": 32}, "draft_vocab_size = 32 but the rows of lm_head.weight = 31"),
        ({"num_hidden_layers": 3}, "has no tensor layers.2."),
        ({"hidden_size": 8}, "expected"),
        ({"attention_bias": True}, "has no tensor layers.0.self_attn.q_proj.bias"),
        ({"norm_before_fc": True}, "norm_before_fc is True but input_norm.weight is missing"),
        ({"architectures": ["PeagleQwen3ForCausalLM"]}, "has no tensor layers.0.self_attn.q_norm.weight"),
        (
            {
                "peagle_jax": {"taps": [1, 3, 6]},
                "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
                "eagle_config": {},
            },
            "taps [1, 3, 6] are not boundaries of a target of 5 layers",
        ),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4 but fc.weight is as wide as 3 taps"),
    ],
    ids=range(13),
)
def test_a_config_that_contradicts_the_weights_is_one_line(tmp_path, keys, said):
    assert said in fails(saved_head(tmp_path / "head").edit(**keys))


def test_an_eagle3_head_marked_parallel_lacks_mask_hidden(tmp_path):
    saved = saved_head(tmp_path / "head", "eagle3").edit(parallel_drafting=True)
    assert "has no tensor mask_hidden" in fails(saved)


def test_an_eagle1_head_is_recognised(tmp_path):
    def change(config, tensors):
        rename(tensors, lambda name: name)
        for name in ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight"):
            del tensors[name]
        for name in ("mask_hidden", "d2t", "t2d", "lm_head.weight"):
            tensors.pop(name, None)
        tensors["fc.weight"] = np.zeros((12, 24), np.float32)
        for part in "qkv":
            name = f"layers.0.self_attn.{part}_proj.weight"
            tensors[name] = np.ascontiguousarray(tensors[name][:, :12])

    saved = saved_head(tmp_path / "head", "eagle3", block=SAME_WIDTH, num_layers=1).edit(change)
    message = fails(saved)
    assert "looks like an EAGLE-1 head (fc.weight takes 24, no hidden_norm)" in message
    assert "mask_hidden" in message


def test_taps_given_by_the_caller_are_checked(tmp_path):
    saved = saved_head(tmp_path / "head")
    assert "the taps option: 2 tapped layers [1, 2]" in fails(saved, taps=(1, 2))
    assert "taps [1, 2, 9] are not boundaries" in fails(saved, taps=(1, 2, 9))


def test_unnamed_taps_of_another_count_must_be_given(tmp_path):
    saved = saved_head(tmp_path / "head", taps=(1, 2, 3, 4))
    saved.edit(eagle_aux_hidden_state_layer_ids=None, eagle_config=None, peagle_jax=MISSING)
    assert "names no tapped layers and fc.weight takes 4" in fails(saved)
    assert saved.load(taps=(1, 2, 3, 5))[0].taps == (1, 2, 3, 5)


def test_a_folder_of_pickles_loads_and_other_files_are_named(tmp_path):
    saved = saved_head(tmp_path / "head")
    weights = saved.folder / "model.safetensors"
    save_torch(saved.folder / "pytorch_model.bin", load_file(weights))
    weights.rename(saved.folder / "head.pt")
    assert_same(saved.load()[1], saved.params)
    (saved.folder / "pytorch_model.bin").unlink()
    assert "convert head.pt to safetensors first" in fails(saved)


def test_an_absolute_map_loads_when_it_is_said(tmp_path):
    def change(config, tensors):
        tensors["d2t"] = tensors["d2t"] + np.arange(31)

    saved = saved_head(tmp_path / "head").edit(change)
    assert "peagle_jax.convert --d2t absolute rewrites it" in fails(saved)
    assert_same(saved.load(map_kind="absolute")[1], saved.params)
    whole = saved_head(tmp_path / "head")
    assert "d2t cannot hold target ids" in fails(whole, map_kind="absolute")


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.self_attn.q_proj.weight", "lm_head.weight", "d2t"])
def test_a_single_number_in_place_of_an_array_is_named(tmp_path, name):
    def change(config, tensors):
        tensors[name] = np.asarray(tensors[name].flat[0])

    message = fails(saved_head(tmp_path / "head").edit(change))
    assert f"tensor {name}" in message


def test_taps_that_our_key_and_vllms_give_differently_are_refused(tmp_path):
    saved = saved_head(tmp_path / "head").edit(eagle_aux_hidden_state_layer_ids=[0, 2, 4], eagle_config={})
    said = fails(saved)
    assert "gives the tapped layers twice: peagle_jax.taps = [1, 3, 5] but eagle_aux" in said
    assert "[0, 2, 4]" in said


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda k: np.dtype(k).name)
def test_weights_that_are_not_finite_are_refused(tmp_path, kind, value):
    def change(config, tensors):
        tensors["fc.weight"] = tensors["fc.weight"].astype(kind)
        tensors["fc.weight"][3, 2] = value

    assert "tensor fc.weight holds NaN or infinity" in fails(saved_head(tmp_path / "head").edit(change))


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16], ids=lambda k: np.dtype(k).name)
def test_the_largest_finite_weights_load(tmp_path, kind):
    largest = ml_dtypes.finfo(kind).max

    def change(config, tensors):
        tensors["fc.weight"] = tensors["fc.weight"].astype(kind)
        tensors["fc.weight"][3, 2] = largest

    params = saved_head(tmp_path / "head").edit(change).load()[1]
    assert float(params.fc[3, 2]) == float(largest)
