"""A run in several processes: how they find each other, agree, and part. jax.distributed does the work."""

from __future__ import annotations

import functools
import os
import sys
import threading
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle_jax.train.errors import TrainError

HEARTBEAT = 60  # seconds without a sign of life after which the others give up
FAREWELL = 10  # seconds in which the others may fail as well


def join(address: str | None = None, count: int | None = None, index: int | None = None) -> None:
    """Joins the run's other processes, before anything else uses a device.

    Without arguments the environment says who they are (Cloud TPU, Slurm, Open MPI, Kubernetes).

    Raises TrainError: they do not find each other.
    """
    try:
        jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=HEARTBEAT)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TrainError(
            f"the processes of this run do not find each other: {reason}; give --coordinator-address "
            "HOST:PORT, --num-processes and --process-id to every one, or start them where the environment "
            "names them (a TPU pod, Slurm)"
        ) from error


def is_main() -> bool:
    """Whether this process writes the logs and the head."""
    return jax.process_index() == 0


def check_agreement(what: str, value: Any) -> None:
    """Raises TrainError in every process unless ``value``, printed, is the same in all of them."""
    if jax.process_count() == 1:
        return
    own = np.array([zlib.crc32(repr(value).encode())], np.uint32)
    found = np.asarray(multihost_utils.process_allgather(own)).reshape(-1)
    other = np.flatnonzero(found != found[0])
    if len(other):
        raise TrainError(
            f"process {other[0]} has another {what} than process 0; give all of them the same recipe and "
            "files"
        )


class StopVote:
    """Whether any process was asked to stop, the same answer in all of them.

    Several processes count their requests on the devices, behind the step that runs; the answer is that
    of the call before, so that nobody waits.
    """

    def __init__(self, request: threading.Event):
        self.request = request
        self._last: jax.Array | None = None
        if jax.process_count() > 1:
            mesh = Mesh(np.array(jax.devices()), ("all",))
            self._votes = NamedSharding(mesh, PartitionSpec("all"))
            self._any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def is_set(self) -> bool:
        """To be called by every process after each step."""
        if jax.process_count() == 1:
            return self.request.is_set()
        answer = self._last is not None and bool(self._last)
        own = np.full(1, self.request.is_set())
        shape = (jax.device_count(),)
        self._last = self._any(jax.make_array_from_callback(shape, self._votes, lambda index: own))
        return answer


@functools.cache
def all_failed() -> bool:
    """Whether the other processes fail as this one does. It is asked once, and waits for them a little."""
    from jax._src.distributed import global_state  # the client has no public name

    if global_state.client is None:
        return True
    try:
        global_state.client.wait_at_barrier("peagle_jax failed", FAREWELL * 1000)
    except RuntimeError:  # the others still train, or are gone
        return False
    return True


def leave(status: int) -> None:
    """Ends a process that failed, with ``status``, once all that fail with it have told why. It goes without
    the usual farewell: there it and those that still train would wait for each other."""
    sys.stdout.flush()
    sys.stderr.flush()
    all_failed()
    os._exit(status)
