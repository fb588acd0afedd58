"""Weights quantised one tensor at a time while they are read, or kept packed as a GGUF file has them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.layers.quantized import GROUP, PAIR, BlockWeight, QuantizedWeight, pack, quantize

QUANTIZATIONS = ("int8", "int4", "fp8", "gguf")

VOCABULARY = "lm_head"
MATRICES = frozenset({"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", VOCABULARY})
"""Fields that are quantised. A tied table counts as ``lm_head``: every step multiplies with all of it. Of one
that is not tied a step reads single rows, and it keeps its dtype, as norms and biases do."""


@runtime_checkable
class PackedSource(Protocol):
    """A checkpoint whose tensors may be packed already."""

    def packed(self, name: str, dtype: np.dtype) -> BlockWeight | None:
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


def block_weight(data: np.ndarray, kind: str, shape: tuple[int, ...], dtype: Any) -> BlockWeight | None:
    """A GGUF tensor's bytes as a weight of the same values; ``kind`` is ggml's name of its type.

    None for another type than Q8_0, Q4_0 and Q4_1, and for rows that are no whole number of pairs of blocks.
    """
    bits, has_minimum = {"Q8_0": (8, False), "Q4_0": (4, False), "Q4_1": (4, True)}.get(kind, (0, False))
    if not bits or len(shape) != 2 or shape[1] % PAIR:
        return None
    head = 4 if has_minimum else 2
    blocks = data.reshape(shape[0], -1, head + GROUP * bits // 8)
    factors = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    values = blocks[..., head:]
    if bits == 4:  # a block's first half lies in the low bits, here a pair's first block does
        values = pack(np.concatenate([values & 15, values >> 4], -1).reshape(shape))
    if not has_minimum:  # Q4_0 counts from -8: in two's complement that is one flipped bit
        values = (values ^ 0x88 if bits == 4 else values).view(np.int8)
    values = np.ascontiguousarray(values.reshape(shape[0], -1))
    parts = [np.ascontiguousarray(factors[..., i]) for i in range(head // 2)]
    return BlockWeight(values, parts[0], parts[1] if has_minimum else None, dtype)
