"""Rows of a batch cut along their length: each part computes its own positions and reads all keys.

The parts are a leading axis of every array, so that a merge of batch and position axes, as in every
product, stays within one part; the compiler splits that axis over the mesh. With one part nothing changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from peagle_jax.parallel.rules import constrain

_NAME = "sequence_part"


@dataclasses.dataclass(frozen=True)
class SequenceParts:
    """``count`` contiguous parts of equal length; it must divide the length of a row."""

    count: int = 1

    def split(self, x: Array) -> Array:
        """(B, n, ...) -> (parts, B, n / parts, ...)."""
        if self.count == 1:
            return x
        x = x.reshape(x.shape[0], self.count, -1, *x.shape[2:]).swapaxes(0, 1)
        return constrain(x, "sequence", "batch", *(None,) * (x.ndim - 2))

    def join(self, x: Array) -> Array:
        """Inverse of ``split``; every part stays where it is."""
        if self.count == 1:
            return x
        x = x.swapaxes(0, 1)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
        return constrain(x, "batch", "sequence", *(None,) * (x.ndim - 2))

    def everywhere(self, x: Array) -> Array:
        """A joined (B, n, ...) array that every part can read as a whole."""
        return x if self.count == 1 else constrain(x, "batch", *(None,) * (x.ndim - 1))

    def positions(self, n: int) -> Array:
        """0..n-1, int32 (n,), or split (parts, n / parts)."""
        index = jnp.arange(n)
        return index if self.count == 1 else index.reshape(self.count, -1)

    def map(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """``function`` of every part of split trees; the results are split too."""
        return function(*arrays) if self.count == 1 else jax.vmap(function, axis_name=_NAME)(*arrays)

    def whole(self, x: Array) -> Array:
        """Inside ``map``: all parts of (B, n / parts, ...) in order, (B, n, ...)."""
        if self.count == 1:
            return x
        x = jax.lax.all_gather(x, _NAME, axis=1, tiled=True)
        return constrain(x, "batch", *(None,) * (x.ndim - 1))

    def total(self, tree: Any) -> Any:
        """Sums over the parts of what ``map`` returned."""
        return tree if self.count == 1 else jax.tree.map(lambda x: x.sum(0), tree)


WHOLE = SequenceParts()
