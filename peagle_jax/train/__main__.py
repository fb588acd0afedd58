"""Commands: ``python -m peagle_jax.train [features] --config RECIPE``."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from peagle_jax.train.recipe import load_recipe


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m peagle_jax.train", description=__doc__)
    top.add_argument("command", nargs="?", default="run", choices=["run", "features"])
    top.add_argument("--config", required=True, help="the recipe, a YAML file")
    return top


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    console = Console(soft_wrap=True)
    try:
        recipe = load_recipe(arguments.config)
        if arguments.command == "features":
            from peagle_jax.train.prepare import compute_features

            compute_features(recipe, console)
        else:
            from peagle_jax.train.loop import train

            train(recipe, console)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
