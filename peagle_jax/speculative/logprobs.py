"""Log-probabilities of tokens under the model alone: log softmax of raw logits, before every rule.

vLLM calls these raw_logprobs. A row depends on its own logits only, so a token's report is the same
with any head, in any batch, and when its text is scored again as a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.parallel.rules import anywhere
from peagle_jax.speculative.sampling import MAX_LOGPROBS, TokenLogprob, best_tokens

PROMPT_BLOCK = 8
"""Prompt positions scored at once: bounds the logits that a whole chunk would need."""


@struct.dataclass
class LogprobReport:
    """Of T tokens a sequence: log-probability, rank (1 = best) and the N best. Zeros if unasked."""

    logprob: Array  # float32 (B, T)
    rank: Array  # int32 (B, T)
    top_ids: Array  # int32 (B, T, N), best first
    top: Array  # float32 (B, T, N)


def _report(logits: Float[Array, "b t v"], tokens: Int[Array, "b t"]) -> LogprobReport:
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    is_own = jnp.arange(logits.shape[-1]) == tokens[..., None]
    own = jnp.sum(jnp.where(is_own, logits, 0), axis=-1, keepdims=True)  # a gather would want whole rows
    top, ids = best_tokens(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    return LogprobReport(
        logprob=(own - total)[..., 0],
        rank=1 + jnp.sum(logits > own, axis=-1, dtype=jnp.int32),
        top_ids=ids.astype(jnp.int32),
        top=top - total,
    )


def _zeros(tokens: Int[Array, "b t"], vocab_size: int) -> LogprobReport:
    n = min(MAX_LOGPROBS, vocab_size)
    return LogprobReport(
        logprob=jnp.zeros(tokens.shape, jnp.float32),
        rank=jnp.zeros(tokens.shape, jnp.int32),
        top_ids=jnp.zeros((*tokens.shape, n), jnp.int32),
        top=jnp.zeros((*tokens.shape, n), jnp.float32),
    )


def report_logprobs(
    logits: Float[Array, "b w v"],
    tokens: Int[Array, "b t"],
    wanted: Bool[Array, ""],
    rows: Callable[[Array], Array] = lambda x: x,
) -> LogprobReport:
    """Reports ``tokens`` under the raw logits of the rows that chose them, if ``wanted``; ``rows`` takes them
    from all."""
    v = logits.shape[-1]
    wanted = anywhere(wanted)
    return jax.lax.cond(wanted, lambda x: _report(rows(x), tokens), lambda _: _zeros(tokens, v), logits)


def report_prompt(
    logits_of: Callable[[Array], Array],
    hidden: Float[Array, "b t d"],
    tokens: Int[Array, "b t"],
    wanted: Bool[Array, ""],
    vocab_size: int,
) -> LogprobReport:
    """Reports prompt ``tokens``, each under ``logits_of`` the hidden state before it, if ``wanted``."""
    b, t = tokens.shape
    blocks = -(-t // PROMPT_BLOCK)
    pad = blocks * PROMPT_BLOCK - t

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pad), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(b, blocks, PROMPT_BLOCK, *x.shape[2:]).swapaxes(0, 1)

    def joined(x: Array) -> Array:
        return x.swapaxes(0, 1).reshape(b, blocks * PROMPT_BLOCK, *x.shape[3:])[:, :t]

    def scored(hidden: Array) -> LogprobReport:
        pairs = split(hidden), split(tokens)
        reports = jax.lax.map(lambda pair: _report(logits_of(pair[0]), pair[1]), pairs)
        return jax.tree.map(joined, reports)

    return jax.lax.cond(anywhere(wanted), scored, lambda _: _zeros(tokens, vocab_size), hidden)


def token_logprobs(report: LogprobReport, tokens: Sequence[int], n: int) -> list[TokenLogprob]:
    """The first ``len(tokens)`` rows of one sequence's report (NumPy, without the batch axis)."""
    rows = []
    for i, token in enumerate(tokens):
        pairs = zip(report.top_ids[i, :n].tolist(), report.top[i, :n].tolist(), strict=True)
        rows.append(TokenLogprob(int(token), float(report.logprob[i]), int(report.rank[i]), tuple(pairs)))
    return rows
