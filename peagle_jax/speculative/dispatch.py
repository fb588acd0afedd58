"""A dispatch as bytes, so that the processes of other hosts can repeat it."""

from __future__ import annotations

import dataclasses
import json
import zlib
from typing import Any

import numpy as np

from peagle_jax.speculative.rules import RulesState
from peagle_jax.speculative.sampling import SamplingState
from peagle_jax.speculative.state import Chunk, Copy, Settings, Turn

_TYPES = {kind.__name__: kind for kind in (Chunk, Copy, RulesState, SamplingState, Settings, Turn)}


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A step by its name, its NumPy inputs and its static sizes."""

    step: str
    inputs: Any = None
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def pack(self) -> bytes:
        """Arrays are mostly zeros (a request's settings have a number for each token): compressed."""
        arrays: list[np.ndarray] = []

        def described(x: Any) -> Any:
            if x is None:
                return None
            if isinstance(x, tuple):
                return [described(part) for part in x]
            if dataclasses.is_dataclass(x):
                parts = {f.name: described(getattr(x, f.name)) for f in dataclasses.fields(x)}
                return {"of": type(x).__name__, "parts": parts}
            arrays.append(np.asarray(x))
            return {"dtype": arrays[-1].dtype.str, "shape": arrays[-1].shape}

        header = json.dumps([self.step, described(self.inputs), self.sizes]).encode()
        body = b"".join(array.tobytes() for array in arrays)
        return zlib.compress(len(header).to_bytes(4, "little") + header + body, 1)

    @classmethod
    def unpack(cls, data: bytes) -> Dispatch:
        """Inverse of ``pack``."""
        data = zlib.decompress(data)
        at = 4 + int.from_bytes(data[:4], "little")
        step, inputs, sizes = json.loads(data[4:at])

        def made(x: Any) -> Any:
            nonlocal at
            if x is None:
                return None
            if isinstance(x, list):
                return tuple(made(part) for part in x)
            if "of" in x:
                return _TYPES[x["of"]](**{name: made(part) for name, part in x["parts"].items()})
            dtype, count = np.dtype(x["dtype"]), int(np.prod(x["shape"]))
            array = np.frombuffer(data, dtype, count, at).reshape(x["shape"])
            at += array.nbytes
            return array

        return cls(step, made(inputs), sizes)
