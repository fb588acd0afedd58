"""``bench latency``: one request at a time through the engine in this process, methods interleaved."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

from rich.progress import Progress

from peagle_jax import generate
from peagle_jax.bench import datasets, methods, prompts, report, runner
from peagle_jax.bench.acceptance import progress_note
from peagle_jax.bench.datasets import Conversation
from peagle_jax.bench.methods import Method
from peagle_jax.bench.report import Table, number, numbers, summary
from peagle_jax.bench.runner import Asking, Reply
from peagle_jax.bench.split import SplitDecoder
from peagle_jax.bench.tally import Tally
from peagle_jax.serve import build

Part = dict[str, Any]
WARM_TOKENS = 16
"""Of an answer before the first that counts."""


@dataclasses.dataclass
class Answers:
    """A method's answers to a set, by repeat."""

    replies: list[list[tuple[str, Reply]]]
    same: int = 0
    ties: int = 0

    def rate(self, repeat: int, category: str | None = None) -> float | None:
        """Tokens after each answer's first round a second; None where there were none."""
        chosen = [r for c, r in self.replies[repeat] if category in (None, c)]
        tokens, seconds = sum(r.decode_tokens for r in chosen), sum(r.decode_seconds for r in chosen)
        return tokens / seconds if tokens and seconds else None

    def described(self, first: Answers) -> Part:
        replies = [reply for of_repeat in self.replies for _, reply in of_repeat]
        tally = _tally(replies)
        decoded = [r for r in replies if r.decode_tokens]
        times = {
            "ttft_ms": [1000 * r.time_to_first_token for r in replies],
            "tpot_ms": [1000 * r.decode_seconds / r.decode_tokens for r in decoded],
            "e2el_ms": [1000 * r.latency for r in replies],
        }
        categories = dict.fromkeys(c for c, _ in self.replies[0])
        return {
            "answers": len(replies),
            "tokens": tally.tokens,
            **self._rates(first, None),
            **{name: summary(values) for name, values in times.items()},
            **tally.report(),
            "identical_answers": self.same,
            "parted_at_a_tie": self.ties,
            "categories": {
                c: {
                    **self._rates(first, c),
                    "mean_acceptance_length": _tally(
                        [r for x in self.replies for d, r in x if d == c]
                    ).length,
                }
                for c in categories
            },
        }

    def _rates(self, first: Answers, category: str | None) -> Part:
        """Medians over the repeats, with the least and the most."""
        pairs = [(self.rate(i, category), first.rate(i, category)) for i in range(len(self.replies))]
        rates = [a for a, _ in pairs if a is not None]
        ratios = [a / b for a, b in pairs if a is not None and b is not None]
        return {
            "tokens_per_second": statistics.median(rates) if rates else None,
            "tokens_per_second_spread": [min(rates), max(rates)] if rates else None,
            "speedup": statistics.median(ratios) if ratios else None,
            "speedup_spread": [min(ratios), max(ratios)] if ratios else None,
        }


def _tally(replies: Sequence[Reply]) -> Tally:
    found = Tally()
    for reply in replies:
        found.merge(reply.tally)
    return found


def run(args: argparse.Namespace, result: Part, progress: Progress) -> None:
    """Fills the result. Raises what loading raises."""
    asking, sets = Asking.of(args), prompts.sets_of(args)
    with progress_note(progress, "loading"):
        chosen = methods.chosen(args)
    result |= prompts.described(sets, args) | prompts.models(chosen) | {"repeats": args.repeats}
    result["runs"] = {method.name: method.described() | {"sets": {}} for method in chosen}
    with (
        progress_note(progress, "starting") as note,
        methods.engines(chosen, args.max_model_len, note) as ready,
    ):
        decoders = [decoder for *_, decoder in ready]
        tokens, first = min(WARM_TOKENS, args.max_tokens), sets[0].conversations[0]
        short = dataclasses.replace(asking, max_tokens=tokens, later_turns=False)
        for method, engine, _ in ready:
            runner.converse(engine, method.loaded.target, first, args.max_model_len, short)
        task = progress.add_task("answers", total=0, note="")
        for prompt_set in sets:
            count = len(prompt_set.conversations) * args.repeats * len(ready)
            progress.update(task, total=(progress.tasks[-1].total or 0) + count)
            sums = {method.name: Answers([]) for method in chosen}
            for repeat in range(args.repeats):
                for one in sums.values():
                    one.replies.append([])
                for i, conversation in enumerate(prompt_set.conversations):
                    turn = (i + repeat) % len(ready)
                    order = [*ready[turn:], *ready[:turn]]
                    for method, engine, _ in order:
                        progress.update(task, advance=1, note=f"{prompt_set.name}, {method.name}")
                        got = runner.converse(
                            engine, method.loaded.target, conversation, args.max_model_len, asking
                        )
                        sums[method.name].replies[-1] += [(conversation.category, reply) for reply in got]
            _check(chosen, sums, asking)
            for method in chosen:
                described = sums[method.name].described(sums[chosen[0].name])
                result["runs"][method.name]["sets"][prompt_set.name] = described
            report.write_result(result, args.out)
    if args.split_prompts:
        every = [c for prompt_set in sets for c in prompt_set.conversations]
        few = datasets.spread(every, args.split_prompts)
        _split(list(zip(chosen, decoders, strict=True)), few, args.max_model_len, asking, result, progress)


def _check(chosen: Sequence[Method], sums: dict[str, Answers], asking: Asking) -> None:
    """Which answers of the first repeat are those of the first method, and which part from them at a tie."""
    baseline = [reply for _, reply in sums[chosen[0].name].replies[0]]
    for method in chosen:
        one = sums[method.name]
        for (_, reply), first in zip(one.replies[0], baseline, strict=False):
            if reply.prompt_ids != first.prompt_ids:  # a later turn, after answers that differ
                continue
            told = generate.compare_tokens(
                method.loaded, reply.prompt_ids, asking.sampling, reply.token_ids, first.token_ids
            )
            one.same += told["identical"]
            one.ties += told.get("first_difference", {}).get("tie", False)


def _split(
    pairs: Sequence[tuple[Method, Any]],
    conversations: Sequence[Conversation],
    context: int,
    asking: Asking,
    result: Part,
    progress: Progress,
) -> None:
    """The pass that tells draft, verification and host apart, and what a wider verification costs."""
    task = progress.add_task("splitting rounds", total=len(pairs) * len(conversations), note="")
    walls: collections.Counter[str] = collections.Counter()
    with contextlib.ExitStack() as stack:
        ready = []
        for method, decoder in pairs:
            progress.update(task, note=f"compiling {method.name}")
            split = SplitDecoder(decoder)
            tokenizer = method.loaded.target.tokenizer
            engine = build.build_engine(split, tokenizer, methods.OPTIONS, method.speculative)
            ready.append((method, split, stack.enter_context(methods.running(engine))))
        for conversation in conversations:
            for method, split, engine in ready:
                progress.update(task, advance=1, note=method.name)
                begun = time.monotonic()
                with split.answering():
                    runner.converse(engine, method.loaded.target, conversation, context, asking)
                walls[method.name] += time.monotonic() - begun
    for method, split, _ in ready:
        result["runs"][method.name]["time"] = split.times.report(walls[method.name])
    _costs(result)


def _costs(result: Part) -> None:
    """Of methods with a fixed K: what a verification of K + 1 tokens costs beside that of one, and how many
    tokens a whole round must give to be worth it."""
    times = {name: entry["time"] for name, entry in result["runs"].items() if "time" in entry}
    plain = next((t["rounds"]["0"] for t in times.values() if set(t["rounds"]) == {"0"}), None)
    for split in times.values():
        for k, of_k in split["rounds"].items():
            if plain is not None and k != "0":
                whole = of_k["draft_ms"] + of_k["verify_ms"]
                of_k["verify_cost"] = of_k["verify_ms"] / plain["verify_ms"]
                of_k["break_even_acceptance_length"] = whole / plain["verify_ms"]


def tables(result: Part) -> list[Table]:
    found = []
    for prompt_set in result["datasets"]:
        name, rows = prompt_set["name"], []
        for method, entry in result["runs"].items():
            if (part := entry["sets"].get(name)) is None:
                continue
            rows.append(
                [
                    method,
                    number(part["tokens_per_second"], 1),
                    _range(part["tokens_per_second_spread"], 1),
                    number(part["speedup"]),
                    _range(part["speedup_spread"], 2),
                    number(part["ttft_ms"]["median"], 0),
                    number(part["tpot_ms"]["median"], 1),
                    number(part["e2el_ms"]["median"], 0),
                    number(part["mean_acceptance_length"]) if part["num_drafts"] else "",
                    numbers(part["acceptance_per_position"]),
                    f"{part['identical_answers']}+{part['parted_at_a_tie']}",
                ]
            )
        title = f"{name}: {prompt_set['prompts']} prompts, {result['repeats']} repeats, one request at a time"
        columns = ("", "tokens/s", "least-most", "to first", "least-most", "TTFT ms", "TPOT ms", "E2E ms")
        columns += ("accepted", "by position", "same+ties")
        found.append(Table(title, columns, rows))
    times = {name: entry["time"] for name, entry in result["runs"].items() if "time" in entry}
    if times:
        found += [_time_table(times), _cost_table(times)]
    return [table for table in found if table.rows]


def _range(pair: Sequence[float] | None, digits: int) -> str:
    return "" if pair is None else f"{number(pair[0], digits)}-{number(pair[1], digits)}"


def _time_table(times: dict[str, Part]) -> Table:
    parts = ("prefill", "draft", "verify", "host")
    rows = []
    for name, split in times.items():
        shares = (100 * split[f"{part}_s"] / split["wall_s"] for part in parts)
        rows.append([name, number(split["wall_s"]), *(f"{share:.1f} %" for share in shares)])
    return Table("where the time goes", ("", "wall s", *parts), rows)


def _cost_table(times: dict[str, Part]) -> Table:
    rows = [
        [
            name,
            k,
            number(of_k["draft_ms"]),
            number(of_k["verify_ms"]),
            number(of_k.get("verify_cost")),
            number(of_k.get("break_even_acceptance_length")),
        ]
        for name, split in times.items()
        for k, of_k in split["rounds"].items()
    ]
    columns = ("", "K", "draft ms", "verify ms", "cost(K+1)/cost(1)", "length to break even")
    return Table("what a round costs", columns, rows)


def notes(result: Part) -> list[str]:
    found = []
    if "experts" in result:
        top, of = result["experts"]
        found.append(
            f"The target is a mixture of experts ({top} of {of} a token): each verified token wakes more of "
            "them, which is in cost(K+1)/cost(1)."
        )
    return found
