"""Acceptance and speed with and without a head, in one process, prompt by prompt in turn.

    python benchmarks/decode.py --prompts mt_bench.jsonl --prompts HumanEval.jsonl.gz --out results.json

Every prompt is decoded by every method before the next one, so that a noisy machine treats them
alike. Speed counts the tokens after the first one and their time; a ratio is of summed times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from machine import describe_machine, save
from prompts import Prompt, read_prompts
from rich.console import Console
from rich.progress import track

from peagle_jax import commands, generate
from peagle_jax.arguments import CommandError, run_command
from peagle_jax.speculative.sampling import SamplingParams
from peagle_jax.speculative.statistics import AcceptanceStatistics

CONSOLE = Console(stderr=True)


class Method:
    """One way to decode, and its sums over a prompt set."""

    def __init__(self, name: str, loaded: commands.Loaded, max_model_len: int):
        self.name, self.loaded = name, loaded
        self.k = loaded.num_speculative_tokens
        self.decoder = loaded.decoder(max_model_len)
        self.decoder.warm_up()
        self.reset()

    def reset(self) -> None:
        self.acceptance = AcceptanceStatistics(self.k)
        self.seconds, self.tokens, self.rates, self.same, self.ties = 0.0, 0, [], 0, 0

    def add(self, run: generate.Run) -> None:
        count = len(run.token_ids) - 1
        if count > 0:
            self.seconds += count / run.tokens_per_second
            self.tokens += count
            self.rates.append(run.tokens_per_second)
        self.acceptance.merge(run.acceptance)

    def report(self, baseline: Method) -> dict[str, Any]:
        rate = self.tokens / self.seconds
        return {
            "num_speculative_tokens": self.k,
            "mean_acceptance_length": self.acceptance.mean_acceptance_length,
            "acceptance_per_position": self.acceptance.acceptance_per_position,
            "tokens": self.tokens,
            "tokens_per_second": rate,
            "tokens_per_second_median": statistics.median(self.rates),
            "speedup": rate * baseline.seconds / baseline.tokens,
            "identical_answers": self.same,
            "parted_at_a_tie": self.ties,
        }


def decode_set(methods: list[Method], prompts: list[Prompt], max_tokens: int) -> dict[str, Any]:
    """Decodes every prompt by every method, greedily. The first method is the baseline."""
    sampling = SamplingParams()
    for method in methods:
        method.reset()
    for prompt in track(prompts, "decoding", console=CONSOLE):
        target = methods[0].loaded.target
        ids = generate.prompt_token_ids(target.tokenizer, prompt.text)
        stops = set(target.config.eos_token_ids)
        baseline: generate.Run | None = None
        for method in methods:
            run = generate.decode(
                method.decoder, target.tokenizer, ids, sampling, max_tokens, stops, method.k
            )
            method.add(run)
            baseline = baseline or run
            report = generate.compare(method.loaded, ids, sampling, run, baseline)
            method.same += report["identical"]
            method.ties += report.get("first_difference", {}).get("tie", False)
    return {method.name: method.report(methods[0]) for method in methods}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prompts", action="append", required=True, help="JSONL with turns or prompt; repeat for more sets")
    add("--limit", type=int, help="take the first N prompts of each set")
    add("--spread", type=int, metavar="N", help="take at most N prompts of each set, evenly spread over it")
    add("--max-tokens", type=int, default=128)
    add("--head", action="append", help="a head's folder; repeat for more (default: the shipped head)")
    add(
        "--num-speculative-tokens",
        type=int,
        action="append",
        metavar="K",
        help="repeat for more (default: 5)",
    )
    add("--dtype", default="auto", choices=commands.DTYPES)
    add("--max-model-len", type=int, default=1024)
    add("--out", type=Path, help="write the JSON here too")
    args = parser.parse_args()

    loaded = commands.load(None, None, 0, dtype=args.dtype)
    methods = [Method("plain", loaded, args.max_model_len)]
    heads = args.head or [None]
    for head in heads:
        for k in args.num_speculative_tokens or [5]:
            loaded = commands.load(None, head, k, dtype=args.dtype)
            kind = loaded.head.config.method if loaded.head else "plain"
            name = f"{kind} K={k}" + (f" {Path(head).name}" if head and len(heads) > 1 else "")
            if name in [method.name for method in methods]:
                raise CommandError(f"two heads' folders are named {Path(str(head)).name}; rename one of them")
            methods.append(Method(name, loaded, args.max_model_len))
    report: dict[str, Any] = {
        **describe_machine(("jax", "jaxlib", "numpy")),
        "dtype": loaded.dtype.name,
        "max_tokens": args.max_tokens,
        "sets": {},
    }
    for path in args.prompts:
        prompts = read_prompts(path)
        prompts = prompts[:: -(-len(prompts) // (args.spread or len(prompts)))][: args.limit]
        name = Path(path).name.split(".")[0]
        report["sets"][name] = {"prompts": len(prompts), **decode_set(methods, prompts, args.max_tokens)}
        save(report, args.out)
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
