"""Packed 4-bit floats widen to the values that the format's table names."""

import jax.numpy as jnp
import numpy as np

from peagle_jax.layers.linear import product
from peagle_jax.layers.mxfp4 import BLOCK, Mxfp4, dequantize

TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP Microscaling Formats, E2M1
VALUES = np.array(TABLE + [-v for v in TABLE], np.float32)


def test_every_code_at_every_scale_that_bfloat16_holds():
    codes = np.arange(BLOCK) % 16
    scales = np.arange(2, 252)
    packed = np.tile((codes[1::2] << 4 | codes[0::2]).astype(np.uint8), (len(scales), 1))
    found = dequantize(Mxfp4(jnp.array(packed), jnp.array(scales[:, None], jnp.uint8), jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    expected = VALUES[codes] * 2.0 ** (scales[:, None].astype(np.float64) - 127)
    np.testing.assert_array_equal(np.asarray(found, np.float64), expected)


def test_a_block_of_32_shares_a_scale_and_low_halves_come_first():
    values = jnp.full((3, 2, 2 * BLOCK // 2), 0x21, jnp.uint8)
    scales = jnp.array(np.arange(12).reshape(3, 2, 2) + 120, jnp.uint8)
    w = Mxfp4(values, scales, jnp.bfloat16)
    found = np.asarray(dequantize(w), np.float32)
    assert w.shape == found.shape == (3, 2, 64)
    np.testing.assert_array_equal(found[..., 0::32], 0.5 * 2.0 ** (np.arange(12).reshape(3, 2, 2) - 7.0))
    np.testing.assert_array_equal(found[..., 1::2], 2 * found[..., 0::2])


def test_a_product_is_that_of_the_widened_weight():
    rng = np.random.default_rng(0)
    values, scales = (
        jnp.array(rng.integers(*of, (7, n)), jnp.uint8) for of, n in (((0, 256), 32), ((120, 130), 2))
    )
    x = jnp.array(rng.normal(size=(3, 64)), jnp.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        w = Mxfp4(values, scales, jnp.dtype(dtype))
        np.testing.assert_array_equal(product(x, w), product(x, dequantize(w).astype(dtype)))
