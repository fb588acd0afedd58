"""The scan over segments against the flat N x K masked pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.drafter.head import draft_logits, fuse, run_head
from peagle_jax.layers.attention import NEGATIVE, grouped, ungrouped
from peagle_jax.train import partition
from peagle_jax.train.partition import Batch, peagle_loss, shifted, supervised
from tests.tiny import TARGET, head_config, head_params

N, DEPTHS = 23, 4


def make_batch(segments: int) -> tuple[Batch, tuple[int, ...], list[list[tuple[int, int]]]]:
    """Two packed rows with hand-made rollouts; also the list of kept (anchor, length) a row."""
    rng = np.random.default_rng(0)
    ids = np.full((2, N), -1)
    ids[0, :9], ids[0, 9:20] = 0, 1
    ids[1, :21] = 3
    positions = np.stack([np.r_[np.arange(9), np.arange(14)], np.arange(N)])
    flags = np.ones((2, N), bool)
    flags[0, :3] = flags[0, 9:13] = flags[1, :5] = False
    kept = [
        [(2, 3), (4, 2), (11, 3), (12, 1), (14, 2), (13, 3)],
        [(4, 3), (9, 3), (10, 1), (12, 2), (15, 3), (6, 1)],
    ]
    counts = tuple(-(-c // segments) for c in (6, 5, 3))
    anchors = np.zeros((segments, 2, counts[0]), np.int32)
    lengths = np.zeros_like(anchors)
    for b, rollouts in enumerate(kept):
        for i, (a, length) in enumerate(sorted(rollouts, key=lambda r: -r[1])):
            anchors[i % segments, b, i // segments] = a
            lengths[i % segments, b, i // segments] = length
    batch = Batch(
        tokens=jnp.array(rng.integers(0, 50, (2, N))),
        segment_ids=jnp.array(ids),
        positions=jnp.array(positions),
        loss_flags=jnp.array(flags),
        features=jnp.array(rng.normal(size=(2, N, 36)), jnp.float32),
        target_hidden=jnp.array(rng.normal(size=(2, N, 12)), jnp.float32),
        anchors=jnp.array(anchors),
        lengths=jnp.array(lengths),
    )
    return batch, counts, kept


def flat_loss(params, cfg, target_head, batch, kept, weights):
    """Every row of every depth in one pass under one dense mask."""
    total, count = 0.0, 0.0
    for b in range(2):
        rows = [(a, 0) for a in range(N)] + [(a, d) for a, m in kept[b] for d in range(1, m + 1)]
        a, d = np.array(rows).T
        ids = np.array(batch.segment_ids)[b]
        real_depth = np.stack([a, d])
        same = ids[a][:, None] == ids[a][None]
        mask = same & (
            ((d[None] == 0) & (a[None] <= a[:, None])) | ((a[None] == a[:, None]) & (d[None] <= d[:, None]))
        )

        def attend(q, k, v, mask=mask):
            g = k.shape[-2]
            s = jnp.einsum("bgth,bsgh->bgts", grouped(q, g) * q.shape[-1] ** -0.5, k)
            s = jnp.where(jnp.tile(mask, (q.shape[2] // g, 1)), s, NEGATIVE)
            return ungrouped(jnp.einsum("bgts,bsgh->bgth", jax.nn.softmax(s, -1), v), q.shape[1])

        token = jnp.where(d == 0, shifted(batch.tokens, 1)[b][a], cfg.mask_token_id)
        feature = jnp.where((d == 0)[:, None], batch.features[b][a], params.mask_hidden)
        position = batch.positions[b][a] + d
        g = fuse(params, cfg, feature)[None]
        h, _ = run_head(params, cfg, token[None], g, position[None], [attend] * cfg.num_layers)
        logits = draft_logits(params, cfg, h)[0]
        at = np.minimum(a + d + 1, N - 1)
        target = batch.target_hidden[b][at] @ target_head.T
        p = jax.nn.softmax(target)
        kl = jnp.sum(p * (jax.nn.log_softmax(target) - jax.nn.log_softmax(logits)), -1)
        real = jnp.where(d == 0, supervised(batch)[b][a], True)
        assert real_depth.shape[1] == len(rows)
        total += jnp.sum(kl * real * jnp.array(weights)[d])
        count += real.sum()
    return total / count


@pytest.mark.parametrize(("layers", "vocab", "all_segments"), [(1, 31, (1, 3)), (4, 53, (2,))])
def test_scan_over_segments_gives_the_flat_loss_and_every_gradient(layers, vocab, all_segments):
    cfg = head_config(num_layers=layers, draft_vocab=vocab, norm_before_fc=layers == 4)
    params = head_params(cfg).replace(draft_to_target=None)
    target_head = jax.random.normal(jax.random.key(5), (vocab, TARGET.hidden_size))
    weights = (1.0, 0.9, 0.7, 0.6)
    batch, _, kept = make_batch(1)
    flat = jax.jit(jax.value_and_grad(lambda p: flat_loss(p, cfg, target_head, batch, kept, weights)))
    expected, expected_grads = flat(params)
    for segments in all_segments:
        batch, counts, _ = make_batch(segments)
        ours = jax.value_and_grad(
            lambda p, b=batch, c=counts: peagle_loss(p, cfg, target_head, b, c, weights)[0]
        )
        loss, grads = jax.jit(ours)(params)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("kind", ["kl", "cross_entropy"])
def test_what_is_kept_for_the_reverse_pass_changes_nothing(kind):
    cfg = head_config(num_layers=1)
    batch, counts, _ = make_batch(2)
    target_head = jax.random.normal(jax.random.key(5), (31, TARGET.hidden_size))
    params = head_params(cfg).replace(draft_to_target=None)

    @jax.jit
    def all_ways(params):
        def loss(p, remat):
            return peagle_loss(p, cfg, target_head, batch, counts, None, kind, remat)[0]

        return [jax.value_and_grad(loss)(params, remat) for remat in ("off", "dots", "full")]

    for a, *others in zip(*map(jax.tree.leaves, all_ways(params)), strict=True):
        assert jnp.isfinite(a).all()
        for b in others:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_rows_in_blocks_give_the_same_loss_and_gradients(monkeypatch):
    cfg = head_config(num_layers=2)
    batch, counts, _ = make_batch(1)
    target_head = jax.random.normal(jax.random.key(5), (31, TARGET.hidden_size))
    params = head_params(cfg).replace(draft_to_target=None)

    def run():
        loss = jax.jit(jax.value_and_grad(lambda p: peagle_loss(p, cfg, target_head, batch, counts)[0]))
        return jax.tree.leaves(loss(params))

    whole = run()
    asked = []

    def few(heads, keys):
        asked.append((heads, keys))
        return 3

    monkeypatch.setattr(partition, "rows_at_once", few)
    assert sum(counts) % 3 and sum(counts) > 6
    for a, b in zip(whole, run(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert set(asked) == {(2 * cfg.block.num_heads, N)}


def test_counts_and_accuracy_are_reported_per_depth():
    cfg = head_config()
    batch, counts, kept = make_batch(2)
    target_head = jax.random.normal(jax.random.key(5), (31, TARGET.hidden_size))
    _, metrics = jax.jit(lambda p: peagle_loss(p, cfg, target_head, batch, counts))(head_params(cfg))
    lengths = [m for rollouts in kept for _, m in rollouts]
    expected = [int(supervised(batch).sum())] + [sum(m >= d for m in lengths) for d in (1, 2, 3)]
    assert metrics.count.tolist() == expected
    assert (metrics.correct <= metrics.count).all()


def test_one_depth_trains_without_the_mask_state():
    cfg = head_config()
    batch, _, _ = make_batch(1)
    batch = batch.replace(anchors=jnp.zeros((0, 2, 0), int), lengths=jnp.zeros((0, 2, 0), int))
    target_head = jax.random.normal(jax.random.key(5), (31, TARGET.hidden_size))
    params = head_params(cfg).replace(draft_to_target=None)
    grads = jax.jit(jax.grad(lambda p: peagle_loss(p, cfg, target_head, batch, ())[0]))(params)
    assert float(jnp.abs(grads.mask_hidden).max()) == 0.0
    assert float(jnp.abs(grads.fc).max()) > 0.0


def test_supervision_sits_on_the_label_and_stays_inside_a_document():
    batch, _, _ = make_batch(1)
    flags = supervised(batch)[0]
    assert flags.nonzero()[0].tolist() == [1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16, 17]
