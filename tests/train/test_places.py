import os
from pathlib import Path

import pytest

from peagle_jax.train.places import check_writable, existing
from peagle_jax.train.recipe import TrainError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "loose").symlink_to(tmp_path / "nowhere")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("inner", "a folder"),
        ("file", "a file"),
        ("new/one", "a folder"),
        ("new/one", "a file"),
        ("", "a folder"),
    ],
)
def test_a_free_place_is_accepted_and_left_as_it_was(folder, name, wanted):
    before = sorted(folder.rglob("*"))
    check_writable("output", folder / name, wanted)
    assert sorted(folder.rglob("*")) == before and (folder / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("name", "wanted", "words"),
    [
        ("file", "a folder", "file is a file, expected a folder; move it away or choose another output"),
        ("inner", "a file", "inner is a folder, expected a file; move it away"),
        ("loose", "a folder", "loose is neither a file nor a folder, expected a folder"),
        (
            "file/deep/run",
            "a folder",
            "file/deep/run cannot be written: .*/file is a file; choose another output",
        ),
    ],
)
def test_what_stands_in_the_way_is_named(folder, name, wanted, words):
    with pytest.raises(TrainError, match=words):
        check_writable("output", folder / name, wanted)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder that refuses root too")
def test_a_folder_that_refuses_to_be_written_is_told():
    with pytest.raises(TrainError, match="/proc/x/run cannot be written: .*; choose another output"):
        check_writable("output", Path("/proc/x/run"), "a folder")


def test_the_nearest_place_that_exists_is_found(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert existing(folder / "inner" / "a" / "b") == folder / "inner"
    assert existing(folder.relative_to(folder) / "a") == folder
    assert existing(folder / "loose") == folder / "loose"
