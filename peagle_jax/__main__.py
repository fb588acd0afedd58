"""``python -m peagle_jax``: says which commands there are."""

from __future__ import annotations

import sys

from peagle_jax.arguments import run_command

COMMANDS = """\
python -m peagle_jax.generate   decode one prompt, with and without a head
python -m peagle_jax.serve      serve a model over OpenAI's HTTP API
python -m peagle_jax.train      train a head: regenerate, show-mask, features, train
python -m peagle_jax.convert    convert a head to another layout, a target to Orbax; inspect a head
python -m peagle_jax.doctor     decode a few prompts, say whether a head is healthy and what ails it

Each of them explains itself with --help.
"""


def main() -> int:
    print(COMMANDS, end="")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
