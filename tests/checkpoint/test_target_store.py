"""Targets in Orbax: the same model as from its folder or its GGUF file."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.gguf import GGUFFile, read_config
from peagle_jax.checkpoint.model import load_target
from peagle_jax.checkpoint.target_store import read_target_facts, store_target, target_json, target_tensors
from peagle_jax.checkpoint.tensors import gguf_name
from peagle_jax.checkpoint.weights import open_weights
from peagle_jax.models import registry
from tests.checkpoint import files
from tests.checkpoint.files import MISSING, GGUFOptions, with_fields, write_folder, write_gguf, write_json
from tests.checkpoint.heads import assert_same
from tests.checkpoint.test_gguf import CONFIG, PARAMS, Q
from tests.tiny import GPT_OSS, TARGET, target_params


@pytest.fixture
def hf_folder(tmp_path):
    tensors = files.target_tensors(target_params())
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    path = write_folder(tmp_path / "model", files.target_json(TARGET), narrow)
    write_json(path / "generation_config.json", {"temperature": 0.6})
    return files.write_tokenizer(path)


def assert_same_target(a, b) -> None:
    assert (a.config, a.generation) == (b.config, b.generation)
    assert_same(a.params, b.params)
    for text in ("a b a", "b"):
        assert a.tokenizer(text)["input_ids"] == b.tokenizer(text)["input_ids"]


def test_a_folder_keeps_its_tensors_and_loads_the_same_in_every_form(tmp_path, hf_folder):
    store_target(str(hf_folder), tmp_path / "orbax")
    before, after = open_weights(hf_folder), open_weights(tmp_path / "orbax")
    assert set(after.names()) == set(before.names())
    for name in before.names():
        assert after.read(name).dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(after.read(name), before.read(name))
    for options in ({}, {"dtype": jnp.bfloat16, "stacked": True}):
        assert_same_target(load_target(tmp_path / "orbax", **options), load_target(hf_folder, **options))
    assert json.loads((tmp_path / "orbax" / "orbax.json").read_text())["format_version"] == 1


def mixture_file(path, family):
    """A mixture's GGUF file. The tiny one's is gpt-oss's; Qwen's has norms of q and k, and no biases."""
    oss, params = family == "gpt_oss", target_params(GPT_OSS)
    d, f, moe = GPT_OSS.block.hidden_size, GPT_OSS.block.intermediate_size, GPT_OSS.block.moe
    arch = registry.by_name(family).gguf_architectures[0]
    tensors = {}
    for i, layer in enumerate(params.layers):
        for field in registry.by_name(family).layer_fields({}):
            value = getattr(layer, field)
            value = np.full((GPT_OSS.block.head_dim,), 1.0 + i) if value is None else value
            tensors[gguf_name(field, i, registry.by_name(family))] = np.asarray(value)
        for part in ("gate", "up", "down"):
            tensors[f"blk.{i}.ffn_{part}_exps.weight"] = np.asarray(getattr(layer.experts, part))
            if oss:
                tensors[f"blk.{i}.ffn_{part}_exps.bias"] = np.asarray(getattr(layer.experts, f"{part}_bias"))
    extra = {
        f"{arch}.expert_count": moe.num_experts,
        f"{arch}.expert_used_count": moe.top_k,
        f"{arch}.expert_feed_forward_length": f,
        f"{arch}.feed_forward_length": MISSING,
    }
    extra |= {f"{arch}.attention.sliding_window": 8} if oss else {}
    vocab = GPT_OSS.vocab_size
    cfg = dataclasses.replace(GPT_OSS, family=arch)
    tables = {name: getattr(params, name) for name in ("embed", "lm_head")}
    pad = {
        name: np.pad(np.asarray(w), ((0, CONFIG.vocab_size - vocab), (0, 0))) for name, w in tables.items()
    }
    assert pad["embed"].shape == (CONFIG.vocab_size, d)
    whole = params.replace(layers=(), **pad)
    return write_gguf(path, cfg, whole, GGUFOptions(extra=extra, extra_tensors=tensors))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_mixture_of_a_gguf_file_loads_the_same(tmp_path, family):
    path = mixture_file(tmp_path / "m.gguf", family)
    store_target(str(path), tmp_path / "orbax")
    ours, theirs = load_target(tmp_path / "orbax"), load_target(path)
    assert theirs.config.family == family and theirs.config.block.moe is not None
    assert (theirs.config.windows != ()) == (family == "gpt_oss")
    assert ours.config == theirs.config
    assert_same(ours.params, theirs.params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gguf_file_loads_the_same(tmp_path, dtype):
    options = GGUFOptions(kinds={"ffn_up.weight": Q.Q4_0}, extra={"general.sampling.temp": 0.5})
    path = write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, options)
    store_target(str(path), tmp_path / "orbax")
    ours, theirs = load_target(tmp_path / "orbax", dtype=dtype), load_target(path, dtype=dtype)
    assert_same(ours.params, theirs.params)
    assert (ours.config, ours.generation) == (theirs.config, theirs.generation)
    for text in ("12 é", "  x"):
        ids = ours.tokenizer(text)["input_ids"]
        assert ids == theirs.tokenizer(text)["input_ids"]
        assert ours.tokenizer.decode(ids) == theirs.tokenizer.decode(ids)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_written_config_reads_back(tmp_path, family):
    extra = {"llama": ("bq", "bk", "bv", "bo"), "qwen2": ("bq", "bk", "bv"), "qwen3": ("q_norm", "k_norm")}
    cfg = dataclasses.replace(TARGET, family=family)
    params = with_fields(target_params(), cfg, extra[family])
    write_folder(tmp_path, target_json(cfg, params), target_tensors(cfg, params))
    facts = read_target_facts(str(tmp_path))
    assert facts.config == cfg
    files.write_tokenizer(tmp_path)
    assert_same(load_target(tmp_path).params, params)


def test_facts_have_tables_without_layers(tmp_path, hf_folder):
    facts = read_target_facts(str(hf_folder))
    assert (facts.config, facts.architectures) == (TARGET, ("LlamaForCausalLM",))
    np.testing.assert_array_equal(facts.table("lm_head"), target_params().lm_head.astype(jnp.bfloat16))
    path = write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, GGUFOptions(drop=("output.weight",)))
    facts = read_target_facts(str(path))
    assert facts.config == read_config(GGUFFile(path)) and facts.config.tie_word_embeddings
    np.testing.assert_array_equal(facts.table("lm_head"), PARAMS.embed)
    assert facts.tables().layers == ()


def test_a_target_that_is_not_supported_or_cut_is_not_written(tmp_path, hf_folder):
    write_json(hf_folder / "config.json", files.target_json(TARGET, hidden_act="gelu"))
    with pytest.raises(CheckpointError, match="hidden_act"):
        store_target(str(hf_folder), tmp_path / "orbax")
    weights = hf_folder / "model.safetensors"
    write_json(hf_folder / "config.json", files.target_json(TARGET))
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        store_target(str(hf_folder), tmp_path / "orbax")
    assert not (tmp_path / "orbax").exists()
