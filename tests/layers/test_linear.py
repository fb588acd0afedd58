"""Narrow products: float32 accumulation, gradients, and rows that do not depend on their number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.layers.linear import product, table_rows


def random(*shape, seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_a_product_has_the_same_bits_in_steps_of_any_width():
    x, w = random(20, 64), random(48, 64, seed=1).astype(jnp.bfloat16)
    whole = product(x, w)
    for rows in (1, 2, 6, 9):
        np.testing.assert_array_equal(product(x[:rows], w), whole[:rows])


def test_narrow_operands_accumulate_in_float32():
    x, w = random(3, 2, 40), random(5, 40, seed=1)
    exact = np.einsum("abk,fk->abf", *(np.float64(v.astype(jnp.bfloat16)) for v in (x, w)))
    got = product(x, w.astype(jnp.bfloat16))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


def test_narrow_gradients_are_those_of_the_rounded_operands():
    x, w, g = random(12, 7), random(9, 7, seed=1), random(12, 9, seed=2)
    x, w, g = (v.astype(jnp.bfloat16).astype(jnp.float32) for v in (x, w, g))

    def loss(x, w):
        return jnp.sum(product(x, w) * g)

    exact = jax.grad(loss, argnums=(0, 1))(x, w)
    narrow = jax.grad(loss, argnums=(0, 1))(x, w.astype(jnp.bfloat16))
    for got, want in zip(narrow, exact, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_table_rows_are_the_tables_rows(dtype):
    table = random(11, 3).astype(dtype)
    ids = jnp.array([[4, 0], [10, 4]])
    got = table_rows(table, ids)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, table.astype(jnp.float32)[ids])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_table_learns_from_the_rows_that_are_read(dtype):
    """Narrow tables are read through their bits, which have no gradient."""
    table, ids = random(7, 3).astype(dtype), jnp.array([[2, 5], [2, 0]])
    weights = jnp.array([[1.0, 2.0], [4.0, 8.0]])
    gradient = jax.grad(lambda t: jnp.sum(table_rows(t, ids) * weights[..., None]))(table)
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient[:, 0], [8, 0, 5, 0, 0, 2, 0])
