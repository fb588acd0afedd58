"""A sum over segments and its gradient, against reverse mode through an ordinary scan."""

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.train.accumulation import summed


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(3)
    shared = {
        "w": jnp.array(rng.normal(size=(4, 5)), dtype),
        "fixed": jnp.array(rng.normal(size=(5,)), jnp.float32),
        "ids": jnp.arange(3),
    }
    return shared, jnp.array(rng.normal(size=(7, 2, 4)), jnp.float32), jnp.arange(14.0).reshape(7, 2)


def body(shared, x, c):
    y = jnp.tanh(x @ shared["w"].astype(jnp.float32) + shared["fixed"])
    return jnp.sum(y.sum(-1) * c), {"rows": jnp.float32(x.shape[0]), "largest": y.max()}


def by_summed(shared, x, c):
    return summed((body,), lambda tree: tree, (shared,), x, c)


def by_stages(shared, x, c):
    def first(own, x, c):
        return x @ own["w"].astype(jnp.float32), 2 * x

    def second(own, state, c):
        y = jnp.tanh(state[0] + own["fixed"])
        return jnp.sum(y.sum(-1) * c), {"rows": jnp.float32(len(state[1])), "largest": y.max()}

    split = ({"w": shared["w"]}, {"fixed": shared["fixed"], "ids": shared["ids"]})
    return summed((first, second), lambda tree: tree, split, x, c)


def by_loop(shared, x, c):
    parts = [body(shared, x[i], c[i]) for i in range(x.shape[0])]
    return jax.tree.map(lambda *leaves: sum(leaves), *parts)


def derivatives(function, shared, x, c, learned):
    def loss(some, x):
        value, report = function({**shared, **some}, x, c)
        return 3 * value + 1, report

    some = {name: shared[name] for name in learned}
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(some, x)


def test_values_reports_and_gradients_are_those_of_a_loop():
    shared, x, c = inputs()
    for learned in (["w", "fixed"], ["w"], ["fixed"]):
        theirs = derivatives(by_loop, shared, x, c, learned)
        for function in (by_summed, by_stages):
            ours = derivatives(function, shared, x, c, learned)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def test_without_a_gradient_it_is_a_plain_sum():
    shared, x, c = inputs()
    ours, theirs = jax.jit(by_summed)(shared, x, c), by_loop(shared, x, c)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def test_a_leaf_that_nobody_differentiates_costs_no_gradient():
    shared, x, c = inputs()

    def carried(learned):
        text = str(jax.make_jaxpr(lambda: derivatives(by_summed, shared, x, c, learned))())
        return text.count("f32[4,5]")

    assert carried(["fixed"]) < carried(["w"])


def test_gradients_of_narrow_weights_add_up_in_float32():
    """Added up in bfloat16, 300 segments of 1 would end at 256."""
    w = jnp.ones((1,), jnp.bfloat16)
    each, constants = jnp.zeros((300, 1)), jnp.ones((300,))

    def loss(w):
        def body(w, x, c):
            return jnp.sum(w.astype(jnp.float32) * c + x), jnp.float32(0)

        return summed((body,), lambda tree: tree, (w,), each, constants)[0]

    assert float(jax.grad(loss)(w)[0]) == 300


def test_place_sees_every_gradient_under_its_own_name():
    shared, x, c = inputs()
    seen = []

    def place(tree):
        seen.append({name: None if leaf is None else leaf.dtype for name, leaf in tree.items()})
        return tree

    jax.grad(lambda w: summed((body,), place, ({**shared, "w": w},), x, c)[0])(shared["w"])
    assert seen
    for tree in seen:
        assert tree == {"w": jnp.float32, "fixed": None, "ids": None}
