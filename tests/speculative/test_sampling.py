"""The sampling rule against the target's own law, and its independence of neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from peagle_jax.speculative.sampling import (
    SamplingParams,
    best_tokens,
    choose_tokens,
    filter_logits,
    first_argmax,
    gumbel_noise,
    sampling_state,
)

V = 11
LOGITS = np.random.default_rng(3).normal(size=V) * 2


def expected_law(p: SamplingParams) -> np.ndarray:
    """The filtered distribution, written out one step at a time."""
    probs = np.exp(LOGITS / p.temperature)
    probs /= probs.sum()
    probs[probs < p.min_p * probs.max()] = 0
    order = np.argsort(-probs)
    if p.top_k > 0:
        probs[order[p.top_k :]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= p.top_p]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=2.0, top_p=0.8, top_k=7),
        SamplingParams(temperature=2.0, top_p=0.9),
        SamplingParams(temperature=1.5, min_p=0.2),
    ],
    ids=str,
)
def test_tokens_follow_the_filtered_law(params):
    n = 100_000
    state = sampling_state([params])
    logits = jnp.broadcast_to(jnp.array(LOGITS, jnp.float32), (1, n, V))
    drawn = jax.jit(choose_tokens)(logits, jnp.arange(n)[None], state)
    law = expected_law(params)
    found = np.bincount(np.asarray(drawn)[0], minlength=V) / n
    assert 0.5 * np.abs(found - law).sum() < 0.01
    assert found[law == 0].sum() == 0


def test_the_filters_keep_what_a_sort_of_the_row_would():
    rng = np.random.default_rng(5)
    rows = (rng.normal(size=(6, 1, 700)) * 3).astype(np.float32)
    rows[1] = np.round(rows[1])  # many ties, and zeros of both signs
    rows[2, 0, 300:] = -1e30  # what rules have cut
    params = [
        SamplingParams(temperature=1.0, top_k=9),
        SamplingParams(temperature=1.0, top_k=40),
        SamplingParams(temperature=1.0, top_k=500, top_p=0.97),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, top_p=1e-6),
        SamplingParams(temperature=1.0),
    ]
    kept = np.asarray(jax.jit(filter_logits)(jnp.array(rows), sampling_state(params))) > -1e29
    for row, found, p in zip(rows[:, 0], kept[:, 0], params):
        ranked = np.sort(row)[::-1]
        weights = np.exp(ranked.astype(np.float64) - ranked[0])
        weights[p.top_k or len(row) :] = 0
        last = min(p.top_k or len(row), len(row)) - 1
        before = (np.cumsum(weights) - weights) / weights.sum()
        if p.top_p < 1:
            last = min(last, np.flatnonzero(before < p.top_p)[-1])
        np.testing.assert_array_equal(found, (row >= ranked[last]) & (row > -1e29))


def test_seeds_give_different_noise_and_positions_are_independent():
    states = sampling_state([SamplingParams(temperature=1.0, seed=s) for s in (1, 2, 2**33 + 1, -1)])
    positions = jnp.broadcast_to(jnp.arange(200), (4, 200))
    noise = np.asarray(gumbel_noise(states, positions, jnp.arange(50)))
    assert abs(noise.mean() - 0.5772) < 0.02 and abs(noise.std() - 1.2825) < 0.02
    flat = noise.reshape(4, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(4)).max() < 0.05
    assert np.abs(np.corrcoef(noise[0].T[:, :-1].ravel(), noise[0].T[:, 1:].ravel())[0, 1]) < 0.05


def test_noise_belongs_to_the_token_id_so_that_any_shard_can_draw_its_own():
    state = sampling_state([SamplingParams(temperature=1.0, seed=9)])
    positions = jnp.array([[5, 6]])
    whole = gumbel_noise(state, positions, jnp.arange(40))
    part = gumbel_noise(state, positions, jnp.array([3, 39, 17]))
    np.testing.assert_array_equal(part, whole[..., jnp.array([3, 39, 17])])


def test_greedy_and_sampled_rows_of_one_batch_do_not_touch_each_other():
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=4),
        SamplingParams(temperature=0.7, top_k=2),
    ]
    logits = jax.random.normal(jax.random.key(0), (3, 6, V)) * 3
    positions = jnp.arange(18).reshape(3, 6)
    together = choose_tokens(logits, positions, sampling_state(params))
    np.testing.assert_array_equal(together[0], jnp.argmax(logits[0], -1))
    for i, p in enumerate(params):
        alone = choose_tokens(logits[i : i + 1], positions[i : i + 1], sampling_state([p]))
        np.testing.assert_array_equal(together[i], alone[0])


def test_no_noise_is_drawn_when_every_row_is_greedy():
    program = jax.make_jaxpr(choose_tokens)(
        jnp.zeros((1, 2, V)), jnp.zeros((1, 2), int), sampling_state([SamplingParams()])
    )
    conditionals = [e for e in program.jaxpr.eqns if e.primitive.name == "cond"]
    assert len(conditionals) == 1
    greedy, sampled = (str(b) for b in conditionals[0].params["branches"])
    assert "threefry" in sampled and "threefry" not in greedy
    outside = [e.primitive.name for e in program.jaxpr.eqns]
    assert "threefry2x32" not in outside


def test_first_argmax_takes_the_first_of_equals_and_survives_nan():
    x = jnp.array([[1.0, 5.0, 5.0], [jnp.nan, 1.0, 2.0], [-jnp.inf, -jnp.inf, -jnp.inf]])
    assert first_argmax(x).tolist() == [1, 2, 0]


def test_top_k_of_one_is_greedy_at_any_temperature():
    state = sampling_state([SamplingParams(temperature=5.0, top_k=1, seed=3)])
    logits = jnp.array(LOGITS, jnp.float32)[None, None]
    kept = filter_logits(logits, state)[0, 0] > -1e29
    assert kept.sum() == 1 and kept[int(np.argmax(LOGITS))]


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 100.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"top_k": -2},
        {"seed": 2**64},
    ],
)
def test_values_out_of_range_are_refused_by_name(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        SamplingParams(**values)


def test_values_that_the_arrays_cannot_hold_become_the_nearest_meaning():
    assert SamplingParams(temperature=1e-40).temperature == 0.0
    assert SamplingParams(temperature=1e-5).temperature == 1e-5
    state = sampling_state([SamplingParams(temperature=1.0, top_k=2**40)])
    assert state.top_k[0] == 2**31 - 1
    logits = jax.random.normal(jax.random.key(0), (1, 1, 11))
    assert (filter_logits(logits, state) == logits).all()


@pytest.mark.parametrize("size", [96, 97])
def test_the_best_of_a_vocabulary_that_does_not_divide_over_devices_are_found(size):
    logits = jnp.round(jax.random.normal(jax.random.key(2), (2, 3, size)) * 4)  # with equal ones
    alone = best_tokens(logits, 7)
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = jax.jit(best_tokens, static_argnums=1)(logits, 7)
    for a, b in zip(alone, split, strict=True):
        np.testing.assert_array_equal(a, b)
    rows = np.asarray(logits)
    for place in np.ndindex(2, 3):
        np.testing.assert_array_equal(alone[1][place], np.argsort(-rows[place], kind="stable")[:7])
