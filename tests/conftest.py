"""Set before jax is imported: four CPU devices, and quick compilation of many small programs."""

import os

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from peagle_jax.xla import tune_cpu

tune_cpu()  # as every command does, and as the processes that tests start then find it done
