"""What a head is worth on held-out documents: its loss, and real speculative decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.config import SpecConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.speculative.decoder import Decoder, Request
from peagle_jax.speculative.placement import Placement as DecoderPlacement
from peagle_jax.speculative.sampling import SamplingParams
from peagle_jax.speculative.statistics import AcceptanceStatistics
from peagle_jax.train.data import Rows, validation_batches
from peagle_jax.train.losses import Metrics
from peagle_jax.train.metrics import acceptance_lengths, ratios
from peagle_jax.train.placement import ONE_DEVICE, Placement
from peagle_jax.train.recipe import TrainError
from peagle_jax.train.setup import Setup
from peagle_jax.train.step import Frozen, complete

MOST_DRAFTS = 5  # what serving drafts unless asked
DECODE_BATCH = 8


def validate(
    setup: Setup, evaluate: Callable[..., Metrics], params: Any, frozen: Frozen, placement: Placement
) -> dict[str, Any]:
    """Loss, accuracy by depth and estimated acceptance lengths on held-out rows."""
    assert setup.heldout is not None
    run = setup.recipe.run
    limit, seed = run.validate_rows, setup.recipe.seed
    rows = min(placement.micro, limit or len(setup.heldout), len(setup.heldout))
    spread = placement.rows(rows)
    own, total = placement.own_rows(spread), None
    for batch in validation_batches(setup.heldout, limit, rows, seed, setup.cod, own):
        metrics = evaluate(params, frozen, placement.place_rows(batch, spread))
        total = metrics if total is None else total + metrics
    assert total is not None
    accuracy = ratios(total.correct, total.count)
    return {
        "validation_loss": float(total.loss_sum.sum() / jnp.maximum(total.count.sum(), 1.0)),
        "validation_accuracy": accuracy,
        "validation_depth_loss": ratios(total.loss_sum, total.count),
        "acceptance_length": acceptance_lengths(accuracy),
    }


def heldout_prompts(store: Rows, count: int, longest: int) -> list[list[int]]:
    """At most ``count`` prompts of at most ``longest`` tokens: a document's tokens up to its first
    supervised one. Documents that start with an answer (the rest of a longer one) have none."""
    tokens, ids, flags = (store.array(key) for key in ("tokens", "segment_ids", "flags"))
    prompts: list[list[int]] = []
    for row in range(len(store)):
        for segment in range(int(ids[row].max()) + 1):
            places = np.flatnonzero(ids[row] == segment)
            first = int(flags[row][places].argmax())
            if 0 < first <= longest:
                prompts.append(tokens[row][places[:first]].tolist())
                if len(prompts) == count:
                    return prompts
    return prompts


class DecodeEvaluation:
    """Greedy answers to held-out prompts, drafted by the head of the moment.

    One decoder lives as long as the run and takes the head's new weights each time, so its programs
    compile once. The drafts of a round are 5, or as many as the head is trained for. It runs on one
    device, which needs room for the whole target; every process does the same, for the same answer.

    Raises:
        TrainError: no held-out document has a prompt that fits.
    """

    def __init__(self, setup: Setup, placement: Placement = ONE_DEVICE):
        run, target = setup.recipe.run, setup.target
        room = min(setup.train.row_length + run.decode_tokens, target.config.max_position)
        prompts = (
            [] if setup.heldout is None else heldout_prompts(setup.heldout, run.decode_prompts, room - 1)
        )
        if not prompts:
            raise TrainError(
                "run.decode_every needs held-out documents with a prompt, and there is none; "
                "raise data.heldout or set run.decode_every to 0"
            )
        stops = frozenset(target.config.eos_token_ids)
        self.requests = [Request(p, SamplingParams(), run.decode_tokens, stops) for p in prompts]
        self.drafts = min(MOST_DRAFTS, setup.depths)
        self.setup, self.room = setup, room
        self.decoder: Decoder | None = None
        dtype = setup.frozen.embed.dtype
        self._complete = placement.compile(
            lambda params, frozen: complete(params, frozen, dtype), placement.everywhere
        )

    def __call__(self, params: DrafterParams, frozen: Frozen) -> dict[str, Any]:
        """Acceptance length, and the share of rounds that accepted at least 1, 2, ... drafts."""
        setup, counts, tokens = self.setup, AcceptanceStatistics(self.drafts), 0
        head = jax.tree.map(lambda w: w.addressable_data(0), self._complete(params, frozen))
        if setup.draft_ids is not None:
            head = head.replace(draft_to_target=jnp.asarray(setup.draft_ids))
        if self.decoder is None:
            self.decoder = Decoder(
                setup.target.config,
                setup.target.params,
                setup.cfg,
                head,
                SpecConfig(self.drafts, setup.cfg.method),
                max_model_len=self.room,
                batch=min(DECODE_BATCH, len(self.requests)),
                placement=DecoderPlacement.on(jax.local_devices()[:1]),
            )
        else:
            self.decoder.replace_head(head)
        for start in range(0, len(self.requests), self.decoder.batch):
            for results in self.decoder.run(self.requests[start : start + self.decoder.batch]):
                for result in results:
                    if result is not None:
                        counts.add(result.accepted, result.drafted)
                        tokens += len(result.tokens)
        return {
            "decode_acceptance_length": counts.mean_acceptance_length,
            "decode_acceptance_rates": counts.acceptance_per_position,
            "decode_prompts": len(self.requests),
            "decode_tokens": tokens,
        }
