"""``bench acceptance``: how many drafts are accepted, by position, category and K, in this process and by
servers' own counters."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rich.progress import Progress

from peagle_jax.arguments import CommandError
from peagle_jax.bench import methods, prompts, report, runner
from peagle_jax.bench.clients import Timed, converse, http_client
from peagle_jax.bench.datasets import Conversation
from peagle_jax.bench.peers import Peers
from peagle_jax.bench.report import Table, number, numbers
from peagle_jax.bench.runner import Asking
from peagle_jax.bench.servers import Server, ServerError, change
from peagle_jax.bench.tally import Tally

Part = dict[str, Any]


class ByCategory:
    """What one way of decoding has made of a set, by category."""

    def __init__(self) -> None:
        self.categories: dict[str, Tally] = {}
        self.prompts, self.prompt_tokens = 0, 0

    def add(self, category: str, tally: Tally, asked: int, prompt_tokens: int) -> None:
        self.categories.setdefault(category, Tally()).merge(tally)
        self.prompts += asked
        self.prompt_tokens += prompt_tokens

    def described(self) -> Part:
        whole = Tally()
        for tally in self.categories.values():
            whole.merge(tally)
        found = {"requests": self.prompts, "prompt_tokens": self.prompt_tokens, "tokens": whole.tokens}
        parts = {name: {"tokens": t.tokens, **t.report()} for name, t in self.categories.items()}
        return {**found, **whole.report(), "categories": parts}


def run(args: argparse.Namespace, result: Part, progress: Progress) -> None:
    """Fills the result.

    Raises:
        CommandError: there is nothing to measure, or not in the same way.
        CommandError, CheckpointError, ConfigError: what loading and starting raise.
    """
    others = args.endpoint or args.start
    if not (args.methods or others):
        raise CommandError("nothing to measure; name --methods, --endpoint NAME=URL or --start NAME=COMMAND")
    if others and args.raw:
        raise CommandError("--raw is not for servers, which use their chat template; leave one of them out")
    asking, sets = Asking.of(args), prompts.sets_of(args)
    result |= prompts.described(sets, args) | {"runs": {}}
    with contextlib.ExitStack() as stack:
        peers = Peers(args, progress, result)
        ours = stack.enter_context(_engines(args, result, progress))
        servers = stack.enter_context(peers.started())
        for entry in result["runs"].values():
            entry.setdefault("sets", {})  # one that did not start has none
        names = [*(method.name for method, _ in ours), *(server.name for server in servers)]
        total = sum(len(s.conversations) for s in sets) * len(names)
        task = progress.add_task("acceptance", total=total, note="")
        for prompt_set in sets:
            sums = {name: ByCategory() for name in names}
            by_category = itertools.groupby(
                sorted(prompt_set.conversations, key=lambda c: c.category), lambda c: c.category
            )
            for category, group in by_category:
                asked = list(group)
                for method, engine in ours:
                    for conversation in asked:
                        progress.update(task, advance=1, note=f"{method.name}, {category}")
                        target = method.loaded.target
                        for reply in runner.converse(
                            engine, target, conversation, args.max_model_len, asking
                        ):
                            size = len(reply.prompt_ids)
                            sums[method.name].add(category, reply.tally, 1, size)
                for server in servers:
                    progress.update(task, advance=len(asked), note=f"{server.name}, {category}")
                    _count(server, category, asked, sums[server.name], asking, result)
            for name, found in sums.items():
                result["runs"][name]["sets"][prompt_set.name] = found.described()
            report.write_result(result, args.out)
    _compare(result)


@contextlib.contextmanager
def _engines(
    args: argparse.Namespace, result: Part, progress: Progress
) -> Iterator[list[tuple[methods.Method, Any]]]:
    """Warm engines of the methods, if any are named."""
    if not args.methods:
        yield []
        return
    with progress_note(progress, "loading") as note:
        chosen = methods.chosen(args)
        result |= prompts.models(chosen)
        for method in chosen:
            result["runs"][method.name] = method.described() | {"sets": {}}
        stack = contextlib.ExitStack()
        found = stack.enter_context(methods.engines(chosen, args.max_model_len, note))
    with stack:
        yield [(method, engine) for method, engine, _ in found]


@contextlib.contextmanager
def progress_note(progress: Progress, what: str) -> Iterator[methods.Note]:
    """A line of the bar for work whose length nobody knows."""
    task = progress.add_task(what, total=None, note="")
    try:
        yield lambda note: progress.update(task, note=note)
    finally:
        progress.remove_task(task)


def _count(
    server: Server,
    category: str,
    asked: Sequence[Conversation],
    sums: ByCategory,
    asking: Asking,
    result: Part,
) -> None:
    """Lets a server answer a category's prompts one after the other, and reads its counters."""
    entry = result["runs"][server.name]
    if "error" in entry:
        return
    try:
        sampling, follow = asking.sampling, asking.later_turns
        options = {
            "ignore_eos": asking.ignore_eos,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
        }
        talks = [server.talk(c, asking.max_tokens, follow=follow, **options) for c in asked]
        before = server.settled_metrics()

        async def all_of_them() -> list[Timed]:
            async with http_client(server.url) as client:
                return [timed for talk in talks for timed in await converse(client, talk)]

        timed = asyncio.run(all_of_them())
        failed = next((t.error for t in timed if t.error is not None), None)
        if failed is not None:
            raise ServerError(f"{server.name} did not answer: {failed}")
        tally = Tally.of_counters(change(before, server.settled_metrics()))
    except ServerError as error:
        entry["error"] = str(error)
        return
    tally.tokens = sum(t.tokens for t in timed)
    sums.add(category, tally, len(timed), sum(t.prompt_tokens for t in timed))


def _compare(result: Part) -> None:
    """Each length to that of the first run that drafted, set by set."""
    for name in [s["name"] for s in result["datasets"]]:
        drafted = [
            r["sets"][name] for r in result["runs"].values() if r["sets"].get(name, {}).get("num_drafts")
        ]
        for found in drafted:
            found["length_to_first"] = found["mean_acceptance_length"] / drafted[0]["mean_acceptance_length"]


def notes(result: Part) -> list[str]:
    return [f"{name}: {entry['error']}" for name, entry in result["runs"].items() if "error" in entry]


def tables(result: Part) -> list[Table]:
    found = []
    for prompt_set in result["datasets"]:
        rows, categories = [], {}
        for name, entry in result["runs"].items():
            if (part := entry["sets"].get(prompt_set["name"])) is None:
                continue
            rows.append(
                [
                    name,
                    number(part["mean_acceptance_length"]),
                    number(part.get("length_to_first"), 3),
                    f"{100 * part['draft_acceptance_rate']:.0f} %" if part["num_drafts"] else "",
                    numbers(part["acceptance_per_position"]),
                    str(part["num_drafts"]),
                    f"{100 * part['share_of_tokens_from_drafting_rounds']:.0f} %"
                    if part["num_drafts"]
                    else "",
                    str(part["tokens"]),
                    str(part["prompt_tokens"]),
                ]
            )
            if part["num_drafts"]:
                categories[name] = part["categories"]
        title = f"{prompt_set['name']}: acceptance, {prompt_set['prompts']} prompts, {result['turns']} turns"
        columns = (
            "",
            "length",
            "to first",
            "drafts accepted",
            "by position",
            "rounds that drafted",
            "their tokens",
            "tokens",
            "prompt tokens",
        )
        found.append(Table(title, columns, rows))
        names = sorted({c for parts in categories.values() for c in parts})
        if len(names) > 1:
            by_category = [
                [n, *(number(parts[c]["mean_acceptance_length"]) if c in parts else "" for c in names)]
                for n, parts in categories.items()
            ]
            found.append(Table(f"{prompt_set['name']}: length by category", ("", *names), by_category))
    return found
