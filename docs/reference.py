"""Writes what docs/ says of flags, recipe keys and metrics, from the parsers and registries themselves.

python docs/reference.py    writes flags.md, and the table in metrics.md
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from peagle_jax import convert, doctor, generate
from peagle_jax.bench import arguments as bench
from peagle_jax.serve import arguments as serve
from peagle_jax.serve.metrics import Metrics
from peagle_jax.serve.speculative_config import _KNOWN
from peagle_jax.train import __main__ as train
from peagle_jax.train.recipe import Recipe

DOCS = Path(__file__).parent
START, END = "<!-- written by docs/reference.py -->", "<!-- end -->"


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command's parser, by the command."""
    found = {
        "generate": generate.build_parser(),
        "serve": serve.build_parser(),
        "train": train.parser("run"),
        **{f"train {name}": train.parser(name) for name in train.DESCRIPTIONS},
        "convert": convert.build_parser(),
        "convert inspect": convert.build_inspect_parser(),
        "doctor": doctor.build_parser(),
        **{f"bench {name}": parser for name, parser in bench.parsers().items()},
    }
    return {f"python -m peagle_jax.{name}": parser for name, parser in found.items()}


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def flag(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """A row of the table: how the argument is written, and what it is."""
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    values = ""
    if action.option_strings and action.nargs != 0 and action.choices is None:
        values = f" {action.metavar or action.dest.upper()}"
    elif action.choices is not None:
        values = " " + " \\| ".join(map(str, action.choices))
    told = parser._get_formatter()._expand_help(action) if action.help else ""
    needed = " (required)" if action.required and action.option_strings else ""
    return f"| {names}{values} | {cell(told)}{needed} |"


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if not isinstance(action, argparse._HelpAction))


def keys_of_speculative_config() -> Iterator[str]:
    """A row a key. Raises ValueError: --help of the server does not tell one."""
    for key in _KNOWN:
        names = rf"(?:\w+, )*{key}\b(?:, \w+)*"
        found = re.search(rf"^  {names}\s+(.*(?:\n {{20,}}.*)*)", serve._EPILOG, re.MULTILINE)
        if found is None:
            raise ValueError(f"--help of the server does not tell the key {key}")
        yield f"| `{key}` | {cell(found[1])} |"


def written(kind: Any, default: Any) -> str:
    """A recipe key's values and default."""
    if typing.get_origin(kind) is typing.Literal:
        return " \\| ".join(f"**{v}**" if v == default else str(v) for v in typing.get_args(kind))
    if isinstance(default, bool) or default is None:
        return {True: "true", False: "false", None: "none"}[default]
    return (
        "none" if default in ((), {}, "") else f"{default:g}" if isinstance(default, float) else str(default)
    )


def recipe_keys() -> Iterator[str]:
    """A table for every section of a recipe, and what its docstring says."""

    def table(prefix: str, cls: type, fields: list[dataclasses.Field]) -> Iterator[str]:
        kinds = typing.get_type_hints(cls)
        yield "| key | default |"
        yield "|---|---|"
        for field in fields:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            yield f"| `{prefix}{field.name}` | {written(kinds[field.name], default)} |"
        yield ""
        yield re.sub(r"``(.*?)``", r"`\1`", " ".join((cls.__doc__ or "").split()))
        yield ""

    fields = dataclasses.fields(Recipe)
    yield from table("", Recipe, [f for f in fields if not dataclasses.is_dataclass(f.default)])
    for field in fields:
        if dataclasses.is_dataclass(field.default):
            cls = type(field.default)
            yield from table(f"{field.name}.", cls, list(dataclasses.fields(cls)))


def flags() -> str:
    lines = [
        START,
        "",
        "# Flags, keys and recipes",
        "",
        "Everything that the commands take, as `--help` tells it; a test keeps this page as they are.",
        "The server's names are vLLM's. A flag is taken in full only, and an unknown one is refused.",
        "",
    ]
    for name, parser in parsers().items():
        lines += [f"## `{name}`", "", cell((parser.description or "").split("\n\n")[0]), ""]
        for group in parser._action_groups:
            rows = [flag(parser, a) for a in group._group_actions if not isinstance(a, argparse._HelpAction)]
            if not rows:
                continue
            title = group.title or ""
            heading = "arguments" if title == "positional arguments" else title
            lines += [f"| {heading} | |", "|---|---|", *rows, ""]
        if name == "python -m peagle_jax.serve":
            lines += ["### Keys of `--speculative-config`", "", "| key | |", "|---|---|"]
            lines += [*keys_of_speculative_config(), ""]
    lines += ["## Recipes of `python -m peagle_jax.train`", ""]
    lines += ["A YAML file; a section (`data`, `features`, ...) is a mapping of its keys."]
    return "\n".join([*lines, "", *recipe_keys(), END, ""])


def metrics() -> str:
    """The server's metrics, as it would write them."""
    rows = ["| metric | type | |", "|---|---|---|"]
    for family in text_string_to_metric_families(Metrics("model", 4096).text().decode()):
        if family.name.endswith("_created"):  # prometheus_client's own, beside every histogram
            continue
        suffix = "_total" if family.type == "counter" else ""
        rows.append(f"| `{family.name}{suffix}` | {family.type} | {family.documentation} |")
    return "\n".join([START, *rows, END])


def with_table(page: str) -> str:
    """A page with its written part made anew."""
    before, rest = page.split(START, 1)
    return before + metrics() + rest.split(END, 1)[1]


def pages() -> dict[Path, str]:
    """What every written page should hold."""
    found = DOCS / "metrics.md"
    return {DOCS / "flags.md": flags(), found: with_table(found.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
