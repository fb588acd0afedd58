"""Arrangements of drafts as the round's configuration."""

import pytest

from peagle_jax.config import ConfigError, SpecConfig
from peagle_jax.speculation import CHAIN, Arrangement, describe
from tests.tiny import head_config

HEAD = head_config()


def test_a_chain_verifies_all_or_half_where_it_adapts():
    assert CHAIN.spec(5, HEAD).nodes_of(5) == (5,)
    assert Arrangement(adaptive=True).spec(5, HEAD).nodes_of(5) == (3, 5)
    assert Arrangement(adaptive=True).spec(1, HEAD).nodes_of(1) == (1,)
    assert Arrangement(adaptive=True).spec(5, HEAD).nodes_of(2) == (2,)  # fewer drafts are a plain chain


def test_a_tree_verifies_as_much_as_a_chain_or_more():
    assert Arrangement(32, adaptive=True).spec(5, HEAD).nodes_of(5) == (3, 5, 16, 32)
    assert Arrangement(8, adaptive=True).spec(5, HEAD).nodes_of(5) == (3, 4, 5, 8)
    assert Arrangement(8).spec(5, HEAD).nodes_of(5) == (8,)


def test_a_tree_that_no_machine_verifies_is_refused_at_once():
    for many in (Arrangement(num_trees=10**9), Arrangement(num_speculative_nodes=6000)):
        with pytest.raises(ConfigError, match="expected at most 256"):
            many.spec(3, HEAD)


def test_trees_of_a_number_are_so_many_chains_side_by_side():
    spec = Arrangement(num_trees=2).spec(3, HEAD, rounds=4)
    assert spec.speculative_token_tree == ((0,), (0, 0), (0, 0, 0), (1,), (1, 0), (1, 0, 0))
    assert spec.rounds == 4 and spec.is_tree and spec.most_nodes == 6


def test_an_eagle3_head_drafts_chains_alone():
    eagle3 = head_config("eagle3")
    assert Arrangement(adaptive=True).spec(4, eagle3).nodes_of(4) == (4,)
    with pytest.raises(ConfigError, match="EAGLE-3"):
        Arrangement(9).spec(4, eagle3)


def test_an_arrangement_is_told_in_words():
    assert describe(SpecConfig()) == "none"
    assert describe(CHAIN.spec(5, HEAD)) == "a chain of 5"
    assert describe(Arrangement(adaptive=True).spec(5, HEAD)) == (
        "a chain of 5; rounds verify 3 or all of it, by what pays"
    )
    assert describe(Arrangement(9).spec(5, HEAD)) == (
        "a tree of 9 likeliest nodes, 5 deep; a chain for requests with grammars"
    )
