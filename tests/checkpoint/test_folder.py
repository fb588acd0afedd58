"""References, JSON files, safetensors files and replacing a folder."""

from __future__ import annotations

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from peagle_jax.checkpoint import folder
from peagle_jax.checkpoint.errors import CheckpointError
from tests.checkpoint.files import write_json, write_shards


def fails(call, *arguments) -> str:
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_itself(tmp_path):
    assert folder.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("ref", ["/no/such/folder", "./nothing", "a/b/c", ""])
def test_a_path_that_is_not_there_is_never_asked_of_the_hub(ref, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert "does not exist" in fails(folder.resolve, ref)


def test_a_hub_id_is_fetched_at_its_revision(tmp_path, monkeypatch):
    asked = {}

    def fetch(ref, revision, allow_patterns):
        asked.update(ref=ref, revision=revision, patterns=allow_patterns)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert folder.resolve("someone/model", "v2") == tmp_path
    assert (asked["ref"], asked["revision"]) == ("someone/model", "v2")
    assert "*.bin" not in asked["patterns"]


@pytest.mark.parametrize("file", ["model.safetensors", "arrays/x", None])
def test_pickles_are_fetched_only_where_there_is_nothing_else(tmp_path, monkeypatch, file):
    asked = []

    def fetch(ref, revision, allow_patterns):
        asked.append(allow_patterns)
        return str(tmp_path)

    if file is not None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert folder.resolve("someone/head") == tmp_path
    assert ["pytorch_model*.bin" in patterns for patterns in asked] == [False] + [True] * (file is None)


def test_files_of_another_kind_of_weights_are_dropped_when_a_folder_is_replaced(tmp_path):
    for name in ("a.safetensors", "pytorch_model.bin", "orbax.json", "README.md"):
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / name).touch()
    folder.replace_folder(tmp_path / "x", lambda into: (into / "new").touch(), drop=folder.WEIGHTS)
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["README.md", "new"]


def test_a_hub_that_refuses_is_one_line(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("404 Client Error\nmany\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert fails(folder.resolve, "someone/none").endswith("the Hugging Face hub says: 404 Client Error")


def test_json_files_that_are_not_there_or_not_objects(tmp_path):
    assert "has no config.json" in fails(folder.read_json, tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    assert "is not readable JSON" in fails(folder.read_json, tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1]")
    assert "holds a list; expected a JSON object" in fails(folder.read_json, tmp_path / "config.json")


TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.array([True, False]),
    "d": np.arange(3, dtype=np.float16),
}


def assert_reads_all(source: folder.SafeTensors) -> None:
    assert set(source.names()) == set(TENSORS)
    for name, expected in TENSORS.items():
        found = source.read(name)
        assert (source.shape(name), found.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(found, expected)


def test_one_file_and_shards_hold_the_same_tensors(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_reads_all(folder.SafeTensors(tmp_path))
    assert_reads_all(folder.SafeTensors(write_shards(tmp_path / "shards", {}, TENSORS)))


def test_shards_that_are_not_whole_are_one_line(tmp_path):
    shards = write_shards(tmp_path, {}, TENSORS)
    index = folder.read_json(shards / "model.safetensors.index.json")
    first = "model-00001-of-00003.safetensors"
    write_json(shards / "model.safetensors.index.json", {"weight_map": index["weight_map"] | {"e": first}})
    assert f"{first} lacks tensor e" in fails(folder.SafeTensors, shards)
    (shards / first).write_bytes((shards / first).read_bytes()[:-1])
    assert f"{first} is not a whole safetensors file" in fails(folder.SafeTensors, shards)
    (shards / first).unlink()
    assert f"{first} is missing" in fails(folder.SafeTensors, shards)


def test_a_folder_without_weights_says_what_it_has_instead(tmp_path):
    assert "has no model.safetensors" in fails(folder.SafeTensors, tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "convert pytorch_model.bin" in fails(folder.SafeTensors, tmp_path)


def test_a_file_in_the_way_is_not_replaced(tmp_path):
    (tmp_path / "head").write_text("precious")
    assert "is a file" in fails(folder.replace_folder, tmp_path / "head", lambda into: None)
    assert (tmp_path / "head").read_text() == "precious"


def test_any_error_of_the_writer_leaves_nothing_behind(tmp_path):
    def write(into):
        (into / "half").touch()
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        folder.replace_folder(tmp_path / "new", write)
    assert list(tmp_path.iterdir()) == []


def test_parents_are_made(tmp_path):
    folder.replace_folder(tmp_path / "a" / "b", lambda into: (into / "x").touch())
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["x"]


@pytest.mark.parametrize("files", [None, [], "x", {"a": 5}, {"a": None}, {"a": "b", "c": 4}], ids=repr)
def test_an_index_of_another_kind_is_refused(tmp_path, files):
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": files})
    with pytest.raises(CheckpointError, match="weight_map must give each tensor the name of its file"):
        folder.SafeTensors(tmp_path)


def test_json_without_end_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is not readable JSON"):
        folder.read_json(tmp_path / "config.json")
