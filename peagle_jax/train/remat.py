"""What the reverse pass keeps of the forward pass, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

Remat = Literal["off", "dots", "full"]
"""``off`` keeps everything, ``dots`` the results of matrix products, ``full`` only the inputs."""


def rematerialised(body: Callable[..., Any], remat: Remat, static_argnums: tuple[int, ...] = ()) -> Any:
    """``body`` with the same values and gradients, at another point between memory and time."""
    if remat == "off":
        return body
    policy = jax.checkpoint_policies.dots_saveable if remat == "dots" else None
    return jax.checkpoint(body, policy=policy, static_argnums=static_argnums)
