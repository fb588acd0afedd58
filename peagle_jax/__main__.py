"""``python -m peagle_jax``: says which commands there are."""

from __future__ import annotations

import sys

from peagle_jax.arguments import run_command

COMMANDS = """\
python -m peagle_jax.generate   decode one prompt, with and without a head
python -m peagle_jax.serve      serve a model over OpenAI's HTTP API
python -m peagle_jax.train      train a head: regenerate, show-mask, features, train

Each of them explains itself with --help.
"""


def main() -> int:
    print(COMMANDS, end="")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
