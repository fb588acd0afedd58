"""Whether a head is healthy, and which other reading of its files makes it so.

A head that is read wrongly still gives the right text: only acceptance dies. So each way to read it
differently is tried on the same prompts, with the decoder that serves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.checkpoint.config_writer import rope_section
from peagle_jax.checkpoint.dialects import AUX_KEY
from peagle_jax.config import (
    ConfigError,
    DrafterConfig,
    RopeConfig,
    SpecConfig,
    TargetConfig,
    default_taps,
)
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.quantized import QuantizedWeight, dequantize
from peagle_jax.models.stack import TargetParams
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.placement import Placement
from peagle_jax.speculative.request import Request
from peagle_jax.speculative.statistics import AcceptanceStatistics

HEALTHY_FIRST = 0.30
"""Share of rounds that accept the first draft. A head after a sanity run of 5,000 conversations has 0.41,
published ones 0.67 to 0.75; features that are off by one layer gave 0.10 and unnamed taps 0.01."""

HEALTHY_SECOND = 0.10
"""The second draft's share of the rounds that accepted the first. The same sanity run has 0.27, published
heads 0.56 to 0.67; drafting without the mask state leaves nearly none."""

_CONFIDENCE = 2.0  # standard errors
_LEAST_GAIN = 0.1  # accepted drafts a round

Prompts = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another reading of the head: what it is, and what makes it the files' own."""

    name: str
    fix: str
    config: DrafterConfig
    params: DrafterParams


class Trials:
    """Decodes the same prompts, greedily and side by side, with one head after another."""

    def __init__(
        self,
        target: TargetConfig,
        params: TargetParams,
        prompts: Prompts,
        num_speculative_tokens: int,
        max_tokens: int,
        placement: Placement | None = None,
    ) -> None:
        self._target, self._params, self._placement = target, params, placement
        self.num_speculative_tokens = num_speculative_tokens
        self._requests = [
            Request(
                list(ids),
                max_tokens=min(max_tokens, target.max_position - len(ids)),
                stop_ids=frozenset(target.eos_token_ids),
            )
            for ids in prompts
        ]
        self._decoders: dict[DrafterConfig, Decoder] = {}

    def measure(self, cfg: DrafterConfig, params: DrafterParams) -> AcceptanceStatistics:
        """Acceptance over all prompts. Heads of one config share their compiled programs."""
        decoder = self._decoder(cfg, params)
        found = AcceptanceStatistics(self.num_speculative_tokens)
        for results in decoder.run(self._requests):
            for result in results:
                if result is not None:
                    found.add(result.accepted, result.drafted)
        return found

    def _decoder(self, cfg: DrafterConfig, params: DrafterParams) -> Decoder:
        kept = self._decoders.get(cfg)
        if kept is not None:
            try:
                kept.replace_head(params)
                return kept
            except ValueError:  # arrays of other shapes: programs of their own
                pass
        longest = max(len(request.prompt) + request.max_tokens for request in self._requests)
        count = len(self._requests)
        decoder = Decoder(
            self._target,
            self._params,
            cfg,
            params,
            SpecConfig(self.num_speculative_tokens, cfg.method),
            max_model_len=longest,
            batch=count,
            widths=(count,),
            prefill_chunk=32,
            placement=self._placement,
        )
        if not self._decoders:  # the head as it is; each alternative's programs serve once
            self._decoders[cfg] = decoder
        return decoder


def illness(found: AcceptanceStatistics) -> str | None:
    """What is wrong with these rates, None for a healthy head's."""
    rates = found.acceptance_per_position
    if rates[0] < HEALTHY_FIRST:
        return (
            f"the first draft is accepted in {rates[0]:.0%} of rounds; "
            f"a healthy head's in {HEALTHY_FIRST:.0%} or more"
        )
    if len(rates) > 1 and rates[1] < HEALTHY_SECOND * rates[0]:
        return (
            f"the second draft is accepted in {rates[1] / rates[0]:.0%} of the rounds that accept the first; "
            f"a healthy head's in {HEALTHY_SECOND:.0%} or more"
        )
    return None


def clearly_better(a: AcceptanceStatistics, b: AcceptanceStatistics) -> bool:
    """Whether ``a`` accepts more drafts a round than ``b``, beyond chance and by an amount that matters."""
    gain = a.mean_acceptance_length - b.mean_acceptance_length
    return gain > max(_LEAST_GAIN, _CONFIDENCE * math.hypot(_error(a), _error(b)))


def _error(found: AcceptanceStatistics) -> float:
    """Standard error of the accepted drafts a round."""
    if found.rounds < 2:
        return math.inf
    mean = found.mean_acceptance_length - 1
    square = sum((2 * j + 1) * count for j, count in enumerate(found.accepted_at)) / found.rounds
    return math.sqrt(max(square - mean**2, 1 / found.rounds) / (found.rounds - 1))


def alternatives(
    cfg: DrafterConfig,
    params: DrafterParams,
    target: TargetConfig,
    target_params: TargetParams,
    absolute: Callable[[], DrafterParams | None],
) -> Iterator[Alternative]:
    """Other readings of a head, those that need no new programs first, then the likeliest.

    ``absolute`` gives the head with its d2t read as target ids, None where it cannot hold such.
    """
    if (other := absolute()) is not None:
        yield Alternative("d2t holds target ids", "--d2t absolute", cfg, other)
    shared = target_params.embed
    if params.embed is not shared and params.embed.shape == shared.shape:
        fix = "leave embed_tokens.weight out of the head, so that the target's is taken"
        table = dequantize(shared) if isinstance(shared, QuantizedWeight) else shared
        other = params.replace(embed=table.astype(params.embed.dtype))
        yield Alternative("the target's embedding", fix, cfg, other)
    for name, taps in _other_taps(cfg, target):
        yield Alternative(
            f"taps {', '.join(map(str, taps))} ({name})",
            f"--taps {','.join(map(str, taps))}",
            dataclasses.replace(cfg, taps=taps),
            params,
        )
    flipped = not cfg.norm_before_residual
    yield Alternative(
        f"norm_before_residual {str(flipped).lower()}",
        f'"norm_before_residual": {str(flipped).lower()} in config.json',
        dataclasses.replace(cfg, norm_before_residual=flipped),
        params,
    )
    for name, rope in _other_ropes(cfg.block.rope, target.block.rope):
        scaling = str(rope_section(rope) or "null").replace("'", '"')
        block = dataclasses.replace(cfg.block, rope=rope)
        yield Alternative(
            f"RoPE {name}: theta {rope.theta:g}, {rope.variant}",
            f'"rope_theta": {rope.theta:g} and "rope_scaling": {scaling} in config.json',
            dataclasses.replace(cfg, block=block),
            params,
        )


def _other_taps(cfg: DrafterConfig, target: TargetConfig) -> list[tuple[str, tuple[int, ...]]]:
    found: dict[tuple[int, ...], str] = {
        tuple(tap + 1 for tap in cfg.taps): "layer ids that mean outputs",
        tuple(tap - 1 for tap in cfg.taps): "layer ids that mean boundaries",
    }
    if len(cfg.taps) == 3:
        with contextlib.suppress(ConfigError):  # a target too shallow for it
            found.setdefault(default_taps(target.num_layers), f"the default, {AUX_KEY} being left out")
    inside = {t: name for t, name in found.items() if min(t) >= 0 and max(t) <= target.num_layers}
    return [(name, taps) for taps, name in inside.items() if taps != cfg.taps]


def _other_ropes(own: RopeConfig, target: RopeConfig) -> list[tuple[str, RopeConfig]]:
    readings = (
        ("as the target's", target),
        ("without scaling", RopeConfig(theta=own.theta)),
        ("with the target's theta, without scaling", RopeConfig(theta=target.theta)),
        ("as trainers that ignore rope_theta have it", RopeConfig()),
    )
    found: dict[RopeConfig, str] = {}
    for name, rope in readings:
        found.setdefault(rope, name)
    return [(name, rope) for rope, name in found.items() if rope != own]


def lost_mask(params: DrafterParams) -> bool:
    """Whether a P-EAGLE head's mask state is all zeros, as one that was never trained or saved."""
    return params.mask_hidden is not None and not np.any(np.asarray(params.mask_hidden))


def same_array(a: jax.Array | None, b: jax.Array | None) -> bool:
    """Whether two optional maps are one."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(jnp.array_equal(a, b))
