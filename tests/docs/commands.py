"""The commands of the documentation: found, parsed by their own parsers, and run in a small form.

A command is a line of a block that is marked ``sh``. Every one is parsed or checked; test_commands.py runs
those of this package, too, that need no more than a tiny model.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from peagle_jax import convert, doctor, generate
from peagle_jax.bench import arguments as bench
from peagle_jax.serve import arguments as serve
from peagle_jax.serve.sagemaker import expand
from peagle_jax.serve.speculative_config import parse_speculative_config
from peagle_jax.train import __main__ as train

ROOT = Path(__file__).parents[2]
PACKAGE = "peagle_jax."


class Command(NamedTuple):
    """A command line in words, and where it stands."""

    words: tuple[str, ...]
    where: str = ""

    @property
    def module(self) -> str:
        """Of ``python -m peagle_jax.X ...``: X; otherwise empty."""
        found = self.words[:2] == ("python", "-m") and self.words[2].startswith(PACKAGE)
        return self.words[2].removeprefix(PACKAGE) if found else ""

    @property
    def arguments(self) -> list[str]:
        return list(self.words[3:] if self.module else self.words[1:])

    def __str__(self) -> str:
        return shlex.join(self.words)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands_in(text: str, where: str = "") -> list[Command]:
    """The commands of a page's ``sh`` blocks; quotes and backslashes join lines, comments are left out."""
    found = []
    for block in blocks(text, "sh"):
        waiting = ""
        for line in block.splitlines():
            waiting += line + "\n"
            if line.endswith("\\"):
                continue
            try:
                words = shlex.split(waiting.replace("\\\n", " "), comments=True)
            except ValueError:  # within quotes
                continue
            if words:
                found.append(Command(tuple(words), where))
            waiting = ""
        assert not waiting, f"{where}: a quote is never closed in {waiting!r}"
    return found


def takes(parser, arguments: list[str]):
    """Parses, and names a command line that the parser refuses."""
    try:
        return parser.parse_args(arguments)
    except SystemExit as stop:
        raise AssertionError(f"{parser.prog} refuses {shlex.join(arguments)}") from stop


def parse(command: Command) -> None:
    """Checks a command without running it. Raises AssertionError for one that is wrong or not known here."""
    known = {
        "generate": lambda words: takes(generate.build_parser(), words),
        "bench": lambda words: takes(bench.build_parser(), words),
        "doctor": lambda words: takes(doctor.build_parser(), words),
        "convert": _convert,
        "serve": _serve,
        "train": _train,
    }
    if command.module:
        known[command.module](command.arguments)
    else:
        OTHERS[command.words[0]](command)


def _convert(words: list[str]) -> None:
    if words[0] == "inspect":
        takes(convert.build_inspect_parser(), words[1:])
    else:
        takes(convert.build_parser(), words)


def _serve(words: list[str]) -> None:
    parser = serve.build_parser()
    args = takes(parser, expand(words, {}, parser))
    serve.model_of(args)
    serve.check(args)
    if args.speculative_config is not None:
        parse_speculative_config(args.speculative_config)


def _train(words: list[str]) -> None:
    name = words.pop(0) if words and words[0] in train.COMMANDS else "run"
    args = takes(train.parser(name), words)
    if name != "regenerate" and args.config.startswith("train/"):
        assert (ROOT / args.config).is_file(), args.config


def _make(command: Command) -> None:
    """Its targets and variables: make says what it would do."""
    done = subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _pip(command: Command) -> None:
    """What it installs of ours has the extras that it names; other names are in the project's files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = (ROOT / "pyproject.toml").read_text() + (ROOT / "Makefile").read_text()
    named += "".join(p.read_text() for p in (ROOT / "serve" / "docker").iterdir())
    named += (ROOT / "benchmarks" / "README.md").read_text()
    assert command.words[1] == "install"
    for word in command.words[2:]:
        if match := re.fullmatch(r"peagle_jax\[(\w+)\]", word):
            assert match[1] in project["optional-dependencies"], word
        elif word not in ("--no-deps", "--editable"):
            assert word.partition("==")[0] in named, word


def _script(command: Command) -> None:
    """A script of this repository: it takes these arguments, by its --help or by running it."""
    script = ROOT / command.words[1]
    assert script.is_file(), script
    if script.parent.name == "benchmarks":
        words = [sys.executable, str(script), *command.words[2:]]
        words += [] if "--help" in words else ["--help"]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert [word for word in words if word.startswith("--") and word not in done.stdout] == []
    else:  # docs/: tests/docs/test_pages.py runs them
        assert script.is_relative_to(ROOT / "docs") and len(command.words) == 2


def _files(command: Command) -> None:
    """Programs that are not on a test machine (Docker, Kubernetes): the files that they are given exist."""
    given = [word for word in command.words if "/" in word and word.startswith(("serve/", "train/"))]
    missing = [word for word in given if not (ROOT / word).exists()]
    assert not missing, missing
    if "build" in command.words:
        assert given, f"{command} names no Dockerfile"
    if "run" in command.words:
        assert command.words[-1] in ("serve", "peagle-jax:cuda"), command


def _pod(command: Command) -> None:
    """The launcher for a TPU slice needs gcloud: its syntax, its three arguments and the recipe."""
    assert subprocess.run(["bash", "-n", str(ROOT / command.words[0])]).returncode == 0
    assert len(command.words) == 4 and (ROOT / command.words[3]).is_file()


def _elsewhere(command: Command) -> None:
    """A peer's program, which a test machine does not have: that it is pointed at a server of this kind."""
    assert any(re.fullmatch(r"https?://[\w.:]+", word) for word in command.words), command


def _posted(command: Command) -> None:
    """curl: test_commands.py posts the body to a server."""
    assert "-d" in command.words


OTHERS = {
    "make": _make,
    "pip": _pip,
    "python": _script,
    "docker": _files,
    "kubectl": _files,
    "train/tpu_pod.sh": _pod,
    "vllm": _elsewhere,
    "vllm-router": _elsewhere,
    "curl": _posted,
}
"""How a command of another program is checked, by its first word."""
