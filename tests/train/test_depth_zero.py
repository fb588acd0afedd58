"""Long rows chunk by chunk against the same rows layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import BlockConfig
from peagle_jax.train import depth_zero as module
from peagle_jax.train.depth_zero import Positions, chunk_length, depth_zero
from peagle_jax.train.partition import peagle_loss
from tests.tiny import TARGET, VOCAB, head_config, head_params
from tests.train.test_partition import make_batch

N = 23


def inputs() -> Positions:
    """Two rows of several documents and padding; 23 is no multiple of a chunk."""
    rng = np.random.default_rng(2)
    ids = np.full((2, N), -1)
    ids[0, :9], ids[0, 9:20], ids[1, :21] = 0, 1, 3
    positions = np.stack([np.r_[np.arange(9), np.arange(14)], np.arange(N)])
    return Positions(
        tokens=jnp.array(rng.integers(0, VOCAB, (2, N))),
        segment_ids=jnp.array(ids),
        positions=jnp.array(positions),
        features=jnp.array(rng.normal(size=(2, N, 36)), jnp.float32),
    )


@pytest.mark.parametrize("layers", [1, 3])
def test_chunks_give_the_states_context_and_gradients_of_whole_rows(layers):
    cfg = head_config(num_layers=layers)
    params, given = head_params(cfg).replace(draft_to_target=None), inputs()
    real = (given.segment_ids >= 0)[..., None]

    def run(chunk):
        def loss(params):
            hidden, context = depth_zero(params, cfg, given, chunk=chunk)
            ends = [jnp.sum(jnp.where(real[..., None], jnp.cos(x), 0)) for kv in context for x in kv]
            return jnp.sum(jnp.where(real, jnp.sin(hidden), 0)) + 3 * sum(ends), (hidden, context)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    (_, whole), gradient = run(N)
    assert float(jnp.abs(gradient.embed).max()) > 0
    for chunk in (5, 8):
        (_, (hidden, context)), other = run(chunk)
        np.testing.assert_allclose(hidden * real, whole[0] * real, rtol=1e-5, atol=5e-5)
        for a, b in zip(jax.tree.leaves(context), jax.tree.leaves(whole[1]), strict=True):
            np.testing.assert_allclose(a * real[..., None], b * real[..., None], rtol=1e-5, atol=5e-5)
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))


def test_the_loss_of_rows_in_chunks_is_that_of_whole_rows(monkeypatch):
    cfg = head_config(num_layers=2)
    params = head_params(cfg).replace(draft_to_target=None)
    batch, counts, _ = make_batch(2)
    target_head = jax.random.normal(jax.random.key(5), (31, TARGET.hidden_size))

    def run(counts):
        found = jax.jit(jax.value_and_grad(lambda p: peagle_loss(p, cfg, target_head, batch, counts)[0]))
        return jax.tree.leaves(found(params))

    both = [(run(c), c) for c in (counts, ())]
    monkeypatch.setattr(module, "chunk_length", lambda *_: 6)
    for whole, c in both:
        for a, b in zip(run(c), whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_only_long_rows_go_in_chunks():
    cfg = head_config()
    assert chunk_length(cfg, 4, 512) == 512
    wide = head_config(block=BlockConfig(10, 14336, 6, 3, 4, 1e-5, cfg.block.rope))
    assert chunk_length(wide, 1, 2048) == 2048
    assert chunk_length(wide, 1, 131072) == 2048
    assert chunk_length(wide, 64, 131072) == 256
