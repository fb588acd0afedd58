import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.speculative.cache import copy_slot, create_cache, reshaped, storage_dtype, write

SLOTS, G, POSITIONS, H, T = 4, 2, 9, 4, 5


def filled(stacked: bool, count: int, slot: int = 0, dtype=jnp.float32):
    """A cache of 3 layers after one write of T rows to each of ``count`` slots, and what it should hold."""
    rows = np.random.default_rng(0).normal(size=(2, 3, count, T, G, H)).astype(np.float32)
    k, v = (jnp.array(x) if stacked else tuple(jnp.array(x)) for x in rows)
    starts = np.array([1, 4][:count])
    cache = create_cache(3, SLOTS, G, POSITIONS, H, dtype, stacked)
    cache = write(cache, k, v, jnp.array(starts), jnp.zeros((count, T, 8)), slot)
    want = np.zeros((2, 3, SLOTS, G, POSITIONS, H), np.float32)
    for b in range(count):
        want[:, :, slot + b, :, starts[b] : starts[b] + T] = rows[:, :, b].swapaxes(2, 3)
    return cache, want


def content(cache) -> np.ndarray:
    return np.stack([np.stack([np.asarray(layer) for layer in part]) for part in (cache.k, cache.v)])


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


def test_bfloat16_is_stored_as_its_bits_on_a_cpu_only():
    assert storage_dtype(jnp.dtype(jnp.bfloat16), "cpu") == jnp.uint16
    assert storage_dtype(jnp.dtype(jnp.bfloat16), "tpu") == jnp.bfloat16
    assert storage_dtype(jnp.dtype(jnp.float32), "cpu") == jnp.float32
    cache, want = filled(False, 2, dtype=jnp.uint16)
    np.testing.assert_array_equal(content(cache), np.asarray(want.astype(jnp.bfloat16)).view(np.uint16))
