"""What published head configs say, key by key, and the draft vocabulary map."""

from __future__ import annotations

import numpy as np
import pytest

from peagle_jax.checkpoint.dialects import draft_to_target, read_facts, spelling
from peagle_jax.checkpoint.errors import CheckpointError

BLOCK = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
}
PLAIN = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 128, **BLOCK}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 128,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
    },
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": BLOCK,
}


def fails(config) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_facts(config, "config.json")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plain_config_without_options():
    facts = read_facts(PLAIN, "config.json")
    assert (facts.vocab_size, facts.draft_vocab_size) == (512, 128)
    assert [facts.claims_parallel, facts.norm_before_fc, facts.norm_before_residual] == [False] * 3
    silent = (facts.mask_token_id, facts.aux_ids, facts.own_taps, facts.num_depths, facts.target_hidden_size)
    assert silent == (None,) * 5


def test_a_speculators_config_nests_its_block():
    facts = read_facts(SPECULATORS, "config.json")
    assert facts.block is BLOCK
    assert (facts.vocab_size, facts.draft_vocab_size, facts.num_depths) == (512, 128, 5)
    assert facts.norm_before_residual
    assert not facts.claims_parallel


@pytest.mark.parametrize(
    ("kind", "default"), [("eagle3", True), ("peagle", False)], ids=["as vLLM's adapter", "p-eagle"]
)
def test_a_speculators_config_without_the_residual_flag(kind, default):
    config = {k: v for k, v in SPECULATORS.items() if k != "norm_before_residual"}
    config |= {"speculators_model_type": kind, "speculators_config": {"algorithm": kind}}
    assert read_facts(config, "config.json").norm_before_residual is default


@pytest.mark.parametrize(
    "claim",
    [
        {"parallel_drafting": True},
        {"architectures": ["PEagleDraftModel"]},
        {"architectures": ["PeagleQwen3ForCausalLM"], "model_type": "qwen3"},
    ],
    ids=repr,
)
def test_a_head_may_claim_to_be_parallel(claim):
    assert read_facts({**PLAIN, **claim}, "config.json").claims_parallel


def test_a_pretraining_style_config_of_the_first_eagle3_release_is_read():
    config = {**PLAIN, "architectures": ["LlamaForCausalLM"], "pad_token_id": 0, "torch_dtype": "float16"}
    assert read_facts(config, "config.json").draft_vocab_size == 128


def test_another_familys_model_type_matters_only_where_it_picks_the_block():
    assert read_facts({**PLAIN, "model_type": "phi3"}, "config.json").vocab_size == 512
    nested = {**SPECULATORS, "transformer_layer_config": {**BLOCK, "model_type": "mamba"}}
    assert "transformer_layer_config.model_type is 'mamba'; expected one of llama" in fails(nested)


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (PLAIN, False),
        ({**PLAIN, "model_type": "qwen3"}, False),
        ({**PLAIN, "architectures": ["Eagle3Qwen3ForCausalLM"]}, True),
        ({**SPECULATORS, "transformer_layer_config": {**BLOCK, "model_type": "qwen3"}}, True),
    ],
    ids=["plain", "model_type alone", "by architecture", "by the nested model_type"],
)
def test_a_qwen3_block_needs_its_norms(config, needed):
    assert read_facts(config, "config.json").needs_qk_norm is needed


def test_layer_types_that_a_head_has_of_its_target_are_let_be():
    kinds = ["full_attention"] * 9 + ["sliding_attention"]
    assert read_facts({**PLAIN, "layer_types": kinds, "sliding_window": 8}, "config.json")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"fc_norm": True}, "fc_norm is set (EAGLE-3.1)"),
        ({"norm_output": True}, "norm_output is set (EAGLE-3.1)"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state is false"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"speculators_model_type": "dflash"}, "is a 'dflash' speculator; expected eagle3 or peagle"),
        ({"architectures": ["DFlashDraftModel"]}, "architecture 'DFlashDraftModel' is not a head"),
        (
            {"sliding_window": 16, "layer_types": ["sliding_attention"]},
            "asks for sliding_attention (window 16)",
        ),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 3],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]},
            },
            "gives eagle_aux_hidden_state_layer_ids twice: eagle_aux_hidden_state_layer_ids = (2, 3) but",
        ),
        ({"eagle_aux_hidden_state_layer_ids": "2,3"}, "is '2,3'; expected a list of layer numbers"),
        ({"mask_token_id": "<mask>"}, "mask_token_id is '<mask>'; expected a whole number"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
    ],
    ids=range(12),
)
def test_what_is_not_supported_is_one_line(keys, said):
    assert said in fails({**PLAIN, **keys})


@pytest.mark.parametrize(
    ("name", "in_file", "found"),
    [
        ("fc.weight", "fc.weight", "fc.weight"),
        ("fc.weight", "model.fc.weight", "model.fc.weight"),
        ("layers.0.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"),
        (
            "layers.0.mlp.up_proj.weight",
            "model.midlayer.mlp.up_proj.weight",
            "model.midlayer.mlp.up_proj.weight",
        ),
        ("d2t", "draft_id_to_target_id", "draft_id_to_target_id"),
        ("layers.1.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
        ("norm.weight", "nothing", "norm.weight"),
    ],
)
def test_the_spelling_is_the_files(name, in_file, found):
    assert spelling(name, {in_file}.__contains__) == found


def mapped(offsets, vocab=200, members=None):
    flags = None if members is None else np.isin(np.arange(vocab), members)
    return draft_to_target(np.asarray(offsets), flags, vocab, "head")


def test_a_map_holds_offsets():
    np.testing.assert_array_equal(mapped(np.zeros(128, np.int64)), np.arange(128))
    np.testing.assert_array_equal(mapped([5, 5, 5]), [5, 6, 7])
    np.testing.assert_array_equal(mapped([3, 0, 8], members=[1, 3, 10]), [3, 1, 10])
    assert mapped([5, 5, 5]).dtype == np.int32


@pytest.mark.parametrize(
    ("offsets", "members", "said"),
    [
        (np.arange(128), None, "d2t looks absolute"),
        (np.arange(90), None, "d2t looks absolute"),
        ([4, 60, 150, 199], None, "d2t looks absolute"),
        ([1, 5, 9], [1, 5, 9], "d2t looks absolute"),
        ([2, 1, 1], None, "leaves the vocabulary or repeats an id"),
        ([0, 0, 500], None, "leaves the vocabulary or repeats an id"),
        ([0, -2, 0], None, "leaves the vocabulary or repeats an id"),
        ([0, 3, 3], [0, 4, 6], "differs from t2d, which marks 3 ids"),
        ([0.0, 1.0], None, "d2t has dtype float64"),
    ],
    ids=range(9),
)
def test_a_map_that_cannot_be_offsets_is_refused(offsets, members, said):
    with pytest.raises(CheckpointError) as caught:
        mapped(offsets, members=members)
    assert said in str(caught.value)


def test_doubled_ids_are_offsets_where_t2d_says_so():
    np.testing.assert_array_equal(mapped([0, 1, 2], members=[0, 2, 4]), [0, 2, 4])
