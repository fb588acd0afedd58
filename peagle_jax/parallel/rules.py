"""Which axis of which array is split over which axis of the mesh: one table of names, one of rules.

Models and losses name the axes of their arrays; only RULES knows a mesh: training's, which stores weights in
parts and gathers them for their use (``fsdp``), or a decoder's, which uses them as they lie (``tensor``).
Outside of a mesh (one device, or inside a mapped replica) the functions here leave arrays as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from peagle_jax.parallel.mesh import MeshError

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "sequence": ("sequence",),
    "experts": ("fsdp", "tensor"),
    # Of a weight's axes the first of these that divides is split, the others stay whole.
    "model": ("fsdp",),
    "input": ("fsdp",),
    "features": ("fsdp", "tensor"),
    "ffn": ("fsdp", "tensor"),
    "heads": ("fsdp", "tensor"),
    "kv_heads": ("fsdp", "tensor"),
    "vocabulary": ("fsdp", "tensor"),
    # Norms and biases are a ten-thousandth of a head, and a scan takes layers one by one.
    "vector": (),
    "layers": (),
}
"""Mesh axes by the name of an array's axis, in the order in which a weight's axes are tried."""

VECTOR = ("vector",)
WEIGHTS: dict[str, tuple[str, ...]] = {
    # blocks
    "attn_norm": VECTOR,
    "wq": ("heads", "input"),
    "wk": ("kv_heads", "input"),
    "wv": ("kv_heads", "input"),
    "wo": ("model", "heads"),
    "mlp_norm": VECTOR,
    "w_gate": ("ffn", "model"),
    "w_up": ("ffn", "model"),
    "w_down": ("model", "ffn"),
    "bq": VECTOR,
    "bk": VECTOR,
    "bv": VECTOR,
    "bo": VECTOR,
    "b_gate": VECTOR,
    "b_up": VECTOR,
    "b_down": VECTOR,
    "q_norm": VECTOR,
    "k_norm": VECTOR,
    "sinks": VECTOR,
    "w_router": VECTOR * 2,
    "b_router": VECTOR,
    # a mixture's experts
    "gate": ("experts", "ffn", "model"),
    "up": ("experts", "ffn", "model"),
    "down": ("experts", "model", "ffn"),
    "gate_bias": ("experts", "vector"),
    "up_bias": ("experts", "vector"),
    "down_bias": ("experts", "vector"),
    # targets and heads
    "embed": ("vocabulary", "model"),
    "lm_head": ("vocabulary", "model"),
    "target_head": ("vocabulary", "model"),
    "final_norm": VECTOR,
    "fc": ("model", "features"),
    "fc_bias": VECTOR,
    "hidden_norm": VECTOR,
    "mask_hidden": VECTOR,
    "input_norm": VECTOR,
    "draft_to_target": VECTOR,
}
"""Names of a weight's axes by its field; a stack of layers has one more in front."""


_SPLITTING = {axis for names in WEIGHTS.values() for name in names for axis in RULES[name]}


def spec(names: tuple[str | None, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Where the axes ``names`` go on a mesh of ``sizes``; mesh axes of one device are left out."""
    parts = []
    for name in names:
        axes = () if name is None else tuple(a for a in RULES[name] if sizes.get(a, 1) > 1)
        parts.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*parts)


def field_of(path: tuple[Any, ...]) -> str:
    """The weight that a path in a tree leads to: the innermost name of WEIGHTS (a weight may itself be a tree
    of values and scales), or else the last name."""
    names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
    return next((name for name in reversed(names) if name in WEIGHTS), names[-1] if names else "")


def _axis_names(field: str, ndim: int) -> tuple[str, ...]:
    if ndim and field not in WEIGHTS:
        raise MeshError(f"the rules name no axes for the weight {field!r}; add it to WEIGHTS")
    names = WEIGHTS[field] if ndim else ()
    # One expert's weight has no axis of experts.
    return ("layers", *names) if ndim > len(names) else names[len(names) - ndim :]


def weight_spec(path: tuple[Any, ...], shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Where a weight goes, or a moment of it, with ``path`` in its tree. Vectors stay whole, and axes of one
    (those of scales).

    Raises:
        MeshError: the rules do not know the weight, or none of its axes divides.
    """
    return field_spec(field_of(path), shape, sizes)


def field_spec(field: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """``weight_spec`` of a field."""
    if all(sizes.get(axis, 1) == 1 for axis in _SPLITTING):
        return PartitionSpec()
    names = _axis_names(field, len(shape))
    at_all = [name for name in RULES if name in names and _parts(name, sizes) > 1]
    candidates = [name for name in at_all if shape[names.index(name)] > 1]
    for name in candidates:
        at = names.index(name)
        if shape[at] % _parts(name, sizes) == 0:
            only = tuple(n if i == at else None for i, n in enumerate(names))
            return spec(only, sizes)
    if candidates and "vector" not in names:  # biases of experts that are split within stay whole
        axis = "the tensor parallel size" if sizes.get("tensor", 1) > 1 else "mesh.fsdp"
        raise MeshError(
            f"{axis} {_parts(candidates[0], sizes)} divides no axis of {field}, which is {shape}; "
            "choose a divisor of one of them"
        )
    return PartitionSpec()


def _parts(name: str, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in RULES[name])


def weight_shardings(tree: Any, mesh: Mesh) -> Any:
    """The shardings of a tree of weights, moments and scalars (arrays, or anything with a shape).

    Raises MeshError as ``weight_spec`` does.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, weight_spec(path, leaf.shape, mesh.shape)), tree
    )


def _ambient_sizes() -> dict[str, int]:
    """Axes of the mesh that ``jax.set_mesh`` has set and that the compiler splits over, if any."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind == AxisType.Auto}


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """``x`` with its axes where the rules put ``names``, one a dimension; None is whole on every device."""
    sizes = _ambient_sizes()
    if max(sizes.values(), default=1) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(names, sizes))


def by_part(f: Callable[..., Any], x: jax.Array, name: str) -> Any:
    """``f(part, first)`` of each part of ``x``, which is split along its last axis, ``name``, and begins at
    index ``first``; the results' last axes are put together. One device has one part, and so has an axis
    that does not divide: every device holds the whole of it."""
    parts = _parts(name, sizes := _ambient_sizes())
    if parts == 1 or x.shape[-1] % parts:
        return f(x, 0)
    names = (*(None,) * (x.ndim - 1), name)
    (axis,) = (a for a in RULES[name] if sizes.get(a, 1) > 1)
    split = spec(names, sizes)
    return jax.shard_map(
        lambda x: f(x, jax.lax.axis_index(axis) * x.shape[-1]),
        in_specs=split,
        out_specs=split,
        axis_names={axis},
        check_vma=False,
    )(x)


def splits_inputs(field: str, shape: tuple[int, ...], tensor: int) -> bool:
    """Whether a weight (..., out, in) of a decoder's is split along its inputs."""
    place = field_spec(field, shape, {"tensor": tensor})
    return len(place) == len(shape) and place[-1] is not None


def product_in_parts(f: Callable[..., jax.Array], x: jax.Array, w: Any, field: str) -> jax.Array:
    """``f(x, w, axis)``, the product of x (rows, in) with a weight (out, in) that is a tree of arrays, by
    each device of a replica with its part of the weight. Parts of the outputs are put together, those of
    the inputs are summed; ``axis`` is the mesh axis that x is split over then, or None."""
    if (tensor := _ambient_sizes().get("tensor", 1)) == 1:
        return f(x, w, None)
    inputs, whole = splits_inputs(field, w.shape, tensor), PartitionSpec()
    parts, axis = PartitionSpec(None, "tensor"), "tensor" if inputs else None

    def part(x: jax.Array, w: Any) -> jax.Array:
        out = f(x, w, axis)
        return jax.lax.psum(out, axis) if inputs else out

    places = jax.tree.map(lambda leaf: field_spec(field, leaf.shape, {"tensor": tensor}), w)
    specs = {"in_specs": (parts if inputs else whole, places), "out_specs": whole if inputs else parts}
    return jax.shard_map(part, **specs, axis_names={"tensor"}, check_vma=False)(x, w)


def split_over(name: str, size: int) -> tuple[str, ...]:
    """The axes of the ambient mesh over which the rules split an array's axis of ``size``; none if they do
    not, or if it does not divide."""
    sizes = _ambient_sizes()
    axes = tuple(axis for axis in RULES[name] if sizes.get(axis, 1) > 1)
    return () if size % math.prod(sizes[axis] for axis in axes) else axes


def joined(tree: Any) -> Any:
    """Arrays whole on every device of a replica: the partial sums of a split product meet here."""
    if _ambient_sizes().get("tensor", 1) == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def anywhere(flag: jax.Array) -> jax.Array:
    """A scalar condition, or where replicas are split over ``tensor`` whether any of them meets it: branches
    may hold collectives there, and all devices must take the same one. Of a branch's index the largest."""
    mesh = jax.sharding.get_abstract_mesh()
    if _ambient_sizes().get("tensor", 1) == 1 or mesh.shape.get("data", 1) == 1:
        return flag
    return jax.lax.pmax(flag.astype(jnp.int32), "data").astype(flag.dtype)


def gathered(tree: Any) -> Any:
    """The weights whole on every device, for the time of their use. Their cotangents come back summed. What
    lies over ``tensor`` is used as it lies."""
    if _ambient_sizes().get("tensor", 1) > 1:
        return tree
    return jax.tree.map(lambda w: constrain(w, *(None,) * w.ndim), tree)


def split_as_stored(tree: Any) -> Any:
    """Weights, or gradients of them, split as ``weight_spec`` stores them."""
    sizes = _ambient_sizes()
    if max(sizes.values(), default=1) == 1:
        return tree

    def one(path: tuple[Any, ...], w: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(w, weight_spec(path, w.shape, sizes))

    return jax.tree_util.tree_map_with_path(one, tree)
