"""Decoding of quantised targets: a head changes no token."""

from functools import partial

import jax
import pytest

from peagle_jax.config import SpecConfig
from peagle_jax.layers.quantized import quantize
from peagle_jax.models.stack import stack_layers
from peagle_jax.speculative.decoder import Decoder
from tests.speculative import mesh_run
from tests.tiny import WIDE, head_config, head_params, target_params

CFG = head_config(num_layers=1, target_hidden_size=64, taps=(1, 2, 3))


def target(kind, stacked=False):
    params = target_params(WIDE)
    to = partial(quantize, kind=kind)
    layers = jax.tree.map(lambda w: to(w) if w.ndim == 2 else w, params.layers)
    params = params.replace(layers=layers, lm_head=quantize(params.lm_head, "int8"))
    return stack_layers(params) if stacked else params


def tokens(params, head=None, k=3, **options):
    spec = SpecConfig(k, "peagle") if head is not None else SpecConfig()
    decoder = Decoder(WIDE, params, CFG, head, spec, max_model_len=64, prefill_chunk=8, **options)
    results = list(decoder.generate([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], max_tokens=40))
    return [t for r in results for t in r.tokens]


@pytest.mark.parametrize(("kind", "stacked"), [("int8", False), ("int4", False), ("int4", True)])
def test_a_head_changes_no_token(kind, stacked):
    params = target(kind, stacked)
    plain = tokens(params)
    assert len(plain) == 40
    assert tokens(params, head_params(CFG)) == plain


@pytest.mark.parametrize("stacked", [False, True])
def test_a_head_changes_no_token_of_an_int8_cache(stacked):
    """Rows see each other in a wide step as they are stored, so plain decode sees the same."""
    params = stack_layers(target_params(WIDE)) if stacked else target_params(WIDE)
    plain = tokens(params, int8_cache=True)
    assert len(plain) == 40
    assert tokens(params, head_params(CFG), 7, int8_cache=True) == plain
    if not stacked:
        assert plain != tokens(params)  # so the cache was in use


def test_a_heads_cache_keeps_the_dtype_of_the_computation():
    decoder = Decoder(
        WIDE,
        target_params(WIDE),
        CFG,
        head_params(CFG),
        SpecConfig(3, "peagle"),
        max_model_len=64,
        int8_cache=True,
    )
    state = decoder._programs.state
    assert state.target_cache.k[0].values.dtype == "int8"
    assert state.drafter_cache.k[0].dtype == "float32"


def test_an_int8_cache_lies_in_parts_with_its_scales():
    alone, split = (mesh_run.decoder("none", 1, tensor, int8_cache=True) for tensor in (1, 2))
    for x in jax.tree.leaves(split._programs.state.target_cache):
        assert x.size == 2 * x.addressable_shards[0].data.size
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    assert list(split.generate(prompt, max_tokens=20)) == list(alone.generate(prompt, max_tokens=20))
