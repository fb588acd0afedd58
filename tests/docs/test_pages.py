"""The pages: what programs write is up to date, links lead somewhere, figures come from their scripts."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDERS = ("serve", "heads", "train", "benchmarks")
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / folder / "README.md" for folder in FOLDERS),
    ]
)
FIGURES = ROOT / "docs" / "figures"
DRAWN = ("partition", "round", "sampling", "tree")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flags_and_metrics_are_those_of_the_parsers_and_the_registry():
    """If they are not: python docs/reference.py"""
    for path, text in load(ROOT / "docs" / "reference.py").pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python docs/reference.py"


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_what_its_script_draws(name, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    drawn = runpy.run_path(str(FIGURES / f"{name}.py"))["draw"]().written()
    assert (FIGURES / f"{name}.svg").read_text(encoding="utf-8") == drawn


def test_the_playgrounds_picture_is_small_and_a_png():
    data = (FIGURES / "playground.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) < 200_000


def test_every_figure_is_shown_somewhere():
    shown = "".join(page.read_text() for page in PAGES)
    figures = [path for path in FIGURES.iterdir() if path.suffix in (".svg", ".png")]
    assert [path.name for path in figures if f"figures/{path.name}" not in shown] == []


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_within_the_repository_lead_somewhere(page):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(target)
    assert wrong == []


def test_the_citation_is_yaml_and_names_this_version_and_the_paper():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert cited["cff-version"] == "1.2.0" and cited["authors"] == [{"name": "The peagle_jax project"}]
    assert cited["version"] == version and cited["license"] == "Apache-2.0"
    assert cited["references"][0]["url"] == "https://arxiv.org/abs/2602.01469"
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_results_that_pages_name_exist_and_are_all_named():
    """A result is a file, or a folder that ``bench --out`` wrote."""
    text = "".join(page.read_text() for page in PAGES)
    named = {a or b for a, b in re.findall(r"results/(?:([\w.-]+)/[\w.-]+|([\w.-]+\.(?:json|svg)))", text)}
    assert named == {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
