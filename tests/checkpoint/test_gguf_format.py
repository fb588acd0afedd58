"""Our reading of the header agrees with the gguf package's, and damage is named."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from peagle_jax.checkpoint.embedded import embedded_path
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.gguf_format import TensorData, read_header


@pytest.fixture
def small(tmp_path):
    """A file with a value of every type and two tensors."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -70000)
    writer.add_uint64("a.u64", 2**60)
    writer.add_int64("a.i64", -(2**60))
    writer.add_float32("a.f32", 0.25)
    writer.add_float64("a.f64", 1e-300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "naïve \n 🙂")
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.strings", ["x", "", "ÿ"])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("vector", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def assert_agrees_with_the_package(path, tensors: slice) -> None:
    header, reader = read_header(path), gguf.GGUFReader(path)
    theirs = {key: f.contents() for key, f in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == theirs
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    data = TensorData(path, header.tensors)
    for tensor in reader.tensors[tensors]:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert data.read(tensor.name).shape == header.tensors[tensor.name].shape == expected.shape
        np.testing.assert_array_equal(data.read(tensor.name), expected)


def test_every_type_of_value_reads_as_the_package_reads_it(small):
    assert_agrees_with_the_package(small, slice(None))


def test_the_embedded_model_reads_as_the_package_reads_it():
    assert_agrees_with_the_package(embedded_path(), slice(1, 10))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda b: b"PK\x03\x04" + b[4:], "is not a GGUF file: it starts with b'PK"),
        (lambda b: b[:4] + b"\x01" + b[5:], "GGUF version 1; expected 2 or 3"),
        (lambda b: b[:200], "is not a whole GGUF file"),
        (lambda b: b[:-40], "is cut off: tensor vector ends at byte"),
        (lambda b: b"", "is not a whole GGUF file"),
    ],
    ids=["another format", "an old version", "half a header", "half the tensors", "nothing"],
)
def test_a_damaged_file_is_one_line(small, damage, said):
    small.write_bytes(damage(small.read_bytes()))
    with pytest.raises(CheckpointError) as caught:
        TensorData(small, read_header(small).tensors)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.gguf cannot be read: No such file"):
        read_header(tmp_path / "none.gguf")


def test_a_type_that_the_package_does_not_know_names_the_tensor(small):
    header = read_header(small)
    tensors = {"odd": header.tensors["vector"]._replace(kind=9999)}
    with pytest.raises(CheckpointError, match="tensor odd has unknown type number 9999"):
        TensorData(small, tensors)
