"""Compiled programs that tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax


@contextlib.contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Equal programs are compiled once while this lasts: even the smallest is kept in the folder."""
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
