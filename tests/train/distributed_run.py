"""python -m tests.train.distributed_run RECIPE HAPPENING STEP ARGUMENT...

`python -m peagle_jax.train --config RECIPE --distributed ARGUMENT...` with the tiny target. When STEP is
dispatched HAPPENING befalls the process: nothing, a signal (term), an error, or its end (killed).
"""

from __future__ import annotations

import os
import signal
import sys

from peagle_jax import processes
from peagle_jax.train import __main__, loop, sources
from peagle_jax.train.errors import TrainError
from tests.train import tiny_run


def befall(happening: str) -> None:
    if happening == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif happening == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif happening == "error":
        raise TrainError("this process alone failed")


def main(recipe: str, happening: str, at: int, arguments: list[str]) -> int:
    processes.HEARTBEAT = 20  # nobody waits longer for one that is gone
    sources.load_target = lambda *args, **kwargs: tiny_run.target()
    make_step = loop.make_step

    def eventful(*args):
        step = make_step(*args)

        def wrapped(state, *rest):
            if int(state.step) + 1 == at:
                befall(happening)
            return step(state, *rest)

        return wrapped

    loop.make_step = eventful
    return __main__.main(["--config", recipe, "--distributed", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
