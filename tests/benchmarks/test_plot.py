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


def test_a_heads_acceptance_is_drawn_once_at_its_largest_k(tmp_path, monkeypatch):
    def entry(k: int, shares: list[float]) -> dict:
        length = {"mean_acceptance_length": 1 + sum(shares), "acceptance_per_position": shares}
        return {"num_speculative_tokens": k, "tokens_per_second": 9.0, "speedup": 1.5, **length}

    methods = {"plain": entry(0, []), "peagle K=2 a": entry(2, [0.5, 0.25])}
    methods |= {"peagle K=3 a": entry(3, [0.5, 0.25, 0.125]), "peagle K=2 b": entry(2, [0.4, 0.2])}
    report = {"sets": {"chat": {"prompts": 4, **methods}}, "dtype": "float32", "cores": 2}
    picture = drawn(report, tmp_path, monkeypatch)
    assert "<!-- chat, peagle K=3: 1.88 tokens a round -->" in picture
    assert "<!-- chat, peagle K=2 b: 1.60 tokens a round -->" in picture
    assert "K=2 a: 1.75" not in picture
    assert "<!-- 1.50x -->" in picture
