"""Servers over HTTP, measured from outside at rising concurrency: ours without a head, with each head fixed
on and as it comes (adaptive), and vLLM's.

    python benchmarks/serve.py --prompts mt_bench.jsonl --prompts HumanEval.jsonl.gz --out serve.json
    python benchmarks/serve.py --prompts mt_bench.jsonl --eagle3-head ./eagle3 \\
        --vllm-python .venv-vllm/bin/python --vllm-target /tmp/smollm2 --interleave --repeats 3

Every server gets the same token ids, at temperature 0, and answers each with just as many tokens. Clients
send their next request when the last one is answered. Tokens are counted while all clients are at work: from
the start until the first has no more to do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import servers
from clients import Run, closed_loop
from machine import describe_machine, save, tell
from prompts import read_prompts
from rich.console import Console
from rich.table import Table
from servers import Launch, Server, ServerError

PROGRESS = Console(stderr=True, highlight=False)
OURS = ("off", "peagle", "eagle3", "adaptive")
VLLM = ("vllm", "vllm-peagle")
FAILURES_SHOWN = 3


def launches(args: argparse.Namespace) -> list[Launch]:
    """The servers that the arguments ask for, in the order in which they take their turns."""
    common = ["--dtype", args.dtype, "--max-model-len", str(args.max_model_len)]
    # Sampling defaults of the model would hold for one and not be known to another.
    common += ["--max-num-seqs", str(args.max_num_seqs), "--generation-config", "vllm"]
    if not args.prefix_caching:
        common.append("--no-enable-prefix-caching")
    k = args.num_speculative_tokens
    most = args.most_speculative_tokens or k
    own = [*common, *(["--model", args.model] if args.model else []), *args.server_flag]
    head = {"model": args.head} if args.head else {}
    fixed = {"num_speculative_tokens_per_batch_size": [[1, args.max_num_seqs, k]]}
    configs: dict[str, Any] = {
        "off": None,
        "peagle": head | {"method": "peagle", "num_speculative_tokens": k} | fixed,
        "adaptive": head | {"method": "peagle", "num_speculative_tokens": most},
    }
    if args.eagle3_head:
        method = {"model": args.eagle3_head, "method": "eagle3", "num_speculative_tokens": k}
        configs["eagle3"] = method | fixed
    found = {
        name: servers.ours(name, [*own, "--speculative-config", json.dumps(configs[name])])
        for name in OURS
        if name in configs
    }
    if args.vllm_python:
        peer = [*common, *args.vllm_flag]
        parallel = {"method": "eagle3", "model": args.head or str(servers.SHIPPED_HEAD)}
        parallel |= {"num_speculative_tokens": k, "parallel_drafting": True}
        for name, more in (("vllm", []), ("vllm-peagle", ["--speculative-config", json.dumps(parallel)])):
            found[name] = servers.vllm(name, args.vllm_python, args.vllm_target, [*peer, *more])
    return [launch for name, launch in found.items() if args.servers is None or name in args.servers]


def bodies_of(server: Server, texts: Iterable[str], tokens: int, context: int) -> list[dict[str, Any]]:
    """A request a prompt, of those that fit the context; one of the servers makes the token ids."""
    prompts = [server.chat_tokens(text) for text in texts]
    sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    return [{"prompt": prompt, **sampling} for prompt in prompts if len(prompt) + tokens <= context]


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float | None]:
    """Median and 99th percentile; None of nothing."""
    if not values:
        return {"median": None, "p99": None}
    return {name: float(np.percentile(values, q)) * scale for name, q in (("median", 50), ("p99", 99))}


def summary(runs: Sequence[Run], counted: dict[str, float]) -> dict[str, Any]:
    """A point of the result: several runs at one concurrency, and what the server has counted in them.

    Its rate is the median of the runs', so that one in which the machine stalled does not decide. Latencies
    are those of the requests that began while all clients were at work.
    """
    good = [r for run in runs for r in run.requests if r.error is None and r.begun < run.end]
    failures = [r.error for run in runs for r in run.requests if r.error is not None]
    tokens = [sum(r.tokens_by(run.end) for r in run.requests) for run in runs]
    seconds = [run.end - run.begun for run in runs]
    rates = [t / s for t, s in zip(tokens, seconds, strict=True)]
    found: dict[str, Any] = {
        "concurrency": len(runs[0].clients),
        "output_tokens_per_second": statistics.median(rates),
        "ttft_s": spread([r.time_to_first_token for r in good]),
        "time_per_output_token_ms": spread([r.time_per_token for r in good], 1000),
        "time_between_chunks_ms": spread([gap for r in good for gap in r.gaps], 1000),
        "requests": sum(len(run.requests) for run in runs),
        "failures": len(failures),
        "output_tokens": round(sum(tokens)),
        "seconds": sum(seconds),
        "runs_output_tokens_per_second": rates,
        **servers.acceptance(counted),
    }
    if servers.COMPILED in counted:
        found["compilations"] = int(counted[servers.COMPILED])
    return found | ({"errors": failures[:FAILURES_SHOWN]} if failures else {})


def ratios(rates: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """What the servers' tokens/s are to each other at each concurrency, where all were measured."""

    def best(names: Sequence[str]) -> dict[int, float]:
        measured = [rates[name] for name in names if name in rates]
        shared = set.intersection(*map(set, measured)) if measured else set()
        return {c: max(rate[c] for rate in measured) for c in sorted(shared)}

    pairs = {
        "adaptive / better of off and peagle": (best(["adaptive"]), best(["off", "peagle"])),
        "peagle / off": (best(["peagle"]), best(["off"])),
        "eagle3 / off": (best(["eagle3"]), best(["off"])),
        "adaptive / better of vllm's": (best(["adaptive"]), best(VLLM)),
    }
    found = {name: {c: a[c] / b[c] for c in a if b.get(c)} for name, (a, b) in pairs.items()}
    return {name: values for name, values in found.items() if values}


class Benchmark:
    """One run of the script: its servers' points, kept up to date in the report."""

    def __init__(self, args: argparse.Namespace, report: dict[str, Any]) -> None:
        self.args, self.report = args, report
        self.texts = [prompt.text for path in args.prompts for prompt in read_prompts(path, args.limit)]
        self.bodies: list[dict[str, Any]] = []

    def measure(self, group: Sequence[Launch], logs: Path) -> None:
        """Measures servers that run side by side, in turn at each concurrency."""
        with contextlib.ExitStack() as stack:
            ready = [s for launch in group if (s := self._start(launch, logs, stack)) is not None]
            for concurrency in self.args.concurrency:
                runs: dict[str, list[Run]] = {server.name: [] for server in ready}
                before = {server.name: server.metrics() for server in ready}
                for _ in range(self.args.repeats):
                    ready = [s for s in ready if self._add(s, concurrency, runs[s.name])]
                for server in ready:
                    counted = servers.change(before[server.name], server.metrics())
                    self._tell(server.name, summary(runs[server.name], counted))

    def _start(self, launch: Launch, logs: Path, stack: contextlib.ExitStack) -> Server | None:
        """A server that has answered once; None if it does not come up, which the report then tells."""
        entry: dict[str, Any] = launch.described() | {"points": []}
        self.report["servers"][launch.name] = entry
        PROGRESS.print(f"{launch.name}: starting", style="dim")
        server = stack.enter_context(servers.started(launch, logs))
        try:
            entry["ready_in_s"] = round(server.wait_until_ready(self.args.start_within), 1)
            entry |= {"version": server.version(), **server.start_up_report()}
            if not self.bodies:
                size = self.args.output_tokens, self.args.max_model_len
                self.bodies = bodies_of(server, self.texts, *size)
                self.report["prompts"] = len(self.bodies)
                if not self.bodies:
                    raise ServerError(f"no prompt fits {size[1]} tokens; raise --max-model-len")
            warm = asyncio.run(closed_loop(server.url, self._bodies_for(server), 1, 1))
            if (error := warm.requests[0].error) is not None:
                raise ServerError(f"{launch.name} did not answer: {error}{server.last_words()}")
        except (ServerError, httpx.HTTPError) as error:
            entry["error"] = str(error)
            PROGRESS.print(f"{launch.name}: {error}", style="red", markup=False, soft_wrap=True)
            return None
        return server

    def _bodies_for(self, server: Server) -> list[dict[str, Any]]:
        return [body | {"model": server.model} for body in self.bodies]

    def _add(self, server: Server, concurrency: int, runs: list[Run]) -> bool:
        """One more run; False if the server has ended."""
        args, bodies = self.args, self._bodies_for(server)
        each = max(args.requests_per_client, -(-args.least_requests // concurrency))
        runs.append(asyncio.run(closed_loop(server.url, bodies, concurrency, each, args.least_seconds)))
        if not server.running:
            error = f"{server.name} ended at {concurrency} clients{server.last_words()}"
            self.report["servers"][server.name]["error"] = error
            PROGRESS.print(error, style="red", markup=False, soft_wrap=True)
        return server.running

    def _tell(self, name: str, point: dict[str, Any]) -> None:
        self.report["servers"][name]["points"].append(point)
        rates = {
            key: {p["concurrency"]: p["output_tokens_per_second"] for p in entry["points"]}
            for key, entry in self.report["servers"].items()
        }
        self.report["ratios"] = ratios({key: rate for key, rate in rates.items() if rate})
        failed = f", {point['failures']} failed" if point["failures"] else ""
        PROGRESS.print(
            f"{name} at {point['concurrency']}: {point['output_tokens_per_second']:.1f} tokens/s, "
            f"{point['requests']} requests{failed} in {point['seconds']:.0f} s",
            style="red" if failed else "dim",
        )
        save(self.report, self.args.out)


def show(report: dict[str, Any]) -> None:
    """The tables for people."""

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    dtypes = {entry.get("dtype", report["dtype"]) for entry in report["servers"].values()}
    title = f"{report['output_tokens']} tokens an answer, dtype {' or '.join(sorted(dtypes))}"
    table = Table(title=title, box=None)
    for name in ("server", "clients", "tokens/s", "TTFT s", "p99", "ms/token", "p99", "chunk p99 ms"):
        table.add_column(name, justify="left" if name == "server" else "right")
    for name in ("accepted", "requests", "failed"):
        table.add_column(name, justify="right")
    for name, entry in report["servers"].items():
        for p in entry["points"]:
            latencies = [(p["ttft_s"], 2), (p["time_per_output_token_ms"], 1)]
            table.add_row(
                name,
                str(p["concurrency"]),
                number(p["output_tokens_per_second"], 1),
                *(number(values[key], digits) for values, digits in latencies for key in ("median", "p99")),
                number(p["time_between_chunks_ms"]["p99"], 0),
                number(p.get("mean_acceptance_length"), 2),
                str(p["requests"]),
                str(p["failures"]),
            )
        table.add_section()
    console = Console(width=max(Console().width, 110), highlight=False)
    console.print(table)
    levels = sorted({c for values in report["ratios"].values() for c in values})
    compared = Table(title="tokens/s, one to another, by clients", box=None)
    for name in ("", *map(str, levels)):
        compared.add_column(name, justify="right" if name else "left")
    for name, values in report["ratios"].items():
        compared.add_row(name, *(number(values.get(c), 2) for c in levels))
    if levels:
        console.print(compared)
    for name, entry in report["servers"].items():
        if "error" in entry:
            console.print(f"{name}: {entry['error']}", markup=False, soft_wrap=True)


def counts(text: str) -> tuple[int, ...]:
    """An argument's type: whole numbers above 0, with commas."""
    values = tuple(int(part) for part in text.split(","))
    if not all(value > 0 for value in values):
        raise ValueError
    return values


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prompts", action="append", required=True, help="JSONL with turns or prompt; repeat for more sets")
    add("--limit", type=int, help="take the first N prompts of each set")
    add(
        "--concurrency",
        type=counts,
        default=(1, 2, 4, 8, 16, 32, 64),
        metavar="N,N,...",
        help="clients at once (default: 1,2,4,8,16,32,64)",
    )
    add("--output-tokens", type=int, default=128, help="of every answer (default: %(default)s)")
    add("--requests-per-client", type=int, default=2, help="at least (default: %(default)s)")
    add("--least-requests", type=int, default=24, help="of all clients together (default: %(default)s)")
    add("--least-seconds", type=float, default=0.0, help="clients go on so long (default: %(default)g)")
    add("--repeats", type=int, default=1, help="runs at each concurrency (default: %(default)s)")
    add("--interleave", action="store_true", help="all servers stay up and take turns at each concurrency")
    add("--servers", nargs="+", choices=(*OURS, *VLLM), help="only these (default: all that can be)")
    add("--model", help="of our servers: folder, hub id or .gguf file (default: the embedded one)")
    add("--head", help="P-EAGLE head's folder, vLLM's too (default: the shipped one)")
    add("--eagle3-head", metavar="HEAD", help="EAGLE-3 head's folder; without it no server eagle3")
    add("--num-speculative-tokens", type=int, default=5, metavar="K", help="of every head (default: 5)")
    add("--most-speculative-tokens", type=int, metavar="K", help="of the adaptive server (default: the same)")
    add("--vllm-python", metavar="PYTHON", help="of an environment with vLLM; without it none is measured")
    add("--vllm-target", metavar="DIR", help="the target as export_hf_target.py writes it, for vLLM")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of all servers")
    add("--max-model-len", type=int, default=1024, help="of all servers (default: %(default)s)")
    add("--max-num-seqs", type=int, metavar="N", help="of all servers (default: the highest concurrency)")
    add("--prefix-caching", action="store_true", help="leave it on: prompts come again and again")
    add(
        "--server-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="for ours too: --server-flag=--flag=value",
    )
    add(
        "--vllm-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="for vLLM too: --vllm-flag=--flag=value",
    )
    add("--start-within", type=float, default=1800, metavar="S", help="seconds until ready (default: 1800)")
    add("--logs", type=Path, metavar="DIR", help="keeps the servers' logs (default: they are dropped)")
    add("--json", action="store_true", help="print the JSON instead of tables")
    add("--out", type=Path, help="write the JSON here too, after every point")
    args = parser.parse_args(argv)
    if args.vllm_python and not args.vllm_target:
        parser.error("--vllm-python needs --vllm-target, a folder that export_hf_target.py writes")
    args.max_num_seqs = args.max_num_seqs or max(args.concurrency)
    return args


def main() -> int:
    args = parse()
    servers.end_on_sigterm()
    report: dict[str, Any] = {
        **describe_machine(("jax", "jaxlib", "numpy")),
        "dtype": args.dtype,
        "output_tokens": args.output_tokens,
        "repeats": args.repeats,
        "interleaved": args.interleave,
        "servers": {},
        "ratios": {},
    }
    found = launches(args)
    benchmark = Benchmark(args, report)
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for group in [found] if args.interleave else [[launch] for launch in found]:
            benchmark.measure(group, logs)
    save(report, args.out)
    tell(report, args.json, show)
    points = [point for entry in report["servers"].values() for point in entry["points"]]
    failed = any("error" in entry for entry in report["servers"].values())
    return int(failed or not points or any(point["failures"] for point in points))


if __name__ == "__main__":
    sys.exit(main())
