import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.speculative.cache import create_cache, with_slots, write


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_land_at_each_sequences_own_slot(stacked, batch):
    cache = create_cache(3, batch, 2, 9, 4, jnp.float32, stacked)
    rows = np.random.default_rng(0).normal(size=(2, 3, batch, 5, 2, 4)).astype(np.float32)
    k, v = jnp.array(rows)
    starts = jnp.array([1, 4][:batch])
    new = write(
        cache, k if stacked else tuple(k), v if stacked else tuple(v), starts, jnp.zeros((batch, 5, 8))
    )
    grown = with_slots(new, 12)
    assert grown.slots == 12
    for layer in range(3):
        for b in range(batch):
            for got, want in ((grown.k, rows[0]), (grown.v, rows[1])):
                plane = np.asarray(got[layer])[b]
                np.testing.assert_array_equal(
                    plane[:, starts[b] : starts[b] + 5], want[layer, b].swapaxes(0, 1)
                )
                assert not plane[:, : starts[b]].any() and not plane[:, starts[b] + 5 :].any()
