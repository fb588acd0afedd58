"""Whether a device has the memory that a decoder asks for."""

from __future__ import annotations

import os
from typing import Any

from peagle_jax.config import ConfigError
from peagle_jax.speculative.decoder import Decoder


def device_memory(device: Any) -> int | None:
    """Bytes of a device in all (of a CPU: its machine's); None where nothing says it."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def check_memory(decoder: Decoder) -> None:
    """The largest state is allocated only when a sequence grows to it: what cannot be had is told now.

    Raises:
        ConfigError: the state is larger than the device's memory.
    """
    needed, available = decoder.state_bytes(), device_memory(decoder.device)
    if available is not None and needed > available:
        raise ConfigError(
            f"a context of {decoder.max_model_len} tokens needs {needed / 1e9:.1f} GB of KV cache at batch "
            f"{decoder.batch}, and the device has {available / 1e9:.1f} GB; ask for a smaller max_model_len"
        )
