"""Trees of drafts: the best nodes, their mask, and the accepted path, against brute force in NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.speculative.tree import (
    Marginals,
    accepted_path,
    ancestors,
    best_tree,
    calibrated,
    candidates_of,
    chain_paths,
    first_children,
    fixed_tree,
    ordered_paths,
)

B, K, C = 3, 4, 6
LAST = jnp.array([70, 71, 72])


def marginals(seed: int = 0) -> tuple[Marginals, np.ndarray]:
    """Candidates with distinct tokens at each position, best first."""
    rng = np.random.default_rng(seed)
    log_probs = np.sort(np.log(rng.dirichlet(np.ones(C) * 0.5, (B, K))), axis=-1)[..., ::-1]
    tokens = np.argsort(rng.random((B, K, 50)), axis=-1)[..., :C]
    found = Marginals(jnp.asarray(tokens, jnp.int32), jnp.asarray(log_probs, jnp.float32))
    return found, log_probs


def paths_of(tree, b: int) -> list[tuple[int, ...]]:
    """Each node's tokens from the root on, the root left out."""
    tokens, parents = np.asarray(tree.tokens[b]), np.asarray(tree.parents[b])
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], int(token)))  # an IndexError here: a child before its parent
    return found


@pytest.mark.parametrize("nodes", [1, 4, 11, 32])
def test_the_best_tree_has_the_most_probable_paths_of_all_best_first(nodes):
    found, log_probs = marginals(nodes)
    tree = best_tree(LAST, found, found.log_probs, nodes)
    for b in range(B):
        every = []
        for depth in range(1, K + 1):
            for ranks in itertools.product(range(C), repeat=depth):
                chance = sum(log_probs[b, d, r] for d, r in enumerate(ranks))
                tokens = tuple(int(found.tokens[b, d, r]) for d, r in enumerate(ranks))
                every.append((chance, tokens))
        best = sorted(every, reverse=True)[:nodes]
        got = paths_of(tree, b)[1:]
        assert got == [tokens for _, tokens in best]
        np.testing.assert_allclose(tree.chances[b, 1:], np.exp([c for c, _ in best]), rtol=1e-4)
        assert [len(path) for path in got] == tree.depths[b, 1:].tolist()
        last = [int(found.tokens[b, len(p) - 1].tolist().index(p[-1])) for p in got]
        own = [np.exp(log_probs[b, len(p) - 1, r]) for p, r in zip(got, last, strict=True)]
        np.testing.assert_allclose(tree.confidences[b, 1:], own, rtol=1e-4)
    assert tree.tokens[:, 0].tolist() == LAST.tolist()


def test_equal_chances_still_put_parents_first():
    found = Marginals(marginals()[0].tokens, jnp.zeros((B, K, C)))
    tree = best_tree(LAST, found, found.log_probs, 20)
    assert len(set(paths_of(tree, 0))) == 21


def test_a_vocabulary_smaller_than_the_tree_gives_deeper_nodes():
    found, _ = marginals()
    few = Marginals(found.tokens[..., :2], found.log_probs[..., :2])
    tree = best_tree(LAST, few, few.log_probs, 30)  # 2 + 4 + 8 + 16: all there are
    assert {len(p) for p in paths_of(tree, 1)} == {0, 1, 2, 3, 4}
    assert len(set(paths_of(tree, 1))) == 31


TREE = ordered_paths(((0, 0), (0,), (1,), (0, 1), (1, 2), (0, 0, 0)))


def test_a_fixed_tree_takes_the_candidates_of_its_ranks():
    found, log_probs = marginals()
    tree = fixed_tree(LAST, found, found.log_probs, TREE)
    assert TREE == ((0,), (1,), (0, 0), (0, 1), (1, 2), (0, 0, 0))
    tokens = np.asarray(found.tokens)
    for b in range(B):
        expected = [tuple(int(tokens[b, d, r]) for d, r in enumerate(path)) for path in TREE]
        assert paths_of(tree, b)[1:] == expected
        chances = [np.exp(sum(log_probs[b, d, r] for d, r in enumerate(path))) for path in TREE]
        np.testing.assert_allclose(tree.chances[b, 1:], chances, rtol=1e-4)
    assert candidates_of(TREE) == 3
    assert not tree.is_chain


def test_a_chain_is_the_tree_of_one_candidate_a_depth():
    found, _ = marginals()
    chain = fixed_tree(LAST, found, found.log_probs, chain_paths(K))
    assert chain.is_chain and chain.nodes == K
    assert chain.tokens[:, 1:].tolist() == found.tokens[..., 0].tolist()
    assert chain.depths[0].tolist() == [0, 1, 2, 3, 4] and chain.parents[0].tolist() == [0, 0, 1, 2, 3]
    free = chain.replace(is_chain=False)
    np.testing.assert_array_equal(ancestors(chain), ancestors(free))
    assert fixed_tree(LAST, found, None, ()).nodes == 0


def brute_mask(parents: np.ndarray) -> np.ndarray:
    seen = np.zeros((len(parents), len(parents)), bool)
    for i in range(len(parents)):
        at = i
        while True:
            seen[i, at] = True
            if at == 0:
                break
            at = parents[at]
    return seen


@pytest.mark.parametrize("nodes", [1, 2, 5, 18, 32])
def test_a_node_sees_itself_and_its_ancestors_and_no_other(nodes):
    found, _ = marginals(nodes + 100)
    tree = best_tree(LAST, found, found.log_probs, nodes)
    for b in range(B):
        np.testing.assert_array_equal(ancestors(tree)[b], brute_mask(np.asarray(tree.parents[b])))


def test_the_accepted_path_is_the_walk_from_the_root():
    found, _ = marginals(7)
    tree = best_tree(LAST, found, found.log_probs, 24)
    rng = np.random.default_rng(1)
    chosen = np.asarray(rng.integers(0, 50, tree.tokens.shape))
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    for b in range(B):  # let the target agree with some node after most nodes
        for i in range(tree.nodes + 1):
            children = [j for j in range(1, tree.nodes + 1) if parents[b, j] == i]
            if children and rng.random() < 0.8:
                chosen[b, i] = tokens[b, rng.choice(children)]
    agreed = tree.tokens == jnp.take_along_axis(jnp.asarray(chosen), tree.parents, axis=1)
    path, count, alive = accepted_path(tree, ancestors(tree), agreed, K)
    lengths = []
    for b in range(B):
        walk, at = [0], 0
        while True:
            nexts = [
                j for j in range(1, tree.nodes + 1) if parents[b, j] == at and tokens[b, j] == chosen[b, at]
            ]
            if not nexts:
                break
            (at,) = nexts
            walk.append(at)
        assert path[b, : len(walk)].tolist() == walk and int(count[b]) == len(walk) - 1
        assert not path[b, len(walk) :].any()
        assert np.flatnonzero(alive[b]).tolist() == sorted(walk)
        lengths.append(len(walk))
    assert max(lengths) > 2


def test_first_children_lead_the_likeliest_path():
    found, _ = marginals(3)
    tree = best_tree(LAST, found, found.log_probs, 13)
    parents = np.asarray(tree.parents)
    for b in range(B):
        first = {parents[b, i]: i for i in range(13, 0, -1)}
        assert np.flatnonzero(first_children(tree)[b]).tolist() == sorted(first.values())


def test_calibration_moves_log_odds_and_survives_what_is_no_number():
    p = np.array([[[0.9, 0.05, 0.0], [0.5, np.nan, 1.0]]])
    same = np.exp(calibrated(jnp.log(p), jnp.array([[1.0, 0.0], [1.0, 0.0]])))
    np.testing.assert_allclose(same[0, 0, :2], [0.9, 0.05], rtol=1e-4)
    assert np.isfinite(same).all() and (same > 0).all() and (same < 1).all()
    half = np.exp(calibrated(jnp.log(p), jnp.array([[0.5, 0.2], [1.0, -1.0]])))
    odds = 0.5 * np.log(0.9 / 0.1) + 0.2
    np.testing.assert_allclose(half[0, 0, 0], 1 / (1 + np.exp(-odds)), rtol=1e-4)
    np.testing.assert_allclose(half[0, 1, 0], 1 / (1 + np.exp(1.0)), rtol=1e-4)


def test_the_first_nodes_of_a_tree_are_a_tree():
    found, _ = marginals(5)
    tree = best_tree(LAST, found, found.log_probs, 20)
    small = best_tree(LAST, found, found.log_probs, 6)
    np.testing.assert_array_equal(tree.first(6).tokens, small.tokens)
    np.testing.assert_array_equal(tree.first(6).parents, small.parents)
