"""What a load test has found: differences judged with the server's log-probabilities, and the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from answers import Ask, Difference
from rich.console import Console

from peagle_jax.bench.servers import Server

TIE = 1e-4
"""Two tokens whose log-probabilities are that close may change places with the width of the batch."""
SHOWN = 20
"""Differences and errors that are told in full."""


class Found(NamedTuple):
    """An answer that differs, and what was asked."""

    ask: Ask
    difference: Difference


def judge(server: Server, found: Found) -> dict[str, Any]:
    """A difference for the report. Where another token came, the server is asked for the log-probabilities of
    both at that place, and a tie is one of at most ``TIE``."""
    ask, position, token = found.ask, found.difference.position, found.difference.found
    report: dict[str, Any] = {
        "what": found.difference.what,
        "max_tokens": ask.max_tokens,
        "n": ask.n,
        "stop": ask.stop,
    }
    report |= {"stream": ask.stream, "prompt": list(ask.expected.prompt), "tie": False}
    if position is None or token is None:
        return report
    expected = ask.expected.token_ids
    prefix = [*ask.expected.prompt, *expected[:position]]
    body = {"model": server.model, "prompt": prefix, "max_tokens": 1, "temperature": 0.0, "logprobs": 5}
    body |= {"return_tokens_as_token_ids": True}
    response = server.http.post("/v1/completions", json=body).raise_for_status()
    best = response.json()["choices"][0]["logprobs"]["top_logprobs"][0]
    values = [best.get(f"token_id:{i}") for i in (expected[position], token)]
    report |= {"position": position, "expected_token": expected[position], "found_token": token}
    report |= {"logprobs": values, "expected_next": ask.expected.pieces[position : position + 8]}
    report["tie"] = all(v is not None for v in values) and abs(values[0] - values[1]) <= TIE
    return report


def judge_all(server: Server, differences: Sequence[Found]) -> tuple[list[dict[str, Any]], int, int]:
    """The distinct differences, how many answers differ, and how many more differ by a tie alone."""
    judged: dict[Any, dict[str, Any]] = {}
    wrong = ties = 0
    for found in differences:
        what = found.difference
        key = (found.ask.expected.prompt, what.position, what.found, what.what)
        if key not in judged:
            judged[key] = judge(server, found) | {"answers": 0}
        judged[key]["answers"] += 1
        ties += judged[key]["tie"]
        wrong += not judged[key]["tie"]
    return list(judged.values()), wrong, ties


def verdicts(report: dict[str, Any], health_limit: float, growth_limit: float) -> list[dict[str, Any]]:
    """Each condition: whether it holds (None: not measured), and the figures.

    Args:
        health_limit: milliseconds that /health may take, ever.
        growth_limit: MiB by which memory may grow.
    """
    counts, health, memory = report["requests"], report["health_ms"], report["memory_mib"]
    lost = counts.get("errors", 0)
    answers = counts.get("answers", 0)
    found: list[tuple[str, bool | None, str]] = [
        (
            "no answer lost",
            answers > 0 and not lost,
            f"{lost} errors in {counts.get('requests', 0)} requests",
        ),
        (
            "no answer mixed or changed",
            answers > 0 and not report["wrong_answers"],
            f"{report['wrong_answers']} of {answers} answers and {counts.get('beginnings', 0)} beginnings "
            f"differ, and {report['ties']} at ties of {TIE:g}",
        ),
        ("slots are free in the end", report["idle"], f"within {report['idle_within_s']:g} s"),
    ]
    fast = bool(health) and health["max"] < health_limit and not report["health_failures"]
    text = ", ".join(f"{name} {value:.1f}" for name, value in health.items())
    late = report["watcher_late_ms"].get("max", 0.0)
    failed = len(report["health_failures"])
    found.append(
        (
            f"/health below {health_limit:g} ms",
            fast,
            f"{text} ms, {failed} failed; the watcher itself was up to {late:.1f} ms late",
        )
    )
    growth = memory.get("growth")
    text = (
        f"{memory['start']:.0f} to {memory['end']:.0f} MiB, growth {growth:.1f}" if memory else "no process"
    )
    name = f"memory grows by less than {growth_limit:g} MiB"
    found.append((name, None if growth is None else growth < growth_limit, text))
    for name, key in (("compile count", "compilations"), ("compilations in the log", "logged_compilations")):
        value = report[key]
        found.append((f"no growth of {name}", None if value is None else value == 0, f"{value} more"))
    return [{"condition": name, "holds": holds, "found": text} for name, holds, text in found]


def show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    for found in report["differences"][:SHOWN]:
        place = f"position {found.get('position')}: expected {found.get('expected_token')} "
        place += f"{''.join(found.get('expected_next', ()))!r}, found {found.get('found_token')}"
        kind = "tie" if found["tie"] else "differs"
        line = f"{kind}, {found['answers']} answers: {found['what']}"
        console.print(line + (f", {place}" if "position" in found else ""), markup=False, soft_wrap=True)
    for error in report["errors"]:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
    for verdict in report["verdicts"]:
        word = {True: "holds", False: "FAILS", None: "not measured"}[verdict["holds"]]
        console.print(f"{word}: {verdict['condition']} ({verdict['found']})", markup=False, soft_wrap=True)
