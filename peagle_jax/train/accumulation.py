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
from jax.custom_derivatives import SymbolicZero

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
    leaves, shape = jax.tree.flatten(shared, is_leaf=_is_primal)
    learned = [leaf.perturbed for leaf in leaves]
    shared, each, constants = (
        jax.tree.map(lambda p: p.value, x, is_leaf=_is_primal) for x in (shared, each, constants)
    )
    values = jax.tree.leaves(shared)

    def loss(some: list[jax.Array | None], x: Any, fixed: Any) -> tuple[jax.Array, Any]:
        pairs = zip(some, values, strict=True)
        return body(jax.tree.unflatten(shape, [v if s is None else s for s, v in pairs]), x, fixed)

    some = [v if wanted else None for v, wanted in zip(values, learned, strict=True)]

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        sums, gradient = carry
        found, (d_some, d_each) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(some, *xs)
        gradient = jax.tree.map(lambda a, d: a + d, gradient, placed(d_some))
        return (jax.tree.map(jnp.add, sums, found), gradient), d_each

    def placed(gradient: list[jax.Array | None]) -> Any:
        """Float32, under the names of ``shared``; None stays None."""
        tree = jax.tree.unflatten(shape, [None if g is None else g.astype(jnp.float32) for g in gradient])
        return place(tree)

    none = placed([None if v is None else jnp.zeros(v.shape) for v in some])
    start = (_zeros(body, shared, each, constants), none)
    (sums, gradient), d_each = jax.lax.scan(step, start, (each, constants))
    return sums, (gradient, d_each, shared)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _backward(body: Body, place: Callable[[Any], Any], residual: Any, cotangent: Any) -> tuple[Any, Any, Any]:
    del body, place
    gradient, d_each, shared = residual
    factor = cotangent[0]
    if isinstance(factor, SymbolicZero):
        factor = jnp.zeros(())

    def scaled(d: Any, value: jax.Array) -> Any:
        return None if d is None else (d * factor).astype(value.dtype)

    d_shared = jax.tree.map(scaled, gradient, shared, is_leaf=lambda x: x is None)
    return d_shared, jax.tree.map(lambda d: d * factor, d_each), None


summed.defvjp(_forward, _backward, symbolic_zeros=True)
