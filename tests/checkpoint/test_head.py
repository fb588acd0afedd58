"""Saving a head: the layout that vLLM loads, all of it or nothing, and the same head back."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import peagle_jax
from peagle_jax.checkpoint import head, layouts
from peagle_jax.checkpoint.config_reader import read_rope
from peagle_jax.checkpoint.config_writer import rope_section
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.config import BlockConfig, RopeConfig
from tests.checkpoint.heads import SAME_WIDTH, TARGET_PARAMS, Saved, assert_same, saved_head
from tests.tiny import TARGET, head_config, head_params

ROPES = [
    RopeConfig(theta=500.0),
    RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
    RopeConfig(1e4, "linear", 2.5),
    RopeConfig(150000.0, "yarn", 32.0, original_max_position=4096, truncate=False, attention_factor=1.3),
    RopeConfig(1e4, "yarn", 40.0, original_max_position=4096, beta_fast=16.0, mscale=0.7, mscale_all_dim=0.6),
]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "eagle3", "num_layers": 1},
        {"norm_before_residual": True, "norm_before_fc": True, "taps": (0, 2, 4, 5)},
        {"draft_vocab": 53, "num_depths": 5, "num_layers": 4},
    ],
    ids=["p-eagle", "eagle3", "options", "full vocabulary"],
)
def test_a_saved_head_loads_as_it_was(tmp_path, changes):
    saved = saved_head(tmp_path / "head", **changes)
    cfg, params = saved.load()
    assert cfg == saved.cfg
    assert_same(params, saved.params)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.variant)
def test_every_rope_setting_survives(tmp_path, rope):
    block = dataclasses.replace(head_config().block, rope=rope)
    assert saved_head(tmp_path / "head", block=block).load()[0].block.rope == rope
    section = {"rope_theta": rope.theta, "rope_scaling": rope_section(rope)}
    assert read_rope(section, "config.json") == rope


def test_biases_and_head_norms_survive_and_are_declared(tmp_path):
    rng, cfg = np.random.default_rng(0), head_config()
    params, block = head_params(cfg), cfg.block
    sizes = {"bq": 24, "bk": 12, "bv": 12, "bo": 10, "b_gate": 14, "b_up": 14, "b_down": 10}
    sizes |= {"q_norm": block.head_dim, "k_norm": block.head_dim}
    layers = tuple(
        layer.replace(**{f: jnp.asarray(rng.normal(size=n), jnp.float32) for f, n in sizes.items()})
        for layer in params.layers
    )
    params = params.replace(layers=layers, fc_bias=jnp.arange(10.0))
    saved = saved_head(tmp_path / "head", params=params)
    assert_same(saved.load()[1], params)
    config = json.loads((saved.folder / "config.json").read_text())
    assert (config["attention_bias"], config["mlp_bias"], config["model_type"]) == (True, True, "qwen3")
    assert config["architectures"] == ["PeagleQwen3ForCausalLM"]


def test_the_tensors_are_named_shaped_and_typed_as_vllm_reads_them(tmp_path):
    cfg = head_config()
    params = head_params(cfg)
    head.save_head(tmp_path / "head", cfg, params, target=TARGET, share_embed=False)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    blocks = {"q": 24, "k": 12, "v": 12}
    expected = {f"layers.0.self_attn.{n}_proj.weight": (rows, 20) for n, rows in blocks.items()}
    expected |= {f"layers.1.self_attn.{n}_proj.weight": (rows, 10) for n, rows in blocks.items()}
    for i in (0, 1):
        expected |= {f"layers.{i}.{n}.weight": (10,) for n in ("input_layernorm", "post_attention_layernorm")}
        expected |= {f"layers.{i}.mlp.{n}_proj.weight": (14, 10) for n in ("gate", "up")}
        expected |= {
            f"layers.{i}.mlp.down_proj.weight": (10, 14),
            f"layers.{i}.self_attn.o_proj.weight": (10, 24),
        }
    expected |= {"fc.weight": (10, 36), "mask_hidden": (1, 1, 36), "layers.0.hidden_norm.weight": (10,)}
    expected |= {"norm.weight": (10,), "lm_head.weight": (31, 10), "embed_tokens.weight": (53, 10)}
    assert {n: a.shape for n, a in tensors.items()} == expected | {"d2t": (31,), "t2d": (53,)}
    assert {a.dtype for n, a in tensors.items() if n not in ("d2t", "t2d")} == {np.dtype(jnp.bfloat16)}
    assert tensors["d2t"].dtype == np.int64
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(31), params.draft_to_target)
    assert tensors["t2d"].dtype == bool
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), params.draft_to_target)
    np.testing.assert_array_equal(tensors["fc.weight"], np.asarray(params.fc.astype(jnp.bfloat16)))


def test_the_config_has_every_key_that_loaders_look_for(tmp_path):
    rope = ROPES[1]
    block = BlockConfig(10, 14, 6, 3, 4, 1e-5, rope)
    cfg = head_config(block=block)
    params = head_params(cfg)
    metadata = {"trained_on": "a set", "taps": "not these"}
    head.save_head(tmp_path / "h", cfg, params, target=TARGET, metadata=metadata, share_embed=False)
    config = json.loads((tmp_path / "h" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["ptd_token_id"] == config["pard_token"] == config["mask_token_id"] == 51
    assert config["parallel_drafting"] is True
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    }
    assert config["peagle_jax"] == {"trained_on": "a set", "taps": [1, 3, 5], "format_version": 1}
    assert config["torch_dtype"] == "bfloat16"
    expected = {
        "model_type": "llama",
        "hidden_size": 10,
        "target_hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "intermediate_size": 14,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "max_position_embeddings": 256,
        "vocab_size": 53,
        "draft_vocab_size": 31,
        "num_depths": 8,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
    }
    assert {key: config[key] for key in expected} == expected


def test_an_eagle3_head_is_not_marked_parallel(tmp_path):
    saved = saved_head(tmp_path / "head", "eagle3")
    config = json.loads((saved.folder / "config.json").read_text())
    parallel = {"parallel_drafting", "num_depths", "mask_token_id", "ptd_token_id", "pard_token"}
    assert parallel.isdisjoint(config)


def test_a_shared_embedding_is_left_out_and_comes_back_as_the_targets_array(tmp_path):
    saved = saved_head(tmp_path / "head", share_embed=True, block=SAME_WIDTH)
    assert "embed_tokens.weight" not in load_file(saved.folder / "model.safetensors")
    assert saved.load()[1].embed is TARGET_PARAMS.embed


def test_bfloat16_is_the_default_and_loads_in_the_asked_dtype(tmp_path):
    cfg = head_config()
    params = head_params(cfg)
    head.save_head(tmp_path / "head", cfg, params, target=TARGET, share_embed=False)
    _, loaded = Saved(tmp_path / "head", cfg, params).load(dtype=jnp.bfloat16)
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, params)
    assert_same(loaded, rounded)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fc": jnp.zeros((10, 35))}, "fc.weight has shape [10, 35]; expected [10, 36]"),
        ({"mask_hidden": None}, "needs mask_hidden of shape [36]"),
        ({"draft_to_target": None}, "needs draft_to_target of shape [31]"),
        ({"layers": ()}, "0 layers to save; expected 2"),
    ],
    ids=["a wrong width", "no mask_hidden", "no map", "no layers"],
)
def test_a_head_that_would_not_load_is_not_written(tmp_path, changes, said):
    cfg = head_config()
    with pytest.raises(CheckpointError) as caught:
        head.save_head(
            tmp_path / "head", cfg, head_params(cfg).replace(**changes), target=TARGET, share_embed=False
        )
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_embedding_of_another_width_cannot_be_shared(tmp_path):
    cfg = head_config()
    with pytest.raises(CheckpointError, match="a head of width 10 cannot share the embedding"):
        head.save_head(tmp_path / "head", cfg, head_params(cfg), target=TARGET, share_embed=True)


def test_a_failed_save_leaves_the_old_head(tmp_path, monkeypatch):
    saved = saved_head(tmp_path / "head")
    before = {p.name: p.read_bytes() for p in saved.folder.iterdir()}

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layouts, "save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*: .*No space left on device"):
        head.save_head(saved.folder, saved.cfg, saved.params, target=TARGET, share_embed=False)
    assert {p.name: p.read_bytes() for p in saved.folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_saving_again_replaces_the_head_and_keeps_other_files(tmp_path):
    saved = saved_head(tmp_path / "head")
    (saved.folder / "README.md").write_text("about")
    again = saved_head(tmp_path / "head", "eagle3", num_layers=1)
    assert again.load()[0] == again.cfg
    assert sorted(p.name for p in again.folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("place", ["peagle_jax/_heads", "heads"])
def test_the_default_head_is_found_in_a_wheel_and_in_a_checkout(tmp_path, monkeypatch, place):
    (tmp_path / "peagle_jax").mkdir()
    monkeypatch.setattr(peagle_jax, "__file__", str(tmp_path / "peagle_jax" / "__init__.py"))
    assert head.default_head_path() is None
    folder = tmp_path / place / "smollm2-135m-instruct-p-eagle"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert head.default_head_path() == folder
