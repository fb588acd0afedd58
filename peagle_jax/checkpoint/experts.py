"""The experts of a mixture, as checkpoints store them: one by one, or all of a layer together."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.quantization import check_scales
from peagle_jax.checkpoint.tensors import Reader, ReadExperts, Shape
from peagle_jax.config import BlockConfig
from peagle_jax.layers.moe import Experts
from peagle_jax.layers.mxfp4 import BLOCK, Mxfp4
from peagle_jax.models.family import Family


def read_each(reader: Reader, block: BlockConfig, layer: int, dtype: np.dtype) -> Experts:
    """Qwen3-MoE's ``mlp.experts.J.gate_proj.weight`` and so on, stacked."""

    def stack(part: str, shape: Shape) -> np.ndarray:
        out = np.empty((_count(block), *shape), dtype)
        for j in range(len(out)):
            name = f"model.layers.{layer}.mlp.experts.{j}.{part}_proj.weight"
            out[j] = reader.take(name, shape, dtype)
        return out

    d, f = block.hidden_size, block.intermediate_size
    return Experts(stack("gate", (f, d)), stack("up", (f, d)), stack("down", (d, f)))


def read_gguf(reader: Reader, block: BlockConfig, layer: int, dtype: np.dtype) -> Experts:
    """GGUF's ``ffn_gate_exps`` and so on, a layer's experts in one tensor, which may stay packed; and
    biases where there are any."""
    e, d, f = _count(block), block.hidden_size, block.intermediate_size
    shapes = {"gate": (e, f, d), "up": (e, f, d), "down": (e, d, f)}

    def name(part: str, kind: str) -> str:
        return f"blk.{layer}.ffn_{part}_exps.{kind}"

    weights = [reader.as_packed(name(part, "weight"), shape, dtype) for part, shape in shapes.items()]
    if not reader.has(name("gate", "bias")):
        return Experts(*weights)
    return Experts(
        *weights, *(reader.take(name(part, "bias"), shape[:2], dtype) for part, shape in shapes.items())
    )


def read_gpt_oss(reader: Reader, block: BlockConfig, layer: int, dtype: np.dtype) -> Experts:
    """gpt-oss's experts, where the rows of gate and up alternate; packed as MXFP4 they stay so.

    Raises:
        CheckpointError: a tensor is missing or misshaped, a scale is NaN, or a width is no multiple of 32.
    """
    prefix = f"model.layers.{layer}.mlp.experts"
    e, d, f = _count(block), block.hidden_size, block.intermediate_size
    both_bias = reader.take(f"{prefix}.gate_up_proj_bias", (e, 2 * f), dtype)
    down_bias = reader.take(f"{prefix}.down_proj_bias", (e, d), dtype)
    both: Any
    down: Any
    if reader.has(f"{prefix}.gate_up_proj_blocks"):
        both = _packed(reader, f"{prefix}.gate_up_proj", (e, 2 * f, d), dtype)
        down = _packed(reader, f"{prefix}.down_proj", (e, d, f), dtype)
    else:  # stored (in, out)
        both = reader.take(f"{prefix}.gate_up_proj", (e, d, 2 * f), dtype).swapaxes(1, 2)
        down = np.ascontiguousarray(reader.take(f"{prefix}.down_proj", (e, f, d), dtype).swapaxes(1, 2))
    gate, up, gate_bias, up_bias = (
        jax.tree.map(lambda x, first=first: np.ascontiguousarray(x[:, first::2]), x)
        for x in (both, both_bias)
        for first in (0, 1)
    )
    return Experts(gate, up, down, gate_bias, up_bias, down_bias)


def named_experts(family: Family, experts: Experts, layer: int) -> dict[str, np.ndarray]:
    """A layer's experts by their names in a Hugging Face folder: what the family's reader reads."""
    prefix = f"model.layers.{layer}.mlp.experts"
    gate, up, down = (np.asarray(getattr(experts, part)) for part in ("gate", "up", "down"))
    if family.experts == "each":
        parts = {"gate": gate, "up": up, "down": down}
        return {f"{prefix}.{j}.{part}_proj.weight": w[j] for part, w in parts.items() for j in range(len(w))}
    both = np.stack([gate, up], 2).reshape(len(gate), -1, gate.shape[-1])
    biases = [np.asarray(b) for b in (experts.gate_bias, experts.up_bias)]
    return {
        f"{prefix}.gate_up_proj": both.swapaxes(1, 2),
        f"{prefix}.down_proj": down.swapaxes(1, 2),
        f"{prefix}.gate_up_proj_bias": np.stack(biases, 2).reshape(len(gate), -1),
        f"{prefix}.down_proj_bias": np.asarray(experts.down_bias),
    }


def _count(block: BlockConfig) -> int:
    assert block.moe is not None
    return block.moe.num_experts


def _packed(reader: Reader, name: str, shape: tuple[int, int, int], dtype: np.dtype) -> Mxfp4:
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
    check_scales(f"{name}_scales", scales, place)
    return Mxfp4(np.array(blocks.reshape(count, out, width // 2)), np.array(scales), dtype)


EXPERTS: dict[str | None, ReadExperts] = {"each": read_each, "gpt_oss": read_gpt_oss}
"""How a family's ``experts`` are read."""
