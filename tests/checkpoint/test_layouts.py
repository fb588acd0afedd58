"""What a layout cannot hold is refused by name, and nothing is written."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.layouts import in_layout, write_head
from peagle_jax.checkpoint.stored_head import StoredHead, read_stored_head
from tests.checkpoint.heads import SAME_WIDTH, saved_head
from tests.tiny import TARGET

DEEP = dataclasses.replace(TARGET, num_layers=9)
CONFIG = dict(block=SAME_WIDTH, taps=(2, 4, 6), target=DEEP)


def head(folder, method="eagle3", **changes) -> StoredHead:
    layers = {"num_layers": 1} if method == "eagle3" else {}
    return read_stored_head(saved_head(folder, method, **CONFIG | layers | changes).folder)


def with_tensors(stored: StoredHead, *names: str) -> StoredHead:
    extra = {name: np.ones(3, np.float32) for name in names}
    return dataclasses.replace(stored, tensors=stored.tensors | extra)


def without(stored: StoredHead, name: str) -> StoredHead:
    return dataclasses.replace(stored, tensors={n: t for n, t in stored.tensors.items() if n != name})


def said(stored: StoredHead, layout, target=DEEP) -> str:
    with pytest.raises(CheckpointError) as caught:
        in_layout(stored, layout, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_eagle3_refuses_what_is_p_eagles_and_what_is_newer(tmp_path):
    parallel = head(tmp_path / "p", "peagle")
    assert "eagle3 cannot hold mask_hidden: EAGLE-3 drafts without mask slots" in said(parallel, "eagle3")
    plain = head(tmp_path / "e")
    in_layout(plain, "eagle3", DEEP)
    part = "layers.0.self_attn."
    for name in ("input_norm.weight", "fc.bias", f"{part}q_norm.weight", f"{part}o_proj.bias"):
        assert f"eagle3 cannot hold {name}: " in said(with_tensors(plain, name), "eagle3")
    for name, changes in {
        "layers.1.input_layernorm.weight": {"num_layers": 2},
        "norm_before_residual": {"norm_before_residual": True},
        "input_norm.weight": {"norm_before_fc": True},
        "fc.weight: it takes three taps, this head 4": {"taps": (2, 3, 4, 6)},
        "eagle_aux_hidden_state_layer_ids: it implies [2, 4, 6] of 9 layers, not [2, 4, 7]": {
            "taps": (2, 4, 7)
        },
    }.items():
        assert f"eagle3 cannot hold {name}" in said(head(tmp_path / "x", **changes), "eagle3")
    assert "its number of layers L tells whether they are the same" in said(plain, "eagle3", None)
    assert "eagle3 cannot serve this target" in said(plain, "eagle3", TARGET)
    assert "eagle3 holds lm_head.weight" in said(without(plain, "lm_head.weight"), "eagle3")


def test_speculators_refuses_what_its_models_have_no_place_for(tmp_path):
    plain = head(tmp_path / "p", "peagle")
    in_layout(plain, "speculators")
    assert "cannot hold fc.bias" in said(with_tensors(plain, "fc.bias"), "speculators")
    narrow = head(tmp_path / "n", "peagle", block=dataclasses.replace(SAME_WIDTH, hidden_size=10))
    assert "cannot hold fc.weight: its target is 12 wide and the head 10" in said(narrow, "speculators")
    part = "layers.1.self_attn."
    partly = with_tensors(plain, f"{part}q_proj.bias")
    assert f"cannot hold {part}q_proj.bias: it needs layers.0.self_attn.q_proj.bias" in said(
        partly, "speculators"
    )
    norms = [f"layers.{i}.self_attn.{n}_norm.weight" for i in range(2) for n in "qk"]
    biases = [f"layers.{i}.mlp.{n}_proj.bias" for i in range(2) for n in ("gate", "up", "down")]
    in_layout(with_tensors(plain, *norms), "speculators")
    in_layout(with_tensors(plain, *biases), "speculators")
    both = with_tensors(plain, *norms, *biases)
    assert "cannot hold layers.0.mlp.gate_proj.bias: its Qwen3 block has no such bias" in said(
        both, "speculators"
    )
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert f"speculators holds {name}" in said(without(plain, name), "speculators")


def test_a_refused_head_leaves_the_folder_as_it_was(tmp_path):
    with pytest.raises(CheckpointError):
        write_head(tmp_path / "out", head(tmp_path / "p", "peagle"), "eagle3", DEEP)
    assert not (tmp_path / "out").exists()


def test_speculators_keys_are_those_of_its_config(tmp_path):
    stored = head(tmp_path / "p", "peagle", num_depths=6)
    config, tensors = in_layout(stored, "speculators")
    assert (config["architectures"], config["speculators_model_type"]) == (["PEagleSpeculator"], "peagle")
    assert config["speculators_config"] == {
        "algorithm": "peagle",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}],
        "verifier": {"name_or_path": None, "architectures": []},
    }
    assert (config["mask_token_id"], config["embed_requires_grad"]) == (51, True)
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert tensors["mask_hidden"].shape == (1, 1, 36)
    sequential = in_layout(head(tmp_path / "e"), "speculators")[0]
    assert sequential["architectures"] == ["Eagle3Speculator"]
    assert "mask_token_id" not in sequential and sequential["embed_requires_grad"] is False


def test_what_speculators_says_beside_the_head_comes_back(tmp_path):
    saved = saved_head(tmp_path / "h", "eagle3", num_layers=1, **CONFIG)
    verifier = {"name_or_path": "someone/model", "architectures": ["LlamaForCausalLM"]}
    saved.edit(peagle_jax={"verifier": verifier, "speculative_tokens": 4, "trained_on": "a set"})
    write_head(tmp_path / "s", read_stored_head(saved.folder), "speculators")
    back = read_stored_head(tmp_path / "s").about
    assert (back.verifier, back.speculative_tokens, back.metadata) == (verifier, 4, {"trained_on": "a set"})
    write_head(tmp_path / "o", read_stored_head(tmp_path / "s"), "orbax")
    assert read_stored_head(tmp_path / "o").about == back
