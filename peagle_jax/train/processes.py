"""A training run in several processes: how they stop together, and part."""

from __future__ import annotations

import functools
import os
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle_jax.processes import coordination_client

FAREWELL = 10  # seconds in which the others may fail as well


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
    client = coordination_client()
    if client is None:
        return True
    try:
        client.wait_at_barrier("peagle_jax failed", FAREWELL * 1000)
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
