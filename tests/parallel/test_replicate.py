"""pmap and shard_map run the same steps, token for token, on several devices."""

import jax
import jax.numpy as jnp
import pytest

from peagle_jax.config import SpecConfig
from peagle_jax.models.stack import stack_layers
from peagle_jax.parallel.mesh import decoding_mesh
from peagle_jax.parallel.replicate import replicate
from peagle_jax.speculative.decoder import Decoder, Request
from peagle_jax.speculative.placement import Placement
from peagle_jax.speculative.sampling import SamplingParams
from tests.tiny import TARGET, head_config, head_params, target_params

CONFIG = head_config()
PARAMS = (stack_layers(target_params()), head_params(CONFIG))
SPEC = SpecConfig(3, "peagle")
REQUESTS = [
    Request([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], SamplingParams(temperature=0.8, seed=1), 30),
    Request([9, 2, 6], SamplingParams(), 25),
    Request([2, 7, 1, 8], SamplingParams(temperature=1.1, seed=3), 11),
]


def decoder(**options) -> Decoder:
    options = {"max_model_len": 64, "prefill_chunk": 16} | options
    return Decoder(TARGET, PARAMS[0], CONFIG, PARAMS[1], SPEC, **options)


def tokens_of(backend: str) -> list[list[int]]:
    """Three requests on two replicas of two slots."""
    placement = Placement.on(jax.devices()[:2], backend=backend)
    d = decoder(batch=2, widths=(2,), placement=placement, lookahead=1)
    out: list[list[int]] = [[] for _ in REQUESTS]
    for results in d.run(REQUESTS):
        for tokens, result in zip(out, results, strict=True):
            tokens += result.tokens if result else []
    return out


@pytest.mark.timeout(1200)  # six programs, which a busy machine compiles slowly
def test_pmap_and_shard_map_give_the_tokens_of_a_single_replica():
    alone = decoder()
    expected = [
        [t for result in alone.generate(r.prompt, r.sampling, r.max_tokens) for t in result.tokens]
        for r in REQUESTS
    ]
    assert [len(tokens) for tokens in expected] == [30, 25, 11]
    assert tokens_of("pmap") == expected
    assert tokens_of("shard_map") == expected


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="vmap"):
        replicate(lambda *_: jnp.zeros(()), decoding_mesh(jax.devices()[:1]), "vmap")


def test_pmap_cannot_hold_a_tensor_axis():
    with pytest.raises(
        ValueError, match="pmap cannot split a replica over 2 devices; replicate by shard_map"
    ):
        replicate(lambda *_: jnp.zeros(()), decoding_mesh(jax.devices()[:2], 2))
