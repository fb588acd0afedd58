"""Makes XLA write the text of the programs it compiles. To be imported before jax.

A program for a TPU can be too new for its own ``as_text()`` to read back.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_FOLDER = tempfile.TemporaryDirectory()
_FLAGS = f"--xla_dump_to={_FOLDER.name} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*one_replica.*"

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
# Without a TPU, libtpu would ask a metadata server for these.
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def latest() -> str:
    """The optimised program that was compiled last, of those that map a replica."""
    found = sorted(Path(_FOLDER.name).glob("*after_optimizations.txt"), key=lambda path: path.stat().st_mtime)
    assert found, f"XLA wrote no program to {_FOLDER.name}"
    text = found[-1].read_text()
    for path in Path(_FOLDER.name).glob("*.txt"):
        path.unlink()
    return text
