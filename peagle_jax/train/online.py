"""The target's states computed inside the training step, instead of read from disk."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array

from peagle_jax.config import TargetConfig
from peagle_jax.models.stack import TargetParams
from peagle_jax.parallel.sequence import WHOLE, SequenceParts
from peagle_jax.train import features
from peagle_jax.train.partition import Batch


@struct.dataclass
class OnlineTarget:
    """A target for the step. ``params.embed`` is None: the step has that table already."""

    params: TargetParams
    cfg: TargetConfig = struct.field(pytree_node=False)
    taps: tuple[int, ...] = struct.field(pytree_node=False)
    parts: SequenceParts = struct.field(pytree_node=False, default=WHOLE)


def online_target(
    params: TargetParams, cfg: TargetConfig, taps: tuple[int, ...], parts: SequenceParts = WHOLE
) -> OnlineTarget:
    return OnlineTarget(params.replace(embed=None), cfg, taps, parts)


def with_features(batch: Batch, target: OnlineTarget | None, embed: Array) -> Batch:
    """The batch with the features (B, n, C) and last states (B, n, D) of its tokens, in the dtype of
    ``embed`` (V, D), as `features` would have stored them. Without a target it has them already.

    Called outside of what is differentiated, so nothing flows back into the target.
    """
    if target is None:
        return batch
    params = target.params.replace(embed=embed)
    inputs = (batch.tokens, batch.segment_ids, batch.positions)
    found, hidden = features.compute(params, target.cfg, *inputs, target.taps, embed.dtype, target.parts)
    return batch.replace(features=found, target_hidden=hidden)
