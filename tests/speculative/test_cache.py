import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.layers.quantized_rows import Int8Rows, widened
from peagle_jax.speculative.cache import (
    copy_slot,
    create_cache,
    position_bytes,
    reshaped,
    storage_dtype,
    write,
)

SLOTS, G, POSITIONS, H, T = 4, 2, 9, 4, 5


def filled(stacked: bool, count: int, slot: int = 0, dtype=jnp.float32, int8=False):
    """A cache of 3 layers after one write of T rows to each of ``count`` slots, and what it should hold."""
    rows = np.random.default_rng(0).normal(size=(2, 3, count, T, G, H)).astype(np.float32)
    k, v = (jnp.array(x) if stacked else tuple(jnp.array(x)) for x in rows)
    starts = np.array([1, 4][:count])
    cache = create_cache(3, SLOTS, G, POSITIONS, H, jnp.dtype(dtype), stacked, int8)
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
def test_the_bytes_of_a_position_are_those_of_the_arrays(int8):
    cache = create_cache(3, SLOTS, G, POSITIONS, H, jnp.dtype(jnp.uint16), False, int8)
    taken = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert taken == SLOTS * POSITIONS * position_bytes(3, G, H, jnp.dtype(jnp.bfloat16), int8)


def test_bfloat16_is_stored_as_its_bits_on_a_cpu_only():
    assert storage_dtype(jnp.dtype(jnp.bfloat16), "cpu") == jnp.uint16
    assert storage_dtype(jnp.dtype(jnp.bfloat16), "tpu") == jnp.bfloat16
    assert storage_dtype(jnp.dtype(jnp.float32), "cpu") == jnp.float32
    cache, want = filled(False, 2, dtype=jnp.uint16)
    np.testing.assert_array_equal(content(cache), np.asarray(want.astype(jnp.bfloat16)).view(np.uint16))
