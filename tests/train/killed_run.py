"""python -m tests.train.killed_run FOLDER CHANGES DIE_AT WAITING_FOR

Trains the tiny recipe with CHANGES (JSON) over FOLDER, and dies by SIGKILL when step DIE_AT (0: never) is
dispatched, after the checkpoint of step WAITING_FOR (0: none) is on disk.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from peagle_jax.train import loop, sources
from tests.train import tiny_run


def main(folder: Path, changes: dict, die_at: int, waiting_for: int) -> None:
    loaded = tiny_run.target()
    sources.load_target = lambda *args, **kwargs: loaded
    make_step = loop.make_step

    def mortal(*args):
        step = make_step(*args)

        def wrapped(state, *rest):
            if int(state.step) + 1 == die_at:
                deadline = time.monotonic() + 60
                while waiting_for and not (folder / "out" / "checkpoints" / str(waiting_for)).exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return step(state, *rest)

        return wrapped

    loop.make_step = mortal
    loop.train(tiny_run.recipe(folder, **changes), Console(width=400))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
