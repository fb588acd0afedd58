"""Flags for few bits, and what a report says of them."""

import argparse

import jax
import jax.numpy as jnp
import pytest

from peagle_jax import precision
from peagle_jax.checkpoint.model import LoadedTarget
from peagle_jax.layers.quantized import quantize
from tests.serve.tiny_model import CONFIG, PARAMS, TOKENIZER


def test_the_report_says_what_is_quantised_and_its_bytes():
    first = PARAMS.layers[0]
    first = first.replace(wq=quantize(first.wq, "int8"), wk=quantize(first.wk, "int8"))
    params = PARAMS.replace(layers=(first, *PARAMS.layers[1:]))
    target = LoadedTarget(CONFIG, params, TOKENIZER, "tiny", {}, "memory", "int8")
    wq, wk = target.params.layers[0].wq, target.params.layers[0].wk
    size = wq.values.size + wk.values.size
    whole = sum(x.nbytes for x in jax.tree.leaves(target.params))
    text = precision.describe_quantization(target)
    bits = 8 * (size + 4 * (wq.scale.size + wk.scale.size)) / size
    assert text.startswith(f"int8, {bits:.2f} bits a value: ")
    assert text.endswith(f"all weights {whole / 1e6:.1f} MB")


def test_the_report_says_what_an_int8_cache_saves():
    width = CONFIG.block.head_dim
    text = precision.describe_cache(CONFIG, jnp.dtype(jnp.bfloat16))
    assert text == f"int8, {width + 4} bytes a head and position instead of {2 * width}"


def test_the_cache_is_of_the_computations_dtype_or_int8():
    assert [precision.kv_cache_dtype(kind) for kind in ("auto", "int8")] == ["auto", "int8"]
    for name, why in (("fp8_e4m3", "no kernel here reads fp8; int8"), ("int3", "no such dtype")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"auto, int8, found '{name}': {why}"):
            precision.kv_cache_dtype(name)
