"""Keys and values in int8: their error, and bits that do not depend on the step."""

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.layers.quantized_rows import quantize_rows, widened

F32 = jnp.dtype(jnp.float32)


def random(*shape):
    return jnp.array(np.random.default_rng(0).normal(size=shape), jnp.float32)


def test_rows_are_the_nearest_of_255_values_each_by_its_own_largest():
    x = random(3, 5, 2, 8) * jnp.array([1.0, 1e-3, 100.0])[:, None, None, None]
    got = widened(quantize_rows(x, F32))
    step = np.abs(x).max(-1, keepdims=True) / 127
    assert np.all(np.abs(got - x) <= step * 0.5001)
    np.testing.assert_allclose(np.abs(got).max(-1), np.abs(x).max(-1), rtol=1e-6)


def test_a_row_has_the_same_bits_in_steps_of_any_width():
    x, quantise = random(2, 9, 3, 8), jax.jit(quantize_rows, static_argnums=1)
    whole = quantise(x, F32)
    for t in (1, 2, 6):
        part = quantise(x[:1, :t], F32)
        np.testing.assert_array_equal(part.values, whole.values[:1, :t])
        np.testing.assert_array_equal(part.scale, whole.scale[:1, :t])


def test_zeros_stay_zeros_and_a_lost_row_is_lost():
    x = jnp.zeros((2, 4)).at[1, 0].set(jnp.nan)
    got = widened(quantize_rows(x, jnp.dtype(jnp.bfloat16)))
    assert got.dtype == jnp.bfloat16
    assert np.all(got[0] == 0)
    assert np.all(np.isnan(got[1].astype(jnp.float32)))
