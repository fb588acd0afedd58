import pytest

from peagle_jax.config import ConfigError, SpecConfig
from peagle_jax.speculative.sizes import Pool, Sizes, backlog_of, chunks_of, pools_of, scratch_of, widths_of


def test_one_pool_where_the_memory_has_room_for_every_context():
    assert pools_of(8, 1000, 50, None) == (Pool(8, 1050),)
    assert pools_of(8, 1000, 50, 8 * 1050) == (Pool(8, 1050),)


def test_less_memory_has_more_short_slots_and_fewer_long_ones():
    pools = pools_of(64, 8192, 100, 20_000)
    assert [pool.positions for pool in pools] == [612, 1124, 2148, 4196, 8292]
    assert [pool.slots for pool in pools] == [32, 17, 9, 4, 2]
    assert all(pool.slots * pool.positions <= 20_000 for pool in pools)


def test_a_shorter_pool_of_as_many_slots_is_left_out():
    assert pools_of(2, 2000, 0, 3000, 512) == (Pool(2, 1024), Pool(1, 2000))


def test_a_context_that_does_not_fit_is_refused_with_the_largest_that_does():
    with pytest.raises(ConfigError, match=r"at most 950$"):
        pools_of(4, 2000, 50, 1000)


def test_widths_are_powers_of_two_and_all_slots():
    assert [widths_of(n) for n in (1, 2, 3, 6, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 6), (1, 2, 4, 8)]
    sizes = Sizes((Pool(6, 10), Pool(3, 20)), (1, 2, 4, 6), (0,), (8,))
    assert [sizes.widths_of(pool) for pool in sizes.pools] == [(1, 2, 4, 6), (1, 2, 3)]
    assert [sizes.width_for(n, sizes.pools[1]) for n in (1, 2, 3)] == [1, 2, 3]
    assert [sizes.guided_widths_of(Pool(n, 10)) for n in (1, 2, 6)] == [(1,), (1, 2), (1, 6)]


def test_every_width_of_a_later_pool_is_there_once():
    big, small = Pool(6, 10), Pool(3, 20)
    sizes = Sizes((big, small), (1, 2, 4, 6), (0,), (8,))
    assert sizes.every_width() == [(big, 1), (big, 2), (big, 4), (big, 6), (small, 3)]


@pytest.mark.parametrize(("tokens", "width"), [(1, 32), (32, 32), (33, 128), (128, 128), (500, 128)])
def test_a_chunk_is_the_shortest_that_holds_the_tokens(tokens, width):
    assert Sizes((), (), (), chunks_of(128)).chunk_for(tokens) == width


def test_scratch_has_room_for_a_chunk_a_dispatch_and_what_waits_for_the_drafter():
    assert scratch_of(128, SpecConfig(5, "peagle")) == 128
    assert scratch_of(8, SpecConfig(5, "peagle", rounds=4)) == 4 * 6 + 11
    assert scratch_of(8, SpecConfig(3, "peagle")) == backlog_of(SpecConfig(3, "peagle")) == 20


def test_a_ring_forgets_what_lies_a_ring_less_a_window_behind():
    sizes = Sizes((Pool(1, 900),), (1,), (0,), (8,), windows=(8, 0), rings=(128, 0))
    assert [sizes.least_kept(written) for written in (100, 128, 129, 300)] == [0, 0, 9, 180]
    assert Sizes((Pool(1, 900),), (1,), (0,), (8,)).least_kept(10**6) == 0
