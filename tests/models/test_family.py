"""Which tensors a layer has, by family and config flag."""

from __future__ import annotations

import dataclasses

import pytest

from peagle_jax.layers.block import BlockParams
from peagle_jax.models.family import COMMON_FIELDS, LAYER_NAMES, MODEL_NAMES
from peagle_jax.models.llama import LLAMA
from peagle_jax.models.qwen2 import QWEN2
from peagle_jax.models.qwen3 import QWEN3
from peagle_jax.models.stack import TargetParams

BIASES = {"bq", "bk", "bv"}


@pytest.mark.parametrize(
    ("family", "flags", "extra"),
    [
        (LLAMA, {}, set()),
        (LLAMA, {"attention_bias": True}, BIASES | {"bo"}),
        (LLAMA, {"mlp_bias": True, "attention_bias": False}, {"b_gate", "b_up", "b_down"}),
        (QWEN2, {}, BIASES),
        (QWEN3, {}, {"q_norm", "k_norm"}),
        (QWEN3, {"attention_bias": True}, {"q_norm", "k_norm", "bo"} | BIASES),
    ],
)
def test_layer_fields_follow_the_family_and_its_flags(family, flags, extra):
    fields = family.layer_fields(flags)
    assert set(fields) == set(COMMON_FIELDS) | extra
    assert len(fields) == len(set(fields))


def test_every_parameter_has_one_name_in_each_format():
    assert set(LAYER_NAMES) == {field.name for field in dataclasses.fields(BlockParams)} - {"experts"}
    assert set(MODEL_NAMES) == {field.name for field in dataclasses.fields(TargetParams)} - {"layers"}
    names = [*LAYER_NAMES.values(), *MODEL_NAMES.values()]
    assert len({name.hf for name in names}) == len({name.gguf for name in names}) == len(names)
