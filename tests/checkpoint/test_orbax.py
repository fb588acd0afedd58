"""Named arrays through Orbax, bit for bit, whatever devices wrote them."""

from __future__ import annotations

import json
import os
import signal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from peagle_jax.checkpoint import orbax
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.folder import WEIGHTS, replace_folder
from peagle_jax.checkpoint.orbax import OrbaxTensors, read_shapes, restore_arrays, save_arrays

ARRAYS = {
    "a.weight": np.arange(24, dtype=np.float32).reshape(4, 6),
    "layers.0.b": np.arange(8).astype(ml_dtypes.bfloat16),
    "half": np.arange(4, dtype=np.float16),
    "d2t": np.array([2**40, -1, 0, 7]),
    "t2d": np.array([True, False]),
}


def save(folder, arrays=ARRAYS):
    replace_folder(folder, lambda into: save_arrays(into, arrays), drop=WEIGHTS)
    return folder


def assert_equal(found, arrays=ARRAYS) -> None:
    assert found.keys() == arrays.keys()
    for name, value in arrays.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes()


def test_arrays_come_back_bit_for_bit_with_64_bit_maps(tmp_path):
    save(tmp_path / "x")
    assert_equal(restore_arrays(tmp_path / "x"))
    source = OrbaxTensors(tmp_path / "x")
    assert {n: source.shape(n) for n in source.names()} == {n: a.shape for n, a in ARRAYS.items()}
    assert_equal({name: source.read(name) for name in source.names()})


def test_what_four_devices_wrote_other_numbers_read(tmp_path):
    narrow = {name: value for name, value in ARRAYS.items() if name != "d2t"}  # 64 bits are NumPy's only
    row = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x"))
    whole = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec())
    placed = {n: jax.device_put(v, row if v.shape[0] % 4 == 0 else whole) for n, v in narrow.items()}
    save(tmp_path / "x", placed)
    assert_equal(restore_arrays(tmp_path / "x"), narrow)
    one = SingleDeviceSharding(jax.devices()[3])
    square = NamedSharding(jax.make_mesh((2, 2), ("a", "b")), PartitionSpec())
    split = NamedSharding(jax.make_mesh((2, 2), ("a", "b")), PartitionSpec("a", "b"))
    for chosen in (lambda name, shape: one, lambda name, shape: split if len(shape) == 2 else square):
        found = restore_arrays(tmp_path / "x", chosen)
        assert_equal(found, narrow)
        assert {n: v.sharding for n, v in found.items()} == {n: chosen(n, v.shape) for n, v in narrow.items()}


def test_shapes_are_read_without_arrays(tmp_path):
    save(tmp_path / "x")
    (tmp_path / "x" / "arrays").rename(tmp_path / "elsewhere")
    assert read_shapes(tmp_path / "x")["a.weight"] == ((4, 6), np.dtype(np.float32))
    with pytest.raises(CheckpointError, match="cannot be restored"):
        restore_arrays(tmp_path / "x")


def test_saving_again_replaces_and_other_weights_leave_with_it(tmp_path):
    save(tmp_path / "x")
    (tmp_path / "x" / "model.safetensors").write_bytes(b"old")
    (tmp_path / "x" / "README.md").write_text("about")
    other = {"a.weight": jnp.ones((2, 3))}
    save(tmp_path / "x", other)
    assert_equal(restore_arrays(tmp_path / "x"), other)
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["README.md", "arrays", "orbax.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_cannot_be_restored_is_one_line(tmp_path):
    folder = save(tmp_path / "x")
    header = json.loads((folder / "orbax.json").read_text())
    assert header["format_version"] == 1

    def fails(**changes) -> str:
        (folder / "orbax.json").write_text(json.dumps(header | changes))
        with pytest.raises(CheckpointError) as caught:
            restore_arrays(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "has format_version 9; expected 1" in fails(format_version=9)
    assert "does not describe arrays" in fails(arrays={"a": [[3], "float31"]})
    assert "does not describe arrays" in fails(arrays=[3])
    assert "cannot be restored" in fails(arrays={"z": [[3], "float32"]})
    (folder / "orbax.json").unlink()
    with pytest.raises(CheckpointError, match="has no orbax.json"):
        restore_arrays(folder)


def test_an_array_without_values_is_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor e of shape \[0, 3\] has no values"):
        save(tmp_path / "x", {"e": np.zeros((0, 3))})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_waits_until_the_writers_are_done(tmp_path, monkeypatch):
    """A folder that is being replaced is cleared after it, and nobody writes to it any more."""
    done = []
    write = orbax.ocp.StandardCheckpointer.save

    def interrupted(self, *arguments):
        os.kill(os.getpid(), signal.SIGINT)
        write(self, *arguments)
        done.append(True)

    monkeypatch.setattr(orbax.ocp.StandardCheckpointer, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "o")
    assert done == [True]
    assert list(tmp_path.iterdir()) == []


def test_what_the_writers_raise_of_a_disk_is_one_line(tmp_path, monkeypatch):
    def full(self, *arguments):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device\nsource: somewhere")

    monkeypatch.setattr(orbax.ocp.StandardCheckpointer, "save", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*arrays: RESOURCE_EXHAUSTED: No space left.*$"):
        save_arrays(tmp_path, {"a": np.ones(3)})
