"""Decoding of quantised targets: a head changes no token."""

from functools import partial

import jax
import pytest

from peagle_jax.config import SpecConfig
from peagle_jax.layers.quantized import quantize
from peagle_jax.models.stack import stack_layers
from peagle_jax.speculative.decoder import Decoder
from tests.tiny import WIDE, head_config, head_params, target_params

CFG = head_config(num_layers=1, target_hidden_size=64, taps=(1, 2, 3))


def target(kind, stacked=False):
    params = target_params(WIDE)
    to = partial(quantize, kind=kind)
    layers = jax.tree.map(lambda w: to(w) if w.ndim == 2 else w, params.layers)
    params = params.replace(layers=layers, lm_head=quantize(params.lm_head, "int8"))
    return stack_layers(params) if stacked else params


def tokens(params, head=None, **options):
    spec = SpecConfig(3, "peagle") if head is not None else SpecConfig()
    decoder = Decoder(WIDE, params, CFG, head, spec, max_model_len=64, prefill_chunk=8, **options)
    results = list(decoder.generate([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], max_tokens=40))
    return [t for r in results for t in r.tokens]


@pytest.mark.parametrize(("kind", "stacked"), [("int8", False), ("int4", False), ("int4", True)])
def test_a_head_changes_no_token(kind, stacked):
    params = target(kind, stacked)
    plain = tokens(params)
    assert len(plain) == 40
    assert tokens(params, head_params(CFG)) == plain
