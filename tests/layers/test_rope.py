"""Rotary tables: indexed by value, and the published formulas of each variant."""

import math

import jax.numpy as jnp
import numpy as np

from peagle_jax.config import RopeConfig
from peagle_jax.layers.rope import apply_rope, attention_scale, inverse_frequencies, rope_tables


def test_positions_are_used_by_value():
    rope, positions = RopeConfig(theta=100.0), jnp.array([[7, 8, 9, 3]])
    cos, sin = rope_tables(rope, 6, positions)
    angles = np.array([7, 8, 9, 3])[:, None] * 100.0 ** (-np.arange(0, 6, 2) / 6)
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=1e-6)


def test_rotation_keeps_norms_and_depends_on_distance_only():
    rope = RopeConfig(theta=50.0)
    q, k = (jnp.array(np.random.default_rng(i).normal(size=(1, 1, 1, 8)), jnp.float32) for i in (0, 1))

    def score(at_q, at_k):
        a = apply_rope(q, rope_tables(rope, 8, jnp.array([[at_q]])))
        b = apply_rope(k, rope_tables(rope, 8, jnp.array([[at_k]])))
        np.testing.assert_allclose(jnp.linalg.norm(a), jnp.linalg.norm(q), rtol=1e-5)
        return float(jnp.sum(a * b))

    assert abs(score(5, 2) - score(105, 102)) < 1e-4
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


def test_linear_scaling_stretches_positions():
    plain, linear = (inverse_frequencies(RopeConfig(variant=v, factor=4.0), 8) for v in ("default", "linear"))
    np.testing.assert_allclose(linear * 4, plain)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones():
    rope = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    base, scaled = inverse_frequencies(RopeConfig(5e5), 128), inverse_frequencies(rope, 128)
    wavelength = 2 * math.pi / base
    short, long = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_allclose(scaled[short], base[short])
    np.testing.assert_allclose(scaled[long] * 8, base[long], rtol=1e-6)
    between = ~short & ~long
    assert (
        between.any()
        and (scaled[between] < base[between]).all()
        and (scaled[between] > base[between] / 8).all()
    )


def test_yarn_scales_cos_and_sin_by_its_concentration():
    rope = RopeConfig(150000.0, "yarn", 32.0, original_max_position=4096, truncate=False)
    assert abs(attention_scale(rope) - (0.1 * math.log(32) + 1)) < 1e-9
    cos, _ = rope_tables(rope, 64, jnp.array([0]))
    np.testing.assert_allclose(cos, attention_scale(rope), rtol=1e-6)
    base, scaled = inverse_frequencies(RopeConfig(150000.0), 64), inverse_frequencies(rope, 64)
    np.testing.assert_allclose(scaled[0], base[0])
    np.testing.assert_allclose(scaled[-1] * 32, base[-1], rtol=1e-6)
