"""What inspect tells of a head: every line, and every fault among them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from peagle_jax.checkpoint.conversion import Reading, convert_head
from peagle_jax.checkpoint.head import default_head_path
from peagle_jax.checkpoint.inspection import inspect_head
from peagle_jax.checkpoint.target_store import read_target_facts
from tests.checkpoint.files import MISSING, target_json, target_tensors, write_folder
from tests.checkpoint.heads import (
    SAME_WIDTH,
    TARGET_PARAMS,
    saved_head,
    to_aws,
    to_original_eagle3,
    to_specforge,
    to_speculators,
    without_own_keys,
)
from tests.tiny import TARGET


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return read_target_facts(str(write_folder(folder, target_json(TARGET), target_tensors(TARGET_PARAMS))))


def lines(folder, *arguments) -> dict[str, str]:
    """The lines by name; there must be no fault."""
    rows = inspect_head(folder, *arguments)
    assert [row.value for row in rows if row.fault] == []
    return {row.name: row.value for row in rows}


def faults(folder, *arguments) -> list[str]:
    rows = inspect_head(folder, *arguments)
    assert all("\n" not in row.value for row in rows)
    return [row.value for row in rows if row.fault]


def test_a_head_is_told_line_by_line(tmp_path):
    told = lines(saved_head(tmp_path / "h", num_depths=6).folder)
    assert told == {
        "files": "safetensors, 26 tensors",
        "dialect": "vLLM, as peagle_jax writes it",
        "method": "P-EAGLE: drafts in one pass, trained for K up to 6",
        "layers": "2 of width 10, 6 heads and 3 of k and v, 4 wide, ffn 14, Llama block",
        "taps": "1, 3, 5; boundaries, by peagle_jax.taps",
        "norms": "residual before hidden_norm (norm_before_residual false), no norm before fc",
        "RoPE": "theta 500, no scaling",
        "mask token": "51, by mask_token_id, ptd_token_id, pard_token",
        "vocabulary": "drafts 31 of 53; d2t and t2d: offsets, ascending",
        "embedding": "its own, embed_tokens.weight [53, 10]",
        "output table": "its own, lm_head.weight [31, 10]",
        "dtypes": "float32 0.0 MiB, int64 0.0 MiB, bool 0.0 MiB",
    }


def test_how_the_taps_were_decided_is_told(tmp_path):
    saved = saved_head(tmp_path / "h", taps=(2, 3, 5)).edit(to_specforge)
    assert lines(saved.folder)["taps"] == "2, 3, 5; layer ids [1, 2, 4] taken as outputs: the first is 1"
    told = lines(saved.folder, None, Reading(convention="boundary"))["taps"]
    assert told == "1, 2, 4; layer ids taken as boundaries: by the taps-convention option"
    assert lines(saved.folder, None, Reading(taps=(0, 1, 2)))["taps"].startswith(
        "0, 1, 2; boundaries, by the"
    )
    saved = saved_head(tmp_path / "s", block=SAME_WIDTH).edit(to_speculators)
    assert lines(saved.folder)["taps"] == "1, 3, 5; layer ids taken as boundaries: speculators' layout"
    saved = saved_head(tmp_path / "e", "eagle3", num_layers=1, block=SAME_WIDTH).edit(to_original_eagle3)
    told = lines(saved.folder)
    assert told["taps"].startswith("not named: loaders take the default")
    assert told["dialect"] == "original EAGLE-3"
    assert told["method"] == "EAGLE-3: drafts one token a pass"
    assert "mask token" not in told


def test_what_is_shared_with_the_target_is_told(tmp_path, target):
    saved = saved_head(tmp_path / "h", block=SAME_WIDTH, draft_vocab=53)
    told = lines(saved.folder, target)
    assert told["embedding"].endswith("other values than the target's")
    assert told["vocabulary"] == "53, all drafted; no map"

    def equal(config, tensors):
        tensors["embed_tokens.weight"] = np.asarray(TARGET_PARAMS.embed)
        del tensors["lm_head.weight"]

    told = lines(saved.edit(equal).folder, target)
    assert told["embedding"].endswith("equal to the target's")
    assert told["output table"] == "absent: shared with the target"


def test_an_orbax_head_is_told_the_same(tmp_path):
    saved = saved_head(tmp_path / "h")
    convert_head(saved.folder, tmp_path / "o", "orbax")
    a, b = lines(saved.folder), lines(tmp_path / "o")
    assert b["files"] == "Orbax, 26 tensors"
    assert b["dialect"] == "vLLM, as peagle_jax writes it, in Orbax"
    assert {n: v for n, v in a.items() if n not in ("files", "dialect")}.items() <= b.items()


def test_every_fault_is_told_and_not_the_first_alone(tmp_path):
    def damage(config, tensors):
        del tensors["norm.weight"]
        tensors["fc.weight"][0, 0] = np.nan
        tensors["odd"] = np.zeros(2, np.float32)
        tensors["layers.1.mlp.up_proj.weight"] = np.zeros((13, 10), np.float32)
        tensors["mask_hidden"][:] = 0

    saved = saved_head(tmp_path / "h").edit(damage)
    told = faults(saved.folder)
    for said in (
        "has no tensor norm.weight",
        "tensor fc.weight holds NaN",
        "no place for tensor odd",
        "tensor layers.1.mlp.up_proj.weight has shape [13, 10]; expected [14, 10]",
        "mask_hidden is all zeros",
    ):
        assert sum(said in line for line in told) == 1, said
    assert len(told) == 5


def test_faults_of_the_config_are_told_beside_those_of_the_tensors(tmp_path, target):
    saved = saved_head(tmp_path / "h").edit(
        pard_token=3, rope_scaling={"rope_type": "odd"}, vocab_size=64, fc_norm=True, logit_scale=0.5
    )
    told = faults(saved.folder, target)
    for said in (
        "mask_token_id = 51 but pard_token = 3",
        "rope_type 'odd' is not supported",
        "vocab_size is 64 but the target has 53",
        "fc_norm is set (EAGLE-3.1)",
        "logit_scale is 0.5",
    ):
        assert any(said in line for line in told), said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c, t: t.update(d2t=t["d2t"] + np.arange(31)), "d2t looks absolute"),
        (lambda c, t: t.pop("d2t"), "has no tensor d2t"),
        (lambda c, t: t.pop("mask_hidden"), "has no tensor mask_hidden, but its config is P-EAGLE's"),
        (lambda c, t: t.pop("fc.weight"), "has no tensor fc.weight"),
        (lambda c, t: t.update({"fc.weight": np.zeros((10, 35), np.float32)}), "no multiple of the target's"),
        (lambda c, t: c.update(peagle_jax={"taps": [1, 3]}), "gives the tapped layers twice"),
        (lambda c, t: t.update({"fc.weight": np.asarray(np.float32(1))}), "fc.weight is a single number"),
        (lambda c, t: c.update(architectures="LlamaForCausalLM"), "expected a list of strings"),
        (lambda c, t: c.update(num_hidden_layers=None), "has no num_hidden_layers"),
        (lambda c, t: c.update(hidden_size="wide"), "hidden_size is 'wide'"),
    ],
    ids=range(10),
)
def test_each_fault_is_a_line_and_never_an_exception(tmp_path, target, change, said):
    saved = saved_head(tmp_path / "h").edit(change)
    for arguments in ((), (target,)):
        assert any(said in line for line in faults(saved.folder, *arguments))


def test_an_absolute_map_is_told_as_what_it_is_read_as(tmp_path):
    saved = saved_head(tmp_path / "h").edit(lambda c, t: t.update(d2t=t["d2t"] + np.arange(31)))
    assert "absolute" in lines(saved.folder, None, Reading(map_kind="absolute"))["vocabulary"]


def test_a_folder_without_files_is_lines_too(tmp_path):
    assert any("has no config.json" in line for line in faults(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4}))
    assert any("has no model.safetensors" in line for line in faults(tmp_path))


def test_the_shipped_head_has_no_fault():
    folder = default_head_path()
    assert folder is not None
    assert lines(folder)["vocabulary"] == "drafts 6656 of 49152; d2t and t2d: offsets, ascending"


P_EAGLE_OF_SPECFORGE = {
    # sgl-project/SpecForge, configs/qwen3-8b-peagle.json: what differs from vLLM's layout, in our sizes.
    "architectures": ["PEagleDraftModel"],
    "model_type": "llama",
    "max_window_layers": 36,
    "sliding_window": None,
    "use_sliding_window": False,
    "use_cache": True,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
EAGLE3_OF_KIMI = {
    # huggingface.co/AQ-MedAI/Kimi-K2-Instruct-eagle3: ids in eagle_config alone, first one 2.
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "use_aux_hidden_state": True},
    "pretraining_tp": 1,
}


def test_published_configs_resolve(tmp_path):
    saved = saved_head(tmp_path / "s").edit(to_aws).edit(**P_EAGLE_OF_SPECFORGE)
    told = lines(saved.folder)
    assert (told["dialect"], told["mask token"]) == ("SpecForge", "51, by ptd_token_id")
    saved = saved_head(tmp_path / "k", "eagle3", num_layers=1).edit(without_own_keys)
    saved.edit(eagle_aux_hidden_state_layer_ids=MISSING, norm_before_fc=MISSING, **EAGLE3_OF_KIMI)
    assert lines(saved.folder)["taps"] == "2, 3, 5; layer ids taken as boundaries: the first is not 1"
