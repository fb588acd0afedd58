"""The header of a GGUF file: metadata and where each tensor lies.

The gguf package reads it too, through one numpy view a string; a vocabulary then takes seconds.
Source: the GGUF specification in ggml's ``docs/gguf.md``, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peagle_jax.checkpoint.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


class TensorInfo(NamedTuple):
    """Shape as (out, in), ggml type number, and the first byte from the start of the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFHeader(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer, self.at = buffer, 0

    def unpack(self, layout: str) -> tuple:
        values = struct.unpack_from(f"<{layout}", self.buffer, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.buffer):
            raise struct.error("a string runs past the end of the file")
        return self.buffer[start : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.unpack(_SCALARS[kind])[0]
        item, count = self.unpack("IQ")
        if item in _SCALARS:
            return list(self.unpack(f"{count}{_SCALARS[item]}"))
        return [self.value(item) for _ in range(count)]


def read_header(path: Path) -> GGUFHeader:
    """Parses the header.

    Raises:
        CheckpointError: not a GGUF file, an unknown version, or a damaged one.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return _parse(_Cursor(buffer), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not a whole GGUF file ({error}); fetch it again") from error


def _parse(cursor: _Cursor, path: Path) -> GGUFHeader:
    magic, version = cursor.unpack("4sI")
    if magic != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it starts with {magic!r}; expected b'GGUF'")
    if version not in (2, 3):
        raise CheckpointError(f"{path} has GGUF version {version}; expected 2 or 3, little-endian")
    tensor_count, value_count = cursor.unpack("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        (kind,) = cursor.unpack("I")
        metadata[key] = cursor.value(kind)
    found = []
    for _ in range(tensor_count):
        name = cursor.string()
        (axes,) = cursor.unpack("I")
        shape = cursor.unpack(f"{axes}Q")[::-1]  # stored fastest axis first
        found.append((name, shape, *cursor.unpack("IQ")))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = math.ceil(cursor.at / alignment) * alignment
    return GGUFHeader(
        metadata, {name: TensorInfo(shape, kind, start + offset) for name, shape, kind, offset in found}
    )


class TensorData:
    """The tensors' values, decoded by the gguf package one tensor at a time.

    Raises:
        CheckpointError: a tensor lies past the end of the file, or has an unknown type.
    """

    _CHUNK = 1 << 16  # bytes a row: the package decodes 16 rows a step, so short rows are slow

    def __init__(self, path: Path, tensors: dict[str, TensorInfo]) -> None:
        import gguf

        self._gguf, self._path, self._tensors = gguf, path, tensors
        self._data = np.memmap(path, np.uint8, "r")
        for name, info in tensors.items():
            end = info.offset + self._size(name)
            if end > self._data.size:
                raise CheckpointError(
                    f"{path} is cut off: tensor {name} ends at byte {end}, the file at {self._data.size}; "
                    "fetch it again"
                )

    def _type(self, name: str):
        number = self._tensors[name].kind
        try:
            return self._gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise CheckpointError(
                f"{self._path}: tensor {name} has unknown type number {number}; update the gguf package"
            ) from error

    def _size(self, name: str) -> int:
        block, size = self._gguf.GGML_QUANT_SIZES[self._type(name)]
        return math.prod(self._tensors[name].shape) // block * size

    def _bytes(self, name: str) -> np.ndarray:
        start = self._tensors[name].offset
        return np.asarray(self._data[start : start + self._size(name)])

    def blocks(self, name: str) -> tuple[np.ndarray, str]:
        """The tensor's bytes, and ggml's name of its type."""
        return self._bytes(name), self._type(name).name

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, (out, in). Raises CheckpointError for a type without a decoder."""
        info, kind = self._tensors[name], self._type(name)
        data = self._bytes(name)
        step = self._gguf.GGML_QUANT_SIZES[kind][1]
        blocks = data.size // step
        rows = max(1, data.size // self._CHUNK)
        while blocks % rows:
            rows -= 1
        try:
            values = self._gguf.quants.dequantize(data.reshape(rows, -1), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self._path}: tensor {name} has type {kind.name}, which the gguf package cannot decode; "
                "use a file of another type"
            ) from error
        return values.reshape(info.shape)
