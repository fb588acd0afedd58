"""The decoder and the engine that the flags ask for."""

from __future__ import annotations

import copy
import logging
from typing import Any, cast

import jax

from peagle_jax import commands
from peagle_jax.arguments import CommandError
from peagle_jax.config import Method
from peagle_jax.parallel.replicate import Backend
from peagle_jax.serve.arguments import EngineOptions
from peagle_jax.serve.draft_length import DraftLength
from peagle_jax.serve.engine import Engine
from peagle_jax.serve.speculative_config import SpeculativeOptions
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.placement import Placement

log = logging.getLogger(__name__)

CPU_SEQUENCES = 8
"""Requests at once on CPU: more only share its cores."""

SEQUENCES = 64

MEMORY_UTILIZATION = 0.9


def placement(options: EngineOptions, speculative: SpeculativeOptions) -> Placement:
    """The devices that were asked for.

    Raises:
        CommandError: this machine does not have them.
        ConfigError: flags that contradict each other.
    """
    return commands.placement(
        options.data_parallel_size,
        options.tensor_parallel_size,
        cast(Backend | None, options.replicate),
        speculative.draft_tensor_parallel_size,
    )


def sequences(options: EngineOptions) -> int:
    """Slots of a replica."""
    default = CPU_SEQUENCES if jax.default_backend() == "cpu" else SEQUENCES
    return options.max_num_seqs or default


def draft_lengths(most: int, speculative: SpeculativeOptions, method: Method | None) -> set[int]:
    """The K that rounds may have: none and all, or those that were fixed by hand. Half of them saves an
    EAGLE-3 head passes, too; a P-EAGLE head makes its one pass; the round verifies fewer (``Arrangement``).

    Raises:
        CommandError: one is above ``most``, what the head drafts.
    """
    rows = speculative.num_speculative_tokens_per_batch_size
    if rows is None:
        return {0, most} if method == "peagle" else {0, -(-most // 2), most}
    above = next((k for _, _, k in rows if k > most), None)
    if above is not None:
        raise CommandError(
            f"--speculative-config: num_speculative_tokens_per_batch_size asks for K = {above}, above "
            f"num_speculative_tokens, {most}; raise that one, or lower this one"
        )
    return {0, most, *(k for _, _, k in rows)}


def build_decoder(
    loaded: commands.Loaded,
    max_model_len: int,
    options: EngineOptions,
    speculative: SpeculativeOptions,
    *,
    guided: bool,
) -> Decoder:
    """A decoder with the slots, the replicas and the K that were asked for; ``guided``: with grammars.

    Raises:
        CommandError: flags that contradict the head or the machine.
        ConfigError: the head does not fit the target.
    """
    rates, k = speculative.synthetic_acceptance_rates, loaded.num_speculative_tokens
    if rates is not None and len(rates) != k:
        raise CommandError(
            f"--speculative-config: synthetic_acceptance_rates has {len(rates)} rates, but "
            f"num_speculative_tokens is {k}; give one a draft"
        )
    return loaded.decoder(
        max_model_len,
        rounds=options.rounds_per_dispatch or 1,
        memory_utilization=options.gpu_memory_utilization or MEMORY_UTILIZATION,
        batch=sequences(options),
        draft_lengths=draft_lengths(k, speculative, loaded.head and loaded.head.config.method),
        arrangement=speculative.arrangement,
        guided=guided,
        synthetic_rates=rates,
    )


def build_engine(
    decoder: Decoder,
    tokenizer: Any,
    options: EngineOptions,
    speculative: SpeculativeOptions,
    **observers: Any,
) -> Engine:
    """An engine of this decoder, with a tokenizer of its own. ``observers``: more of Engine's arguments."""
    return Engine(
        decoder,
        copy.deepcopy(tokenizer),
        decoder.spec.num_speculative_tokens,
        on_progress=lambda what, number, count: log.info("compiling %d of %d: %s", number, count, what),
        enable_prefix_caching=options.enable_prefix_caching is not False,
        max_num_batched_tokens=options.max_num_batched_tokens,
        draft_length=DraftLength(
            decoder.sizes.drafts,
            speculative.num_speculative_tokens_per_batch_size or None,
            decoder.spec.nodes_of,
        ),
        **observers,
    )
