"""A command in several processes: how they find each other and agree. jax.distributed does the work."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from peagle_jax.arguments import CommandError

HEARTBEAT = 60  # seconds without a sign of life after which the others give up


def join(address: str | None = None, count: int | None = None, index: int | None = None) -> None:
    """Joins the other processes, before anything else uses a device.

    Without arguments the environment says who they are (Cloud TPU, Slurm, Open MPI, Kubernetes).

    Raises CommandError: they do not find each other.
    """
    try:
        jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=HEARTBEAT)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CommandError(
            f"the processes do not find each other: {reason}; give --coordinator-address HOST:PORT, "
            "--num-processes and --process-id to every one, or start them where the environment names them "
            "(a TPU pod, Slurm)"
        ) from error


def is_main() -> bool:
    """Whether this process speaks for all of them."""
    return jax.process_index() == 0


def check_agreement(what: str, value: Any, advice: str) -> None:
    """Raises CommandError in every process unless ``value``, printed, is the same in all of them."""
    if jax.process_count() == 1:
        return
    own = np.array([zlib.crc32(repr(value).encode())], np.uint32)
    found = np.asarray(multihost_utils.process_allgather(own)).reshape(-1)
    other = np.flatnonzero(found != found[0])
    if len(other):
        raise CommandError(f"process {other[0]} has another {what} than process 0; {advice}")


def coordination_client() -> Any:
    """The client of the service that all processes share, None for a process alone. It has no public name."""
    from jax._src.distributed import global_state

    return global_state.client
