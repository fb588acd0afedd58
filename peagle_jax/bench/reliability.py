"""What a head's own probabilities are worth: drafts by what it thought of them and what became of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BINS = 10
STEPS = 30
"""Of Newton's method; it converges in a few."""

PRIOR = 4.0
"""Drafts that the fit of the depth above weighs (of the first, the identity): a depth that was hardly ever
reached stays close to it."""

LEAST_SLOPE = 0.05
LEAST = 1e-6


class Drafts(NamedTuple):
    """Nodes that were verified after an accepted parent, each array (N,)."""

    depths: np.ndarray  # from 1 on
    confidence: np.ndarray
    accepted: np.ndarray  # bool

    def where(self, mask: np.ndarray) -> Drafts:
        return Drafts(*(x[mask] for x in self))


def log_odds(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, LEAST, 1 - LEAST)
    return np.log(p) - np.log1p(-p)


def fit(drafts: Drafts, depths: int) -> np.ndarray:
    """For each depth (slope, offset) on the log-odds that make the outcomes likeliest, float32 (depths, 2).

    Logistic regression (Platt's scaling) with the depth above as prior.
    """
    found, prior = np.zeros((depths, 2)), np.array([1.0, 0.0])
    for depth in range(1, depths + 1):
        _, confidence, accepted = drafts.where(drafts.depths == depth)
        x = np.stack([log_odds(confidence), np.ones(len(confidence))], axis=1)
        w = prior.copy()
        for _ in range(STEPS):
            p = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
            slope = x.T @ (accepted - p) - PRIOR * (w - prior)
            curvature = (x * (p * (1 - p))[:, None]).T @ x + PRIOR * np.eye(2)
            w += np.clip(np.linalg.solve(curvature, slope), -1, 1)
        found[depth - 1] = prior = np.array([max(w[0], LEAST_SLOPE), w[1]])
    return found.astype(np.float32)


def apply(drafts: Drafts, calibration: np.ndarray) -> Drafts:
    """The drafts with calibrated probabilities."""
    slope, offset = calibration[drafts.depths - 1].T
    odds = slope * log_odds(drafts.confidence) + offset
    return drafts._replace(confidence=1 / (1 + np.exp(-odds)))


def table(drafts: Drafts) -> list[dict[str, Any]]:
    """By tenths of the probability: how many drafts, their mean probability, and the share accepted."""
    bins = np.minimum((drafts.confidence * BINS).astype(int), BINS - 1)
    found = []
    for i in range(BINS):
        part = drafts.where(bins == i)
        if len(part.depths):
            found.append(
                {
                    "drafts": len(part.depths),
                    "confidence": float(part.confidence.mean()),
                    "accepted": float(part.accepted.mean()),
                }
            )
    return found


def calibration_error(drafts: Drafts) -> float:
    """The mean gap between probability and acceptance over the tenths, weighed by drafts (ECE)."""
    rows = table(drafts)
    total = sum(row["drafts"] for row in rows)
    return sum(row["drafts"] * abs(row["confidence"] - row["accepted"]) for row in rows) / max(total, 1)
