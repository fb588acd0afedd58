"""A load test: clients that ask for answers which are known, and leave when they like.

    python benchmarks/load.py --prompts mt_bench.jsonl --prompts HumanEval.jsonl.gz --clients 64 --minutes 10

Starts our server in float32 (or takes the one at --url), lets it answer a set of prompts greedily, one at a
time and without its head, and then loads it: every client asks for random parts of these answers, streamed or
not, several at once, with stop strings, and disconnects at random. Each answer is compared with the one that
was given alone. Meanwhile another process watches /health and the server's memory. Exit status 1: a condition
does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from answers import Ask, Expected, Received, difference, random_ask
from judge import SHOWN, Found, judge_all, show, verdicts
from rich.console import Console
from watch import Sight, Watcher, in_milliseconds, memory_report

from peagle_jax.bench import servers
from peagle_jax.bench.clients import RequestError, events, http_client
from peagle_jax.bench.datasets import read_prompts
from peagle_jax.bench.machine import describe_machine, save, tell
from peagle_jax.bench.servers import Server, ServerError
from peagle_jax.bench.tally import Tally as Drafts

PROGRESS = Console(stderr=True, highlight=False)
LONG_EVERY = 5
"""Each fifth prompt is several in one, about half the context, so that it is prefilled in chunks."""
IDLE_WITHIN = 10.0
"""Seconds after the last answer until nothing may run or wait any more."""


class Tally:
    """What happened to the requests."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.errors: list[str] = []
        self.differences: list[Found] = []

    def error(self, text: str) -> None:
        self.counts["errors"] += 1
        self.errors.append(text)

    def compare(self, ask: Ask, choices: Sequence[Received], *, whole: bool) -> None:
        """Compares a request's answers, or what a client that left has read of them."""
        self.counts["finished" if whole else "left"] += 1
        if whole and len(choices) != ask.n:
            self.error(f"{len(choices)} choices, expected {ask.n}")
        for choice in choices:
            self.counts["answers" if whole else "beginnings"] += 1
            if (found := difference(ask, choice, whole=whole)) is not None:
                self.differences.append(Found(ask, found))


async def send(client: httpx.AsyncClient, model: str, ask: Ask, tally: Tally) -> None:
    """One request, to its end or until the client leaves."""
    tally.counts["requests"] += 1
    body = ask.body | {"model": model}
    try:
        if ask.stream:
            choices, whole = await _read_stream(client, body, ask)
        else:
            leave = asyncio.timeout(ask.leave_after)
            try:
                async with leave:
                    response = await client.post("/v1/completions", json=body)
            except TimeoutError:
                tally.counts["left"] += 1
                return
            if response.status_code != 200:
                raise RequestError(f"status {response.status_code}: {response.text[:200]}")
            choices, whole = [Received() for _ in response.json()["choices"]], True
            for choice in response.json()["choices"]:
                choices[choice["index"]].add(choice)
    except (httpx.HTTPError, RequestError, ValueError, KeyError, IndexError) as error:
        tally.error(f"{type(error).__name__}: {error}")
        await asyncio.sleep(0.1)
        return
    tally.compare(ask, choices, whole=whole)


async def _read_stream(
    client: httpx.AsyncClient, body: dict[str, Any], ask: Ask
) -> tuple[list[Received], bool]:
    """The choices, and whether they came to their end before the client left."""
    choices, chunks = [Received() for _ in range(ask.n)], 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if ask.leave_after == 0:
            return choices, False
        async for event in events(response):
            for choice in event["choices"]:
                choices[choice["index"]].add(choice)
            chunks += 1
            if ask.leave_after is not None and chunks >= ask.leave_after:
                return choices, False
    return choices, True


def prompt_set(
    server: Server, texts: Sequence[str], count: int, context: int, tokens: int
) -> list[list[int]]:
    """``count`` prompts as token ids, some of them long."""
    prompts: list[list[int]] = []
    for start in range(len(texts)):
        if len(prompts) == count:
            break
        ids = server.chat_tokens(texts[start])
        if len(prompts) % LONG_EVERY == LONG_EVERY - 1:
            joined = [*texts[start:], *texts[:start]]
            for size in range(2, len(joined) + 1):
                longer = server.chat_tokens("\n\n".join(joined[:size]))
                if len(longer) > context // 2:
                    break
                ids = longer
        if len(ids) + tokens <= context:
            prompts.append(ids)
    if not prompts:
        raise ServerError(f"no prompt fits {context} tokens; raise --max-model-len")
    return prompts


def answer_alone(server: Server, prompt: list[int], tokens: int) -> Expected:
    """The greedy answer to a prompt while nothing else runs, a token a round."""
    body = {"model": server.model, "prompt": prompt, "temperature": 0.0, "max_tokens": tokens, "stream": True}
    body |= {"return_token_ids": True, "speculative": False}

    async def ask() -> Expected:
        ids, pieces, finish = [], [], None
        async with (
            http_client(server.url) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for event in events(response):
                for choice in event["choices"]:
                    new = choice.get("token_ids") or []
                    if len(new) > 1:
                        raise RequestError(f"a chunk of {len(new)} tokens; expected one at a time")
                    ids += new
                    if new:
                        pieces.append(choice["text"])
                    elif choice["text"] and pieces:
                        pieces[-1] += choice["text"]
                    finish = choice["finish_reason"] or finish
        if finish is None or not ids:
            raise RequestError(f"an answer of {len(ids)} tokens that ended with {finish}")
        return Expected(tuple(prompt), tuple(ids), tuple(pieces), finish)

    return asyncio.run(ask())


async def load(server: Server, answers: Sequence[Expected], args: argparse.Namespace, tally: Tally) -> None:
    """All clients, until the time is over and their last requests are answered."""
    end = time.monotonic() + 60 * args.minutes

    async def one(index: int) -> None:
        rng = random.Random(f"{args.seed} {index}")
        while time.monotonic() < end and server.running:
            ask = random_ask(rng, rng.choice(answers), leave=args.leave, most_choices=args.most_choices)
            await send(client, server.model, ask, tally)

    async def tell() -> None:
        while True:
            await asyncio.sleep(30)
            left = max(0.0, end - time.monotonic())
            counts = ", ".join(f"{value} {name}" for name, value in sorted(tally.counts.items()))
            PROGRESS.print(f"{left:.0f} s left: {counts}", style="dim")

    async with http_client(server.url) as client:
        telling = asyncio.create_task(tell())
        try:
            await asyncio.gather(*(one(i) for i in range(args.clients)))
        finally:
            telling.cancel()


def becomes_idle(server: Server, within: float = IDLE_WITHIN) -> bool:
    """Whether nothing runs or waits after so many seconds: what was cancelled must not."""
    deadline = time.monotonic() + within
    while True:
        now = server.metrics()
        if not any(now.get(f"vllm:num_requests_{state}", 0) for state in ("running", "waiting")):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def run(server: Server, args: argparse.Namespace, report: dict[str, Any]) -> None:
    """The test; fills the report."""
    report["ready_in_s"] = round(server.wait_until_ready(args.start_within), 1)
    report |= {"version": server.version(), **server.start_up_report()}
    texts = [prompt.turns[0] for path in args.prompts for prompt in read_prompts(path)]
    random.Random(args.seed).shuffle(texts)
    prompts = prompt_set(server, texts, args.answers, args.max_model_len, args.output_tokens)
    answers = []
    for prompt in prompts:
        answers.append(answer_alone(server, prompt, args.output_tokens))
        PROGRESS.print(f"alone: {len(answers)} of {len(prompts)}", style="dim")
    report["prompts"] = {"count": len(prompts), "longest": max(map(len, prompts))}
    pid = args.pid if server.process is None else server.process.pid
    tally, before, logged = Tally(), server.metrics(), logged_compilations(server)
    watcher = Watcher(server.url, pid)
    try:
        asyncio.run(load(server, answers, args, tally))
    finally:
        sight: Sight = watcher.seen()
    report["errors"] = tally.errors[:SHOWN]
    report["health_ms"], report["watcher_late_ms"] = (
        in_milliseconds(sight.health),
        in_milliseconds(sight.late),
    )
    report["health_polls"], report["health_failures"] = len(sight.health), sight.failures[:SHOWN]
    report["memory_mib"] = memory_report(sight.memory, settled=60.0)
    if not server.running:
        raise ServerError(f"the server has ended{server.last_words()}")
    report["idle"], report["idle_within_s"] = becomes_idle(server), IDLE_WITHIN
    counted, after = servers.change(before, server.metrics()), logged_compilations(server)
    report["compilations"] = int(counted[servers.COMPILED]) if servers.COMPILED in counted else None
    report["logged_compilations"] = None if logged is None or after is None else after - logged
    report |= {
        "preemptions": counted.get("vllm:num_preemptions_total"),
        **Drafts.of_counters(counted).report(),
    }
    report["differences"], report["wrong_answers"], report["ties"] = judge_all(server, tally.differences)
    report["requests"] = dict(tally.counts)


def logged_compilations(server: Server) -> int | None:
    """Programs that JAX itself says it has compiled (JAX_LOG_COMPILES); None of a server with no log here."""
    return None if server.log is None else server.log_text().count("Finished XLA compilation")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prompts", action="append", required=True, help="JSONL with turns or prompt; repeat for more sets")
    add("--clients", type=int, default=64, help="at once (default: %(default)s)")
    add("--minutes", type=float, default=10.0, help="clients begin requests for so long (default: 10)")
    add("--answers", type=int, default=40, help="prompts whose answers are known (default: %(default)s)")
    add("--output-tokens", type=int, default=96, help="of the longest answer (default: %(default)s)")
    add("--leave", type=float, default=0.3, help="share of requests that clients leave (default: 0.3)")
    add("--most-choices", type=int, default=3, help="n of a request; vLLM needs 1 (default: %(default)s)")
    add("--health-limit", type=float, default=100.0, metavar="MS", help="of /health, ever (default: 100)")
    add("--growth-limit", type=float, default=32.0, metavar="MIB", help="of memory (default: 32)")
    add("--seed", type=int, default=0, help="of the clients' choices (default: 0)")
    add("--url", help="a server that runs (in float32, or ties are many), instead of one of our own")
    add("--pid", type=int, help="with --url: the process whose memory is watched")
    add("--model", help="of our server: folder, hub id or .gguf file (default: the embedded one)")
    add("--speculative-config", metavar="JSON", help="of our server (default: its own)")
    add("--max-model-len", type=int, default=1024, help="of the server (default: %(default)s)")
    add("--max-num-seqs", type=int, metavar="N", help="of our server (default: its own)")
    add("--server-flag", action="append", default=[], metavar="FLAG", help="another: --server-flag=--x=y")
    add("--start-within", type=float, default=1800, metavar="S", help="seconds until ready (default: 1800)")
    add("--logs", type=Path, metavar="DIR", help="keeps the server's log (default: it is dropped)")
    add("--json", action="store_true", help="print the JSON instead of verdicts")
    add("--out", type=Path, help="write the JSON here too")
    args = parser.parse_args(argv)
    if args.most_choices < 1 or args.clients < 1:
        parser.error("--clients and --most-choices must be at least 1")
    return args


def launch(args: argparse.Namespace) -> servers.Launch:
    """Our server, in float32, which tells of every program that is compiled."""
    flags = ["--dtype", "float32", "--max-model-len", str(args.max_model_len)]
    for name in ("model", "speculative_config", "max_num_seqs"):
        value = getattr(args, name)
        flags += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return servers.ours("ours", [*flags, *args.server_flag], {"JAX_LOG_COMPILES": "1"})


def main() -> int:
    args = parse()
    servers.end_on_sigterm()
    report: dict[str, Any] = describe_machine(("jax", "jaxlib", "numpy"))
    report |= {"clients": args.clients, "minutes": args.minutes, "leave": args.leave, "seed": args.seed}
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            if args.url:
                run(Server("server", args.url), args, report)
            else:
                start = launch(args)
                report["server"] = start.described()
                with servers.started(start, logs) as server:
                    run(server, args, report)
        except (ServerError, RequestError, httpx.HTTPError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    report["verdicts"] = verdicts(report, args.health_limit, args.growth_limit)
    save(report, args.out)
    tell(report, args.json, show)
    return int(any(verdict["holds"] is False for verdict in report["verdicts"]))


if __name__ == "__main__":
    sys.exit(main())
