"""A mixture's products read chosen experts only, and give each row the same wherever it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import ConfigError, MoeConfig
from peagle_jax.layers.moe import LayerOf, expert_of, mixture, route, rows_of_a_block

D, E = 6, 11
RNG = np.random.default_rng(0)
WEIGHTS = jnp.array(RNG.normal(size=(E, D, D)), jnp.float32)


def expert(index, rows):
    return rows @ expert_of(WEIGHTS, index).T


def everywhere(x, logits, cfg):
    """All experts of all rows, weighted by what is left of the others' shares: nothing."""
    chosen, shares = route(logits, cfg)
    weights = jnp.zeros(logits.shape).at[jnp.arange(len(x))[:, None], chosen].set(shares)
    return jnp.einsum("rd,efd,re->rf", x, WEIGHTS, weights)


def draw(rows):
    return (jnp.array(RNG.normal(size=shape), jnp.float32) for shape in ((rows, D), (rows, E)))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_sum_is_that_over_all_experts_with_the_others_weighing_nothing(rows, normed):
    cfg = MoeConfig(E, 3, normed)
    x, logits = draw(rows)
    found = jax.jit(lambda *a: mixture(*a, cfg, expert))(x, logits)
    np.testing.assert_allclose(found, everywhere(x, logits, cfg), atol=1e-5)


def test_one_expert_that_takes_every_row_goes_in_several_blocks():
    cfg = MoeConfig(E, 1)
    x, logits = draw(40)
    assert rows_of_a_block(40, cfg) == 8
    logits = logits.at[:, 7].set(99.0)
    np.testing.assert_allclose(mixture(x, logits, cfg, expert), x @ WEIGHTS[7].T, atol=1e-5)


def test_experts_that_nobody_chose_are_not_read():
    cfg = MoeConfig(E, 2)
    x, logits = draw(4)
    logits = logits.at[:, :9].set(-99.0)
    poisoned = WEIGHTS.at[:9].set(jnp.nan)
    found = mixture(x, logits, cfg, lambda e, rows: rows @ expert_of(poisoned, e).T)
    assert np.isfinite(np.asarray(found)).all()


def test_a_row_is_the_same_among_other_rows():
    cfg = MoeConfig(E, 4)
    x, logits = draw(30)
    whole = mixture(x, logits, cfg, expert)
    np.testing.assert_allclose(whole[17:18], mixture(x[17:18], logits[17:18], cfg, expert), atol=1e-6)


def test_a_layer_of_a_stack_is_read_by_its_index():
    stack = jnp.stack([WEIGHTS, 2 * WEIGHTS, 3 * WEIGHTS])
    np.testing.assert_array_equal(expert_of(LayerOf(stack, jnp.int32(2)), jnp.int32(4)), 3 * WEIGHTS[4])


def test_equal_logits_go_to_the_lower_experts():
    chosen, shares = route(jnp.zeros((1, E)), MoeConfig(E, 3))
    assert chosen.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(shares, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(route(jnp.zeros((1, E)), MoeConfig(E, 3, False))[1], 1 / E, rtol=1e-6)


@pytest.mark.parametrize("top_k", [0, 12])
def test_more_experts_a_token_than_there_are_is_refused(top_k):
    with pytest.raises(ConfigError, match=rf"must be in 1\.\.11 \(num_experts\), found {top_k}"):
        MoeConfig(E, top_k)
