"""The house rules that a reader relies on: what may import what, and the shape of files.

The core is pure (arrays and frozen configs in, arrays out), the shells around it do the I/O, and
imports go from shells to the core only.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "peagle_jax"

CORE = ("config", "layers", "models", "drafter", "speculative", "parallel")

# All that the core may import besides itself. Nothing here reads a file, a socket or a clock, or prints.
CORE_LIBRARIES = {
    "__future__", "abc", "collections", "contextlib", "dataclasses", "enum", "functools", "itertools", "math",
    "numbers", "operator", "types", "typing",
    "flax", "jax", "jaxtyping", "ml_dtypes", "numpy",
}  # fmt: skip

# Imported by tests/parity and the script for the vllm environment alone.
FORBIDDEN_EVERYWHERE = {"torch", "vllm", "speculators", "tensorflow"}

MAX_LINES = 400

# Tests of the whole rather than of one module.
WITHOUT_COUNTERPART = (
    "tests/benchmarks",  # of benchmarks/
    "tests/parity",
    "tests/vocabularies",
    "tests/packaging",
    "tests/docs",  # of README, docs/ and the other pages
    "tests/notebooks",  # of notebooks/
    "tests/test_layout.py",
    "tests/train/test_recipes.py",  # of train/*.yaml
    "tests/serve/test_deployment.py",  # of serve/
)


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "__pycache__" not in path.parts]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_core(path: Path) -> bool:
    inside = path.relative_to(PACKAGE)
    return inside.parts[0].removesuffix(".py") in CORE


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a file, wherever in the file it stands."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from peagle_jax import x` names a module, so keep the imported names too.
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def faults_in(paths: list[Path], allowed) -> list[str]:
    return [
        f"{name_of(path)}:{line} imports {module}"
        for path in paths
        for line, module in imports(path)
        if not allowed(module)
    ]


def allowed_in_core(module: str) -> bool:
    top, _, rest = module.partition(".")
    if top == "peagle_jax":
        return rest.split(".")[0] in CORE
    return top in CORE_LIBRARIES


def core_files() -> list[Path]:
    package_root = PACKAGE / "__init__.py"
    return [path for path in python_files("peagle_jax") if path != package_root and is_core(path)]


def test_core_imports_only_the_core_and_pure_libraries():
    assert len(core_files()) > len(CORE)
    assert faults_in(core_files(), allowed_in_core) == []


def test_core_neither_opens_files_nor_prints():
    calls = {"open", "print", "input", "exec", "eval"}
    found = [
        f"{name_of(path)}:{node.lineno} calls {node.func.id}"
        for path in core_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls
    ]
    assert found == []


def test_no_file_of_the_package_imports_torch():
    def allowed(module: str) -> bool:
        return module.split(".")[0] not in FORBIDDEN_EVERYWHERE

    assert faults_in(python_files("peagle_jax", "train", "serve"), allowed) == []


def test_the_direction_check_sees_every_spelling_of_an_import(tmp_path, monkeypatch):
    lines = ["import os.path", "from . import tensors", "from ..serve import engine"]
    lines += ["def f():", "    from peagle_jax import train"]
    file = tmp_path / "peagle_jax" / "models" / "bad.py"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(lines))
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert [module for _, module in imports(file)] == [
        "os.path",
        "peagle_jax.models.tensors",
        "peagle_jax.serve.engine",
        "peagle_jax.train",
    ]
    assert [allowed_in_core(module) for _, module in imports(file)] == [False, True, False, False]


@pytest.mark.parametrize("path", python_files("peagle_jax", "tests", "benchmarks"), ids=name_of)
def test_a_file_is_short_and_finished(path: Path):
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_LINES, f"{len(lines)} lines; split it by subject (at most {MAX_LINES})"
    unfinished = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME)\b")
    left = [number for number, line in enumerate(lines, 1) if unfinished.search(line)]
    assert left == [], f"lines {left} name work that is left to do"


@pytest.mark.parametrize("path", python_files("peagle_jax"), ids=name_of)
def test_a_module_says_what_it_is_for(path: Path):
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "the module has no docstring"


def counterparts(test: Path) -> list[Path]:
    """The modules that a test file may be about: test_x.py and test_x_behaviour.py are about x.py."""
    folder = PACKAGE / test.parent.relative_to(ROOT / "tests")
    subject = test.stem.removeprefix("test_")
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    modules += [path for path in folder.glob("*") if (path / "__init__.py").exists()]
    return [path for path in modules if subject == path.stem or subject.startswith(path.stem + "_")]


def test_every_test_file_is_about_a_module_of_the_package():
    tests = [path for path in python_files("tests") if path.name.startswith("test_")]
    tests = [path for path in tests if not name_of(path).startswith(WITHOUT_COUNTERPART)]
    assert [name_of(path) for path in tests if not counterparts(path)] == []
