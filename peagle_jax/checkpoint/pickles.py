"""PyTorch's weight files (``pytorch_model.bin``) without PyTorch, and without running what they say.

Such a file is a zip: a pickle that names the tensors, and one file of raw values a storage. A pickle
is a program; of all that it may ask for, only tensors and plain dictionaries of them are made here.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.fields import shown
from peagle_jax.checkpoint.folder import check_promised, weight_files
from peagle_jax.checkpoint.tensors import Shape

NAME = "pytorch_model.bin"

_DTYPES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


class _Storage(NamedTuple):
    """A storage as the pickle names it: a file of the zip, and how many values it has."""

    dtype: np.dtype
    key: str
    count: int


class _Tensor(NamedTuple):
    """A view of a storage, in values."""

    storage: _Storage
    offset: int
    shape: Shape
    stride: Shape


class _Names(dict):
    """Stands in for an OrderedDict. What a pickle sets on it (modules' versions) holds no tensors."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class _Rebuild:
    """Stands in for ``torch._utils._rebuild_tensor_v2``. It has no attributes that a pickle could set."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Tensor:
        numbers = [offset, *shape, *stride]
        if not isinstance(storage, _Storage) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("a tensor without storage, or of a negative size")
        if len(shape) != len(stride):
            raise ValueError(f"a tensor of {len(shape)} axes and {len(stride)} strides")
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if 0 not in shape and last >= storage.count:
            raise ValueError(f"a tensor of shape {list(shape)} that is larger than its storage")
        return _Tensor(storage, offset, tuple(shape), tuple(stride))


class _Parameter:
    """Stands in for ``torch._utils._rebuild_parameter``."""

    __slots__ = ()

    def __call__(self, tensor: Any, *_: Any) -> Any:
        return tensor


_ADMITTED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Names,
    ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(),
    ("torch._utils", "_rebuild_parameter"): _Parameter(),
    **{("torch", name): name for name in _DTYPES},
}
"""What a pickle may name, and what it gets: nothing that has attributes to set or a state to change."""


class _Unpickler(pickle.Unpickler):
    """Makes nothing but ``_Names`` and ``_Tensor``."""

    def __init__(self, file: Any, place: str) -> None:
        super().__init__(file)
        self.place = place

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise CheckpointError(
                f"{self.place} is a pickle that asks for {shown(f'{module}.{name}')}; only tensors are read, "
                "and nothing in it is run; expected weights alone, as torch.save(state_dict) writes them"
            )
        return _ADMITTED[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", str() as kind, str() as key, _, int() as count) if kind in _DTYPES:
                return _Storage(_DTYPES[kind], key, count)
        raise ValueError(f"a storage that is described as {shown(pid)}")


class _File:
    """The tensors of one file, read when asked for."""

    def __init__(self, path: Path) -> None:
        try:
            self._zip = zipfile.ZipFile(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing; the index lists it") from error
        except (OSError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{path} is not a PyTorch file (a zip, since PyTorch 1.6), or not a whole one: {error}"
            ) from error
        members = self._zip.namelist()
        pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CheckpointError(f"{path} holds no data.pkl; expected a file that torch.save wrote")
        self._root = pickles[0].removesuffix("data.pkl")
        order = f"{self._root}byteorder"
        if order in members and self._zip.read(order).strip() != b"little":
            raise CheckpointError(f"{path} holds big-endian values; expected little-endian ones")
        self.tensors = self._names(path, pickles[0])

    def _names(self, path: Path, member: str) -> dict[str, _Tensor]:
        try:
            with self._zip.open(member) as file:
                found = _Unpickler(file, str(path)).load()
        except CheckpointError:
            raise
        except Exception as error:  # a pickle can end in any error
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"{path} is not a pickle of tensors: {reason}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} holds a {type(found).__name__}; expected tensors by name")
        for name, value in found.items():
            if not isinstance(name, str) or not isinstance(value, _Tensor):
                kind = type(value).__name__.strip("_").lower()
                raise CheckpointError(
                    f"{path} holds {shown(name)}, a {kind}; expected tensors by name and nothing else"
                )
        return found

    def read(self, path: str, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        dtype, key, count = tensor.storage
        try:
            data = self._zip.read(f"{self._root}data/{key}")
        except (KeyError, OSError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path}: the values of tensor {name} cannot be read: {error}") from error
        if len(data) != count * dtype.itemsize:
            raise CheckpointError(
                f"{path}: tensor {name} has a storage of {len(data)} bytes; expected {count} x "
                f"{dtype.itemsize}; fetch the file again"
            )
        values = np.frombuffer(data, dtype)[tensor.offset :]
        strides = tuple(step * dtype.itemsize for step in tensor.stride)
        return np.lib.stride_tricks.as_strided(values, tensor.shape, strides, writeable=False)


class Pickles:
    """All tensors of a folder's PyTorch files, one file or shards. A TensorSource.

    Raises:
        CheckpointError: a file is missing, damaged, or holds anything but tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        files = weight_files(folder, NAME)
        self._file_of: dict[str, _File] = {}
        for name in files.names:
            file = _File(folder / name)
            self._file_of.update(dict.fromkeys(file.tensors, file))
        check_promised(files, self._file_of.keys())

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> Shape:
        return self._file_of[name].tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        return self._file_of[name].read(self.place, name)
