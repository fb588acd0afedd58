"""Meshes of eight devices, in processes of their own, against one device; and placing on four, here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from peagle_jax.parallel.mesh import MeshShape, training_mesh
from peagle_jax.train.data import BatchLoader, MemoryRows, validation_batches
from peagle_jax.train.errors import TrainError
from peagle_jax.train.loop import train
from peagle_jax.train.packing import pack
from peagle_jax.train.placement import Placement, check_length, make_placement
from peagle_jax.train.tokens import Document
from tests.train import tiny_run
from tests.train.test_loop import lines

ROOT = Path(__file__).resolve().parents[2]


def meshes_of_eight(*words):
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.mesh_run", *words],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found.pop("1"), found


@pytest.mark.parametrize(
    "words",
    [
        ["peagle", "8x1x1", "2x4x1"],
        ["peagle", "2x2x2"],
        ["eagle3", "2x4x1"],
        ["eagle3", "2x2x2"],
        ["peagle", "2x2x2", "online"],
    ],
    ids=" ".join,
)
def test_every_mesh_gives_the_loss_and_the_weights_of_one_device(words):
    one, others = meshes_of_eight(*words)
    for mesh, found in others.items():
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-5)
        for a, b in zip(found["evaluation"], one["evaluation"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4)
        for a, b in zip(found["params"], one["params"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        fsdp = int(mesh.split("x")[1])
        for kind in ("params", "moments", "frozen"):
            assert found["shards"][kind] and set(found["shards"][kind]) == {fsdp}, kind


def test_the_mesh_of_a_recipe_takes_the_devices_there_are(tmp_path):
    def made(rows, **mesh):
        return make_placement(tiny_run.recipe(tmp_path, mesh=mesh, optimizer={"batch_rows": rows}))

    assert jax.device_count() == 4
    assert made(8).shape == MeshShape(4) and made(8).line() == "mesh data 4 x fsdp 1 x sequence 1: 4 devices"
    assert made(3).mesh is None  # as many rows as there are, and no mesh was asked for
    assert made(4, fsdp=2).shape == MeshShape(2, 2)
    assert made(1, sequence=4).shape == MeshShape(1, 1, 4)
    assert made(1, data=1).mesh is None
    assert made(4, data=2).line() == "mesh data 2 x fsdp 1 x sequence 1: 2 devices of 4, 2 stay idle"


@pytest.mark.parametrize(
    ("rows", "mesh", "words"),
    [
        (4, {"fsdp": 3}, "mesh fsdp 3 x sequence 1 needs a multiple of 3 devices, found 4; choose numbers"),
        (3, {"fsdp": 2}, "splits rows into 4 parts, but 3 rows run at once .* make them a multiple"),
        (3, {"data": 4}, "splits rows into 4 parts, but 3 rows run at once"),
    ],
)
def test_a_mesh_that_does_not_fit_is_told_before_anything_loads(tmp_path, rows, mesh, words):
    with pytest.raises(TrainError, match=words):
        make_placement(tiny_run.recipe(tmp_path, mesh=mesh, optimizer={"batch_rows": rows}))


def test_rows_are_split_into_equal_lengths_only(tmp_path):
    recipe = tiny_run.recipe(tmp_path, mesh={"sequence": 4})
    assert check_length(recipe, 32).count == 4
    with pytest.raises(TrainError, match="mesh.sequence 4 must divide the rows' 30 positions"):
        check_length(recipe, 30)


def test_weights_that_fsdp_does_not_divide_are_told():
    shape = MeshShape(1, 4)
    placement = Placement(training_mesh(shape, jax.devices()), shape, 4)
    with pytest.raises(TrainError, match="mesh.fsdp 4 divides no axis of fc, which is"):
        placement.place({"fc": np.zeros((6, 5), np.float32)})


class Half(Placement):
    """As a process sees it that holds the second and fourth row of four."""

    def own_rows(self, rows):
        return np.arange(1, rows, 2)


def test_a_process_makes_its_own_rows_of_a_batch_and_counts_all_tokens():
    documents = [Document(str(i), np.full(i + 3, i, np.int32), np.ones(i + 3, bool)) for i in range(8)]
    store = MemoryRows(pack(documents, 12))
    whole, part = (BatchLoader(store, 4, 0, None, own=own) for own in (None, Half(micro=4).own_batch_rows(4)))
    for _ in range(3):
        (tokens, batch), (counted, own) = next(whole), next(part)
        assert tokens == counted == int((batch.segment_ids >= 0).sum())
        np.testing.assert_array_equal(own.tokens, batch.tokens[1::2])
    assert Half(micro=2).own_batch_rows(6).tolist() == [1, 3, 5]
    assert Placement(micro=2).own_batch_rows(6).tolist() == list(range(6))


def test_a_last_validation_batch_is_filled_up_with_rows_that_count_nothing(prepared, console):
    documents = [Document(str(i), np.full(12, i, np.int32), np.ones(12, bool)) for i in range(3)]
    store = MemoryRows(pack(documents, 12))
    (batch,) = validation_batches(store, 0, 3, 0, None, np.arange(4))
    np.testing.assert_array_equal(batch.segment_ids[:, 0], [0, 0, 0, -1])
    assert batch.loss_flags[:3].any(1).all() and not batch.loss_flags[3].any()

    # Two validation rows over four devices give what they give on one.
    settings = {"run": {"validate_rows": 2}, "optimizer": {"batch_rows": 4, "steps": 1}}
    train(tiny_run.recipe(prepared, **settings), console)
    train(tiny_run.recipe(prepared, output=str(prepared / "one"), mesh={"data": 1}, **settings), console)
    four, one = ([r for r in lines(prepared, o) if "validation_loss" in r] for o in ("out", "one"))
    assert four[0]["validation_loss"] == pytest.approx(one[0]["validation_loss"], rel=1e-5)


def test_a_run_goes_on_with_another_mesh(prepared, console):
    optimizer = {"batch_rows": 4, "steps": 4}
    train(tiny_run.recipe(prepared, output=str(prepared / "one"), optimizer=optimizer), console)
    train(tiny_run.recipe(prepared, optimizer=optimizer | {"steps": 2}), console)
    train(tiny_run.recipe(prepared, optimizer=optimizer, mesh={"fsdp": 2, "sequence": 2}), console)
    assert "going on after step 2" in console.file.getvalue()
    assert "mesh data 1 x fsdp 2 x sequence 2: 4 devices" in console.file.getvalue()
    runs = [[r for r in lines(prepared, o) if "loss" in r] for o in ("one", "out")]
    expected, found = ({r["step"]: r["loss"] for r in run} for run in runs)
    assert sorted(found) == sorted(expected) == [1, 2, 3, 4]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-4)
