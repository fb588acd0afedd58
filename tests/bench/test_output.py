"""A result drawn again, from its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from peagle_jax.arguments import CommandError
from peagle_jax.bench import output

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "train-cpu" / "results.json"


def test_a_file_of_another_name_is_drawn_beside_it_and_its_neighbours_stay(tmp_path):
    for name in ("results.json", "RESULTS.md", "memory.svg"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "cpu.json").write_text(RESULT.read_text())
    output.plot(tmp_path / "cpu.json", Console())
    assert {p.name for p in tmp_path.iterdir() if p.read_text() != "mine"} == {
        "cpu.json",
        "cpu.md",
        "cpu-memory.svg",
    }
    assert "![cpu-memory](cpu-memory.svg)" in (tmp_path / "cpu.md").read_text()
    assert (tmp_path / "cpu.json").read_text() == RESULT.read_text()


@pytest.mark.parametrize("change", [{"lengths": None}, {"lengths": {"48": {}}}, {"processor": None}])
def test_a_result_that_lacks_a_part_is_one_line(tmp_path, change):
    found = json.loads(RESULT.read_text()) | change
    (tmp_path / "results.json").write_text(json.dumps({k: v for k, v in found.items() if v is not None}))
    with pytest.raises(CommandError, match="results.json is no whole result of bench train"):
        output.plot(tmp_path, Console())
