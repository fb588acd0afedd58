"""Fits on drafts whose true acceptance is known."""

import numpy as np
import pytest

from peagle_jax.bench.reliability import Drafts, apply, calibration_error, fit, log_odds, table


def drawn(slope: float, offset: float, count: int = 20_000, depth: int = 1) -> Drafts:
    """Drafts whose log-odds of acceptance are so far from what the head says."""
    rng = np.random.default_rng(depth)
    confidence = rng.beta(0.7, 1.3, count)
    true = 1 / (1 + np.exp(-(slope * log_odds(confidence) + offset)))
    return Drafts(np.full(count, depth), confidence, rng.random(count) < true)


def test_the_fit_finds_what_made_the_outcomes():
    parts = [drawn(0.6, -0.8), drawn(1.3, 0.4, depth=2)]
    both = Drafts(*(np.concatenate(x) for x in zip(*parts, strict=True)))
    np.testing.assert_allclose(fit(both, 2), [[0.6, -0.8], [1.3, 0.4]], atol=0.07)


def test_a_depth_that_was_never_reached_is_as_the_one_above():
    found = fit(drawn(0.6, -0.8), 3)
    np.testing.assert_allclose(found[1:], found[:1].repeat(2, axis=0))
    nothing = Drafts(np.zeros(0, int), np.zeros(0), np.zeros(0, bool))
    np.testing.assert_allclose(fit(nothing, 2), [[1, 0], [1, 0]])


def test_outcomes_against_all_probabilities_give_no_negative_slope():
    assert fit(drawn(-2.0, 0.0), 1)[0, 0] > 0


def test_calibration_takes_the_error_away():
    drafts = drawn(0.5, -1.0)
    assert calibration_error(drafts) > 0.1
    assert calibration_error(apply(drafts, fit(drafts, 1))) < 0.02


def test_the_table_counts_every_draft_once():
    drafts = Drafts(np.ones(4, int), np.array([0.05, 0.07, 0.95, 1.0]), np.array([False, True, True, True]))
    assert table(drafts) == [
        {"drafts": 2, "confidence": pytest.approx(0.06), "accepted": 0.5},
        {"drafts": 2, "confidence": pytest.approx(0.975), "accepted": 1.0},
    ]
