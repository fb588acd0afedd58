"""One stack in two forms, and its taps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.layers.attention import causal_mask, packed_attention
from peagle_jax.models import stack
from peagle_jax.speculative.cache import create_cache
from tests.tiny import TARGET, VOCAB, target_params

PARAMS = target_params()
TOKENS = jnp.array(np.random.default_rng(0).integers(0, VOCAB, (2, 6)))
POSITIONS = jnp.broadcast_to(jnp.arange(6), (2, 6))


def run(params, taps):
    block = TARGET.block
    cache = create_cache(5, 2, block.num_kv_heads, 8, block.head_dim, jnp.float32, params.is_stacked)
    return stack.forward(
        params, TARGET, TOKENS, POSITIONS, cache.k, cache.v, jnp.zeros(2, int), causal_mask(2, 6), taps
    )


def test_scanned_and_unrolled_layers_are_the_same_model():
    unrolled, scanned = run(PARAMS, (3, 0, 5)), run(stack.stack_layers(PARAMS), (3, 0, 5))
    np.testing.assert_allclose(unrolled.hidden, scanned.hidden, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(unrolled.features, scanned.features, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jnp.stack(unrolled.k), scanned.k, rtol=1e-4, atol=1e-4)
    again = stack.unstack_layers(stack.stack_layers(PARAMS))
    assert all(
        jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(PARAMS), strict=True)
    )


def test_whole_sequences_without_a_cache_give_the_same_states():
    ids = jnp.zeros_like(TOKENS)
    packed = stack.forward_packed(
        PARAMS, TARGET, TOKENS, POSITIONS, lambda q, k, v: packed_attention(q, k, v, ids), (1, 4)
    )
    cached = run(PARAMS, (1, 4))
    np.testing.assert_allclose(packed.hidden, cached.hidden, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(packed.features, cached.features, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [lambda p: p, stack.stack_layers], ids=["unrolled", "scanned"])
def test_a_tap_is_the_residual_stream_after_that_many_layers(form):
    """Marker target: layer k adds one-hot k to the stream and reads nothing."""
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    d = TARGET.hidden_size
    layers = tuple(
        layer.replace(attn_norm=layer.attn_norm + 1, bo=jnp.zeros(d).at[k].set(1.0))
        for k, layer in enumerate(zero.layers)
    )
    out = run(form(zero.replace(layers=layers)), (0, 2, 5))
    marks = np.asarray(out.features[0, 0]).reshape(3, d)
    assert [m.nonzero()[0].tolist() for m in marks] == [[], [0, 1], [0, 1, 2, 3, 4]]


def test_taps_outside_the_layers_are_refused():
    with pytest.raises(ValueError, match=r"\[6, -1\].*0\.\.5"):
        run(PARAMS, (6, 1, -1))
