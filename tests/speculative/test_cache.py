import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.layers.quantized_rows import Int8Rows, widened
from peagle_jax.speculative.cache import (
    copy_slot,
    create_cache,
    reshaped,
    row_bytes,
    storage_dtype,
    write,
)

SLOTS, G, POSITIONS, H, T = 4, 2, 9, 4, 5


def filled(stacked: bool, count: int, slot: int = 0, dtype=jnp.float32, int8=False):
    """A cache of 3 layers after one write of T rows to each of ``count`` slots, and what it should hold."""
    rows = np.random.default_rng(0).normal(size=(2, 3, count, T, G, H)).astype(np.float32)
    k, v = (jnp.array(x) if stacked else tuple(jnp.array(x)) for x in rows)
    starts = np.array([1, 4][:count])
    cache = create_cache(3, SLOTS, G, POSITIONS, H, jnp.dtype(dtype), stacked, int8=int8)
    cache = write(cache, k, v, jnp.array(starts), jnp.zeros((count, T, 8)), slot)
    want = np.zeros((2, 3, SLOTS, G, POSITIONS, H), np.float32)
    for b in range(count):
        want[:, :, slot + b, :, starts[b] : starts[b] + T] = rows[:, :, b].swapaxes(2, 3)
    return cache, want


def content(cache) -> np.ndarray:
    parts = [part if isinstance(part, tuple) else [part] for part in (cache.k, cache.v)]
    found = [[widened(x) if isinstance(x, Int8Rows) else np.asarray(x) for x in part] for part in parts]
    return np.stack([np.stack(part) if len(part) > 1 else part[0] for part in found])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("count", "slot"), [(1, 0), (1, 3), (2, 0), (2, 1)])
def test_rows_land_at_each_sequences_own_place_and_nowhere_else(stacked, count, slot):
    cache, want = filled(stacked, count, slot)
    np.testing.assert_array_equal(content(cache), want)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_copied_slot_has_the_positions_asked_for(stacked):
    cache, want = filled(stacked, 2)
    copied = content(copy_slot(cache, jnp.int32(1), jnp.int32(3), jnp.int32(6)))
    np.testing.assert_array_equal(copied[:, :, 3, :, :6], want[:, :, 1, :, :6])
    np.testing.assert_array_equal(copied[:, :, :3], want[:, :, :3])


@pytest.mark.parametrize("stacked", [False, True])
def test_another_shape_keeps_the_slots_in_the_order_asked_for(stacked):
    cache, want = filled(stacked, 2)
    longer = content(reshaped(cache, jnp.array([1, 0]), 12))
    np.testing.assert_array_equal(longer[..., :POSITIONS, :], want[:, :, [1, 0]])
    assert not longer[..., POSITIONS:, :].any()
    shorter = content(reshaped(cache, jnp.array([1, 1, 2, 3, 0]), 7))
    np.testing.assert_array_equal(shorter, want[:, :, [1, 1, 2, 3, 0], :, :7])


@pytest.mark.parametrize("stacked", [False, True])
def test_int8_rows_are_written_copied_and_reshaped_with_their_scales(stacked):
    cache, want = filled(stacked, 2, int8=True)
    step = np.abs(want).max(-1, keepdims=True) / 127
    assert cache.positions == POSITIONS
    assert np.all(np.abs(content(cache) - want) <= step * 0.5001)
    moved = content(copy_slot(cache, jnp.int32(1), jnp.int32(3), jnp.int32(POSITIONS)))
    np.testing.assert_array_equal(moved[:, :, 3], content(cache)[:, :, 1])
    longer = content(reshaped(cache, jnp.array([1, 0]), 12))
    np.testing.assert_array_equal(longer[..., :POSITIONS, :], content(cache)[:, :, [1, 0]])


@pytest.mark.parametrize("int8", [False, True])
def test_the_bytes_of_a_row_are_those_of_the_arrays(int8):
    cache = create_cache(3, SLOTS, G, POSITIONS, H, jnp.dtype(jnp.uint16), False, int8=int8)
    taken = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert taken == 2 * 3 * SLOTS * POSITIONS * G * row_bytes(H, jnp.dtype(jnp.bfloat16), int8)


RING = 7


def rings(stacked: bool, starts: list[int], rows: int, int8: bool = False):
    """A cache of a layer with a ring and one without, twice, after writes of ``rows`` positions at each
    start; every number is its position + 1."""
    cache = create_cache(4, SLOTS, G, 30, H, jnp.dtype(jnp.float32), stacked, (RING, 0), int8)
    for start in starts:
        here = jnp.broadcast_to(jnp.arange(start, start + rows)[None, :, None, None] + 1.0, (1, rows, G, H))
        k = (jnp.stack([here, here]),) * 2 if stacked else (here,) * 4
        cache = write(cache, k, k, jnp.array([start]), jnp.zeros((1, rows, 8)), 1)
    return cache


def positions_of(cache, slot: int) -> list[list[int]]:
    """What the slot's places hold of the first ring and the first full layer."""
    stacked = cache.k[0].ndim == 5
    return [np.asarray(x[0] if stacked else x)[slot, 0, :, 0].astype(int).tolist() for x in cache.k[:2]]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_ring_holds_the_last_positions_each_at_its_place(stacked, rows):
    starts = list(range(0, 20, rows))
    ring, full = positions_of(rings(stacked, starts, rows), 1)
    end = starts[-1] + rows
    assert full[:end] == list(range(1, end + 1))
    assert ring == [max(p for p in range(end) if p % RING == place) + 1 for place in range(RING)]


@pytest.mark.parametrize("stacked", [False, True])
def test_a_rewritten_position_of_a_ring_is_the_last_writers(stacked):
    ring, _ = positions_of(rings(stacked, [0, 5, 6], 5), 1)
    assert ring == [8, 9, 10, 11, 5, 6, 7]


@pytest.mark.parametrize("stacked", [False, True])
def test_a_ring_is_copied_whole_and_keeps_its_bound_in_another_shape(stacked):
    cache = rings(stacked, [0, 5, 10], 5)
    moved = copy_slot(cache, jnp.int32(1), jnp.int32(3), jnp.int32(2))
    assert positions_of(moved, 3)[0] == positions_of(cache, 1)[0]
    assert positions_of(moved, 3)[1][:2] == [1, 2]
    short = reshaped(rings(stacked, [0], 5), jnp.array([1]), 6)
    assert positions_of(short, 0) == [[1, 2, 3, 4, 5, 0]] * 2
    again = reshaped(short, jnp.array([0, 0]), 30)
    assert positions_of(again, 1)[0] == [1, 2, 3, 4, 5, 0, 0]
    assert [x.shape[-2] for x in again.k[:2]] == [RING, 30]


def test_bfloat16_is_stored_as_its_bits_on_a_cpu_only():
    assert storage_dtype(jnp.dtype(jnp.bfloat16), "cpu") == jnp.uint16
    assert storage_dtype(jnp.dtype(jnp.bfloat16), "tpu") == jnp.bfloat16
    assert storage_dtype(jnp.dtype(jnp.float32), "cpu") == jnp.float32
    cache, want = filled(False, 2, dtype=jnp.uint16)
    np.testing.assert_array_equal(content(cache), np.asarray(want.astype(jnp.bfloat16)).view(np.uint16))


@pytest.mark.parametrize("stacked", [False, True])
def test_a_ring_of_int8_rows_holds_what_a_ring_of_floats_does(stacked):
    plain, small = (rings(stacked, [0, 5, 10], 5, int8) for int8 in (False, True))
    for moved in (lambda c: c, lambda c: copy_slot(c, jnp.int32(1), jnp.int32(3), jnp.int32(15))):
        for a, b in zip(moved(plain).k, moved(small).k, strict=True):
            np.testing.assert_allclose(widened(b), a, rtol=1e-6)
