"""``bench serve``: servers over HTTP, measured from outside at rising concurrency, in turn at each level."""

from __future__ import annotations

import argparse
import asyncio
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.progress import Progress

from peagle_jax.arguments import CommandError
from peagle_jax.bench import prompts, report
from peagle_jax.bench.clients import Run, Talk, Timed, closed_loop, open_loop
from peagle_jax.bench.peers import Peers
from peagle_jax.bench.report import Table, number, summary
from peagle_jax.bench.servers import COMPILED, Server, ServerError, change
from peagle_jax.bench.tally import Tally

Part = dict[str, Any]
FAILURES_SHOWN = 3
TIMES: dict[str, Callable[[Timed], list[float]]] = {
    "ttft": lambda r: [r.time_to_first_token],
    "tpot": lambda r: [r.time_per_token] if r.tokens > 1 else [],
    "itl": lambda r: r.gaps,
    "e2el": lambda r: [r.latency],
}
"""vLLM's names: time to the first token, per token after it, between chunks, and of the whole answer."""


def acceptance(tally: Tally) -> Part:
    """How drafts fared, by vLLM's names; the rate is in percent there. Nothing if there were none."""
    if not tally.drafts:
        return {}
    told = tally.report()
    return {
        "spec_decode_acceptance_rate": 100 * told["draft_acceptance_rate"],
        "spec_decode_acceptance_length": told["mean_acceptance_length"],
        "spec_decode_num_drafts": told["num_drafts"],
        "spec_decode_draft_tokens": told["num_draft_tokens"],
        "spec_decode_accepted_tokens": told["num_accepted_tokens"],
        "spec_decode_per_position_acceptance_rates": told["acceptance_per_position"],
        "share_of_tokens_from_drafting_rounds": told["share_of_tokens_from_drafting_rounds"],
    }


def good(request: Timed, limits: Mapping[str, float]) -> bool:
    """Whether a request took at most so many milliseconds of each."""
    return all(1000 * value <= limits[name] for name in limits for value in TIMES[name](request))


def point(
    runs: Sequence[Run], concurrency: int, counted: Mapping[str, float], args: argparse.Namespace
) -> Part:
    """One server's figures at one level, of several runs; rates are the medians of theirs."""
    done = [r for run in runs for r in run.requests if r.error is None]
    errors = [r.error for run in runs for r in run.requests if r.error is not None]
    seconds = [run.ended - run.begun for run in runs]
    tokens = [sum(r.tokens for r in run.requests if r.error is None) for run in runs]
    rates = [t / s for t, s in zip(tokens, seconds, strict=True)]
    duration, prompt_tokens = sum(seconds), sum(r.prompt_tokens for r in done)
    found: Part = {
        "max_concurrency": concurrency,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "duration": duration,
        "completed": len(done),
        "failed": len(errors),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": sum(tokens),
        "request_throughput": len(done) / duration,
        "output_throughput": statistics.median(rates),
        "output_throughput_runs": rates,
        "total_token_throughput": (prompt_tokens + sum(tokens)) / duration,
    }
    if math.isinf(args.request_rate):
        steady = [sum(r.tokens_by(run.end) for r in run.requests) / (run.end - run.begun) for run in runs]
        found |= {
            "steady_output_throughput": statistics.median(steady),
            "steady_output_throughput_runs": steady,
        }
    if args.goodput:
        found["request_goodput"] = sum(good(r, dict(args.goodput)) for r in done) / duration
    # Of a closed loop those that began while all clients were at work.
    timed = [r for run in runs for r in run.requests if r.error is None and r.begun < run.end]
    for name, values in TIMES.items():
        told = summary([1000 * v for r in timed for v in values(r)])
        found |= {f"{kind}_{name}_ms": value for kind, value in told.items()}
    found |= acceptance(Tally.of_counters(counted))
    if COMPILED in counted:
        found["compilations"] = int(counted[COMPILED])
    return found | ({"errors": errors[:FAILURES_SHOWN]} if errors else {})


def throughput(found: Part) -> float:
    """The output tokens a second of a point that count: without a closed loop's end, where there is one."""
    return found.get("steady_output_throughput", found["output_throughput"])


def run(args: argparse.Namespace, result: Part, progress: Progress) -> None:
    """Fills the result. Raises CommandError if there is nothing to measure."""
    sets = prompts.sets_of(args)
    conversations = [c for prompt_set in sets for c in prompt_set.conversations]
    result |= prompts.described(sets, args) | {"repeats": args.repeats, "one_by_one": args.one_by_one}
    result |= {"runs": {}, **({"goodput_ms": dict(args.goodput)} if args.goodput else {})}
    peers = Peers(args, progress, result)
    if not (peers.endpoints or peers.launches):
        raise CommandError("name servers: --endpoint NAME=URL, or --start ours, or --start NAME=COMMAND")
    per_level = [_requests(args, c) for c in args.max_concurrency]
    total = sum(per_level) * args.repeats * sum(map(len, peers.groups))
    task = progress.add_task("requests", total=total, note="")
    for group in peers.groups:
        with peers.started(group) as servers:
            _measure(servers, conversations, args, result, progress, task)


def _requests(args: argparse.Namespace, concurrency: int) -> int:
    """Conversations of a run at a level."""
    return concurrency * max(args.requests_per_client, -(-args.least_requests // concurrency))


def _measure(
    servers: list[Server],
    conversations: Sequence[Any],
    args: argparse.Namespace,
    result: Part,
    progress: Progress,
    task: Any,
) -> None:
    """Servers that run side by side, in turn at each level."""
    servers = list(servers)

    def of_each(ask: Callable[[Server], Any]) -> dict[str, Any]:
        """What ``ask`` finds, by server; one that fails is told, and is asked no more."""
        found = {}
        for server in list(servers):
            try:
                found[server.name] = ask(server)
            except ServerError as error:
                result["runs"][server.name]["error"] = str(error)
                progress.console.print(str(error), style="red", markup=False, soft_wrap=True)
                servers.remove(server)
        return found

    def talks_with(server: Server) -> list[Talk]:
        """The conversations, of which one has warmed the server up."""
        result["runs"][server.name]["points"] = []
        options = {"ignore_eos": args.ignore_eos, "follow": args.turns == "all"}
        made = [server.talk(c, args.max_tokens, **options) for c in conversations]
        warm = asyncio.run(closed_loop(server.url, made, 1, 1)).requests[0]
        if warm.error is not None:
            raise ServerError(f"{server.name} did not answer: {warm.error}{server.last_words()}")
        return made

    def once(server: Server, concurrency: int, repeat: int) -> Run:
        progress.update(task, note=f"{server.name} at {concurrency}")
        run = _one(server, talks[server.name], concurrency, repeat, args, lambda: progress.advance(task))
        if not server.running:
            raise ServerError(f"{server.name} ended{server.last_words()}")
        return run

    talks = of_each(talks_with)
    for concurrency in args.max_concurrency:
        before = of_each(Server.settled_metrics)
        runs: dict[str, list[Run]] = {name: [] for name in before}
        for repeat in range(args.repeats):
            of_repeat = functools.partial(once, concurrency=concurrency, repeat=repeat)
            for name, one in of_each(of_repeat).items():
                runs[name].append(one)
        for name, after in of_each(Server.settled_metrics).items():
            found = point(runs[name], concurrency, change(before[name], after), args)
            result["runs"][name]["points"].append(found)
        report.write_result(result, args.out)


def _one(
    server: Server,
    talks: Sequence[Talk],
    concurrency: int,
    repeat: int,
    args: argparse.Namespace,
    told: Callable[[], None],
) -> Run:
    count = _requests(args, concurrency)
    if math.isinf(args.request_rate):
        each = count // concurrency
        return asyncio.run(closed_loop(server.url, talks, concurrency, each, args.least_seconds, told))
    seed = args.seed + repeat
    return asyncio.run(open_loop(server.url, talks, concurrency, count, args.request_rate, seed, told))


def tables(result: Part) -> list[Table]:
    measured = {name: entry["points"] for name, entry in result["runs"].items() if entry.get("points")}
    levels = sorted({p["max_concurrency"] for points in measured.values() for p in points})
    rates = {name: {p["max_concurrency"]: throughput(p) for p in points} for name, points in measured.items()}
    columns = ("", *map(str, levels))
    answers = f"{result['max_tokens']} tokens an answer"
    found = [
        Table(
            f"output tokens/s by clients, {answers}",
            columns,
            [[name, *(number(rate.get(level), 1) for level in levels)] for name, rate in rates.items()],
        )
    ]
    first = next(iter(rates), None)
    if len(rates) > 1:
        rows = [
            [
                name,
                *(
                    number(rate[c] / rates[first][c]) if rate.get(c) and rates[first].get(c) else ""
                    for c in levels
                ),
            ]
            for name, rate in rates.items()
            if name != first
        ]
        found.append(Table(f"tokens/s to those of {first}", columns, rows))
    rows = [
        [
            f"{name} at {p['max_concurrency']}",
            number(throughput(p), 1),
            number(p["median_ttft_ms"], 0),
            number(p["p99_ttft_ms"], 0),
            number(p["median_tpot_ms"], 1),
            number(p["p99_tpot_ms"], 1),
            number(p["p99_itl_ms"], 0),
            number(p["median_e2el_ms"], 0),
            number(p.get("spec_decode_acceptance_length")),
            *([number(p.get("request_goodput"))] if "goodput_ms" in result else []),
            str(p["completed"]),
            str(p["failed"]),
        ]
        for name, points in measured.items()
        for p in points
    ]
    columns = ("", "tokens/s", "TTFT ms", "p99", "TPOT ms", "p99", "ITL p99", "E2E ms", "accepted")
    columns += (*(("goodput/s",) if "goodput_ms" in result else ()), "done", "failed")
    return [*found, Table("latencies, medians and 99th percentiles", columns, rows)] if measured else []


def notes(result: Part) -> list[str]:
    found = [f"{name}: {entry['error']}" for name, entry in result["runs"].items() if "error" in entry]
    errors = {
        e for entry in result["runs"].values() for p in entry.get("points", ()) for e in p.get("errors", ())
    }
    return found + [f"a request failed: {error}" for error in sorted(errors)]
