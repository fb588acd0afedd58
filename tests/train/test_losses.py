"""Losses and the gradients that are kept for them, against plain automatic differentiation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.train.losses import agrees, distillation_loss

DRAFT, TARGET = (jax.random.normal(jax.random.key(i), (2, 3, 11)) * 3 for i in range(2))
WEIGHTS = jnp.array([[1.0, 0.0, 2.0], [0.5, 3.0, 1.0]])


def plain(kind, draft, target):
    log_q = jax.nn.log_softmax(draft)
    if kind == "kl":
        p = jax.nn.softmax(target)
        return jnp.sum(p * (jnp.log(p) - log_q), -1)
    return -jnp.take_along_axis(log_q, jnp.argmax(target, -1)[..., None], -1)[..., 0]


@pytest.mark.parametrize("kind", ["kl", "cross_entropy"])
def test_values_and_gradients_are_the_plain_ones(kind):
    def ours(draft):
        return jnp.sum(distillation_loss(draft, TARGET, kind, jnp.dtype("float32")) * WEIGHTS)

    value, gradient = jax.value_and_grad(ours)(DRAFT)
    expected = jax.value_and_grad(lambda draft: jnp.sum(plain(kind, draft, TARGET) * WEIGHTS))(DRAFT)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], atol=2e-6)


@pytest.mark.parametrize("kind", ["kl", "cross_entropy"])
def test_nothing_flows_into_the_target(kind):
    gradient = jax.grad(lambda t: distillation_loss(DRAFT, t, kind, jnp.dtype("float32")).sum())(TARGET)
    assert not gradient.any()


def test_soft_cross_entropy_has_the_gradient_of_kl():
    def soft(draft):
        return -jnp.sum(jax.nn.softmax(TARGET) * jax.nn.log_softmax(draft))

    ours = jax.grad(lambda d: distillation_loss(d, TARGET, "kl", jnp.dtype("float32")).sum())(DRAFT)
    np.testing.assert_allclose(ours, jax.grad(soft)(DRAFT), atol=2e-6)


def test_a_perfect_draft_costs_nothing_in_kl_and_still_something_in_cross_entropy():
    same = {k: distillation_loss(TARGET, TARGET, k, jnp.dtype("float32")) for k in ("kl", "cross_entropy")}
    np.testing.assert_allclose(same["kl"], 0.0, atol=1e-6)
    assert (same["cross_entropy"] > 0).all()
    assert agrees(TARGET, TARGET).all()


def test_of_equal_best_tokens_the_first_is_the_label():
    target, draft = jnp.array([0.0, 5.0, 5.0]), jnp.array([0.0, 1.0, 2.0])
    expected = -jax.nn.log_softmax(draft)[1]
    np.testing.assert_allclose(
        distillation_loss(draft, target, "cross_entropy", jnp.dtype("float32")), expected
    )
