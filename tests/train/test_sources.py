import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.train.data import BatchLoader
from peagle_jax.train.loop import train
from peagle_jax.train.recipe import TrainError
from peagle_jax.train.setup import build
from peagle_jax.train.sources import open_source
from peagle_jax.train.step import gradients, make_evaluation
from tests.train import tiny_run

ONLINE = {"mode": "online"}


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_the_step_computes_what_would_have_been_stored(prepared, method):
    """Loss, metrics and gradients of one step in micro-batches, online against stored features."""
    found = {}
    for mode in ("disk", "online"):
        options = {"method": method, "loss": {"ttt_steps": 3}, "features": {"mode": mode}}
        setup = build(tiny_run.recipe(prepared, **options))
        assert (setup.frozen.target is not None) == (mode == "online")
        _, batch = next(BatchLoader(setup.train, 4, 0, setup.cod))

        def split(x, axis):
            return np.moveaxis(np.stack(np.split(x, 2, axis)), 0, 0)

        rollouts = ("anchors", "lengths")
        parts = {
            f.name: split(getattr(batch, f.name), 1 if f.name in rollouts else 0)
            for f in dataclasses.fields(batch)
        }
        run = jax.jit(lambda p, z, b, o=setup.objective: gradients(p, z, b, o, jnp.float32))
        loss, gradient, metrics = run(setup.params, setup.frozen, type(batch)(**parts))
        whole = make_evaluation(setup.objective, jnp.float32)(setup.params, setup.frozen, batch)
        found[mode] = jax.tree.leaves((loss, gradient, metrics, whole))
        assert float(metrics.count.sum()) == float(whole.count.sum()) > 0
    for a, b in zip(found["disk"], found["online"], strict=True):
        scale = float(jnp.abs(a).max()) + 1e-12
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * scale)


def test_a_run_without_a_folder_learns_the_same(prepared, console):
    train(tiny_run.recipe(prepared, output=str(prepared / "disk")), console)
    shutil.rmtree(prepared / "features")
    train(tiny_run.recipe(prepared, output=str(prepared / "online"), features=ONLINE), console)
    assert "features: computed in every step" in console.file.getvalue()
    assert not (prepared / "features").exists()
    disk, online = records(prepared / "disk"), records(prepared / "online")
    assert [r["step"] for r in disk] == [r["step"] for r in online]
    compared = 0
    for a, b in zip(disk, online):
        for key in ("loss", "validation_loss"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=1e-4)
                compared += 1
    assert compared >= 9


def test_a_run_may_go_on_with_the_other_kind_of_features(prepared, console):
    train(tiny_run.recipe(prepared, output=str(prepared / "whole")), console)
    train(tiny_run.recipe(prepared, optimizer={"steps": 4}), console)
    train(tiny_run.recipe(prepared, features=ONLINE), console)
    assert "going on after step 4" in console.file.getvalue()
    last, expected = (records(prepared / name)[-2:] for name in ("out", "whole"))
    for a, b in zip(last, expected):
        for key in ("loss", "validation_loss"):
            if key in b:
                assert a[key] == pytest.approx(b[key], rel=1e-4)


def test_a_sample_has_the_states_that_are_stored(prepared):
    disk, online = (open_source(tiny_run.recipe(prepared, features={"mode": m})) for m in ("disk", "online"))
    a, b = disk.sample(5, 3), online.sample(5, 3)
    assert len(b["features"]) == 5 and (disk.weights, disk.data) == (online.weights, online.data)
    for key in a:
        np.testing.assert_allclose(a[key], b[key], rtol=1e-5, atol=1e-5)


def test_a_manifest_of_another_width_than_the_targets_is_refused(prepared):
    path = prepared / "features" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 13}))
    with pytest.raises(
        TrainError, match="says that its hidden_size is 13, but tiny has 12; delete the folder"
    ):
        open_source(tiny_run.recipe(prepared))


def test_stored_features_of_other_data_are_refused(prepared):
    with pytest.raises(TrainError, match=r"holds features of data.jsonl, but data.files names nope.jsonl"):
        open_source(tiny_run.recipe(prepared, data={"files": ["elsewhere/nope.jsonl"]}))


def test_prompts_carry_loss_online_too(prepared):
    recipe = tiny_run.recipe(prepared, features=ONLINE, loss={"on_prompts": True})
    source = open_source(recipe)
    sample = source.sample(3, 3)
    np.testing.assert_array_equal(sample["flags"], sample["segment_ids"] >= 0)
    assert source.heldout.rows(np.array([0]))["flags"].sum() < (source.heldout.array("tokens")[0] != 0).sum()
