"""Named tensors of a file, taken one by one into parameters, with every one accounted for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.placing import Places
from peagle_jax.checkpoint.quantization import (
    MATRICES,
    VOCABULARY,
    PackedSource,
    check_scales,
    quantized,
)
from peagle_jax.config import BlockConfig, TargetConfig
from peagle_jax.layers.block import BlockParams
from peagle_jax.layers.moe import Experts
from peagle_jax.layers.mxfp4 import Mxfp4
from peagle_jax.models.family import MLP_FIELDS, MODEL_NAMES, Family
from peagle_jax.models.llama import LLAMA
from peagle_jax.models.stack import TargetParams

Shape = tuple[int, ...]
NameOf = Callable[[str, int | None], str]
"""(field, layer index or None for the model's own) -> the tensor's name in the file."""

ReadExperts = Callable[["Reader", BlockConfig, int, np.dtype], Experts]
"""(reader, block, layer index, dtype) -> the layer's experts, as NumPy arrays."""


class TensorSource(Protocol):
    """Tensors of one checkpoint, matrices as (out, in), read when asked for."""

    place: str

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> Shape: ...

    def read(self, name: str) -> np.ndarray: ...


def _all_finite(array: np.ndarray) -> bool:
    if array.dtype.itemsize == 2 and array.flags.c_contiguous:
        # An exponent of all ones. numpy's own test of 16-bit floats is several times slower.
        exponent = np.uint16(0x7C00 if array.dtype == np.float16 else 0x7F80)
        return not bool(((array.view(np.uint16) & exponent) == exponent).any())
    return bool(np.isfinite(array).all())


class Reader:
    """Takes tensors out of a source with their expected shapes, and remembers which.

    ``quantization`` is what ``weight`` makes of matrices: int8, int4, fp8, gguf (packed as they are) or None.
    """

    def __init__(self, source: TensorSource, quantization: str | None = None) -> None:
        self.source, self.quantization = source, quantization
        self.available = set(source.names())
        self.taken: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.available

    def raw(self, name: str, shape: Shape | None) -> np.ndarray:
        """The tensor as stored. ``shape`` None accepts any.

        Raises:
            CheckpointError: it is missing, or has another shape.
        """
        self._check(name, shape)
        return self.source.read(name)

    def _check(self, name: str, shape: Shape | None) -> None:
        place = self.source.place
        if name not in self.available:
            expected = "" if shape is None else f" of shape {list(shape)}"
            raise CheckpointError(f"{place} has no tensor {name}; expected one{expected}")
        found = self.source.shape(name)
        if shape is not None and found != shape:
            raise CheckpointError(
                f"{place}: tensor {name} has shape {list(found)}; expected {list(shape)} from the config"
            )
        self.taken.add(name)

    def take(self, name: str, shape: Shape, dtype: np.dtype | None) -> np.ndarray:
        """The tensor in ``dtype`` (None: its own), contiguous and owned.

        Raises:
            CheckpointError: as ``raw``; it is quantised, or holds a value that is not finite.
        """
        array = self.raw(name, shape)
        if array.dtype.kind in "iub" or array.dtype.itemsize == 1:
            raise CheckpointError(
                f"{self.source.place}: tensor {name} is {array.dtype}, a quantised weight; "
                "expected float32, float16 or bfloat16; load the unquantised checkpoint"
            )
        self._check_finite(name, array)
        return np.array(array, dtype=dtype, order="C")

    def _check_finite(self, name: str, array: np.ndarray) -> None:
        if not _all_finite(array):
            raise CheckpointError(
                f"{self.source.place}: tensor {name} holds NaN or infinity; the file is damaged, or its "
                "training diverged; expected finite weights"
            )

    def weight(self, field: str, name: str, shape: Shape, dtype: np.dtype) -> Any:
        """The tensor of a field in ``dtype``, or quantised: a tree of NumPy arrays.

        Raises:
            CheckpointError: as ``take``; the tensor has no form in the reader's quantization.
        """
        kind, place = self.quantization, self.source.place
        if kind is None or field not in MATRICES:
            return self.take(name, shape, dtype)
        if kind == "gguf":
            return self.as_packed(name, shape, dtype, is_table=field == VOCABULARY)
        array = self.take(name, shape, np.dtype(np.float32))
        return quantized(kind, field, array, dtype, f"{place}: tensor {name}")

    def as_packed(self, name: str, shape: Shape, dtype: np.dtype, is_table: bool = False) -> Any:
        """With quantization gguf the tensor as the file has it, where that is a form of ours (MXFP4 is none
        of a table, whose rows are read one by one); else ``take``.

        Raises:
            CheckpointError: as ``take``; the source is no GGUF file.
        """
        place = self.source.place
        if self.quantization != "gguf":
            return self.take(name, shape, dtype)
        if not isinstance(self.source, PackedSource):
            raise CheckpointError(f"{place} is no GGUF file; expected quantization int8 or int4, or none")
        self._check(name, shape)
        packed = self.source.packed(name, dtype)
        if packed is None or (is_table and isinstance(packed, Mxfp4)):
            return self.take(name, shape, dtype)
        if isinstance(packed, Mxfp4):
            check_scales(name, packed.scales, place)
        for part in jax.tree.leaves(packed):
            if part.dtype.kind == "f":
                self._check_finite(name, part)
        return packed

    def experts(self, found: Experts, dtype: np.dtype, what: str) -> Experts:
        """A layer's experts, quantised as asked for, if they are not packed already.

        Raises:
            CheckpointError: their shape does not suit the kind.
        """
        kind, place = self.quantization, self.source.place
        matrices = {name: getattr(found, name) for name in ("gate", "up", "down")}
        if kind in (None, "gguf") or not all(isinstance(w, np.ndarray) for w in matrices.values()):
            return found
        return found.replace(
            **{name: quantized(kind, name, w, dtype, f"{place}: {what}") for name, w in matrices.items()}
        )

    def finish(self, ignore: Callable[[str], bool] = lambda name: False) -> None:
        """Raises CheckpointError when a tensor of the file found no place."""
        left = sorted(n for n in self.available - self.taken if not ignore(n))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(
                f"{self.source.place}: no place for tensor {', '.join(left[:3])}{more}; "
                "the model has a part that is not supported, or its config does not match its weights"
            )


def layer_shapes(block: BlockConfig, input_size: int | None = None) -> dict[str, Shape]:
    """Shapes of every ``BlockParams`` field; ``input_size`` is q, k and v's."""
    d, f, h = block.hidden_size, block.intermediate_size, block.head_dim
    q, kv, i = block.num_heads * h, block.num_kv_heads * h, input_size or d
    count = 0 if block.moe is None else block.moe.num_experts
    return {
        "attn_norm": (d,),
        "wq": (q, i),
        "wk": (kv, i),
        "wv": (kv, i),
        "wo": (d, q),
        "mlp_norm": (d,),
        "w_gate": (f, d),
        "w_up": (f, d),
        "w_down": (d, f),
        "bq": (q,),
        "bk": (kv,),
        "bv": (kv,),
        "bo": (d,),
        "b_gate": (f,),
        "b_up": (f,),
        "b_down": (d,),
        "q_norm": (h,),
        "k_norm": (h,),
        "w_router": (count, d),
        "b_router": (count,),
        "sinks": (block.num_heads,),
    }


def read_layer(
    reader: Reader,
    name_of: Callable[[str], str],
    fields: Iterable[str],
    shapes: Mapping[str, Shape],
    dtype: np.dtype,
    put: Callable[[str, Any], Any],
) -> dict[str, Any]:
    """One layer's weights by ``BlockParams`` field, each ``put`` where it belongs before the next is read."""
    return {field: put(field, reader.weight(field, name_of(field), shapes[field], dtype)) for field in fields}


def read_target(
    reader: Reader,
    cfg: TargetConfig,
    fields: tuple[str, ...],
    name_of: NameOf,
    dtype: DTypeLike,
    stacked: bool,
    places: Places | None = None,
    experts: ReadExperts | None = None,
) -> TargetParams:
    """All weights of a target in ``dtype``; see ``TargetParams`` for the two forms of its layers. Each goes
    to its place before the next is read; a stack is filled where it lies, layer by layer.

    ``experts`` reads those of a layer, where there is a mixture.

    Raises:
        CheckpointError: a tensor is missing, misshaped or has no place.
    """
    dtype = np.dtype(dtype)
    table = (cfg.vocab_size, cfg.hidden_size)
    shapes = layer_shapes(cfg.block)
    places = places or Places(None, cfg)

    def layer(index: int, put: Callable[[str, Any], Any]) -> dict[str, Any]:
        found = read_layer(reader, lambda field: name_of(field, index), fields, shapes, dtype, put)
        if experts is not None:
            none = dict.fromkeys(MLP_FIELDS)
            mine = reader.experts(experts(reader, cfg.block, index, dtype), dtype, f"layer {index}'s experts")
            found |= none | {"experts": put("experts", mine)}
        return found

    def own(field: str, shape: Shape, kind: str | None = None) -> Any:
        return places.put(field, reader.weight(kind or field, name_of(field, None), shape, dtype))

    def stack(indices: range) -> BlockParams:
        filled: dict[str, Any] = {}

        def fill(at: int, field: str, array: Any) -> Any:
            if field in filled and not _alike(filled[field], array):
                name = "experts" if field == "experts" else name_of(field, indices[at])
                raise CheckpointError(
                    f"{reader.source.place}: {name} of layer {indices[at]} is of another type than in the "
                    "layers before it, which are stacked; leave out quantization gguf, or ask for int8"
                )
            return places.fill(filled.get(field), field, array, at, len(indices))

        for at, index in enumerate(indices):
            filled |= layer(index, functools.partial(fill, at))
        return BlockParams(**filled)

    layers: BlockParams | tuple[BlockParams, ...]
    if stacked:
        stacks = tuple(stack(range(first, cfg.num_layers, cfg.cycle)) for first in range(cfg.cycle))
        layers = stacks if cfg.cycle > 1 else stacks[0]
    else:
        layers = tuple(BlockParams(**layer(i, places.put)) for i in range(cfg.num_layers))
    embed = own("embed", table, VOCABULARY if cfg.tie_word_embeddings else None)
    final_norm = own("final_norm", (cfg.hidden_size,))
    lm_head = None if cfg.tie_word_embeddings else own("lm_head", table)
    return TargetParams(embed, layers, final_norm, lm_head)


def _alike(stack: Any, weight: Any) -> bool:
    """Whether a layer's weight is of its stack's arrays; kv heads may be stored more than once there."""

    def kind(tree: Any) -> tuple[Any, list[tuple[int, np.dtype]]]:
        return jax.tree.structure(tree), [(leaf.shape[-1], leaf.dtype) for leaf in jax.tree.leaves(tree)]

    return kind(stack) == kind(weight)


def hf_name(field: str, layer: int | None, family: Family = LLAMA) -> str:
    """A target tensor's Hugging Face name."""
    if layer is None:
        return MODEL_NAMES[field].hf
    return f"model.layers.{layer}.{family.names(field).hf}"


def gguf_name(field: str, layer: int | None, family: Family = LLAMA) -> str:
    """A target tensor's GGUF name."""
    return MODEL_NAMES[field].gguf if layer is None else f"blk.{layer}.{family.names(field).gguf}"
