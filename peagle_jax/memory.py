"""How many positions of keys and values a machine's memory holds beside a model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import jax

from peagle_jax.arguments import CommandError
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.speculative.cache import row_bytes
from peagle_jax.speculative.request import Request, settings_of

if TYPE_CHECKING:
    from peagle_jax.commands import Loaded


def check_memory(loaded: Loaded, max_model_len: int) -> None:
    """Raises CommandError for a context whose keys and values alone are more than the memory there is."""
    available, position = _device_memory(), _position_bytes(loaded.target.config, loaded, split=True)[0]
    needed = position * max_model_len
    if available and needed > available:
        raise CommandError(
            f"a context of {max_model_len} tokens needs {needed / 2**30:.1f} GiB for keys and values, "
            f"but the machine has {available / 2**30:.1f}; ask for at most {available // position} tokens, "
            f"prompt and answer together"
        )


def kv_room(loaded: Loaded, utilization: float, slots: int, rings: tuple[int, ...] = ()) -> int | None:
    """Positions of the target's and the head's caches that fit ``utilization`` of a device's memory, beside
    its weights, the settings of ``slots`` requests and their ``rings`` (``Sizes``); None where the memory's
    size is not known.

    Raises:
        CommandError: the weights and settings alone take it.
    """
    available = _device_memory()
    if available is None:
        return None
    head = loaded.head
    arrays = {id(x): x for x in jax.tree.leaves((loaded.target.params, head and head.params))}
    weights = sum(x.addressable_shards[0].data.nbytes for x in arrays.values())  # a head may share
    position, slot = _position_bytes(loaded.target.config, loaded, rings, split=True)
    if head is not None:
        split = loaded.placement is not None and loaded.placement.split_head
        position += _position_bytes(head.config, loaded, split=split)[0]
    settings = jax.tree.leaves(settings_of(Request([0]), 1, loaded.target.config.vocab_size))
    taken = weights + slots * (slot + sum(x.nbytes for x in settings))
    left = int(available * utilization) - taken
    if left < position:
        raise CommandError(
            f"the weights and {slots} requests' settings take {taken / 2**30:.1f} GiB, and {utilization:g} "
            f"of the machine's memory are {available * utilization / 2**30:.1f}; raise "
            f"--gpu-memory-utilization, or load less"
        )
    return left // max(position, 1)  # a target may have windows in all layers


def _position_bytes(
    config: TargetConfig | DrafterConfig, loaded: Loaded, rings: tuple[int, ...] = (), *, split: bool
) -> tuple[int, int]:
    """Bytes that the keys and values of one token take on a device, and those of a slot's rings."""
    parts = loaded.placement.tensor if loaded.placement is not None and split else 1
    int8 = loaded.int8_cache and config is loaded.target.config
    layer = 2 * config.block.num_kv_heads // parts * row_bytes(config.block.head_dim, loaded.dtype, int8)
    bounds = rings or (0,)
    bounds *= config.num_layers // len(bounds)
    return layer * sum(ring == 0 for ring in bounds), layer * sum(bounds)


def _device_memory() -> int | None:
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _machine_memory()
    return (device.memory_stats() or {}).get("bytes_limit")


def _machine_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
