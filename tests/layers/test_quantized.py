"""Weights of few bits: what they hold, and products that do not depend on the number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.layers.linear import product, table_rows
from peagle_jax.layers.quantized import GROUP, BlockWeight, dequantize, pack, quantize

KINDS = ("int8", "int4", "fp8")


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def blocks(f=48, d=128, bits=4, minimum=True, dtype=jnp.float32):
    rng = np.random.default_rng(3)
    low, high, kind = (
        (-128, 128, np.int8) if bits == 8 else (0, 16, np.uint8) if minimum else (-8, 8, np.int8)
    )
    values = rng.integers(low, high, (f, d)).astype(kind)
    scale, least = (rng.normal(size=(2, f, d // GROUP)) / 8).astype(np.float16)
    exact = values.reshape(f, -1, GROUP) * scale[..., None].astype(np.float32)
    if minimum:
        exact = exact + least[..., None].astype(np.float32)
    weight = BlockWeight(
        values if bits == 8 else pack(values), scale, least if minimum else None, jnp.dtype(dtype)
    )
    return jax.tree.map(jnp.asarray, weight), exact.reshape(f, d)


def test_int8_holds_the_nearest_of_255_values_of_each_channel():
    w = random(5, 12) * np.array([[1], [100], [1e-3], [0], [1]], np.float32)
    got = quantize(w, "int8")
    assert (got.shape, got.ndim, got.nbytes) == ((5, 12), 2, 5 * 12 + 5 * 4)
    step = np.abs(w).max(1, keepdims=True) / 127
    assert np.all(np.abs(dequantize(got) - w) <= step * 0.5001)
    np.testing.assert_array_equal(np.abs(got.values).max(1), [127, 127, 127, 0, 127])


def test_int4_takes_two_values_a_byte_and_a_step_a_group():
    w = random(6, 192)
    w[2, :GROUP] *= 9  # a group of large values leaves the channel's other groups their own steps
    got = quantize(w, "int4")
    assert (got.shape, got.values.shape, got.steps.shape) == ((6, 192), (6, 96), (6, 6))
    assert got.nbytes == 6 * (96 + 6 + 4)
    error = np.square(dequantize(got) - w).mean(1)
    assert np.all(error < 0.02 * np.square(w).mean(1))
    flat = np.abs(w).max(1, keepdims=True) / 7  # one step a channel
    coarse = np.square(np.round(w / flat) * flat - w).mean(1)
    assert np.all(error < coarse * 0.8)
    assert error[2] < coarse[2] / 4


def test_fp8_keeps_three_bits_after_the_first_of_every_value():
    w = random(5, 12) * np.array([[1], [100], [1e-3], [0], [1]], np.float32)
    got = quantize(w, "fp8")
    assert (got.shape, got.nbytes, got.values.dtype) == ((5, 12), 5 * 12 + 5 * 4, jnp.float8_e4m3fn)
    scale = np.abs(w).max(1, keepdims=True) / 448
    assert np.all(np.abs(dequantize(got) - w) <= np.abs(w) / 16 + scale * 2.0**-9)
    np.testing.assert_array_equal(np.abs(got.values.astype(np.float32)).max(1), [448, 448, 448, 0, 448])


def test_what_int8_can_hold_it_holds_exactly():
    exact = dequantize(quantize(random(4, 120), "int8"))
    np.testing.assert_allclose(dequantize(quantize(exact, "int8")), exact, rtol=1e-6)


def test_a_packed_byte_has_a_column_of_each_group_of_a_pair():
    values = np.repeat(np.array([[1, 7, -8, -1]], np.int8), GROUP, 1)  # two pairs of groups
    assert pack(values)[0, ::GROUP].tolist() == [0x71, -8]  # 0xf8: -1 above, -8 below
    assert pack(values.astype(np.uint8) & 15)[0, ::GROUP].tolist() == [0x71, 0xF8]
    halves = [pack(half) for half in np.split(values, 2, 1)]
    np.testing.assert_array_equal(np.concatenate(halves, 1), pack(values))  # so a device's part is a weight


@pytest.mark.parametrize(("bits", "minimum"), [(8, False), (4, False), (4, True)])
def test_blocks_are_their_exact_values(bits, minimum):
    weight, exact = blocks(bits=bits, minimum=minimum)
    assert (weight.shape, weight.is_packed) == (exact.shape, bits == 4)
    np.testing.assert_array_equal(dequantize(weight), exact)
    np.testing.assert_array_equal(table_rows(weight, jnp.array([[7, 0]])), exact[[[7, 0]]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_exact_values(kind):
    x, weight = random(3, 2, 128), quantize(random(70, 128, seed=1), kind)
    exact = x.astype(np.float64) @ np.asarray(dequantize(weight), np.float64).T
    got = jax.jit(product)(x, weight)
    assert got.dtype == jnp.float32
    # An activation is rounded to a 32,000th of its row's largest, or less.
    np.testing.assert_allclose(got, exact, atol=2e-4 * np.abs(exact).max())
    assert np.abs(got - exact).max() > 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_blocks_are_those_of_the_floats(dtype):
    x = random(9, 128)
    for f in (48, 4099):  # the second has no divisor, so it is one tile
        weight, exact = blocks(f, dtype=dtype)
        want = product(x, jnp.asarray(exact).astype(dtype))
        np.testing.assert_allclose(jax.jit(product)(x, weight), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4"])  # whole numbers, which CPUs multiply as such
def test_a_row_has_the_same_bits_in_steps_of_any_width(kind):
    x, weight = jnp.asarray(random(20, 64)), quantize(random(48, 64, seed=1), kind)
    whole = product(x, weight)
    for rows in (1, 2, 6, 9):
        np.testing.assert_array_equal(product(x[:rows], weight), whole[:rows])
    np.testing.assert_array_equal(product(jnp.concatenate([x[:1], x[5:] * 50]), weight)[0], whole[0])


@pytest.mark.parametrize("largest", [1e-42, 3e-38, 0.99, 1.0, 127 * 256 / 2**15, 1.9999, 5e30])
def test_activations_of_any_size_keep_their_precision(largest):
    x = (random(2, 64) * largest / 4).clip(-largest, largest)
    x[:, 3], x[:, 4] = largest, -largest
    weight = quantize(np.eye(64, dtype=np.float32)[:7], "int8")
    np.testing.assert_allclose(product(x, weight), x[:, :7], atol=max(largest / 2**15, 1e-38), rtol=1e-6)


def test_rows_of_zeros_are_zero_and_a_lost_row_is_lost_alone():
    weight = quantize(random(8, 64), "int8")
    x = jnp.zeros((3, 64)).at[1, 5].set(jnp.nan).at[2, 3].set(jnp.inf)
    got = product(x, weight)
    assert np.all(got[0] == 0)
    assert np.all(np.isnan(got[1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_table_rows_are_the_tables_rows(kind):
    table, ids = quantize(random(11, 64), kind), jnp.array([[4, 0], [10, 4]])
    np.testing.assert_array_equal(table_rows(table, ids), dequantize(table)[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_a_stack_are_the_layers(kind):
    w, x = random(3, 40, 64), jnp.asarray(random(9, 64, seed=4))
    stack = quantize(w, kind)
    assert stack.shape == w.shape
    _, scanned = jax.lax.scan(lambda _, layer: (None, product(x, layer)), None, stack)
    apart = [product(x, quantize(layer, kind)) for layer in w]
    np.testing.assert_array_equal(scanned, np.stack(apart))


@pytest.mark.parametrize("kind", KINDS)
def test_other_platforms_widen_the_same_weight(kind, monkeypatch):
    """Accelerators multiply floats; here their branch runs on the CPU."""
    x, weight = random(9, 128), quantize(random(70, 128, seed=1), kind)
    on_cpu = product(x, weight)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    np.testing.assert_allclose(product(x, weight), on_cpu, atol=2e-3)


def test_an_unknown_kind_and_unfit_inputs_are_refused():
    with pytest.raises(ValueError, match="unknown quantisation 'int3'; expected one of int8, int4, fp8"):
        quantize(random(4, 64), "int3")
    with pytest.raises(ValueError, match="int4 needs inputs in multiples of 64, found 96; ask for int8"):
        quantize(random(4, 96), "int4")
