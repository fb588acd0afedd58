"""pmap and shard_map run the same step, token for token, on several devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import SpecConfig
from peagle_jax.models.stack import stack_layers
from peagle_jax.parallel.replicate import replica_sharding, replicate
from peagle_jax.speculative.decoder import Decoder, Request
from peagle_jax.speculative.round import step
from peagle_jax.speculative.sampling import SamplingParams
from tests.tiny import TARGET, head_config, head_params, target_params

CONFIG = head_config()
PARAMS = (stack_layers(target_params()), head_params(CONFIG))
SPEC = SpecConfig(3, "peagle")
REQUESTS = [
    Request([3, 1, 4, 1, 5], SamplingParams(temperature=0.8, seed=1), 30),
    Request([9, 2, 6], SamplingParams(), 30),
]


def tokens_of(backend: str, alone: Decoder) -> list[list[int]]:
    """Four dispatches of two replicas, a request on each."""
    devices = jax.devices()[:2]
    run = replicate(partial(step, configs=(TARGET, CONFIG), spec=SPEC, rounds=1), devices, backend)
    pairs = [(alone._fresh_state([r], 80), alone._chunk([r], 0)) for r in REQUESTS]
    states, chunks = (
        jax.tree.map(lambda *x: np.concatenate(x), *trees) for trees in zip(*pairs, strict=True)
    )
    state, chunk = jax.device_put((states, chunks), replica_sharding(devices))
    out: list[list[int]] = [[], []]
    for _ in range(4):
        state, output = run(PARAMS, state, chunk)
        chunk = None
        tokens, count = np.asarray(output.tokens), np.asarray(output.count)
        for replica in range(2):
            for r in range(tokens.shape[1]):
                out[replica] += tokens[replica, r, 0, : count[replica, r, 0]].tolist()
    return out


def test_pmap_and_shard_map_give_the_tokens_of_a_single_replica():
    single = Decoder(TARGET, PARAMS[0], CONFIG, PARAMS[1], SPEC, max_model_len=64, prefill_chunk=8)
    by_pmap, by_shard_map = tokens_of("pmap", single), tokens_of("shard_map", single)
    assert by_pmap == by_shard_map
    for request, got in zip(REQUESTS, by_pmap, strict=True):
        expected = [t for r in single.generate(request.prompt, request.sampling, 30) for t in r.tokens]
        assert len(got) >= 5 and got == expected[: len(got)]


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="vmap"):
        replicate(lambda *_: jnp.zeros(()), jax.devices()[:1], "vmap")
