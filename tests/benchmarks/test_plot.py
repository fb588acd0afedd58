"""The pictures of results, as files."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("matplotlib")

import plot


def drawn(report: dict, folder, monkeypatch) -> str:
    (folder / "result.json").write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["plot.py", str(folder / "result.json"), str(folder / "result.svg")])
    assert plot.main() == 0
    return (folder / "result.svg").read_text()


def test_servers_are_drawn_over_their_clients(tmp_path, monkeypatch):
    def entry(*rates: float, **more) -> dict:
        points = [
            {
                "concurrency": 2**i,
                "output_tokens_per_second": rate,
                "time_per_output_token_ms": {"median": 1000 / rate, "p99": None},
            }
            for i, rate in enumerate(rates)
        ]
        return {"points": points, **more}

    servers = {"off": entry(10.0, 18.0, dtype="bfloat16 on cpu"), "vllm": entry(5.0), "eagle3": entry()}
    report = {"servers": servers, "output_tokens": 128, "dtype": "auto", "cores": 2}
    picture = drawn(report, tmp_path, monkeypatch)
    # Text is drawn as glyphs, with the words in comments.
    for word in (
        "off",
        "vllm",
        "clients",
        "output tokens/s",
        "128 tokens an answer, greedy, bfloat16, 2 CPU cores",
    ):
        assert f"<!-- {word} -->" in picture
    assert "eagle3" not in picture
