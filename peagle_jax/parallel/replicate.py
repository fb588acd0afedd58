"""Maps the per-replica step over the replica axis: ``jax.pmap``, or the shard_map it is made of.

pmap can hold neither a tensor axis nor a second mesh inside, nor can it be lowered for several hosts, so
``shard_map`` is the form for those: it maps ``data`` alone and leaves ``tensor`` to the compiler, which
follows the rules' constraints. Both run the same step and give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle_jax.parallel.rules import joined

Backend = Literal["pmap", "shard_map"]
AXIS = "data"


def replicate(
    step: Callable[..., Any],
    mesh: Mesh,
    backend: Backend = "pmap",
    donate: bool = True,
    shardings: tuple[Any, Any] | None = None,
) -> Callable[..., Any]:
    """``step(params, state, inputs) -> (state, output)`` over the replicas of a decoding mesh.

    ``params`` are shared; every leaf of ``state``, ``inputs`` and the results has a leading replica
    axis. The state is donated, unless ``donate`` is false. ``shardings`` are where state and output are
    left (trees, or beginnings of trees; by default over ``data``): a program is keyed by its inputs'
    shardings, so a state that is put there first runs the same program as one that a step returned.

    Raises:
        ValueError: the backend is neither pmap nor shard_map, or pmap is to hold a tensor axis.
    """
    donated = (1,) if donate else ()
    if backend == "pmap":
        if mesh.shape["tensor"] > 1:
            raise ValueError(
                f"pmap cannot split a replica over {mesh.shape['tensor']} devices; replicate by shard_map"
            )
        return jax.pmap(
            step,
            axis_name=AXIS,
            in_axes=(None, 0, 0),
            donate_argnums=donated,
            devices=list(mesh.devices[:, 0]),
        )
    if backend != "shard_map":
        raise ValueError(f"replicate backend {backend!r} is unknown; expected pmap or shard_map")

    split, shared = PartitionSpec(AXIS), PartitionSpec()
    over_data = NamedSharding(mesh, split)
    state_sharding, output_sharding = shardings or (over_data, over_data)

    def within(state: Any) -> Any:
        """A replica's state, held to its place: the compiler would else move it to where one use wants it."""
        if mesh.shape["tensor"] == 1:
            return state
        return jax.tree.map(
            lambda where, part: jax.lax.with_sharding_constraint(part, PartitionSpec(*where.spec[1:])),
            state_sharding,
            state,
        )

    def one_replica(params: Any, state: Any, inputs: Any) -> Any:
        state, inputs = jax.tree.map(lambda x: x[0], (state, inputs))
        state, output = step(params, within(state), joined(inputs))
        return jax.tree.map(lambda x: x[None], (within(state), joined(output)))

    mapped = jax.shard_map(
        one_replica,
        mesh=mesh,
        in_specs=(shared, split, split),
        out_specs=split,
        axis_names={AXIS},
        check_vma=False,
    )
    return jax.jit(
        mapped,
        donate_argnums=donated,
        in_shardings=(None, None, over_data),
        out_shardings=(state_sharding, output_sharding),
    )
