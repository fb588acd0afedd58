"""What the commands share: how a model, its head, K and a context are chosen."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.arguments import CommandError
from peagle_jax.checkpoint.calibration import for_depths, read_calibration
from peagle_jax.checkpoint.folder import local_path
from peagle_jax.checkpoint.head import default_head_path, load_head
from peagle_jax.checkpoint.model import LoadedTarget, load_target
from peagle_jax.config import DrafterConfig, Method, SpecConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.memory import check_memory, kv_room
from peagle_jax.parallel.replicate import Backend
from peagle_jax.precision import describe_cache, describe_quantization
from peagle_jax.speculation import CHAIN, Arrangement
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.lookup import Lookup, LookupDecoder
from peagle_jax.speculative.placement import Placement
from peagle_jax.speculative.sizes import PREFILL_CHUNK, rings_of

DTYPES = ("auto", "float32", "bfloat16")
DEFAULT_TOKENS = 5
"""K when none is asked for. A draft that far ahead is seldom right, and each costs a row to verify."""
CPU_CONTEXT = 2048


def default_dtype() -> jnp.dtype:
    """bfloat16 where the machine multiplies it in hardware, else float32: accelerators, and CPUs with AMX or
    AVX-512's bfloat16 (on the latter plain decode is a little slower so, and with a head 1.5 times as fast).
    """
    fast = jax.default_backend() != "cpu" or {"amx_bf16", "avx512_bf16"} & _cpu_flags()
    return jnp.dtype(jnp.bfloat16 if fast else jnp.float32)


def resolve_dtype(name: str) -> jnp.dtype:
    """The dtype of a ``--dtype`` value, one of DTYPES."""
    return default_dtype() if name == "auto" else jnp.dtype(name)


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


@dataclasses.dataclass
class Head:
    """A loaded head and where it came from."""

    config: DrafterConfig
    params: DrafterParams
    source: str
    calibration: np.ndarray | None = None  # float32 (depths, 2), see ``tree.calibrated``


@dataclasses.dataclass
class Loaded:
    """A target, with a head or without, and how many tokens to draft (0 without a head)."""

    target: LoadedTarget
    head: Head | None
    num_speculative_tokens: int
    dtype: jnp.dtype
    placement: Placement | None = None  # None: the first device
    kv_cache_dtype: str = "auto"
    lookup: Lookup | None = None  # drafts without a head

    def spec(self, rounds: int = 1, arrangement: Arrangement = CHAIN) -> SpecConfig:
        """The round's configuration, of so many rounds a dispatch.

        Raises:
            ConfigError: the head cannot draft such a tree.
        """
        if self.head is None or not self.num_speculative_tokens:
            return SpecConfig(rounds=rounds)
        return arrangement.spec(self.num_speculative_tokens, self.head.config, rounds)

    def decoder(
        self,
        max_model_len: int,
        *,
        speculative: bool = True,
        memory_utilization: float | None = None,
        rounds: int = 1,
        arrangement: Arrangement = CHAIN,
        **options: Any,
    ) -> Decoder:
        """A decoder of this target; without its head if not ``speculative``. ``options`` are Decoder's.

        With a ``memory_utilization`` the caches take at most what that share of the memory leaves beside
        the weights (see ``kv_room``), and the slots adapt to it.

        Raises:
            ConfigError: the head does not fit the target, or K is above what it was trained for.
            CommandError: the machine has no memory for such a context, or a tree is asked for without a
                head.
        """
        if arrangement.is_tree and not (self.head and self.num_speculative_tokens):
            found = "the drafts are looked up" if self.lookup else "there are no drafts: no head, or K = 0"
            raise CommandError(f"a tree is made of a P-EAGLE head's drafts, but {found}; leave the tree out")
        check_memory(self, max_model_len)
        head = self.head if speculative and self.num_speculative_tokens else None
        spec = self.spec(rounds, arrangement) if head else SpecConfig(rounds=rounds)
        if memory_utilization is not None:
            rings = rings_of(self.target.config, options.get("prefill_chunk", PREFILL_CHUNK), spec)
            options["kv_tokens"] = kv_room(self, memory_utilization, options.get("batch", 1), rings)
        target = self.target.config, self.target.params
        options |= {
            "placement": self.placement,
            "int8_cache": self.int8_cache,
            "max_model_len": max_model_len,
        }
        if self.lookup is not None and speculative:
            return LookupDecoder(*target, self.num_speculative_tokens, self.lookup, rounds, **options)
        decoder = Decoder(*target, head and head.config, head and head.params, spec, **options)
        if head and head.calibration is not None:
            decoder.calibration = for_depths(head.calibration, spec.num_speculative_tokens)
        return decoder

    @property
    def int8_cache(self) -> bool:
        return self.kv_cache_dtype == "int8"


def placement(
    data: int, tensor: int, backend: Backend | None = None, draft_tensor: int | None = None
) -> Placement:
    """The first ``data`` x ``tensor`` devices; see ``Placement.on``.

    Raises:
        CommandError: this machine does not have them.
        ConfigError: settings that contradict each other.
    """
    found = jax.device_count()
    if tensor < 1 or data * tensor > found:
        replicas = f"--data-parallel-size {data} x " if data > 1 else ""
        there = "is 1 device" if found == 1 else f"are {found} devices"
        raise CommandError(
            f"{replicas}--tensor-parallel-size {tensor} asks for {data * tensor} devices, but there {there}; "
            f"ask for 1 to {found}"
        )
    if jax.process_count() > 1 and data * tensor != found:
        raise CommandError(
            f"--data-parallel-size {data} x --tensor-parallel-size {tensor} is {data * tensor}, but the "
            f"{jax.process_count()} processes have {found} devices, and each must take part; ask for all"
        )
    return Placement.on(jax.devices()[: data * tensor], tensor, backend, draft_tensor)


def load(
    model: str | None,
    head: str | None,
    num_speculative_tokens: int | None,
    *,
    method: Method | None = None,
    speculate: bool = False,
    dtype: str = "auto",
    revision: str | None = None,
    tokenizer: str | None = None,
    placement: Placement | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> Loaded:
    """Loads what the command line names.

    Args:
        model: None is the embedded default.
        head: a folder or hub id; None is the shipped head if the model is the embedded default and
            no head otherwise.
        num_speculative_tokens: None is 5, or less where a P-EAGLE head was trained for less; 0 loads
            no head.
        method: what the head must be; None accepts what it is.
        speculate: no head is an error, unless num_speculative_tokens is 0.
        revision: of the hub id that ``model`` then must be.
        placement: the devices, to which each tensor goes as it is read (default: the first device).
        quantization: of the target's matrices, int8, int4, fp8 or gguf; a head keeps its dtype.
        kv_cache_dtype: of the target's keys and values, auto or int8.

    Raises:
        CheckpointError: a model or head that cannot be loaded.
        ConfigError: a dimension that cannot be split over the devices.
        CommandError: settings that contradict each other or the head.
    """
    if num_speculative_tokens is not None and num_speculative_tokens < 0:
        raise CommandError(
            f"num_speculative_tokens must be 0 (plain decoding) or more, found {num_speculative_tokens}"
        )
    for ref in (model, head, tokenizer):
        if ref is not None:
            local_path(ref)
    check_revision(model, revision)
    if num_speculative_tokens is None:
        speculate = speculate or method is not None
    else:
        speculate = num_speculative_tokens > 0
    if head is None and model is None and num_speculative_tokens != 0:
        path = default_head_path()
        if path is None and not speculate:
            print("note: the embedded model's head is not installed; decoding without one", file=sys.stderr)
        head = path and str(path)
    if head is None and speculate:
        tokens = num_speculative_tokens
        found = f"num_speculative_tokens is {tokens}" if tokens else "a method of speculation is named"
        name = "the embedded model" if model is None else model
        raise CommandError(f"{found} but there is no head for {name}; name one, or leave it out")
    chosen = resolve_dtype(dtype)
    check_quantization(quantization)
    mesh = placement and placement.mesh
    target = load_target(
        model, dtype=chosen, revision=revision, tokenizer=tokenizer, mesh=mesh, quantization=quantization
    )
    plain = Loaded(target, None, 0, chosen, placement, kv_cache_dtype)
    if head is None or num_speculative_tokens == 0:
        return plain
    return with_head(plain, head, num_speculative_tokens, method)


def with_head(loaded: Loaded, head: str, tokens: int | None, method: Method | None = None) -> Loaded:
    """The same target with a head, drafting ``tokens``; see ``load``, whose errors these are."""
    placement, target = loaded.placement, loaded.target
    mesh, split = placement and placement.mesh, placement is None or placement.split_head
    config, params = load_head(head, target.config, target.params, dtype=loaded.dtype, mesh=mesh, split=split)
    check_method(config, method, head)
    if tokens is None:
        trained = DEFAULT_TOKENS if config.method == "eagle3" else config.num_depths
        tokens = min(trained, DEFAULT_TOKENS)
    found = Head(config, params, head, read_calibration(head))
    return dataclasses.replace(loaded, head=found, num_speculative_tokens=tokens)


def check_quantization(quantization: str | None) -> None:
    """Raises CommandError for one that this machine is not for."""
    if quantization == "fp8" and jax.default_backend() == "cpu":
        raise CommandError(
            "--quantization fp8 is for GPUs and TPUs, found a CPU; ask for int8, which takes as much memory"
        )


def check_revision(model: str | None, revision: str | None) -> None:
    """Raises CommandError for a model that has none: only the hub does; elsewhere it would be ignored."""
    if revision is None:
        return
    if model is not None and not local_path(model).exists():
        return
    found = "the embedded model" if model is None else f"{model}, which is on this machine"
    raise CommandError(
        f"revision {revision[:60]!r} is for a model of the Hugging Face hub, but the model is {found}; "
        f"leave it out, or name a hub id"
    )


def check_method(config: DrafterConfig, wanted: Method | None, source: str) -> None:
    """A parallel head drafts in parallel or not at all: sequential passes would silently be refused.

    Raises:
        CommandError: the head is not of the wanted method; None accepts what it is.
    """
    if wanted is None or wanted == config.method:
        return
    names = {"peagle": "P-EAGLE (parallel drafting)", "eagle3": "EAGLE-3 (sequential drafting)"}
    raise CommandError(
        f"the head {source} is {names[config.method]}, but {names[wanted]} was asked for; "
        f"leave out method and parallel_drafting, or name another head"
    )


def context_limit(target: LoadedTarget, wanted: int | None = None) -> int:
    """The context to serve: what the model was trained for, on CPU at most 2048 unless ``wanted``.

    Raises:
        CommandError: more than the model's positions, or no room for a prompt and a token.
    """
    longest = target.config.max_position
    if wanted is None:
        return min(longest, CPU_CONTEXT) if jax.default_backend() == "cpu" else longest
    if not 2 <= wanted <= longest:
        raise CommandError(
            f"max_model_len must be in 2..{longest}, the positions of {target.name}; found {wanted}"
        )
    return wanted


def describe(loaded: Loaded, max_model_len: int) -> list[tuple[str, Any]]:
    """What was resolved, as (name, value) lines for a start-up report."""
    config, head = loaded.target.config, loaded.head
    shape = f"{config.family}, {config.num_layers} layers of {config.hidden_size}"
    lines: list[tuple[str, Any]] = [
        ("model", f"{loaded.target.name}: {shape}"),
        ("read from", loaded.target.source),
    ]
    if head is None:
        found = loaded.lookup and f"{loaded.num_speculative_tokens} tokens by {loaded.lookup.described}"
        lines.append(("head", f"none: {found or 'plain decoding'}"))
    else:
        drafter = head.config
        shape = f"{drafter.num_layers} layers, draft vocabulary {drafter.draft_vocab_size}"
        kind = f"P-EAGLE, {shape}, trained for K up to {drafter.num_depths}"
        lines += [
            ("head", kind if drafter.method == "peagle" else f"EAGLE-3, {shape}"),
            ("read from", head.source),
            ("taps", f"{', '.join(map(str, drafter.taps))} of boundaries 0..{config.num_layers}"),
            ("K", loaded.num_speculative_tokens),
        ]
    return [
        *lines,
        *_lie(loaded),
        ("dtype", f"{loaded.dtype.name} on {jax.default_backend()}"),
        *([("quantization", describe_quantization(loaded.target))] if loaded.target.quantization else []),
        *([("KV cache", describe_cache(loaded.target.config, loaded.dtype))] if loaded.int8_cache else []),
        ("max_model_len", max_model_len),
    ]


def _lie(loaded: Loaded) -> list[tuple[str, Any]]:
    """How the weights lie on several devices."""
    placement, head = loaded.placement, loaded.head
    if placement is None or placement.mesh.size == 1:
        return []
    shape = f"data {placement.replicas} x tensor {placement.tensor}: {placement.mesh.size} devices"
    hosts = f", {jax.process_count()} processes" if placement.several_hosts else ""
    lines: list[tuple[str, Any]] = [("mesh", f"{shape}{hosts}, replicated by {placement.backend}")]
    if placement.tensor > 1:
        kv = loaded.target.config.block.num_kv_heads // placement.tensor
        parts = f"in {placement.tensor} parts"
        lines.append(("target lies", f"{parts}, {kv} kv head{'s' * (kv > 1)} each"))
        if head is not None:
            lines.append(("head lies", parts if placement.split_head else "whole on every device"))
    return lines
