"""Quantised targets: what is quantised while loading, and GGUF's blocks kept as they are."""

from __future__ import annotations

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.experts import read_gguf
from peagle_jax.checkpoint.gguf import GGUFFile, load_params
from peagle_jax.checkpoint.huggingface import load_folder
from peagle_jax.checkpoint.model import load_target
from peagle_jax.checkpoint.quantization import MATRICES, block_weight
from peagle_jax.checkpoint.tensors import Reader
from peagle_jax.config import BlockConfig, MoeConfig, RopeConfig
from peagle_jax.layers import mxfp4
from peagle_jax.layers.linear import product
from peagle_jax.layers.quantized import (
    BlockWeight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    dequantize,
    quantize,
)
from peagle_jax.models.stack import unstack_layers
from tests.checkpoint.files import (
    GGUFOptions,
    target_json,
    target_tensors,
    write_folder,
    write_gguf,
    write_tokenizer,
)
from tests.checkpoint.heads import assert_same
from tests.checkpoint.test_gguf import CONFIG as GGUF_CONFIG
from tests.tiny import TARGET, WIDE, target_params

Q = gguf.GGMLQuantizationType
PARAMS = target_params(WIDE)


def folder(tmp_path, cfg=WIDE, params=PARAMS, **changes):
    return write_folder(tmp_path / "m", target_json(cfg, **changes), target_tensors(params))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("stacked", [False, True])
def test_matrices_and_the_output_table_are_quantised_and_nothing_else(tmp_path, kind, stacked):
    _, params = load_folder(folder(tmp_path), jnp.bfloat16, stacked, quantization=kind)
    assert params.is_stacked == stacked
    expected = {"int8": Int8Weight, "int4": Int4Weight}[kind]
    for layer, source in zip(unstack_layers(params).layers, PARAMS.layers, strict=True):
        for field in (f.name for f in dataclasses.fields(layer)):
            found = getattr(layer, field)
            if field in MATRICES:
                assert isinstance(found, expected)
                assert found.dtype == jnp.bfloat16
                # From the file's floats, not from floats that were rounded to the dtype first.
                assert_same(found, quantize(getattr(source, field), kind, jnp.bfloat16))
            elif found is not None:
                assert found.dtype == jnp.bfloat16
    assert isinstance(params.lm_head, Int8Weight)  # in either kind
    assert params.embed.dtype == params.final_norm.dtype == jnp.bfloat16
    assert not isinstance(params.embed, QuantizedWeight)


def test_a_tied_table_is_quantised_for_both_its_uses(tmp_path):
    tied = dataclasses.replace(WIDE, tie_word_embeddings=True)
    _, params = load_folder(folder(tmp_path, tied, PARAMS.replace(lm_head=None)), quantization="int4")
    assert params.lm_head is None
    assert_same(params.embed, quantize(PARAMS.embed, "int8"))


KINDS = {
    "q.weight": Q.Q8_0,
    "gate.weight": Q.Q4_0,
    "up.weight": Q.Q4_1,
    "embd.weight": Q.Q8_0,
    "v.weight": Q.Q5_0,
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stacked", [False, True])
def test_packed_blocks_are_bit_for_bit_what_they_widen_to(tmp_path, stacked, dtype):
    path = write_gguf(tmp_path / "m.gguf", WIDE, PARAMS, GGUFOptions(kinds=KINDS))
    file = GGUFFile(path)
    plain = load_params(file, WIDE, dtype, stacked)
    packed = load_params(file, WIDE, dtype, stacked, quantization="gguf")
    layers = unstack_layers(packed).layers
    for name in ("wq", "w_gate", "w_up"):
        assert all(isinstance(getattr(layer, name), BlockWeight) for layer in layers)
    assert not isinstance(layers[0].wv, QuantizedWeight)  # Q5_0 is widened, as F32 is
    assert not isinstance(layers[0].wk, QuantizedWeight)
    assert not isinstance(packed.embed, QuantizedWeight)  # untied: only read by rows
    is_quantized = lambda x: isinstance(x, QuantizedWeight)  # noqa: E731
    widened = jax.tree.map(
        lambda w: dequantize(w).astype(dtype) if is_quantized(w) else w, packed, is_leaf=is_quantized
    )
    assert_same(widened, plain)


def test_a_stack_takes_no_layers_of_different_types(tmp_path):
    kinds = {"blk.1.ffn_up.weight": Q.Q8_0, "ffn_up.weight": Q.Q4_0}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", WIDE, PARAMS, GGUFOptions(kinds=kinds)))
    assert isinstance(load_params(file, WIDE, quantization="gguf").layers[1].w_up, BlockWeight)
    with pytest.raises(
        CheckpointError, match=r"blk\.1\.ffn_up\.weight of layer 1 is of another type .* int8"
    ):
        load_params(file, WIDE, stacked=True, quantization="gguf")


def test_damaged_scales_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", WIDE, PARAMS, GGUFOptions(kinds={"blk.0.ffn_up.weight": Q.Q8_0}))
    data = bytearray(path.read_bytes())
    clean = gguf.quants.quantize(np.asarray(PARAMS.layers[0].w_up), Q.Q8_0).tobytes()
    at = data.index(clean)
    data[at : at + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight holds NaN or infinity"):
        load_params(GGUFFile(path), WIDE, quantization="gguf")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "MXFP4"])
def test_experts_of_a_gguf_file_stay_packed_too(kind):
    w = np.random.default_rng(0).normal(size=(3, 5, 128)).astype(np.float32)
    data = gguf.quants.quantize(w, Q[kind])
    packed = block_weight(data.reshape(-1), kind, w.shape, jnp.dtype(jnp.float32))
    widen = mxfp4.dequantize if kind == "MXFP4" else dequantize
    np.testing.assert_array_equal(widen(packed).astype(jnp.float32), gguf.quants.dequantize(data, Q[kind]))
    block = BlockConfig(128, 64, 4, 2, 6, 1e-5, RopeConfig(), MoeConfig(3, 2))
    source = Packed({f"blk.2.ffn_{part}_exps.weight": (kind, shape) for part, shape in SHAPES.items()})
    experts = read_gguf(Reader(source, "gguf"), block, 2, np.dtype(np.float32))
    assert all(isinstance(w, QuantizedWeight) for w in (experts.gate, experts.up, experts.down))
    assert experts.down.shape == (3, 128, 64)
    layer = jax.tree.map(lambda x: jnp.asarray(x)[1], experts.up)
    x = jnp.asarray(w[0, :2])
    np.testing.assert_allclose(
        product(x, layer), x @ widen(layer).astype(jnp.float32).T, rtol=1e-5, atol=1e-5
    )


def test_a_table_in_mxfp4_is_read_in_floats(tmp_path):
    options = GGUFOptions(
        kinds={"token_embd.weight": Q.MXFP4, "blk.0.ffn_up.weight": Q.MXFP4}, drop=("output.weight",)
    )
    tied = dataclasses.replace(WIDE, tie_word_embeddings=True)
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", tied, PARAMS.replace(lm_head=None), options))
    params = load_params(file, tied, quantization="gguf")
    table = gguf.quants.quantize(np.asarray(PARAMS.embed), Q.MXFP4)
    np.testing.assert_array_equal(params.embed, gguf.quants.dequantize(table, Q.MXFP4))
    assert isinstance(params.layers[0].w_up, mxfp4.Mxfp4)


SHAPES = {"gate": (3, 64, 128), "up": (3, 64, 128), "down": (3, 128, 64)}


class Packed:
    """Random tensors of a GGUF file that is none: (type, shape) by name."""

    place = "model.gguf"

    def __init__(self, kinds):
        self.kinds = kinds

    def names(self):
        return self.kinds.keys()

    def shape(self, name):
        return self.kinds[name][1]

    def read(self, name):
        raise AssertionError("not packed")

    def packed(self, name, dtype):
        kind, shape = self.kinds[name]
        w = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        return block_weight(gguf.quants.quantize(w, Q[kind]).reshape(-1), kind, shape, dtype)


def test_what_cannot_be_quantised_is_one_line(tmp_path):
    path = write_tokenizer(folder(tmp_path, TARGET, target_params()))
    with pytest.raises(
        CheckpointError, match="unknown quantization 'awq'; expected one of int8, int4, fp8, gguf"
    ):
        load_target(str(path), quantization="awq")
    with pytest.raises(
        CheckpointError, match=r"q_proj\.weight: int4 needs inputs in multiples of 64, found 12; ask for int8"
    ):
        load_target(str(path), quantization="int4")
    with pytest.raises(CheckpointError, match="is no GGUF file; expected quantization int8 or int4, or none"):
        load_target(str(path), quantization="gguf")


def test_a_quantised_target_says_so(tmp_path):
    target = load_target(str(write_tokenizer(folder(tmp_path))), quantization="int8")
    assert target.quantization == "int8"
    path = write_gguf(tmp_path / "g.gguf", GGUF_CONFIG, target_params(GGUF_CONFIG))
    assert load_target(str(path), quantization="gguf").quantization == "gguf"


def test_a_folder_that_is_quantised_already_is_refused(tmp_path):
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    with pytest.raises(CheckpointError, match="compressed-tensors"):
        load_folder(folder(tmp_path, **config), quantization="int8")
