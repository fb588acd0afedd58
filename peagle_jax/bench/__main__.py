"""``python -m peagle_jax.bench``: acceptance, latency, serving and training, measured and compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from peagle_jax.arguments import check_extra, run_command

check_extra("bench", "fastapi", "prometheus_client", "llguidance", "httpx")

from peagle_jax.bench import arguments, output


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = arguments.build_parser().parse_args(words)
    console = Console(stderr=True, highlight=False)
    if args.benchmark == "plot":
        output.plot(args.folder, console)
        return 0
    return output.measure(args, ["python", "-m", "peagle_jax.bench", *words], console)


if __name__ == "__main__":
    sys.exit(run_command(main))
