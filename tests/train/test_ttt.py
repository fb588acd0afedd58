"""The training-time test against a plain loop with one dense mask over all steps' keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.drafter.head import draft_logits, fuse, run_head
from peagle_jax.train.partition import Batch, peagle_loss
from peagle_jax.train.ttt import eagle3_loss
from tests.tiny import head_config, head_params

N, STEPS = 17, 4
WEIGHTS = (1.0, 0.8, 0.64, 0.512)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    ids = np.full((2, N), -1)
    ids[0, :7], ids[0, 7:15], ids[1, :16] = 0, 1, 4
    positions = np.stack([np.r_[np.arange(7), np.arange(10)], np.arange(N)])
    flags = rng.random((2, N)) < 0.8
    return Batch(
        tokens=jnp.array(rng.integers(0, 50, (2, N))),
        segment_ids=jnp.array(ids),
        positions=jnp.array(positions),
        loss_flags=jnp.array(flags),
        features=jnp.array(rng.normal(size=(2, N, 36)), jnp.float32),
        target_hidden=jnp.array(rng.normal(size=(2, N, 12)), jnp.float32),
        anchors=jnp.zeros((1, 2, 0), jnp.int32),
        lengths=jnp.zeros((1, 2, 0), jnp.int32),
    )


@pytest.fixture(scope="module")
def target_head():
    return jax.random.normal(jax.random.key(3), (31, 12))


def naive_loss(params, cfg, target_head, batch):
    """Document by document, token by token lists, keys of all steps side by side."""
    total, count, correct = 0.0, 0, np.zeros(STEPS)
    for b in range(2):
        for document in sorted({int(i) for i in np.array(batch.segment_ids[b]) if i >= 0}):
            where = np.flatnonzero(np.array(batch.segment_ids[b]) == document)
            n = len(where)
            tokens = np.r_[np.array(batch.tokens[b])[where], np.zeros(STEPS + 2, int)]
            flags = np.r_[np.array(batch.loss_flags[b])[where], np.zeros(STEPS + 2, bool)]
            states = np.array(batch.target_hidden[b])[where]
            g = fuse(params, cfg, batch.features[b, where])
            keys: list[list] = [[] for _ in range(cfg.num_layers)]
            for s in range(STEPS):
                # columns: step-0 keys of all positions, then one block of diagonals a step
                masks = [np.tril(np.ones((n, n), bool))] + [np.eye(n, dtype=bool)] * s
                mask = jnp.array(np.concatenate(masks, 1))

                def attend(q, k, v, layer, mask=mask):
                    keys[layer].append((k, v))
                    every_k = jnp.concatenate([k for k, _ in keys[layer]])
                    every_v = jnp.concatenate([v for _, v in keys[layer]])
                    repeat = q.shape[1] // every_k.shape[1]
                    every_k, every_v = (jnp.repeat(x, repeat, 1) for x in (every_k, every_v))
                    scores = jnp.einsum("tnh,snh->nts", q, every_k) * q.shape[-1] ** -0.5
                    p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
                    return jnp.einsum("nts,snh->tnh", p, every_v).reshape(n, -1)

                attends = [lambda q, k, v, i=i: attend(q, k, v, i) for i in range(cfg.num_layers)]
                read = jnp.array(tokens[1 + s : 1 + s + n])
                g, _ = run_head(params, cfg, read, g, jnp.arange(n) + s, attends)
                draft = draft_logits(params, cfg, g)
                for p in range(n - 2 - s):
                    if flags[p + 2 + s]:
                        target = target_head @ states[p + 1 + s]
                        log_p, log_q = jax.nn.log_softmax(target), jax.nn.log_softmax(draft[p])
                        total += WEIGHTS[s] * jnp.sum(jnp.exp(log_p) * (log_p - log_q))
                        count += 1
                        correct[s] += int(draft[p].argmax()) == int(target.argmax())
    return total / count, correct


@pytest.mark.parametrize("num_layers", [1, 2])
def test_loss_and_gradients_equal_the_dense_loop(batch, target_head, num_layers):
    cfg = head_config("eagle3", num_layers)
    params = head_params(cfg).replace(draft_to_target=None)

    def ours(params):
        return eagle3_loss(params, cfg, target_head, batch, WEIGHTS)

    with jax.disable_jit(False):
        (loss, metrics), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    plain, correct = naive_loss(params, cfg, target_head, batch)
    np.testing.assert_allclose(loss, plain, rtol=1e-5)
    np.testing.assert_array_equal(metrics.correct, correct)

    # the reverse mode against a finite difference along a random direction
    key = jax.random.key(7)
    direction = jax.tree.map(lambda w: jax.random.normal(key, w.shape), params)
    moved = [
        eagle3_loss(jax.tree.map(lambda w, d, s=s: w + s * 1e-3 * d, params, direction), cfg, target_head, batch, WEIGHTS)[0]
        for s in (1, -1)
    ]
    slope = sum(jax.tree.leaves(jax.tree.map(lambda a, b: (a * b).sum(), gradient, direction)))
    np.testing.assert_allclose(slope, (moved[0] - moved[1]) / 2e-3, rtol=2e-2)


def test_one_step_is_the_p_eagle_loss_of_depth_zero(batch, target_head):
    cfg = head_config("eagle3")
    params = head_params(cfg).replace(draft_to_target=None)
    ttt = jax.value_and_grad(lambda p: eagle3_loss(p, cfg, target_head, batch, (1.0,))[0])(params)
    flat = jax.value_and_grad(lambda p: peagle_loss(p, cfg, target_head, batch, ())[0])(params)
    for a, b in zip(jax.tree.leaves(ttt), jax.tree.leaves(flat), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_recomputation_changes_nothing(batch, target_head):
    cfg = head_config("eagle3", 1)
    params = head_params(cfg).replace(draft_to_target=None)
    found = [
        jax.value_and_grad(lambda p, remat=remat: eagle3_loss(p, cfg, target_head, batch, WEIGHTS, remat)[0])(params)
        for remat in (True, False)
    ]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_label_never_reaches_its_own_prediction(batch, target_head):
    """Changing token x_{p+2+s} must not change the draft of step s at p, only its successors."""
    cfg = head_config("eagle3", 1)
    params = head_params(cfg).replace(draft_to_target=None)
    moved = 12  # row 1: steps s read tokens up to p + 1 + s

    def loss_at(batch, step):
        weights = tuple(float(s == step) for s in range(STEPS))
        only = np.zeros((2, N), bool)
        only[1, moved] = True
        return eagle3_loss(params, cfg, target_head, batch.replace(loss_flags=jnp.array(only)), weights)[0]

    changed = batch.replace(tokens=batch.tokens.at[1, moved].set((batch.tokens[1, moved] + 1) % 50))
    later = batch.replace(tokens=batch.tokens.at[1, moved - 1].set((batch.tokens[1, moved - 1] + 1) % 50))
    for step in range(STEPS):
        assert loss_at(batch, step) == loss_at(changed, step)
        assert loss_at(batch, step) != loss_at(later, step)
