"""Set before jax is imported: four CPU devices, and quick compilation of many small programs."""

import os
import signal
import threading

if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):
    # A shell's background job, and what it starts, would ignore the interrupts that tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from peagle_jax.xla import tune_cpu

tune_cpu()  # as every command does, and as the processes that tests start then find it done

MOST_MAPS = 20_000
"""Memory maps at which compiled programs are let go. Each holds a few, and the suite makes tens of thousands;
Linux grants a process 65,530 (vm.max_map_count), and past them nothing compiles any more."""


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Programs of earlier files are let go before a process has too many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
