"""Conditional drop-token sampling: which mask rows of which anchors are trained (PARD; P-EAGLE, section 3).

An element (anchor a, depth d) has reference position p = a + d and predicts token p + 2. Depth 0
keeps every position. Depth d keeps p only if depth d - 1 kept p - 1, so that an anchor's rows are
always 1..length: a rollout. Budgets come from the row length alone, so shapes never change.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class CodOptions:
    """Depth d keeps a share max(ratio**d, floor) of the seeds, up to depth ``num_depths`` - 1.

    ``max_anchors`` bounds the seeds of a row (0: the row length). ``segments`` is the number of
    parts that the rollouts are dealt to.
    """

    num_depths: int = 8
    ratio: float = 0.8
    floor: float = 0.0
    max_anchors: int = 0
    segments: int = 1


def supervised_positions(flags: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """bool (..., n): p predicts a supervised token, p + 2, of its own document.

    ``flags`` mark the tokens themselves; ``segment_ids`` are -1 on padding.
    """
    valid = np.zeros(flags.shape, bool)
    own, after, label = segment_ids[..., :-2], segment_ids[..., 1:-1], segment_ids[..., 2:]
    valid[..., :-2] = (flags[..., 2:] != 0) & (own >= 0) & (own == after) & (own == label)
    return valid


def depth_budgets(n: int, options: CodOptions) -> tuple[int, ...]:
    """m_d, the most rows of depth d = 1.. that a row of n positions keeps; ends before the first 0."""
    seeds = min(options.max_anchors or n, n)
    budgets: list[int] = []
    for d in range(1, options.num_depths):
        # the tolerance keeps an exact product such as 10 * 0.7 from falling to the integer below
        count = math.floor((seeds - d) * max(options.ratio**d, options.floor) + 1e-9)
        if budgets:  # a floor on the ratio may not let a deeper depth outnumber its parent
            count = min(count, budgets[-1])
        if count <= 0:
            break
        budgets.append(count)
    return tuple(budgets)


def depth_counts(n: int, options: CodOptions) -> tuple[int, ...]:
    """M_d, the rows of depth d = 1.. in every segment: the static structure of a batch."""
    return tuple(-(-m // options.segments) for m in depth_budgets(n, options))


def sample_rollouts(
    valid: np.ndarray, segment_ids: np.ndarray, key: Sequence[int], options: CodOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Anchors and lengths, int32 (S, M_1), of one row's rollouts.

    Row (a, d) is real iff 1 <= d <= length. In every segment, lengths fall, and at most M_d of
    them reach d, so that the rows of depth d are among the first M_d. Unused places hold 0 and 0.
    The result depends on ``key`` (such as seed, epoch, index) and on the arguments alone.
    """
    n = valid.shape[-1]
    budgets = depth_budgets(n, options)
    width = depth_counts(n, options)[0] if budgets else 0
    anchors = np.zeros((options.segments, width), np.int32)
    lengths = np.zeros((options.segments, width), np.int32)
    random = np.random.default_rng([int(k) for k in key])

    has_anchor = np.zeros(n, bool)  # the position before belongs to the same document
    has_anchor[1:] = (segment_ids[1:] == segment_ids[:-1]) & (segment_ids[1:] >= 0)
    pool = np.flatnonzero(valid & has_anchor)
    if options.max_anchors and len(pool) > options.max_anchors:
        pool = random.choice(pool, options.max_anchors, replace=False)
    reach = np.zeros(n, np.int32)  # by anchor
    for d, budget in enumerate(budgets, 1):
        if len(pool) > budget:
            pool = random.choice(pool, budget, replace=False)
        reach[pool - d] = d
        following = pool + 1
        following = following[following < n]
        pool = following[valid[following]]

    order = random.permutation(np.flatnonzero(reach))
    order = order[np.argsort(-reach[order], kind="stable")]
    for s in range(options.segments):
        part = order[s :: options.segments]
        anchors[s, : len(part)] = part
        lengths[s, : len(part)] = reach[part]
    return anchors, lengths


def sample_batch(
    valid: np.ndarray, segment_ids: np.ndarray, keys: Sequence[Sequence[int]], options: CodOptions
) -> tuple[np.ndarray, np.ndarray]:
    """``sample_rollouts`` of every row: anchors and lengths, int32 (S, B, M_1)."""
    rows = [sample_rollouts(v, s, k, options) for v, s, k in zip(valid, segment_ids, keys, strict=True)]
    return np.stack([a for a, _ in rows], 1), np.stack([length for _, length in rows], 1)
