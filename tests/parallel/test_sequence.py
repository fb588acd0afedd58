import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.parallel.sequence import WHOLE, SequenceParts

X = jnp.arange(2 * 12 * 3).reshape(2, 12, 3)


@pytest.mark.parametrize("parts", [WHOLE, SequenceParts(2), SequenceParts(4)])
def test_what_is_split_is_joined_again(parts):
    split = parts.split(X)
    assert split.shape == ((2, 12, 3) if parts is WHOLE else (parts.count, 2, 12 // parts.count, 3))
    np.testing.assert_array_equal(parts.join(split), X)
    np.testing.assert_array_equal(parts.positions(12).reshape(-1), np.arange(12))


@pytest.mark.parametrize("parts", [WHOLE, SequenceParts(3)])
def test_a_part_reads_the_whole_of_what_all_parts_have(parts):
    def part(x, index):
        whole = parts.whole(x)
        return whole.sum(1), whole[:, index] == x

    sums, same = parts.map(part, parts.split(X), parts.positions(12))
    assert same.all()
    np.testing.assert_array_equal(parts.total(sums), X.sum(1) * parts.count)
