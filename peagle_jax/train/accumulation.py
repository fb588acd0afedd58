"""A loss summed over segments, whose gradient is summed along with it.

Reverse mode through a scan keeps every segment's intermediate values, or computes them a second time. A
sum needs neither: each segment's gradient is complete as soon as its loss is, up to the factor of the
whole. So it is taken there and then, and one segment is alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.custom_derivatives import SymbolicZero


@struct.dataclass
class Learned:
    """Which leaves of a tree somebody differentiates."""

    flags: tuple[bool, ...] = struct.field(pytree_node=False)
    shape: Any = struct.field(pytree_node=False)

    def pick(self, tree: Any) -> list[jax.Array | None]:
        """The learned leaves in order, None for the others."""
        pairs = zip(jax.tree.leaves(tree), self.flags, strict=True)
        return [leaf if wanted else None for leaf, wanted in pairs]

    def put(self, some: list[jax.Array | None], tree: Any) -> Any:
        """``tree`` with the leaves of ``pick`` in place; ``tree`` None is None everywhere."""
        rest = [None] * len(self.flags) if tree is None else jax.tree.leaves(tree)
        pairs = zip(some, rest, strict=True)
        return jax.tree.unflatten(self.shape, [other if leaf is None else leaf for leaf, other in pairs])


def learned_of(primals: Any) -> Learned:
    """Of what a custom rule with symbolic zeros is given."""
    leaves, shape = jax.tree.flatten(primals, is_leaf=_is_primal)
    return Learned(tuple(bool(leaf.perturbed) for leaf in leaves), shape)


def values_of(primals: Any) -> Any:
    """The arrays of what a custom rule with symbolic zeros is given."""
    return jax.tree.map(lambda p: p.value, primals, is_leaf=_is_primal)


def materialised(cotangents: Any) -> Any:
    """Arrays, also where nothing depends on a result."""
    return jax.tree.map(
        lambda c: jnp.zeros(c.shape, c.dtype) if isinstance(c, SymbolicZero) else c,
        cotangents,
        is_leaf=lambda c: isinstance(c, SymbolicZero),
    )


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


Body = Callable[[Any, Any, Any], tuple[jax.Array, Any]]
"""(shared, of this segment, constants of this segment) -> (loss, sums to report)."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def summed(body: Body, place: Callable[[Any], Any], shared: Any, each: Any, constants: Any) -> Any:
    """(sum of losses, sum of reports) of ``body`` over the leading axis of ``each`` and ``constants``.

    The loss is differentiable by ``shared`` and ``each``, the reports by nothing. Gradients add up in
    float32, where ``place`` puts a gradient of ``shared``; leaves that nobody differentiates cost none.
    """
    del place

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, carry, body(shared, *xs)), None

    return jax.lax.scan(step, _zeros(body, shared, each, constants), (each, constants))[0]


def _zeros(body: Body, shared: Any, each: Any, constants: Any) -> Any:
    first = jax.tree.map(lambda x: x[0], (each, constants))
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(body, shared, *first))


def _forward(
    body: Body, place: Callable[[Any], Any], shared: Any, each: Any, constants: Any
) -> tuple[Any, Any]:
    learned = learned_of(shared)
    shared, each, constants = values_of((shared, each, constants))

    def loss(some: list[jax.Array | None], x: Any, fixed: Any) -> tuple[jax.Array, Any]:
        return body(learned.put(some, shared), x, fixed)

    some = learned.pick(shared)

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        sums, gradient = carry
        found, (d_some, d_each) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(some, *xs)
        gradient = jax.tree.map(lambda a, d: a + d, gradient, placed(d_some))
        return (jax.tree.map(jnp.add, sums, found), gradient), d_each

    def placed(gradient: list[jax.Array | None]) -> Any:
        """Float32, under the names of ``shared``; None stays None."""
        return place(learned.put([None if g is None else g.astype(jnp.float32) for g in gradient], None))

    none = placed([None if v is None else jnp.zeros(v.shape) for v in some])
    start = (_zeros(body, shared, each, constants), none)
    (sums, gradient), d_each = jax.lax.scan(step, start, (each, constants))
    return sums, (gradient, d_each, shared)


def _backward(body: Body, place: Callable[[Any], Any], residual: Any, cotangent: Any) -> tuple[Any, Any, Any]:
    del body, place
    gradient, d_each, shared = residual
    factor = materialised(cotangent[0])

    def scaled(d: Any, value: jax.Array) -> Any:
        return None if d is None else (d * factor).astype(value.dtype)

    d_shared = jax.tree.map(scaled, gradient, shared, is_leaf=lambda x: x is None)
    return d_shared, jax.tree.map(lambda d: d * factor, d_each), None


summed.defvjp(_forward, _backward, symbolic_zeros=True)
