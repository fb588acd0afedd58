"""What is now ``python -m peagle_jax.bench train``, with the same flags."""

from __future__ import annotations

import sys

from peagle_jax.arguments import run_command
from peagle_jax.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(run_command(lambda: main(["train", *sys.argv[1:]])))
