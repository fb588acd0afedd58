"""Two-part cached attention and packed attention against one dense softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.layers.attention import cached_attention, causal_mask, packed_attention, rows_at_once
from peagle_jax.layers.quantized_rows import quantize_rows

B, T, S, N, G, H = 2, 3, 7, 6, 2, 4


def random(*shape, seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def dense(q, k, v, mask):
    """q (B, T, N, H), k and v (B, S, G, H), mask (B, T, S)."""
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(mask[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", p, v).reshape(*q.shape[:2], -1)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_cached_attention_is_one_softmax_over_committed_slots_and_own_rows(shape):
    q, k_new, v_new = random(B, T, N, H), random(B, T, G, H, seed=1), random(B, T, G, H, seed=2)
    k_cache, v_cache = random(B, G, S, H, seed=3), random(B, G, S, H, seed=4)
    lengths = jnp.array([5, 0])
    own = causal_mask(B, T)
    if shape == "tree":  # two siblings after the root do not see each other
        own = own.at[:, 2, 1].set(False)
    got = cached_attention(q, k_new, v_new, k_cache, v_cache, lengths, own)
    keys = np.concatenate([k_cache.transpose(0, 2, 1, 3), k_new], axis=1)
    values = np.concatenate([v_cache.transpose(0, 2, 1, 3), v_new], axis=1)
    committed = np.broadcast_to((np.arange(S) < np.array(lengths)[:, None])[:, None], (B, T, S))
    want = dense(np.array(q), keys, values, np.concatenate([committed, own], axis=2))
    np.testing.assert_allclose(got, want, atol=1e-5)


def with_sinks(q, k, v, mask, sinks):
    """``dense`` with a key more for each query head, whose score is its sink and whose value is 0."""
    scores = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, q.shape[2] // k.shape[2], axis=2))
    scores = np.where(mask[:, None], scores / np.sqrt(q.shape[-1]), -np.inf)
    p = np.exp(scores)
    p /= p.sum(-1, keepdims=True) + np.exp(sinks)[None, :, None, None]
    values = np.repeat(v, q.shape[2] // v.shape[2], axis=2)
    return np.einsum("bnts,bsnh->btnh", p, values).reshape(*q.shape[:2], -1)


@pytest.mark.parametrize("window", [1, 4, 6])
def test_a_sliding_window_is_read_from_a_ring(window):
    """Keys of every position are dense; the ring holds the last ten, with scratch where the oldest were."""
    lengths, room, sinks = np.array([23, 4, 0, 10]), 10, random(N, seed=9)
    w, most = len(lengths), 26
    q, k, v = random(w, T, N, H), random(w, most, G, H, seed=1), random(w, most, G, H, seed=2)
    ring_k, ring_v = (np.full((w, G, room, H), 77.0, np.float32) for _ in "kv")
    own_k, own_v = (np.zeros((w, T, G, H), np.float32) for _ in "kv")
    mask = np.zeros((w, T, most), bool)
    for b, length in enumerate(lengths):
        for p in range(length):
            ring_k[b, :, p % room], ring_v[b, :, p % room] = k[b, p], v[b, p]
        for p in range(length, length + T):  # rejected drafts of an earlier step
            ring_k[b, :, p % room] = ring_v[b, :, p % room] = 55.0
        own_k[b], own_v[b] = k[b, length : length + T], v[b, length : length + T]
        at = length + np.arange(T)[:, None] - np.arange(most)
        mask[b] = (at >= 0) & (at < window)
    positions = lengths[:, None] + np.arange(T)
    back = np.arange(T)[:, None] - np.arange(T)
    own = np.broadcast_to((back >= 0) & (back < window), (w, T, T))
    since = jnp.array(positions - window + 1)
    arrays = map(jnp.array, (own_k, own_v, ring_k, ring_v, lengths, own))
    got = cached_attention(q, *arrays, 0, since, sinks)
    want = with_sinks(np.array(q), np.array(k), np.array(v), mask, np.array(sinks))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("options", [{"block": 2}, {"block": 2, "unrolled": 1}, {}], ids=str)
def test_packed_rows_see_as_far_as_their_window_within_their_document(options):
    n, window, sinks = 9, 3, random(N, seed=9)
    q, k, v = random(B, n, N, H), random(B, n, G, H, seed=1), random(B, n, G, H, seed=2)
    ids = np.array([[0] * 5 + [1] * 4, [0] * 9])
    back = np.arange(n)[:, None] - np.arange(n)
    mask = (back >= 0) & (back < window) & (ids[:, :, None] == ids[:, None])
    got = packed_attention(q, k, v, jnp.array(ids), window=window, sinks=sinks, **options)
    want = with_sinks(np.array(q), np.array(k), np.array(v), mask, np.array(sinks))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_sequences_of_a_wide_batch_attend_as_they_do_alone():
    """Wide batches are read in groups on CPU, each as far as its own longest sequence."""
    lengths = jnp.array([3, 0, 290, 128, 7, 1, 129, 2, 300, 5, 0, 64])
    w, s = len(lengths), 310
    q, k_new, v_new = random(w, T, N, H), random(w, T, G, H, seed=1), random(w, T, G, H, seed=2)
    k_cache, v_cache = random(w + 2, G, s, H, seed=3), random(w + 2, G, s, H, seed=4)
    attend = jax.jit(cached_attention, static_argnums=7)
    together = attend(q, k_new, v_new, k_cache, v_cache, lengths, causal_mask(w, T), 2)
    for i in range(w):
        own = (x[i : i + 1] for x in (q, k_new, v_new))
        alone = attend(*own, k_cache, v_cache, lengths[i : i + 1], causal_mask(1, T), 2 + i)
        np.testing.assert_allclose(together[i : i + 1], alone, atol=1e-6)


@pytest.mark.parametrize("options", [{"block": 4}, {"block": 4, "unrolled": 1}, {"block": 64}])
def test_documents_of_a_packed_row_stand_apart(options):
    n = 10
    q, k, v = random(B, n, N, H), random(B, n, G, H, seed=1), random(B, n, G, H, seed=2)
    ids = jnp.array([[0] * 4 + [1] * 5 + [-1], [2] * 10])
    got = packed_attention(q, k, v, ids, **options)
    mask = (np.array(ids)[:, :, None] == np.array(ids)[:, None]) & np.tril(np.ones((n, n), bool))
    np.testing.assert_allclose(got, dense(np.array(q), k, v, mask), atol=1e-5)


def test_long_rows_of_many_heads_are_read_in_smaller_blocks():
    assert rows_at_once(9, 512) == 2**26 // (9 * 512)
    assert rows_at_once(64, 131072) == 16
    q, k = (jax.ShapeDtypeStruct((1, 2**17, heads, 64), jnp.bfloat16) for heads in (64, 8))
    ids = jax.ShapeDtypeStruct((1, 2**17), jnp.int32)
    program = str(jax.make_jaxpr(lambda *x: packed_attention(*x, jnp.bfloat16))(q, k, k, ids))
    assert "f32[1,8,8,16,131072]" in program  # a block's scores: 512 MB
    assert "f32[1,8,8,128,131072]" not in program  # what short rows would take


def test_blockwise_rows_have_the_gradients_of_whole_rows():
    n = 9
    ids = jnp.zeros((B, n), int)
    q, k, v = random(B, n, N, H), random(B, n, G, H, seed=1), random(B, n, G, H, seed=2)

    def loss(options):
        return lambda *qkv: jnp.sum(jnp.sin(packed_attention(*qkv, ids, **options)))

    whole, parts = (
        jax.jit(jax.grad(loss(o), argnums=(0, 1, 2)))(q, k, v)
        for o in ({"block": 64}, {"block": 4, "unrolled": 1})
    )
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_part_of_a_row_reads_the_keys_of_all_of_it():
    n, start, t = 10, 3, 5
    q, k, v = random(B, n, N, H), random(B, n, G, H, seed=1), random(B, n, G, H, seed=2)
    ids = jnp.array([[0] * 4 + [1] * 6, [2] * 10])
    part = slice(start, start + t)
    queries = (ids[:, part], jnp.arange(n)[part])
    got = packed_attention(q[:, part], k, v, ids, block=2, queries=queries)
    np.testing.assert_allclose(got, packed_attention(q, k, v, ids)[:, part], atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_own_rows_count_as_the_int8_cache_will_hold_them(dtype):
    """A row that sees another in its step sees what a later step would read of it."""
    dtype = jnp.dtype(dtype)
    q, k, v = random(1, 1, N, H), random(1, S, G, H, seed=1), random(1, S, G, H, seed=2)
    k_rows, v_rows = (quantize_rows(x, dtype).swapaxes(1, 2) for x in (k, v))
    known = S - 1
    last = [x[:, known:] for x in (k, v)]
    stored = cached_attention(q, *last, k_rows, v_rows, jnp.array([known]), causal_mask(1, 1))
    own = jnp.concatenate([jnp.zeros((1, known, N, H)), q], axis=1)
    together = cached_attention(own, k, v, k_rows, v_rows, jnp.array([0]), causal_mask(1, S))
    atol = 1e-6 if dtype == jnp.float32 else 0.01  # weights of a softmax are rounded to bfloat16
    np.testing.assert_allclose(together[:, known:], stored, atol=atol)
    exact = cached_attention(own, k, v, k.swapaxes(1, 2), v.swapaxes(1, 2), jnp.array([0]), causal_mask(1, S))
    assert 1e-4 < np.abs(exact - together).max() < 0.1
