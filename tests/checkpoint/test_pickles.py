"""PyTorch's files without PyTorch: the tensors that it saved, and nothing of what a pickle would run."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.pickles import Pickles
from peagle_jax.checkpoint.weights import open_weights
from tests.checkpoint.files import write_json

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.array([True, False]),
    "d": np.arange(3, dtype=np.float16),
    "e": np.array([2**40, -1]),
}
STORAGES = {
    "float32": "FloatStorage",
    "bfloat16": "BFloat16Storage",
    "bool": "BoolStorage",
    "float16": "HalfStorage",
    "int64": "LongStorage",
}


class Global:
    """Pickled as the name ``module.name``."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Call:
    """Pickled as a call of a global."""

    def __init__(self, function: Global, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments


class Storage:
    def __init__(self, kind: str, key: str, count: Any) -> None:
        self.pid = ("storage", Global("torch", kind), key, "cpu", count)


class Writer(pickle._Pickler):
    """Writes what torch.save writes, without torch."""

    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Storage) else None

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Global):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Call):
            self.save(obj.function)
            self.save(obj.arguments)
            self.write(pickle.REDUCE)
        else:
            super().save(obj, save_persistent_id)


REBUILD = Global("torch._utils", "_rebuild_tensor_v2")


def tensor(storage: Storage, offset: Any, shape: Any, stride: Any) -> Call:
    return Call(REBUILD, storage, offset, shape, stride, False, Call(Global("collections", "OrderedDict")))


def torch_file(path, found: Any, storages: dict[str, bytes], order: bytes = b"little", compress=False):
    data = io.BytesIO()
    Writer(data, protocol=2).dump(found)
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", kind) as file:
        file.writestr("archive/data.pkl", data.getvalue())
        file.writestr("archive/byteorder", order)
        for key, values in storages.items():
            file.writestr(f"archive/data/{key}", values)
    return path


def save(path, tensors: dict[str, np.ndarray]):
    """As torch.save(state_dict): a storage a tensor."""
    named, storages = {}, {}
    for key, (name, value) in enumerate(tensors.items()):
        stride = tuple(s // value.itemsize for s in value.strides)
        named[name] = tensor(
            Storage(STORAGES[value.dtype.name], str(key), value.size), 0, value.shape, stride
        )
        storages[str(key)] = value.tobytes()
    return torch_file(path, named, storages)


def assert_reads_all(folder) -> None:
    source = Pickles(folder)
    assert set(source.names()) == set(TENSORS)
    for name, expected in TENSORS.items():
        found = source.read(name)
        assert (source.shape(name), found.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(found, expected)


def read_all(folder) -> dict[str, np.ndarray]:
    source = Pickles(folder)
    return {name: source.read(name) for name in source.names()}


def fails(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_file_and_shards_hold_the_same_tensors(tmp_path):
    save(tmp_path / "one" / "pytorch_model.bin", TENSORS)
    assert_reads_all(tmp_path / "one")
    names = list(TENSORS)
    shards = {"pytorch_model-1.bin": names[:2], "pytorch_model-2.bin": names[2:]}
    for file, own in shards.items():
        save(tmp_path / "two" / file, {name: TENSORS[name] for name in own})
    weight_map = {name: file for file, own in shards.items() for name in own}
    write_json(tmp_path / "two" / "pytorch_model.bin.index.json", {"weight_map": weight_map})
    assert_reads_all(tmp_path / "two")
    write_json(
        tmp_path / "two" / "pytorch_model.bin.index.json",
        {"weight_map": weight_map | {"f": "pytorch_model-1.bin"}},
    )
    assert "pytorch_model-1.bin lacks tensor f" in fails(tmp_path / "two")
    (tmp_path / "two" / "pytorch_model-2.bin").unlink()
    assert "pytorch_model-2.bin is missing" in fails(tmp_path / "two")


def test_safetensors_beside_a_pickle_are_taken(tmp_path):
    from safetensors.numpy import save_file

    save(tmp_path / "pytorch_model.bin", TENSORS)
    assert isinstance(open_weights(tmp_path), Pickles)
    save_file({"other": TENSORS["a"]}, tmp_path / "model.safetensors")
    assert list(open_weights(tmp_path).names()) == ["other"]


def test_views_parameters_and_module_versions_are_read(tmp_path):
    storage = Storage("FloatStorage", "0", 12)
    versions = Call(Global("collections", "OrderedDict"))
    found = {
        "turned": tensor(storage, 0, (3, 4), (1, 3)),
        "part": tensor(storage, 5, (2, 2), (3, 1)),
        "one": Call(Global("torch._utils", "_rebuild_parameter"), tensor(storage, 4, (), ()), True, versions),
        "none": tensor(storage, 12, (0, 3), (3, 1)),
    }
    values = np.arange(12, dtype=np.float32)
    torch_file(tmp_path / "pytorch_model.bin", found, {"0": values.tobytes()})
    source = Pickles(tmp_path)
    np.testing.assert_array_equal(source.read("turned"), values.reshape(4, 3).T)
    np.testing.assert_array_equal(source.read("part"), [[5, 6], [8, 9]])
    assert (source.read("one").shape, float(source.read("one"))) == ((), 4.0)
    assert source.read("none").shape == (0, 3)


class Harm:
    """What an attacker writes."""

    def __reduce__(self):
        return (print, ("it ran",))


@pytest.mark.parametrize(
    "name",
    [("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("torch", "load"), ("numpy", "load")],
    ids=".".join,
)
def test_a_pickle_that_would_run_something_is_refused_and_named(tmp_path, name):
    torch_file(tmp_path / "pytorch_model.bin", {"a": Call(Global(*name), "touch ran")}, {})
    said = fails(tmp_path)
    assert f"is a pickle that asks for '{'.'.join(name)}'" in said
    assert "nothing in it is run" in said


def test_nothing_of_a_refused_pickle_was_run(tmp_path, capsys):
    data = io.BytesIO()
    pickle.Pickler(data, protocol=4).dump({"a": Harm()})
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as file:
        file.writestr("x/data.pkl", data.getvalue())
    assert "asks for 'builtins.print'" in fails(tmp_path)
    assert capsys.readouterr().out == ""


def test_what_a_pickle_may_name_has_no_state_that_it_could_change(tmp_path):
    """A pickle can set attributes (BUILD) on anything that it can name."""
    for name in (("torch._utils", "_rebuild_tensor_v2"), ("torch", "FloatStorage")):
        data = io.BytesIO()
        writer = Writer(data, protocol=2)
        writer.write(pickle.PROTO + b"\x02")
        writer.save(Global(*name))
        writer.save((None, {"__call__": 1, "x": 1}))
        writer.write(pickle.BUILD + pickle.STOP)
        with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as file:
            file.writestr("x/data.pkl", data.getvalue())
        assert "is not a pickle of tensors" in fails(tmp_path)


FLOATS = Storage("FloatStorage", "0", 4)
DAMAGED = {
    "larger than its storage": ({"a": tensor(FLOATS, 0, (3, 2), (2, 1))}, "larger than its storage"),
    "past its end": ({"a": tensor(FLOATS, 3, (2,), (1,))}, "larger than its storage"),
    "a negative stride": ({"a": tensor(FLOATS, 3, (2,), (-1,))}, "of a negative size"),
    "other axes": ({"a": tensor(FLOATS, 0, (2,), (2, 1))}, "1 axes and 2 strides"),
    "no storage": ({"a": tensor(FLOATS.pid[2], 0, (2,), (1,))}, "without storage"),
    "an unknown storage": (
        {"a": tensor(Storage("QInt8Storage", "0", 4), 0, (2,), (1,))},
        "asks for 'torch.QInt8Storage'",
    ),
    "an absent storage": (
        {"a": tensor(Storage("FloatStorage", "7", 4), 0, (2,), (1,))},
        "the values of tensor a cannot be read",
    ),
    "a short storage": (
        {"a": tensor(Storage("FloatStorage", "0", 5), 0, (2,), (1,))},
        "has a storage of 16 bytes; expected 5 x 4",
    ),
    "a list": ([1], "holds a list; expected tensors by name"),
    "another value": ({"a": 3}, "holds 'a', a int; expected tensors by name"),
    "a nested state": ({"state_dict": {"a": 3}}, "holds 'state_dict', a dict"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_is_not_weights_is_one_line(tmp_path, case):
    found, said = DAMAGED[case]
    torch_file(tmp_path / "pytorch_model.bin", found, {"0": np.zeros(4, np.float32).tobytes()})
    assert said in fails(tmp_path)


def test_other_files_are_one_line(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(pickle.dumps({"a": 1}))  # PyTorch before 1.6 wrote plain pickles
    assert "is not a PyTorch file (a zip, since PyTorch 1.6)" in fails(tmp_path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme", "")
    assert "holds no data.pkl" in fails(tmp_path)
    torch_file(path, {}, {}, order=b"big")
    assert "holds big-endian values" in fails(tmp_path)
    whole = save(path, TENSORS).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "not a whole one" in fails(tmp_path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", b"\x80\x02}q")
    assert "is not a pickle of tensors" in fails(tmp_path)
