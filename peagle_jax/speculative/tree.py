"""The drafts of a round as a tree: which nodes are verified, and which path through them is accepted.

One parallel pass gives K marginals, so more candidates cost no drafting. A node is a candidate for the
position of its depth, after its parent's; node 0 is the root, the last committed token. Parents come before
children, so the first nodes of a tree are a tree as well. A chain is the tree of one candidate a depth.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

Paths = tuple[tuple[int, ...], ...]
"""Nodes of a fixed tree, each by the ranks of the candidates from the first position on."""

LEAST_CHANCE = 1e-6
"""Estimates stay that far from 0 and 1, whose log-odds are infinite."""


@struct.dataclass
class Marginals:
    """For each of K positions its C best candidates, best first, and their log-probabilities by the head.

    ``log_probs`` is None where nobody asks for estimates; C is 1 then.
    """

    tokens: Array  # int32 (B, K, C)
    log_probs: Array | None  # float32 (B, K, C)


@struct.dataclass
class Tree:
    """The root and M nodes of B sequences, each leaf (B, M + 1).

    ``chances`` are the estimated probabilities that a node is accepted (the root: 1), ``confidences`` the
    head's own of a node given its parent. Both are None where nobody asks for them. ``is_chain`` is static.
    """

    tokens: Array  # int32
    parents: Array  # int32; the root's is itself
    depths: Array  # int32; the root's is 0
    chances: Array | None = None  # float32
    confidences: Array | None = None  # float32
    is_chain: bool = struct.field(pytree_node=False, default=False)

    def first(self, nodes: int) -> Tree:
        """The root and the first ``nodes`` nodes."""
        return jax.tree.map(lambda x: x[:, : nodes + 1], self)

    @property
    def nodes(self) -> int:
        """M."""
        return self.tokens.shape[1] - 1


def calibrated(log_probs: Float[Array, "b k c"], calibration: Float[Array, "k 2"]) -> Float[Array, "b k c"]:
    """Log-probabilities after each depth's (slope, offset) on their log-odds; (1, 0) leaves them.

    What is not a number counts as hopeless.
    """
    p = jnp.exp(log_probs)
    p = jnp.clip(jnp.where(jnp.isnan(p), 0.0, p), LEAST_CHANCE, 1 - LEAST_CHANCE)
    slope, offset = calibration[None, :, None, 0], calibration[None, :, None, 1]
    return jax.nn.log_sigmoid(slope * (jnp.log(p) - jnp.log1p(-p)) + offset)


def chain_paths(k: int) -> Paths:
    """The nodes of a chain of K."""
    return tuple((0,) * depth for depth in range(1, k + 1))


def ordered_paths(paths: Paths) -> Paths:
    """A fixed tree's nodes with parents first, each depth by rank."""
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def candidates_of(paths: Paths) -> int:
    """C: how many candidates a position needs for a fixed tree."""
    return 1 + max(max(path) for path in paths)


def fixed_tree(
    last: Int[Array, " b"], marginals: Marginals, log_chances: Float[Array, "b k c"] | None, paths: Paths
) -> Tree:
    """The tree of these paths, whatever the head's estimates; see ``ordered_paths``."""
    depths = np.array([len(path) for path in paths], np.int32)
    ranks = np.array([path[-1] for path in paths], np.int32)
    index = {path: i + 1 for i, path in enumerate(paths)}
    parents = np.array([index.get(path[:-1], 0) for path in paths], np.int32)
    b = last.shape[0]

    def picked(x: Array) -> Array:
        return x[:, depths - 1, ranks]

    def spread(x: np.ndarray) -> Array:
        whole = np.concatenate([np.zeros(1, np.int32), x])
        return jnp.broadcast_to(jnp.asarray(whole), (b, len(paths) + 1))

    chances = None
    if log_chances is not None:
        own = _with_root(picked(log_chances), 0.0)
        along = _ancestors_of(parents)
        chances = jnp.exp(jnp.where(along, own[:, None, :], 0).sum(-1))
    return Tree(
        tokens=_with_root(picked(marginals.tokens), last),
        parents=spread(parents),
        depths=spread(depths),
        chances=chances,
        confidences=_confidences(marginals, picked),
        is_chain=paths == chain_paths(len(paths)),
    )


def _ancestors_of(parents: np.ndarray) -> np.ndarray:
    """bool (M + 1, M + 1): column j is row i's node or an ancestor of it."""
    seen = np.eye(len(parents) + 1, dtype=bool)
    for i, parent in enumerate(parents, start=1):
        seen[i] |= seen[parent]
    return seen


def _with_root(x: Array, root: Array | float) -> Array:
    column = jnp.broadcast_to(jnp.asarray(root, x.dtype), x.shape[:1])
    return jnp.concatenate([column[:, None], x], axis=1)


def _confidences(marginals: Marginals, picked: Callable[[Array], Array]) -> Array | None:
    if marginals.log_probs is None:
        return None
    return _with_root(jnp.exp(picked(marginals.log_probs)), 1.0)


def best_tree(
    last: Int[Array, " b"], marginals: Marginals, log_chances: Float[Array, "b k c"], nodes: int
) -> Tree:
    """The ``nodes`` likeliest nodes, best first: those with the largest products of marginals.

    Depth after depth, a node's children are its own chance times the next position's candidates. Of a depth
    no more than M can matter, and of equal chances the shallower node comes first, so parents do too.
    """
    b, k, c = log_chances.shape
    level = log_chances[:, 0, : min(c, nodes)]
    ranks = jnp.broadcast_to(jnp.arange(level.shape[1]), level.shape)
    levels, offset = [(level, jnp.full(level.shape, -1), ranks)], 0
    for depth in range(1, k):
        above = level.shape[1]
        grown = (level[:, :, None] + log_chances[:, depth, None, :]).reshape(b, -1)
        level, at = jax.lax.top_k(grown, min(max(nodes - depth, 1), grown.shape[1]))
        levels.append((level, offset + at // c, at % c))
        offset += above
    scores, above, ranks = (jnp.concatenate(parts, axis=1) for parts in zip(*levels, strict=True))
    depths = np.concatenate([np.full(part.shape[1], d + 1) for d, (part, _, _) in enumerate(levels)])
    found, ids = jax.lax.top_k(scores, nodes)

    def of(x: Array) -> Array:
        return jnp.take_along_axis(x, ids, axis=1)

    depths = jnp.asarray(depths, jnp.int32)[ids]
    parent_ids = of(above)
    at = (ids[:, None, :] == parent_ids[:, :, None]) * (jnp.arange(nodes) + 1)

    def picked(x: Array) -> Array:
        return jnp.take_along_axis(x.reshape(b, k * c), (depths - 1) * c + of(ranks), axis=1)

    return Tree(
        tokens=_with_root(picked(marginals.tokens), last),
        parents=_with_root(at.sum(-1).astype(jnp.int32), 0),
        depths=_with_root(depths, 0),
        chances=_with_root(jnp.exp(found), 1.0),
        confidences=_confidences(marginals, picked),
    )


def ancestors(tree: Tree) -> Bool[Array, "b w w"]:
    """The mask of the tree: row i sees itself, its parent and so on up to the root."""
    w = tree.tokens.shape[1]
    if tree.is_chain:
        return jnp.broadcast_to(jnp.tril(jnp.ones((w, w), bool)), (*tree.tokens.shape, w))
    step = jnp.eye(w) + (tree.parents[..., None] == jnp.arange(w))
    reach = 1
    while reach < w - 1:  # after n squarings it sees 2**n steps up
        step, reach = jnp.minimum(step @ step, 1.0), 2 * reach
    return step > 0


def accepted_path(
    tree: Tree, seen: Bool[Array, "b w w"], agreed: Bool[Array, "b w"], k: int
) -> tuple[Int[Array, "b k1"], Int[Array, " b"], Bool[Array, "b w"]]:
    """The accepted nodes, where ``agreed`` tells which nodes are what the target chose after their parent.

    Returns their indices by depth, (B, K + 1) from the root on (0 past the last one), how many there are
    below the root, and whether each node is among them. Siblings differ, so at most one of them agrees.
    """
    root = jnp.arange(tree.tokens.shape[1]) == 0
    alive = ~jnp.any(seen & ~(agreed | root)[:, None, :], axis=-1)
    count = (alive.sum(1) - 1).astype(jnp.int32)
    here = alive[:, None, :] & (tree.depths[:, None, :] == jnp.arange(k + 1)[:, None])
    path = jnp.sum(here * jnp.arange(tree.tokens.shape[1]), axis=-1)
    return path, count, alive


def first_children(tree: Tree) -> Bool[Array, "b w"]:
    """Which nodes are the first of their siblings; the root is none."""
    w = tree.tokens.shape[1]
    later = np.tril(np.ones((w, w), bool), -1) & (np.arange(w) > 0)
    twins = tree.parents[:, :, None] == tree.parents[:, None, :]
    return ~jnp.any(twins & later, axis=-1) & (jnp.arange(w) > 0)
