"""Types of arguments."""

from __future__ import annotations

from peagle_jax.bench.flags import numbers


def test_a_number_that_is_named_twice_is_measured_once():
    assert numbers()("3, 5,3") == (3, 5)
