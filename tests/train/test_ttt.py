"""The training-time test against a plain loop with one dense mask over all steps' keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.drafter.head import draft_logits, fuse, run_head
from peagle_jax.train.partition import Batch, peagle_loss
from peagle_jax.train.ttt import eagle3_loss
from tests.tiny import head_config, head_params

N, STEPS = 17, 3
WEIGHTS = (1.0, 0.8, 0.64)


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
    """Document by document, with the keys of all steps side by side under one dense mask."""
    total, count, correct = 0.0, 0, [0] * STEPS
    for b in range(2):
        for document in sorted({int(i) for i in np.array(batch.segment_ids)[b] if i >= 0}):
            where = np.flatnonzero(np.array(batch.segment_ids)[b] == document)
            n = len(where)
            tokens = np.r_[np.array(batch.tokens)[b][where], np.zeros(STEPS + 2, int)]
            flags = np.array(batch.loss_flags)[b][where]
            target = batch.target_hidden[b, where] @ target_head.T
            g = fuse(params, cfg, batch.features[b, where])
            keys: list[list] = [[] for _ in range(cfg.num_layers)]
            for s in range(STEPS):
                # columns: step-0 keys of all positions, then one block of diagonals a step
                mask = np.concatenate([np.tril(np.ones((n, n), bool)), *[np.eye(n, dtype=bool)] * s], 1)

                def attend(q, k, v, layer, mask=mask, n=n, keys=keys):
                    keys[layer].append((k, v))
                    every_k, every_v = (jnp.concatenate(x) for x in zip(*keys[layer], strict=True))
                    repeat = q.shape[1] // every_k.shape[1]
                    every_k, every_v = (jnp.repeat(x, repeat, 1) for x in (every_k, every_v))
                    scores = jnp.einsum("tnh,snh->nts", q, every_k) * q.shape[-1] ** -0.5
                    p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
                    return jnp.einsum("nts,snh->tnh", p, every_v).reshape(n, -1)

                attends = [lambda q, k, v, i=i: attend(q, k, v, i) for i in range(cfg.num_layers)]
                read = jnp.array(tokens[1 + s : 1 + s + n])
                g, _ = run_head(params, cfg, read, g, jnp.arange(n) + s, attends)
                rows = [p for p in range(n - 2 - s) if flags[p + 2 + s]]
                draft, wanted = draft_logits(params, cfg, g)[np.array(rows)], target[np.array(rows) + 1 + s]
                log_p, log_q = jax.nn.log_softmax(wanted), jax.nn.log_softmax(draft)
                total += WEIGHTS[s] * jnp.sum(jnp.exp(log_p) * (log_p - log_q))
                count += len(rows)
                correct[s] += (draft.argmax(-1) == wanted.argmax(-1)).sum()
    return total / count, jnp.array(correct)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_loss_and_gradients_equal_the_dense_loop(batch, target_head, num_layers):
    cfg = head_config("eagle3", num_layers)
    params = head_params(cfg).replace(draft_to_target=None)

    def ours(params):
        return eagle3_loss(params, cfg, target_head, batch, WEIGHTS)

    def plain(params):
        return naive_loss(params, cfg, target_head, batch)

    (loss, metrics), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    (expected, correct), expected_gradient = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_array_equal(metrics.correct, correct)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_one_step_is_the_p_eagle_loss_of_depth_zero(batch, target_head):
    cfg = head_config("eagle3")
    params = head_params(cfg).replace(draft_to_target=None)

    @jax.jit
    def both(params):
        ttt = jax.value_and_grad(lambda p: eagle3_loss(p, cfg, target_head, batch, (1.0,))[0])(params)
        return ttt, jax.value_and_grad(lambda p: peagle_loss(p, cfg, target_head, batch, ())[0])(params)

    for a, b in zip(*map(jax.tree.leaves, both(params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_recomputation_changes_nothing(batch, target_head):
    cfg = head_config("eagle3", 1)
    params = head_params(cfg).replace(draft_to_target=None)

    @jax.jit
    def both(params):
        return [
            jax.value_and_grad(lambda p, r=r: eagle3_loss(p, cfg, target_head, batch, WEIGHTS, remat=r)[0])(
                params
            )
            for r in ("off", "dots", "full")
        ]

    for a, *others in zip(*map(jax.tree.leaves, both(params)), strict=True):
        for b in others:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_label_never_reaches_its_own_prediction(batch, target_head):
    """The draft of step s at p depends on the token p + 1 + s, not on its label p + 2 + s."""
    cfg = head_config("eagle3", 1)
    params = head_params(cfg).replace(draft_to_target=None)
    label = 12  # of row 1
    only = jnp.zeros((2, N), bool).at[1, label].set(True)

    @jax.jit
    def step_losses(tokens):
        found = eagle3_loss(params, cfg, target_head, batch.replace(tokens=tokens, loss_flags=only), WEIGHTS)
        return found[1].loss_sum

    plain = step_losses(batch.tokens)
    same, other = (step_losses(batch.tokens.at[1, at].add(1)) for at in (label, label - 1))
    assert (plain > 0).all()
    np.testing.assert_array_equal(plain, same)
    assert (plain != other).all()
