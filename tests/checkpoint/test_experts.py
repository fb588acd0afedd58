"""Experts from every form that checkpoints store them in: one by one, fused, packed, and GGUF's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.experts import read_gguf
from peagle_jax.checkpoint.huggingface import load_folder
from peagle_jax.checkpoint.tensors import Reader, hf_name
from peagle_jax.config import BlockConfig, MoeConfig, RopeConfig
from peagle_jax.layers.moe import Experts
from peagle_jax.layers.mxfp4 import Mxfp4, dequantize
from peagle_jax.layers.quantized import Int8Weight
from peagle_jax.models.gpt_oss import GPT_OSS as GPT_OSS_FAMILY
from peagle_jax.models.qwen3_moe import QWEN3_MOE
from peagle_jax.models.stack import unstack_layers
from tests.checkpoint.files import target_json, write_folder
from tests.tiny import GPT_OSS, target_params

E, D, F = 7, 12, 10
PARAMS = target_params(GPT_OSS)
QWEN = dataclasses.replace(
    GPT_OSS,
    family="qwen3_moe",
    block=BlockConfig(D, F, 4, 2, 6, 1e-5, RopeConfig(theta=1000.0), MoeConfig(E, 3, False)),
    windows=(),
)
MATRICES = ("gate", "up", "down")


def own_tensors(params, family, cfg) -> dict[str, np.ndarray]:
    """All but the experts, by their names in a folder."""
    found = {hf_name(field, None): getattr(params, field) for field in ("embed", "final_norm", "lm_head")}
    for i, layer in enumerate(params.layers):
        for field in family.layer_fields({}):
            array = getattr(layer, field)
            if array is None:  # the tiny target is gpt-oss's: a norm of q and k is Qwen's
                array = jnp.full((cfg.block.head_dim,), 1.0 + i)
            found[hf_name(field, i, family)] = array
    return {name: np.asarray(array) for name, array in found.items()}


def qwen_folder(tmp_path, drop: str = "", **changes):
    tensors = own_tensors(PARAMS, QWEN3_MOE, QWEN)
    for i, layer in enumerate(PARAMS.layers):
        for part in MATRICES:
            for j in range(E):
                name = f"model.layers.{i}.mlp.experts.{j}.{part}_proj.weight"
                tensors[name] = np.ascontiguousarray(getattr(layer.experts, part)[j])
    keys = {"num_experts": E, "num_experts_per_tok": 3, "moe_intermediate_size": F, "intermediate_size": 99}
    config = target_json(QWEN, **keys | changes)
    return write_folder(tmp_path / "m", config, {k: v for k, v in tensors.items() if k != drop})


def alternating(first: np.ndarray, second: np.ndarray, axis: int) -> np.ndarray:
    """Rows of two arrays in turn, as gpt-oss stores gate and up."""
    stacked = np.stack([first, second], axis + 1)
    return stacked.reshape(*first.shape[:axis], -1, *first.shape[axis + 1 :])


def oss_folder(tmp_path, packed: dict | None = None, cfg=GPT_OSS, params=PARAMS):
    tensors, block = own_tensors(params, GPT_OSS_FAMILY, cfg), cfg.block
    for i, layer in enumerate(params.layers):
        mine, prefix = layer.experts, f"model.layers.{i}.mlp.experts"
        tensors[f"{prefix}.gate_up_proj_bias"] = alternating(mine.gate_bias, mine.up_bias, 1)
        tensors[f"{prefix}.down_proj_bias"] = np.asarray(mine.down_bias)
        if packed is None:
            both = alternating(mine.gate, mine.up, 1).swapaxes(1, 2)
            tensors[f"{prefix}.gate_up_proj"] = np.ascontiguousarray(both)
            tensors[f"{prefix}.down_proj"] = np.ascontiguousarray(mine.down.swapaxes(1, 2))
        else:
            tensors |= {f"{prefix}.{name}": array for name, array in packed.items()}
    keys = {"num_local_experts": E, "num_experts_per_tok": 3, "sliding_window": 8, "swiglu_limit": 1.5}
    keys |= {"quantization_config": {"quant_method": "mxfp4"}} if packed else {}
    config = target_json(cfg, **keys)
    assert block.moe == MoeConfig(E, 3)
    return write_folder(tmp_path / "m", config, tensors)


def assert_experts(found: Experts, wanted: Experts) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("stacked", [False, True])
def test_qwens_experts_are_stacked_from_one_tensor_each(tmp_path, stacked):
    cfg, params = load_folder(qwen_folder(tmp_path), stacked=stacked)
    assert cfg == QWEN
    assert params.is_stacked == stacked
    for layer, mine in zip(unstack_layers(params).layers, PARAMS.layers, strict=True):
        assert_experts(layer.experts, mine.experts.replace(gate_bias=None, up_bias=None, down_bias=None))
        np.testing.assert_array_equal(layer.w_router, mine.w_router)


@pytest.mark.parametrize("stacked", [False, True])
def test_rows_of_gate_and_up_that_alternate_are_taken_apart(tmp_path, stacked):
    cfg, params = load_folder(oss_folder(tmp_path), stacked=stacked)
    assert cfg == GPT_OSS
    for layer, mine in zip(unstack_layers(params).layers, PARAMS.layers, strict=True):
        assert_experts(layer.experts, mine.experts)


WIDE = dataclasses.replace(
    GPT_OSS, block=dataclasses.replace(GPT_OSS.block, hidden_size=64, intermediate_size=32), num_layers=2,
    windows=(8, 0),
)  # fmt: skip


def packed_tensors(**changes) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    out = {}
    for name, rows, width in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        out[f"{name}_blocks"] = rng.integers(0, 256, (E, rows, width // 32, 16), dtype=np.uint8)
        out[f"{name}_scales"] = rng.integers(110, 130, (E, rows, width // 32), dtype=np.uint8)
    return out | changes


def test_packed_experts_stay_packed_row_by_row(tmp_path):
    tensors = packed_tensors()
    _, params = load_folder(oss_folder(tmp_path, tensors, WIDE, target_params(WIDE)))
    up = params.layers[1].experts.up
    assert isinstance(up, Mxfp4)
    assert up.shape == (E, 32, 64)
    blocks, scales = tensors["gate_up_proj_blocks"][2, 5], tensors["gate_up_proj_scales"][2, 5]
    one = Mxfp4(
        jnp.array(blocks.reshape(1, 32)), jnp.array(scales[None]), up.dtype
    )  # row 5 is the third of up's
    np.testing.assert_array_equal(dequantize(up)[2, 2], dequantize(one)[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"down_proj_scales": np.full((E, 64, 1), 255, np.uint8)},
            "0.mlp.experts.down_proj_scales holds NaN (255)",
        ),
        ({"down_proj_blocks": np.zeros((E, 64, 1, 16), np.int8)}, "down_proj_blocks is int8; expected uint8"),
        (
            {"gate_up_proj_scales": np.zeros((E, 64, 3), np.uint8)},
            "has shape [7, 64, 3]; expected [7, 64, 2]",
        ),
    ],
    ids=["NaN", "kind", "shape"],
)
def test_damaged_packed_experts_are_one_line(tmp_path, changes, said):
    with pytest.raises(CheckpointError) as caught:
        load_folder(oss_folder(tmp_path, packed_tensors(**changes), WIDE, target_params(WIDE)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_expert_is_named(tmp_path):
    name = "model.layers.3.mlp.experts.6.up_proj.weight"
    with pytest.raises(CheckpointError, match=rf"has no tensor {name}; expected one of shape \[10, 12\]"):
        load_folder(qwen_folder(tmp_path, drop=name))


def test_experts_are_quantised_with_the_rest_unless_packed(tmp_path):
    _, params = load_folder(qwen_folder(tmp_path), quantization="int8")
    gate = params.layers[2].experts.gate
    assert isinstance(gate, Int8Weight)
    np.testing.assert_allclose(gate.values * gate.scale, PARAMS.layers[2].experts.gate, atol=0.01)
    other = tmp_path / "packed"
    _, params = load_folder(
        oss_folder(other, packed_tensors(), WIDE, target_params(WIDE)), quantization="int8"
    )
    assert isinstance(params.layers[0].experts.gate, Mxfp4)
    assert isinstance(params.layers[0].wo, Int8Weight)


class Arrays:
    """Tensors of a file that is none."""

    place = "model.gguf"

    def __init__(self, arrays):
        self.arrays = arrays

    def names(self):
        return self.arrays.keys()

    def shape(self, name):
        return self.arrays[name].shape

    def read(self, name):
        return self.arrays[name]


@pytest.mark.parametrize("biases", [False, True])
def test_ggufs_experts_are_one_tensor_a_layer(biases):
    mine = PARAMS.layers[4].experts
    arrays = {f"blk.4.ffn_{part}_exps.weight": np.asarray(getattr(mine, part)) for part in MATRICES}
    if biases:
        of = {part: np.asarray(getattr(mine, f"{part}_bias")) for part in MATRICES}
        arrays |= {f"blk.4.ffn_{part}_exps.bias": array for part, array in of.items()}
    found = read_gguf(Reader(Arrays(arrays)), GPT_OSS.block, 4, np.dtype(np.float32))
    assert_experts(found, mine if biases else mine.replace(gate_bias=None, up_bias=None, down_bias=None))
