import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from peagle_jax.train.partition import Batch, peagle_loss
from peagle_jax.train.recipe import OptimizerRecipe
from peagle_jax.train.step import (
    Frozen,
    TrainState,
    complete,
    gradients,
    make_evaluation,
    make_optimizer,
    make_step,
    schedule,
)
from tests.tiny import head_config, head_params

N = 11
CFG = head_config(num_layers=1, num_depths=3)
COUNTS = (4, 2)


def objective(params, head, batch):
    return peagle_loss(params, CFG, head, batch, COUNTS)


def make_batch(rows, seed=0):
    rng = np.random.default_rng(seed)
    flags = rng.random((rows, N)) < np.linspace(0.2, 1.0, rows)[:, None]  # rows of unequal weight
    return Batch(
        tokens=jnp.array(rng.integers(0, 50, (rows, N))),
        segment_ids=jnp.zeros((rows, N), jnp.int32),
        positions=jnp.tile(jnp.arange(N), (rows, 1)),
        loss_flags=jnp.array(flags),
        features=jnp.array(rng.normal(size=(rows, N, 36)), jnp.float32),
        target_hidden=jnp.array(rng.normal(size=(rows, N, 12)), jnp.float32),
        anchors=jnp.tile(jnp.array([2, 4, 1, 0]), (1, rows, 1)),
        lengths=jnp.tile(jnp.array([2, 2, 1, 0]), (1, rows, 1)),
    )


def split(batch, parts):
    def one(x, axis):
        x = x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    return Batch(**{k: one(v, 1 if k in ("anchors", "lengths") else 0) for k, v in vars(batch).items()})


@pytest.fixture
def tables():
    whole = head_params(CFG)
    frozen = Frozen(whole.embed, jax.random.normal(jax.random.key(5), (31, 12)))
    return whole.replace(embed=None, draft_to_target=None), frozen


def test_micro_batches_give_the_whole_batch_gradient(tables):
    params, frozen = tables
    batch = make_batch(4)
    run = jax.jit(lambda batches: gradients(params, frozen, batches, objective, jnp.float32))
    whole, parts = run(split(batch, 1)), run(split(batch, 4))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_only_matrices_are_narrowed_and_frozen_tables_are_put_in(tables):
    params, frozen = tables
    made = complete(params.replace(lm_head=None), frozen.replace(lm_head=frozen.target_head), jnp.bfloat16)
    assert made.embed is frozen.embed and made.lm_head is frozen.target_head
    assert made.fc.dtype == made.layers[0].wq.dtype == jnp.bfloat16
    assert made.final_norm.dtype == made.mask_hidden.dtype == made.layers[0].attn_norm.dtype == jnp.float32


def test_a_step_lowers_the_loss_of_its_batch(tables):
    params, frozen = tables
    recipe = OptimizerRecipe(learning_rate=1e-2, schedule="constant", warmup=0.0)
    optimizer = make_optimizer(recipe, 20)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    step = make_step(optimizer, objective, jnp.float32)
    batch = split(make_batch(3), 1)
    losses = []
    for _ in range(20):
        state, report = step(state, frozen, batch)
        losses.append(float(report.loss))
    assert losses[-1] < 0.5 * losses[0]
    assert int(state.step) == 20
    again = make_evaluation(objective, jnp.float32)(state.params, frozen, make_batch(3))
    assert float(again.loss_sum.sum() / again.count.sum()) < losses[-1]


def test_a_step_that_is_not_finite_changes_nothing(tables):
    params, frozen = tables
    optimizer = make_optimizer(OptimizerRecipe(), 20)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    before = jax.tree.map(np.asarray, state)
    batch = make_batch(2)
    batch = batch.replace(features=batch.features.at[0, 3].set(jnp.inf))
    state, report = make_step(optimizer, objective, jnp.float32)(state, frozen, split(batch, 1))
    assert not np.isfinite(np.asarray(report.squares)).all()
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_schedules_warm_up_to_the_peak_and_end_at_the_final_rate(kind):
    recipe = OptimizerRecipe(learning_rate=0.4, final_learning_rate=0.1, warmup=0.1, schedule=kind)
    rates = [float(schedule(recipe, 100)(s)) for s in range(101)]
    np.testing.assert_allclose(rates[:11], [*np.linspace(0.04, 0.4, 10).tolist(), 0.4], rtol=1e-5)
    assert rates[100] == pytest.approx(0.4 if kind == "constant" else 0.1)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_weight_decay_leaves_vectors_alone(tables):
    params, _ = tables
    optimizer = make_optimizer(OptimizerRecipe(learning_rate=0.1, weight_decay=0.5, warmup=0.0), 10)

    @jax.jit
    def moved_by(params):
        zero = jax.tree.map(jnp.zeros_like, params)
        updates, _ = optimizer.update(zero, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    moved = moved_by(params)
    np.testing.assert_array_equal(moved.final_norm, params.final_norm)
    np.testing.assert_allclose(moved.fc, params.fc * 0.95, rtol=1e-5)


def test_a_gradient_above_the_clip_is_scaled_to_it():
    """Adam is blind to the scale of one step, so two steps of unequal gradients tell."""
    params = {"a": jnp.ones((3, 5)), "b": jnp.ones((3, 5))}
    small, large = (jax.tree.map(lambda w: jnp.full_like(w, value), params) for value in (0.1, 10.0))
    norm = float(optax.global_norm(large))

    def moved(clip, gradients):
        optimizer = make_optimizer(OptimizerRecipe(clip=clip, warmup=0.0, schedule="constant"), 10)
        state, at = optimizer.init(params), params
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, at)
            at = optax.apply_updates(at, updates)
        return np.asarray(at["a"])

    by_hand = jax.tree.map(lambda g: g / norm, large)
    np.testing.assert_allclose(moved(1.0, [small, large]), moved(0.0, [small, by_hand]), rtol=1e-6)
    assert abs(moved(1.0, [small, large]) - moved(0.0, [small, large])).max() > 1e-6
