"""The notebooks: the .ipynb files are those of the sources, and each runs from top to bottom.

They run as continuous integration runs them (CI=true): at their smallest size, in an empty folder, on one CPU
device, with one cache of compiled programs for all.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

from peagle_jax.checkpoint import embedded
from tests.docs.commands import commands_in, parse

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
SECONDS = 900
"""For one cell, on a machine that has other work."""


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def setup(source: Path) -> str:
    """The cell that installs the package and finds the device."""
    return next(text for kind, text in cells(jupytext.read(source)) if kind == "code")


def test_there_are_notebooks():
    names = [path.stem for path in SOURCES]
    assert names == ["cloud_tpu", "convert_a_head", "serve_and_chat", "train_a_head"]
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == names


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_is_that_of_its_source(source):
    """If it is not: make notebooks"""
    written = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(written)
    assert cells(written) == cells(jupytext.read(source))
    assert all(not cell.get("outputs") for cell in written.cells)


def test_all_begin_with_the_same_setup_which_installs_what_the_project_names():
    (text,) = {setup(source) for source in SOURCES}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = set(re.findall(r"peagle_jax\[(\w+)\]", text))
    assert extra in project["optional-dependencies"]
    assert re.search(r'"--no-deps", "(\S+)"', text)[1] == embedded.INSTALL.split()[-1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a notebook; returns what its cells printed."""
    cache = tmp_path_factory.mktemp("jax-cache")
    with pytest.MonkeyPatch.context() as patch:
        flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        settings = {"CI": "true", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        for name, value in (settings | {"JAX_COMPILATION_CACHE_DIR": str(cache)}).items():
            patch.setenv(name, value)

        def execute(name: str) -> str:
            notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
            folder = str(tmp_path_factory.mktemp(name))
            NotebookClient(
                notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": folder}}
            ).execute()
            printed = [out for cell in notebook.cells for out in cell.get("outputs", [])]
            return "".join(out.get("text", "") for out in printed)

        yield execute


@pytest.mark.timeout(SECONDS)
def test_serve_and_chat(run):
    said = run("serve_and_chat")
    assert len(re.findall(r"acceptance length [\d.]+", said)) == 2
    assert re.search(r"vllm:spec_decode_num_drafts_total\{.*\} [1-9]", said)
    assert "exit status 0" in said


@pytest.mark.timeout(SECONDS)
def test_train_a_head(run):
    said = run("train_a_head")
    assert "trained 4 steps; the head in run/head" in said
    assert "tokens: the same with and without the head" in said or "a tie" in said
    assert re.search(r"acceptance length [\d.]+ \(K = 3\)", said)


@pytest.mark.timeout(SECONDS)
def test_convert_a_head(run):
    said = run("convert_a_head")
    assert "cause: norm_before_residual false" in said
    assert "verified: 43 tensors are the same, bit for bit" in said
    found = re.findall(r"^(?:before|after) +acceptance length ([\d.]+)", said, re.MULTILINE)
    before, after = map(float, found)
    assert before < 1.3 < 1.6 < after


@pytest.mark.timeout(SECONDS)
def test_cloud_tpu_says_what_it_skips_and_would_run_commands_that_are_right(run):
    said = run("cloud_tpu")
    assert "the recipe is well formed: MeshRecipe(data=0, fsdp=4" in said
    assert said.count("skipped: needs a TPU") == 7
    commands = commands_in("```sh\n" + "\n".join(re.findall(r"^\$ (.*)$", said, re.MULTILINE)) + "\n```")
    assert len(commands) == 5
    for command in commands:
        parse(command)
