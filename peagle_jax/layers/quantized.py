"""Weights of eight and four bits, and the products that read them.

``Int8Weight`` and ``Int4Weight`` are whole numbers by a float32 scale of each output channel, ``Fp8Weight``
eight-bit floats by such a scale, for hardware that widens them by itself. ``BlockWeight``
is what a GGUF file holds, value for value. Each stands where an array (out, in) would, and every array in it
has the weight's own axes, so that stacks of layers, shardings and copies need not know of it; a device's part
of each of them is a weight again, where its inputs are whole ``units``.

These are own formats because a round must give a row the same bits whatever its width. On two cores with
AVX-512, eight rows through eight layers' products of SmolLM2 and its table took 12 ms in int8 and 15 in int4,
where bfloat16 took 11 and float32 23. qwix 0.1.8's arrays, whose products widen the weight inside of them,
took 5 times as long as these. With a single limb (8 bits) an activation, int8 took 9 ms, and SmolLM2's
perplexity rose by 3 % instead of 0.01 %.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from peagle_jax.layers.apart import computed_apart

GROUP = 32
"""Inputs that share a step in an Int4Weight, and a scale in a BlockWeight (as in GGUF)."""

PAIR = 2 * GROUP
"""Inputs whose four-bit values share bytes."""

MOST_STEPS = 15
"""Largest step of a group in units of its channel's scale: eight of them stay within an int8."""

TILE_BYTES = 2**19
"""A tile of widened blocks: what a CPU's core keeps in its own memory beside its operands."""

LARGEST_FP8 = 448.0
"""Of float8_e4m3fn."""

_LIMB_BITS = 8
_LIMB = 2**_LIMB_BITS
_WHOLE_BITS = 15
_ROOM = 1.008  # 2**15 over the largest whole number whose limbs both fit an int8, 127 * 256, rounded up

Dense = Callable[[Array, Array], Array]
"""(x (rows, d), w (f, d) of floats) -> float32 (rows, f)."""


class QuantizedWeight:
    """What stands where an array of floats would; ``dtype`` is that of the products' floats."""

    values: Any
    dtype: Any

    @property
    def unit(self) -> int:
        """Inputs that stay together where the weight is split over devices."""
        return 1

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array (..., out, in) in whose place it is; unless packed, of its values."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self))


@struct.dataclass
class Int8Weight(QuantizedWeight):
    """values * scale."""

    values: Any  # int8 (..., f, d)
    scale: Any  # float32 (..., f, 1)
    dtype: Any = struct.field(pytree_node=False)


@struct.dataclass
class Fp8Weight(QuantizedWeight):
    """values * scale."""

    values: Any  # float8_e4m3fn (..., f, d)
    scale: Any  # float32 (..., f, 1)
    dtype: Any = struct.field(pytree_node=False)


@struct.dataclass
class Int4Weight(QuantizedWeight):
    """values * steps * scale: a whole number of -120 to 120 by the channel's scale.

    A byte holds a column of an even group in its low bits, and that of the next group in its high ones. Even
    and odd groups are unpacked apart, each for a product of their own, since putting them together costs as
    much as a product.
    """

    values: Any  # int8 (..., f, d/2), two signed values each
    steps: Any  # int8 (..., f, d/GROUP), 1 to MOST_STEPS
    scale: Any  # float32 (..., f, 1)
    dtype: Any = struct.field(pytree_node=False)

    @property
    def unit(self) -> int:
        return PAIR

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], 2 * self.values.shape[-1])


@struct.dataclass
class BlockWeight(QuantizedWeight):
    """GGUF's Q8_0, Q4_0 and Q4_1: values * scale + minimum in blocks of GROUP inputs.

    Four-bit values lie as in an Int4Weight; Q4_1's have no sign, and a minimum.
    """

    values: Any  # int8 (..., f, d), or int8 or (with a minimum) uint8 (..., f, d/2)
    scale: Any  # float16 (..., f, d/GROUP)
    minimum: Any  # float16 (..., f, d/GROUP), or None
    dtype: Any = struct.field(pytree_node=False)

    @property
    def unit(self) -> int:
        return PAIR if self.is_packed else GROUP

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], GROUP * self.scale.shape[-1])

    @property
    def is_packed(self) -> bool:
        """Two values a byte."""
        return self.values.shape[-1] != self.shape[-1]


def quantize(w: Float[Array, "... f d"], kind: str, dtype: Any = jnp.float32) -> QuantizedWeight:
    """The weight in ``kind`` (int8, int4 or fp8); ``dtype`` is that of its products' floats.

    Raises:
        ValueError: an unknown kind, or an int4 weight whose inputs are no whole number of pairs of groups.
    """
    if kind not in _MADE:
        raise ValueError(f"unknown quantisation {kind[:60]!r}; expected one of {', '.join(_MADE)}")
    if kind == "int4" and w.shape[-1] % PAIR:
        raise ValueError(f"int4 needs inputs in multiples of {PAIR}, found {w.shape[-1]}; ask for int8")
    return _MADE[kind](jnp.asarray(w, jnp.float32), jnp.dtype(dtype))


@partial(jax.jit, static_argnums=1)
def _to_int8(w: Array, dtype: jnp.dtype) -> Int8Weight:
    scale = _not_zero(jnp.abs(w).max(-1, keepdims=True) / 127)
    return Int8Weight(jnp.round(w / scale).astype(jnp.int8), scale, dtype)


@partial(jax.jit, static_argnums=1)
def _to_fp8(w: Array, dtype: jnp.dtype) -> Fp8Weight:
    scale = _not_zero(jnp.abs(w).max(-1, keepdims=True) / LARGEST_FP8)
    return Fp8Weight((w / scale).astype(jnp.float8_e4m3fn), scale, dtype)


@partial(jax.jit, static_argnums=1)
def _to_int4(w: Array, dtype: jnp.dtype) -> Int4Weight:
    groups = w.reshape(*w.shape[:-1], -1, GROUP)
    widest = jnp.maximum(groups.max(-1) / 7, groups.min(-1) / -8)
    scale = _not_zero(widest.max(-1, keepdims=True) / MOST_STEPS)

    def rounded(steps: Array) -> tuple[Array, Array]:
        step = (steps * scale)[..., None]
        values = jnp.clip(jnp.round(groups / step), -8, 7)
        return values, jnp.square(values * step - groups).sum(-1)

    # Steps that cut a group's largest values are often nearer to all others.
    first = jnp.round(widest / scale)
    tried = [jnp.clip(first - narrower, 1, MOST_STEPS) for narrower in range(-1, 4)]
    steps, (values, least) = tried[0], rounded(tried[0])
    for other in tried[1:]:
        others, error = rounded(other)
        better = error < least
        steps, least = jnp.where(better, other, steps), jnp.minimum(error, least)
        values = jnp.where(better[..., None], others, values)
    packed = pack(values.reshape(w.shape).astype(jnp.int8))
    return Int4Weight(packed, steps.astype(jnp.int8), scale, dtype)


_MADE: dict[str, Callable[[Array, Any], QuantizedWeight]] = {
    "int8": _to_int8,
    "int4": _to_int4,
    "fp8": _to_fp8,
}


def _not_zero(scale: Array) -> Array:
    """The scales; 1 where all values are zeros."""
    return jnp.where(scale > 0, scale, 1)


def pack(values: Any) -> Any:
    """Two four-bit values a byte, as ``Int4Weight`` has them: (..., d) to (..., d/2)."""
    even, odd = _by_parity(values)
    return (even & 15) | (odd << 4)


def _by_parity(x: Any) -> tuple[Any, Any]:
    """The columns of even groups and those of odd ones."""
    pairs = x.reshape(*x.shape[:-1], -1, 2, GROUP)
    return tuple(pairs[..., i, :].reshape(*x.shape[:-1], -1) for i in range(2))


def _unpacked(values: Array) -> tuple[Array, Array]:
    """The even groups and the odd ones; with their sign where the bytes have one."""
    return (values << 4) >> 4, values >> 4


def _together(parts: tuple[Array, ...]) -> Array:
    """Inverse of ``_by_parity``; a single part is all groups."""
    if len(parts) == 1:
        return parts[0]
    groups = [x.reshape(*x.shape[:-1], -1, GROUP) for x in parts]
    return jnp.stack(groups, -2).reshape(*parts[0].shape[:-1], -1)


def _by_group(values: Array, factors: Array, offsets: Array | None = None) -> Array:
    """values (..., n) times a factor, plus an offset, for each GROUP of them."""
    groups = values.reshape(*values.shape[:-1], -1, GROUP) * factors[..., None]
    if offsets is not None:
        groups = groups + offsets[..., None]
    return groups.reshape(values.shape)


def _whole_numbers(w: Int8Weight | Int4Weight) -> tuple[Array, ...]:
    """The weight without its channels' scales, int8: whole, or where it is packed its even and odd groups."""
    if isinstance(w, Int8Weight):
        return (w.values,)
    parts = zip(_unpacked(w.values), (w.steps[..., 0::2], w.steps[..., 1::2]), strict=True)
    return tuple(_by_group(values, steps) for values, steps in parts)


def _floats(w: BlockWeight) -> tuple[Array, ...]:
    """The weight in float32, in such parts."""
    arrays = [(w.values, w.scale, w.minimum)]
    if w.is_packed:
        of = [(None, None) if x is None else (x[..., 0::2], x[..., 1::2]) for x in (w.scale, w.minimum)]
        arrays = list(zip(_unpacked(w.values), *of, strict=True))
    return tuple(_by_group(*jax.tree.map(lambda x: x.astype(jnp.float32), part)) for part in arrays)


def dequantize(w: QuantizedWeight) -> Float[Array, "... f d"]:
    """The weight's exact value, float32."""
    if isinstance(w, Fp8Weight):
        return w.values.astype(jnp.float32) * w.scale
    if isinstance(w, Int8Weight | Int4Weight):
        return _together(_whole_numbers(w)).astype(jnp.float32) * w.scale
    assert isinstance(w, BlockWeight)
    return _together(_floats(w))


def rows_of(w: QuantizedWeight, ids: Int[Array, "..."]) -> Float[Array, "... d"]:
    """Rows of a table (v, d), float32. Those of blocks are what the table in ``w.dtype`` would hold."""
    # XLA:CPU gathers narrow floats by widening the whole array first, so they are read through their bits.
    rows = dequantize(jax.tree.map(lambda a: _gathered(a, ids), w))
    return rows.astype(w.dtype).astype(jnp.float32) if isinstance(w, BlockWeight) else rows


def _gathered(a: Array, ids: Array) -> Array:
    if a.dtype != jnp.float16:
        return a[ids]
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(a, jnp.uint16)[ids], jnp.float16)


def multiply(
    x: Float[Array, "rows d"], w: QuantizedWeight, dense: Dense, axis: str | None = None
) -> Float[Array, "rows f"]:
    """x times the weight, float32. ``dense`` multiplies floats of ``w.dtype``. Inputs may be a device's part
    of those that are split over a mesh's ``axis``; the parts' products are to be summed.

    A CPU multiplies whole numbers: a row of x is rounded to a 32,000th of its largest value, and since
    sums of whole numbers are exact, a row's bits depend on nothing else. Elsewhere the compiler widens a
    weight inside of the product. Blocks are widened a tile at a time on CPU, for products of ``w.dtype``.
    """
    on = jax.lax.platform_dependent
    if isinstance(w, BlockWeight):
        return on(x, w, cpu=partial(_by_tiles, dense=dense), default=partial(_widened, dense=dense))
    if isinstance(w, Fp8Weight):  # bfloat16 holds every one of them
        return dense(x, w.values.astype(w.dtype)) * w.scale[:, 0]
    assert isinstance(w, Int8Weight | Int4Weight)
    whole = partial(_of_whole_numbers, axis=axis)
    return on(x, w, cpu=whole, default=partial(_widened, dense=dense)) * w.scale[:, 0]


def _beside(x: Array, parts: tuple[Array, ...]) -> list[tuple[Array, Array]]:
    """The columns of x that meet each of the weight's parts."""
    return list(zip((x,) if len(parts) == 1 else _by_parity(x), parts, strict=True))


def _of_whole_numbers(x: Array, w: Int8Weight | Int4Weight, axis: str | None) -> Array:
    largest = jnp.abs(x).max(-1, keepdims=True)
    # Rounded as the whole row is: devices give the bits of one, up to the order of their sum.
    scale = _power_of_two(largest if axis is None else jax.lax.pmax(largest, axis))
    whole = jnp.round(x / scale).astype(jnp.int32)
    high = (whole + _LIMB // 2) >> _LIMB_BITS
    # Both limbs as rows of one product, so that the weight is read once.
    limbs = jnp.concatenate([high, whole - high * _LIMB]).astype(jnp.int8)
    parts = _whole_numbers(w) if isinstance(w, Int8Weight) else _unpacked_late(w, limbs)
    dims = (((1,), (1,)), ((), ()))
    sums = sum(
        jax.lax.dot_general(part, values, dims, preferred_element_type=jnp.int32)
        for part, values in _beside(limbs, parts)
    )
    high, low = jnp.split(jnp.asarray(sums).astype(jnp.float32), 2)
    return (high * _LIMB + low) * scale


def _unpacked_late(w: Int4Weight, limbs: Array) -> tuple[Array, ...]:
    """The whole numbers, not before the activations are there. XLA:CPU would unpack all layers' weights at
    the start of a step, into as much memory: 85 ms a step of SmolLM2, where it takes 27 so."""
    always = (limbs[0, 0] | 1) != 0  # also of a lost row; XLA does not see it
    return computed_apart(_whole_numbers, w, always)


def _power_of_two(largest: Array) -> Array:
    """The least scale of a row by which its values are whole numbers of two limbs; NaN for a lost row.

    Of a power of two any order of multiplications gives the same bits: XLA changes it with the shape.
    """
    bits = jax.lax.bitcast_convert_type(largest * _ROOM, jnp.int32)
    exponent = jnp.maximum(bits >> 23, _WHOLE_BITS) - (_WHOLE_BITS - 1)
    scale = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _widened(x: Array, w: Int8Weight | Int4Weight | BlockWeight, dense: Dense) -> Array:
    parts = _floats(w) if isinstance(w, BlockWeight) else _whole_numbers(w)
    return jnp.asarray(sum(dense(part, values.astype(w.dtype)) for part, values in _beside(x, parts)))


def _by_tiles(x: Array, w: BlockWeight, dense: Dense) -> Array:
    f, d = w.shape
    most = max(TILE_BYTES // (4 * d), 1)
    tile = next(t for t in range(min(f, most), 0, -1) if f % t == 0)
    if tile * 8 < most:  # a number of outputs without fitting divisors
        tile = f

    def one(i: Array, out: Array) -> Array:
        rows = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, i * tile, tile), w)
        found = _widened(x, rows, dense)
        return jax.lax.dynamic_update_slice_in_dim(out, found, i * tile, 1)

    return jax.lax.fori_loop(0, f // tile, one, jnp.zeros((x.shape[0], f), jnp.float32))
