"""The tensors of a folder, whatever kind of file holds them."""

from __future__ import annotations

from pathlib import Path

from peagle_jax.checkpoint.folder import SafeTensors, weight_files
from peagle_jax.checkpoint.pickles import NAME, Pickles
from peagle_jax.checkpoint.tensors import TensorSource


def is_orbax(folder: Path) -> bool:
    """Whether a folder is one of our Orbax checkpoints."""
    return (folder / "orbax.json").exists()


def open_weights(folder: Path) -> TensorSource:
    """Orbax arrays, else safetensors, else PyTorch's pickles.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """
    if is_orbax(folder):
        from peagle_jax.checkpoint.orbax import OrbaxTensors  # importing Orbax takes a second

        return OrbaxTensors(folder)
    if not weight_files(folder, "model.safetensors").names and weight_files(folder, NAME).names:
        return Pickles(folder)
    return SafeTensors(folder)
