"""What few bits cost and bring: perplexity, acceptance of the shipped head, tokens/s, bytes.

    python benchmarks/quantization.py --prompts mt_bench.jsonl --prompts HumanEval.jsonl.gz --out results.json

Every precision is decoded with and without the head, prompt by prompt in turn, so that a noisy machine treats
them alike; ratios are of summed times. Perplexity is of the prompts' own text, in windows that go through the
cache in steps, as a server reads a prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from peagle_jax import commands, generate
from peagle_jax.arguments import run_command
from peagle_jax.bench.datasets import Conversation, read_prompts
from peagle_jax.bench.machine import describe_machine, save, tell
from peagle_jax.layers.attention import causal_mask
from peagle_jax.models import stack
from peagle_jax.models.stack import TargetParams
from peagle_jax.speculative.cache import KVCache, create_cache, row_bytes, storage_dtype, write
from peagle_jax.speculative.sampling import SamplingParams
from peagle_jax.speculative.statistics import AcceptanceStatistics

CONSOLE = Console(stderr=True)

PRECISIONS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "gguf": {"quantization": "gguf"},
    "kv-int8": {"kv_cache_dtype": "int8"},
    "int8-kv-int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
"""Arguments of ``commands.load``; the dtype that one does not name is ``--dtype``."""

WINDOW, STEP = 256, 64


@partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def _step(
    cfg: Any, params: TargetParams, cache: KVCache, tokens: jax.Array, start: int
) -> tuple[KVCache, jax.Array]:
    """Reads STEP tokens of a window and returns the logarithms of their successors' probabilities."""
    here, following = tokens[:, start : start + STEP], tokens[:, start + 1 : start + STEP + 1]
    known, mask = jnp.array([start]), causal_mask(1, STEP)
    out = stack.forward(params, cfg, here, start + jnp.arange(STEP)[None], cache.k, cache.v, known, mask)
    logits = stack.logits(params, cfg, out.hidden)[:, : following.shape[1]]
    chosen = jnp.take_along_axis(logits, following[..., None], -1)[..., 0]
    return write(cache, out.k, out.v, known, out.hidden), chosen - jax.nn.logsumexp(logits, -1)


def perplexity(loaded: commands.Loaded, windows: np.ndarray) -> float:
    """Of token windows (n, WINDOW)."""
    cfg, params = loaded.target.config, loaded.target.params
    dtype, block = storage_dtype(loaded.dtype, jax.default_backend()), cfg.block
    shape = (cfg.num_layers, 1, block.num_kv_heads, WINDOW, block.head_dim)
    total, count = 0.0, 0
    for window in windows:
        cache = create_cache(*shape, dtype, params.is_stacked, int8=loaded.int8_cache)
        for start in range(0, WINDOW, STEP):
            cache, found = _step(cfg, params, cache, jnp.asarray(window)[None], start)
            total, count = total + float(found.sum()), count + found.size
    return math.exp(-total / count)


def windows_of(tokenizer: Any, paths: list[str], tokens: int) -> np.ndarray:
    """The prompts' text as windows of tokens: as many prompts of each file, in the files' order."""
    ids: list[int] = []
    for path in paths:
        own: list[int] = []
        for prompt in read_prompts(path):
            own += tokenizer(prompt.turns[0] + "\n\n")["input_ids"]
        ids += own[: tokens // len(paths)]
    return np.array(ids[: len(ids) // WINDOW * WINDOW], np.int32).reshape(-1, WINDOW)


def sizes_of(loaded: commands.Loaded) -> dict[str, Any]:
    cfg, block = loaded.target.config, loaded.target.config.block
    return {
        "dtype": loaded.dtype.name,
        "quantization": loaded.target.quantization,
        "kv_cache_dtype": loaded.kv_cache_dtype,
        "weight_bytes": sum(x.nbytes for x in jax.tree.leaves(loaded.target.params)),
        "kv_bytes_a_token": 2
        * cfg.num_layers
        * block.num_kv_heads
        * row_bytes(block.head_dim, loaded.dtype, loaded.int8_cache),
    }


class Method:
    """One way to decode, and its sums over a prompt set."""

    def __init__(self, loaded: commands.Loaded, max_model_len: int) -> None:
        self.loaded, self.k = loaded, loaded.num_speculative_tokens
        self.decoder = loaded.decoder(max_model_len)
        self.decoder.warm_up()
        self.reset()

    def reset(self) -> None:
        self.acceptance = AcceptanceStatistics(self.k)
        self.seconds, self.tokens, self.same, self.ties = 0.0, 0, 0, 0

    def add(self, run: generate.Run) -> None:
        count = len(run.token_ids) - 1
        if count > 0:
            self.seconds += count / run.tokens_per_second
            self.tokens += count
        self.acceptance.merge(run.acceptance)


Pair = tuple[Method, Method]
"""A precision without and with the head."""


def decode_pairs(pairs: dict[str, Pair], prompts: list[Conversation], max_tokens: int) -> dict[str, Any]:
    """Decodes every prompt by every precision, greedily, without the head and with it."""
    sampling = SamplingParams()
    for method in (method for pair in pairs.values() for method in pair):
        method.reset()
    for prompt in track(prompts, "decoding", console=CONSOLE):
        for pair in pairs.values():
            target, runs = pair[0].loaded.target, []
            ids = generate.prompt_token_ids(target.tokenizer, prompt.turns[0])
            stops = set(target.config.eos_token_ids)
            for method in pair:
                run = generate.decode(
                    method.decoder, target.tokenizer, ids, sampling, max_tokens, stops, method.k
                )
                method.add(run)
                runs.append(run)
            tokens = runs[1].token_ids, runs[0].token_ids
            report = generate.compare_tokens(pair[1].loaded, ids, sampling, *tokens)
            pair[1].same += report["identical"]
            pair[1].ties += report.get("first_difference", {}).get("tie", False)
    first = next(iter(pairs.values()))
    return {name: figures(pair, first) for name, pair in pairs.items()}


def figures(pair: Pair, first: Pair) -> dict[str, Any]:
    """A precision's figures; ratios are to the ``first`` one's."""
    (plain, head), (first_plain, first_head) = (
        [method.tokens / method.seconds for method in methods] for methods in (pair, first)
    )
    return {
        "plain_tokens_per_second": plain,
        "head_tokens_per_second": head,
        "plain_ratio": plain / first_plain,
        "head_ratio": head / first_head,
        "speedup_of_head": head / plain,
        "mean_acceptance_length": pair[1].acceptance.mean_acceptance_length,
        "acceptance_per_position": pair[1].acceptance.acceptance_per_position,
        "identical_answers": pair[1].same,
        "parted_at_a_tie": pair[1].ties,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {
        **describe_machine(("jax", "jaxlib", "numpy")),
        "max_tokens": args.max_tokens,
        "perplexity_tokens": 0,
        "precisions": {},
        "sets": {},
    }
    pairs: dict[str, Pair] = {}
    windows = None
    for name in track(args.precision or list(PRECISIONS), "loading, perplexity", console=CONSOLE):
        options = {"dtype": args.dtype, **PRECISIONS[name]}
        loaded = commands.load(None, args.head, args.num_speculative_tokens, **options)
        if windows is None:
            windows = windows_of(loaded.target.tokenizer, args.prompts, args.perplexity_tokens)
            report["perplexity_tokens"] = windows.size
        report["precisions"][name] = sizes_of(loaded) | {"perplexity": perplexity(loaded, windows)}
        plain = dataclasses.replace(loaded, head=None, num_speculative_tokens=0)
        pairs[name] = Method(plain, 1024), Method(loaded, 1024)
        save(report, args.out)
    for path in args.prompts:
        prompts = read_prompts(path)
        prompts = prompts[:: -(-len(prompts) // (args.spread or len(prompts)))][: args.limit]
        found = decode_pairs(pairs, prompts, args.max_tokens)
        report["sets"][Path(path).name.split(".")[0]] = {"prompts": len(prompts), **found}
        save(report, args.out)
    return report


def show(report: dict[str, Any]) -> None:
    """The result for people."""
    table = Table("precision", "MB", "KV bytes/token", "perplexity", *report["sets"])
    for name, sizes in report["precisions"].items():
        sets = [
            f"{found[name]['plain_ratio']:.2f} / {found[name]['head_ratio']:.2f}, "
            f"accepted {found[name]['mean_acceptance_length']:.2f}"
            for found in report["sets"].values()
        ]
        megabytes, cache = f"{sizes['weight_bytes'] / 1e6:.0f}", str(sizes["kv_bytes_a_token"])
        table.add_row(name, megabytes, cache, f"{sizes['perplexity']:.3f}", *sets)
    console = Console()
    console.print(table)
    console.print("of a set: tokens/s against the first row's, without and with the head")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prompts", action="append", required=True, help="JSONL with turns or prompt; repeat for more sets")
    add("--limit", type=int, help="decode the first N prompts of each set")
    add("--spread", type=int, metavar="N", help="decode at most N prompts of each set, evenly spread over it")
    add("--max-tokens", type=int, default=128)
    add(
        "--perplexity-tokens", type=int, default=16384, metavar="N", help="of all sets (default: %(default)s)"
    )
    add(
        "--precision",
        action="append",
        choices=PRECISIONS,
        help="repeat for more; ratios are to the first (default: all)",
    )
    add("--head", help="a head's folder (default: the shipped head)")
    add("--num-speculative-tokens", type=int, metavar="K", help="(default: 5)")
    add("--dtype", default="auto", choices=commands.DTYPES, help="where the precision names none")
    add("--out", type=Path, help="write the JSON here")
    add("--json", action="store_true", help="print the JSON")
    args = parser.parse_args()
    tell(measure(args), args.json, show)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
