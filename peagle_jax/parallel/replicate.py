"""Maps the per-replica step over the replica axis: ``jax.pmap``, or the shard_map it is made of.

pmap can hold neither a tensor axis nor a second mesh inside, so ``shard_map`` is the form for
those; both run the same step and give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Backend = Literal["pmap", "shard_map"]
AXIS = "data"


def replica_sharding(devices: Sequence[Any]) -> NamedSharding:
    """Where the step leaves its results. A program is keyed by its inputs' sharding, so a state
    that is put there first runs the same program as one that a step returned."""
    return NamedSharding(Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS))


def replicate(
    step: Callable[..., Any], devices: Sequence[Any], backend: Backend = "pmap", donate: bool = True
) -> Callable[..., Any]:
    """``step(params, state, inputs) -> (state, output)`` over replicas, one of ``devices`` (jax.Device) each.

    ``params`` are shared; every leaf of ``state``, ``inputs`` and the results has a leading replica
    axis of ``len(devices)``. The state is donated, unless ``donate`` is false.

    Raises:
        ValueError: the backend is neither pmap nor shard_map.
    """
    donated = (1,) if donate else ()
    if backend == "pmap":
        return jax.pmap(
            step, axis_name=AXIS, in_axes=(None, 0, 0), donate_argnums=donated, devices=list(devices)
        )
    if backend != "shard_map":
        raise ValueError(f"replicate backend {backend!r} is unknown; expected pmap or shard_map")

    def one_replica(params: Any, state: Any, inputs: Any) -> Any:
        state, inputs = jax.tree.map(lambda x: x[0], (state, inputs))
        return jax.tree.map(lambda x: x[None], step(params, state, inputs))

    split, shared = PartitionSpec(AXIS), PartitionSpec()
    mapped = jax.shard_map(
        one_replica,
        mesh=replica_sharding(devices).mesh,
        in_specs=(shared, split, split),
        out_specs=split,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=donated)
