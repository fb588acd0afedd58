"""Weights quantised one tensor at a time while they are read, or kept packed as a GGUF file has them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.layers.mxfp4 import BLOCK, Mxfp4
from peagle_jax.layers.quantized import GROUP, PAIR, BlockWeight, QuantizedWeight, pack, quantize

QUANTIZATIONS = ("int8", "int4", "fp8", "gguf")

NOT_A_SCALE = 255
"""The E8M0 code of NaN."""

VOCABULARY = "lm_head"
MATRICES = frozenset({"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", VOCABULARY})
"""Fields that are quantised. A tied table counts as ``lm_head``: every step multiplies with all of it. Of one
that is not tied a step reads single rows, and it keeps its dtype, as norms and biases do."""


@runtime_checkable
class PackedSource(Protocol):
    """A checkpoint whose tensors may be packed already."""

    def packed(self, name: str, dtype: np.dtype) -> QuantizedWeight | None:
        """The tensor as it lies in the file, None where it has no such form."""
        ...


def check_quantization(quantization: str | None) -> None:
    """Raises CheckpointError unless it is one of QUANTIZATIONS, or None."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise CheckpointError(
            f"unknown quantization {quantization[:60]!r}; expected one of {', '.join(QUANTIZATIONS)}"
        )


def quantized(kind: str, field: str, w: np.ndarray, dtype: np.dtype, where: str) -> QuantizedWeight:
    """A field's float32 weight in int8, int4 or fp8, in the host's memory.

    The vocabulary is int8 in any of them: its rows are the embeddings of a tied model, and an error in a
    logit is not averaged out by anything.

    Raises:
        CheckpointError: the weight's shape does not suit the kind; ``where`` names the tensor.
    """
    try:
        found = quantize(w, "int8" if field == VOCABULARY else kind, dtype)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error
    return jax.tree.map(np.asarray, found)


def check_scales(name: str, scales: np.ndarray, place: str) -> None:
    """Raises CheckpointError where a scale of MXFP4 is NaN."""
    if (scales == NOT_A_SCALE).any():
        raise CheckpointError(f"{place}: tensor {name} holds NaN ({NOT_A_SCALE}); the file is damaged")


def block_weight(data: np.ndarray, kind: str, shape: tuple[int, ...], dtype: Any) -> QuantizedWeight | None:
    """A GGUF tensor's bytes as a weight (..., out, in) of the same values; ``kind`` is ggml's name of it.

    None for another type than Q8_0, Q4_0, Q4_1 and MXFP4, and for rows that are no whole number of pairs of
    blocks.
    """
    if len(shape) < 2 or shape[-1] % PAIR:
        return None
    if kind == "MXFP4":
        return _mxfp4(data.reshape(*shape[:-1], -1, 1 + BLOCK // 2), dtype)
    bits, has_minimum = {"Q8_0": (8, False), "Q4_0": (4, False), "Q4_1": (4, True)}.get(kind, (0, False))
    if not bits:
        return None
    head = 4 if has_minimum else 2
    blocks = data.reshape(*shape[:-1], -1, head + GROUP * bits // 8)
    factors = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    values = blocks[..., head:]
    if bits == 4:  # a block's first half lies in the low bits, here a pair's first block does
        values = pack(_nibbles(values).reshape(shape))
    if not has_minimum:  # Q4_0 counts from -8: in two's complement that is one flipped bit
        values = (values ^ 0x88 if bits == 4 else values).view(np.int8)
    values = np.ascontiguousarray(values.reshape(*shape[:-1], -1))
    parts = [np.ascontiguousarray(factors[..., i]) for i in range(head // 2)]
    return BlockWeight(values, parts[0], parts[1] if has_minimum else None, dtype)


def _nibbles(values: np.ndarray) -> np.ndarray:
    """The values of blocks (..., 16) whose first halves lie in the low bits: (..., 32)."""
    return np.concatenate([values & 15, values >> 4], -1)


def _mxfp4(blocks: np.ndarray, dtype: Any) -> Mxfp4:
    """Blocks of a scale and 16 bytes; in an ``Mxfp4`` neighbours share a byte."""
    codes = _nibbles(blocks[..., 1:])
    values = codes[..., 0::2] | codes[..., 1::2] << 4
    return Mxfp4(values.reshape(*values.shape[:-2], -1), np.ascontiguousarray(blocks[..., 0]), dtype)
