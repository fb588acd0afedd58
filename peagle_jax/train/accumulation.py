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


Stage = Callable[[Any, Any, Any], Any]
"""(its shared values, state of this segment, constants of this segment) -> the next state; the last stage
gives (loss, sums to report). States are floating-point."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def summed(
    stages: tuple[Stage, ...], place: Callable[[Any], Any], shared: tuple, each: Any, constants: Any
) -> Any:
    """(sum of losses, sum of reports) of ``stages`` over the leading axis of ``each``, the first states,
    and of ``constants``. ``shared`` holds what each stage reads in every segment.

    The loss is differentiable by ``shared`` and ``each``, the reports by nothing. Gradients add up in
    float32, where ``place`` puts those of a stage; leaves that nobody differentiates cost none. One
    stage's gradients of a segment are alive at a time.
    """
    del place

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, carry, _run(stages, shared, *xs)), None

    return jax.lax.scan(step, _zeros(stages, shared, each, constants), (each, constants))[0]


def _run(stages: tuple[Stage, ...], shared: tuple, state: Any, constants: Any) -> Any:
    for stage, own in zip(stages, shared, strict=True):
        state = stage(own, state, constants)
    return state


def _zeros(stages: tuple[Stage, ...], shared: tuple, each: Any, constants: Any) -> Any:
    first = jax.tree.map(lambda x: x[0], (each, constants))
    found = jax.eval_shape(partial(_run, stages), shared, *first)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), found)


def _forward(
    stages: tuple[Stage, ...], place: Callable[[Any], Any], shared: Any, each: Any, constants: Any
) -> tuple[Any, Any]:
    learned = [learned_of(own) for own in shared]
    shared, each, constants = values_of((shared, each, constants))
    some = [which.pick(own) for which, own in zip(learned, shared, strict=True)]

    def placed(which: Learned, gradient: list[jax.Array | None]) -> Any:
        """Float32, under the names of a stage's shared values; None stays None."""
        return place(which.put([None if g is None else g.astype(jnp.float32) for g in gradient], None))

    def one(gradient: list[Any], state: Any, fixed: Any) -> tuple[Any, list[Any], Any]:
        """A segment's sums, all gradients with its own added, and that of its first state."""

        def function(i: int) -> Callable[[list[jax.Array | None], Any], Any]:
            return lambda some, state: stages[i](learned[i].put(some, shared[i]), state, fixed)

        gradient, pulls, last = list(gradient), [], len(stages) - 1
        for i in range(last):
            state, pull = jax.vjp(function(i), some[i], state)
            pulls.append(pull)
        loss, pull, reports = jax.vjp(function(last), some[last], state, has_aux=True)
        pulls.append(pull)
        d = jnp.ones_like(loss)
        for i in reversed(range(len(pulls))):
            d_some, d = pulls[i](d)
            total = jax.tree.map(jnp.add, gradient[i], placed(learned[i], d_some))
            # Left to itself the compiler adds late, and keeps the gradients of all stages until then.
            gradient[i], d = jax.lax.optimization_barrier((total, d))
        return (loss, reports), gradient, d

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        sums, gradient, each = carry
        index, fixed = xs
        x = jax.tree.map(lambda whole: jax.lax.dynamic_index_in_dim(whole, index, keepdims=False), each)
        found, gradient, d_x = one(gradient, x, fixed)
        # Nobody reads a segment's part again, so its gradient takes that place.
        each = jax.tree.map(lambda e, d: jax.lax.dynamic_update_index_in_dim(e, d, index, 0), each, d_x)
        return (jax.tree.map(jnp.add, sums, found), gradient, each), None

    none = [[None if v is None else jnp.zeros(v.shape) for v in own] for own in some]
    gradient = [placed(which, zeros) for which, zeros in zip(learned, none, strict=True)]
    start = (_zeros(stages, shared, each, constants), gradient, each)
    count = jax.tree.leaves(each)[0].shape[0]
    (sums, gradient, d_each), _ = jax.lax.scan(step, start, (jnp.arange(count), constants))
    return sums, (tuple(gradient), d_each, shared)


def _backward(
    stages: tuple[Stage, ...], place: Callable[[Any], Any], residual: Any, cotangent: Any
) -> tuple[Any, Any, Any]:
    del stages, place
    gradient, d_each, shared = residual
    factor = materialised(cotangent[0])

    def scaled(d: Any, value: jax.Array) -> Any:
        return None if d is None else (d * factor).astype(value.dtype)

    d_shared = jax.tree.map(scaled, gradient, shared, is_leaf=lambda x: x is None)
    d_each = jax.tree.map(lambda d: d * factor, d_each)
    # Whoever goes on from here shall not do so beside the wide sums.
    return *jax.lax.optimization_barrier((d_shared, d_each)), None


summed.defvjp(_forward, _backward, symbolic_zeros=True)
