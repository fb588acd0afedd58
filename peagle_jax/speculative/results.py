"""Reads a dispatch's outputs: arrays of R replicas become each slot's tokens and reports."""

from __future__ import annotations

import jax
import numpy as np

from peagle_jax.speculative.logprobs import token_logprobs
from peagle_jax.speculative.request import Flight, RoundResult
from peagle_jax.speculative.sampling import TokenLogprob


def local_rows(x: jax.Array) -> np.ndarray:
    """The replicas' rows (R, ...) on the host. Indexing a replicated array would gather it on a device."""
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(shards[first]) for first in sorted(shards)])


def read(flight: Flight) -> list[dict[int, RoundResult]]:
    """Waits for a dispatch; for each of its rounds what the slots got that got something.

    A prompt's chunk without a token counts as something only if its log-probabilities are asked for.
    """
    output = flight.output
    local = jax.tree.map(local_rows, output.replace(logprobs=None, prompt=None, drafts=None))
    logprobs = jax.tree.map(local_rows, output.logprobs) if (local.wanted >= 0).any() else None
    scored = _scored(flight)
    rounds: list[dict[int, RoundResult]] = []
    for i in range(local.count.shape[1]):
        found: dict[int, RoundResult] = {}
        for r, slots in enumerate(flight.slots):
            for row, slot in enumerate(slots):
                at = r, i, row
                if not local.count[at] and slot not in scored:
                    continue
                reason = "stop" if local.stopped[at] else "length" if local.ended[at] else None
                tokens = local.tokens[at][: local.count[at]].tolist()
                told = None
                if local.wanted[at] >= 0:
                    report = jax.tree.map(lambda x, at=at: x[at], logprobs)
                    told = token_logprobs(report, tokens, int(local.wanted[at]))
                counts = int(local.accepted[at]), int(local.drafted[at])
                found[slot] = RoundResult(tokens, *counts, reason, told, scored.get(slot))
        rounds.append(found)
    return rounds


def _scored(flight: Flight) -> dict[int, list[TokenLogprob]]:
    """By slot the reports of prompt tokens, where they are asked for."""
    asking = [chunk for chunk in flight.chunks if chunk.request.sampling.prompt_logprobs is not None]
    report = jax.tree.map(local_rows, flight.output.prompt) if asking else None
    found = {}
    for chunk in asking:
        prompt, first = chunk.request.prompt, chunk.start + 1
        r = chunk.slot % len(flight.slots)
        rows = jax.tree.map(lambda x, r=r: x[r, 0, 0], report)
        tokens = prompt[first : first + chunk.count]
        found[chunk.slot] = token_logprobs(rows, tokens, chunk.request.sampling.prompt_logprobs or 0)
    return found
