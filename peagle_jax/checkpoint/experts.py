"""The experts of a mixture, as Hugging Face folders store them: one by one, or all of a layer together."""

from __future__ import annotations

from typing import Any

import numpy as np

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.tensors import Reader, ReadExperts, layer_shapes
from peagle_jax.config import BlockConfig
from peagle_jax.layers.mxfp4 import BLOCK, Mxfp4

_PARTS = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}

NOT_A_SCALE = 255
"""The E8M0 code of NaN."""


def read_each(reader: Reader, block: BlockConfig, layer: int, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Qwen3-MoE's ``mlp.experts.J.gate_proj.weight`` and so on, stacked: (E, F, D) and (E, D, F)."""
    shapes, found = layer_shapes(block), {}
    for field, part in _PARTS.items():
        stack = np.empty(shapes[field], dtype)
        for j in range(len(stack)):
            name = f"model.layers.{layer}.mlp.experts.{j}.{part}.weight"
            stack[j] = reader.take(name, stack.shape[1:], dtype)
        found[field] = stack
    return found


def read_gpt_oss(reader: Reader, block: BlockConfig, layer: int, dtype: np.dtype) -> dict[str, Any]:
    """gpt-oss's experts, where the rows of gate and up alternate; packed as MXFP4 they stay so.

    Raises:
        CheckpointError: a tensor is missing or misshaped, a scale is NaN, or a width is no multiple of 32.
    """
    prefix = f"model.layers.{layer}.mlp.experts"
    shapes = layer_shapes(block)
    count, f, d = shapes["w_gate"]
    biases = {"gate_up": (count, 2 * f), "down": (count, d)}
    b_both, b_down = (
        reader.take(f"{prefix}.{part}_proj_bias", shape, dtype) for part, shape in biases.items()
    )
    if reader.has(f"{prefix}.gate_up_proj_blocks"):
        both = _packed(reader, f"{prefix}.gate_up_proj", (count, 2 * f, d))
        down: Any = _packed(reader, f"{prefix}.down_proj", (count, d, f))
        gate, up = (
            Mxfp4(*(np.ascontiguousarray(x[:, first::2]) for x in (both.values, both.scales)))
            for first in (0, 1)
        )
    else:  # stored (in, out)
        both = reader.take(f"{prefix}.gate_up_proj", (count, d, 2 * f), dtype).swapaxes(1, 2)
        gate, up = (np.ascontiguousarray(both[:, first::2]) for first in (0, 1))
        down = reader.take(f"{prefix}.down_proj", (count, f, d), dtype).swapaxes(1, 2)
        down = np.ascontiguousarray(down)
    return {
        "w_gate": gate,
        "w_up": up,
        "w_down": down,
        "b_gate": np.ascontiguousarray(b_both[:, 0::2]),
        "b_up": np.ascontiguousarray(b_both[:, 1::2]),
        "b_down": b_down,
    }


def _packed(reader: Reader, name: str, shape: tuple[int, int, int]) -> Mxfp4:
    """Blocks (E, out, in/32, 16) and scales (E, out, in/32)."""
    count, out, width = shape
    place = reader.source.place
    if width % BLOCK:
        raise CheckpointError(
            f"{place}: {name} is packed as MXFP4 but {width} wide; expected a multiple of {BLOCK}"
        )
    blocks = reader.raw(f"{name}_blocks", (count, out, width // BLOCK, BLOCK // 2))
    scales = reader.raw(f"{name}_scales", (count, out, width // BLOCK))
    for part, array in (("blocks", blocks), ("scales", scales)):
        if array.dtype != np.uint8:
            raise CheckpointError(f"{place}: tensor {name}_{part} is {array.dtype}; expected uint8")
    if (scales == NOT_A_SCALE).any():
        raise CheckpointError(f"{place}: tensor {name}_scales holds NaN ({NOT_A_SCALE}); the file is damaged")
    return Mxfp4(np.array(blocks.reshape(count, out, width // 2)), np.array(scales))


EXPERTS: dict[str | None, ReadExperts] = {"each": read_each, "gpt_oss": read_gpt_oss}
"""How a family's ``experts`` are read."""
