"""The sets that a command line names, and what a result says of them and of the models."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from peagle_jax.arguments import CommandError
from peagle_jax.bench import datasets
from peagle_jax.bench.datasets import PromptSet
from peagle_jax.bench.methods import Method


def sets_of(args: argparse.Namespace) -> list[PromptSet]:
    """The sets of ``--dataset`` and ``--dataset-path``, few prompts of each where ``--num-prompts`` says so.

    Raises:
        CommandError: none is named, the flags do not pair up, or one cannot be read.
    """
    names, paths = args.dataset, args.dataset_path
    if not names and not paths:
        raise CommandError(f"name prompts: --dataset {', '.join(datasets.SOURCES)}, or --dataset-path FILE")
    names = names or ["file"] * len(paths)
    if paths and len(names) != len(paths):
        raise CommandError(
            f"{len(names)} --dataset but {len(paths)} --dataset-path; give a path for each, or none"
        )
    found = []
    for i, name in enumerate(names):
        whole = datasets.load(name, paths[i] if paths else None, args.dataset_config)
        some = [c for c in whole.conversations if not args.category or c.category in args.category]
        if not some:
            known = ", ".join(sorted({c.category for c in whole.conversations}))
            raise CommandError(f"--category {' '.join(args.category)}: {name} has {known[:200]}")
        few = tuple(datasets.spread(some, args.num_prompts))
        found.append(dataclasses.replace(whole, name=_apart(whole, found), conversations=few))
    return found


def _apart(one: PromptSet, others: Sequence[PromptSet]) -> str:
    """A set's name in a result: its file's where that tells more, and never another's."""
    name = one.source.split(".")[0] if one.name == "file" else one.name
    taken = [other.name for other in others]
    return name if name not in taken else f"{name} {len(taken) + 1}"


def described(sets: Sequence[PromptSet], args: argparse.Namespace) -> dict[str, Any]:
    """Of the prompts and how they are asked."""
    return {
        "datasets": [one.described() for one in sets],
        "turns": args.turns,
        "max_tokens": args.max_tokens,
        "temperature": getattr(args, "temperature", 0.0),
        "ignore_eos": args.ignore_eos,
    }


def models(methods: Sequence[Method]) -> dict[str, Any]:
    """Of the target that all methods share, and where it runs."""
    loaded, device = methods[0].loaded, jax.devices()[0]
    moe = loaded.target.config.block.moe
    return {
        "model": loaded.target.name,
        "dtype": loaded.dtype.name,
        "quantization": loaded.target.quantization,
        "kv_cache_dtype": loaded.kv_cache_dtype,
        "device": f"{device.platform} {device.device_kind}" if device.platform != "cpu" else "cpu",
        **({"experts": [moe.top_k, moe.num_experts]} if moe is not None else {}),
    }
