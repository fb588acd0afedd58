import jax.numpy as jnp
import numpy as np

from peagle_jax.layers.norm import rms_norm


def test_rms_norm_is_computed_in_float32():
    x = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32) * 3
    weight = np.linspace(0.5, 2, 5, dtype=np.float32)
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * weight
    got = rms_norm(jnp.array(x), jnp.array(weight), 1e-3)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert rms_norm(jnp.array(x, jnp.bfloat16), jnp.array(weight), 1e-3).dtype == jnp.float32
