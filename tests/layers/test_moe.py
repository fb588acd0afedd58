"""A mixture's products read chosen experts only, and give each row the same wherever it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from peagle_jax.config import ConfigError, MoeConfig
from peagle_jax.layers.moe import Experts, LayerOf, expert_of, mixture, route, rows_of_a_block

D, E = 6, 11
RNG = np.random.default_rng(0)
WEIGHTS = jnp.array(RNG.normal(size=(E, D, D)), jnp.float32)


def experts(weights):
    return Experts(weights, None, None)


def expert(one, rows):
    return rows @ one.gate.T


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
    found = jax.jit(lambda *a: mixture(*a, cfg, experts(WEIGHTS), expert))(x, logits)
    np.testing.assert_allclose(found, everywhere(x, logits, cfg), atol=1e-5)


def test_one_expert_that_takes_every_row_goes_in_several_blocks():
    cfg = MoeConfig(E, 1)
    x, logits = draw(40)
    assert rows_of_a_block(40, cfg) == 8
    logits = logits.at[:, 7].set(99.0)
    np.testing.assert_allclose(mixture(x, logits, cfg, experts(WEIGHTS), expert), x @ WEIGHTS[7].T, atol=1e-5)


def test_experts_that_nobody_chose_are_not_read():
    cfg = MoeConfig(E, 2)
    x, logits = draw(4)
    logits = logits.at[:, :9].set(-99.0)
    poisoned = WEIGHTS.at[:9].set(jnp.nan)
    found = mixture(x, logits, cfg, experts(poisoned), expert)
    assert np.isfinite(np.asarray(found)).all()


def test_a_row_is_the_same_among_other_rows():
    cfg = MoeConfig(E, 4)
    x, logits = draw(30)
    whole = mixture(x, logits, cfg, experts(WEIGHTS), expert)
    alone = mixture(x[17:18], logits[17:18], cfg, experts(WEIGHTS), expert)
    np.testing.assert_allclose(whole[17:18], alone, atol=1e-6)


def test_a_layer_of_a_stack_is_read_by_its_index():
    stack = jnp.stack([WEIGHTS, 2 * WEIGHTS, 3 * WEIGHTS])
    layer = LayerOf(experts(stack), jnp.int32(2))
    np.testing.assert_array_equal(expert_of(layer, jnp.int32(4)).gate, 3 * WEIGHTS[4])


def test_devices_that_share_the_experts_give_the_same_sum():
    cfg, e = MoeConfig(8, 3), 8
    x, logits = draw(20)
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2
    )
    one = mixture(x, logits[:, :e], cfg, experts(WEIGHTS[:e]), expert)
    split = jax.device_put(WEIGHTS[:e], NamedSharding(mesh, PartitionSpec(("fsdp", "tensor"))))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda x, logits, w: mixture(x, logits, cfg, experts(w), expert))
        np.testing.assert_allclose(run(x, logits[:, :e], split), one, atol=1e-5)
        text = run.lower(x, logits[:, :e], split).compile().as_text()
        assert "all-gather" not in text  # each device reads its own experts alone
        stack = jnp.stack([0 * split, split])
        layered = jax.jit(
            lambda x, logits, w: mixture(x, logits, cfg, LayerOf(experts(w), jnp.int32(1)), expert)
        )
        np.testing.assert_allclose(layered(x, logits[:, :e], stack), one, atol=1e-5)


def test_equal_logits_go_to_the_lower_experts():
    chosen, shares = route(jnp.zeros((1, E)), MoeConfig(E, 3))
    assert chosen.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(shares, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(route(jnp.zeros((1, E)), MoeConfig(E, 3, False))[1], 1 / E, rtol=1e-6)


@pytest.mark.parametrize("top_k", [0, 12])
def test_more_experts_a_token_than_there_are_is_refused(top_k):
    with pytest.raises(ConfigError, match=rf"must be in 1\.\.11 \(num_experts\), found {top_k}"):
        MoeConfig(E, top_k)
