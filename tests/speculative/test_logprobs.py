"""Reports against a plain log softmax; the same in blocks, and nothing computed unasked."""

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.speculative.logprobs import report_logprobs, report_prompt, token_logprobs
from peagle_jax.speculative.sampling import MAX_LOGPROBS

B, T, V, D = 2, 11, 37, 5
RNG = np.random.default_rng(2)
HIDDEN = RNG.normal(size=(B, T, D)).astype(np.float32)
TABLE = RNG.normal(size=(D, V)).astype(np.float32) * 2
LOGITS = HIDDEN @ TABLE
TOKENS = RNG.integers(0, V, (B, T))


def test_a_report_is_the_log_softmax_the_rank_and_the_best():
    report = report_logprobs(LOGITS, TOKENS, jnp.array(True))
    expected = np.asarray(jax.nn.log_softmax(LOGITS, axis=-1))
    for b in range(B):
        rows = token_logprobs(jax.tree.map(lambda x, b=b: np.asarray(x)[b], report), TOKENS[b].tolist(), 5)
        assert len(rows) == T
        for row, token, law in zip(rows, TOKENS[b], expected[b], strict=True):
            best = np.argsort(-law)
            assert row.token_id == token
            np.testing.assert_allclose(row.logprob, law[token], atol=1e-5)
            assert row.rank == 1 + np.flatnonzero(best == token)[0]
            assert [i for i, _ in row.top] == best[:5].tolist()
            np.testing.assert_allclose([x for _, x in row.top], law[best[:5]], atol=1e-5)


def test_a_prompt_is_reported_in_blocks_as_in_one_piece():
    whole = report_logprobs(LOGITS, TOKENS, jnp.array(True))
    blocks = report_prompt(lambda h: h @ TABLE, HIDDEN, TOKENS, jnp.array(True), V)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(blocks), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_unasked_reports_are_zeros_and_compute_nothing():
    for make in (
        lambda x, wanted: report_logprobs(x @ TABLE, TOKENS, wanted),
        lambda x, wanted: report_prompt(lambda h: h @ TABLE, x, TOKENS, wanted, V),
    ):
        report = make(HIDDEN, jnp.array(False))
        assert report.top.shape == (B, T, MAX_LOGPROBS)
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(report))
        program = jax.make_jaxpr(make)(HIDDEN, jnp.array(False)).jaxpr
        outside = [e.primitive.name for e in program.eqns if e.primitive.name != "cond"]
        assert not {"top_k", "exp", "reduce_max"} & set(outside)
