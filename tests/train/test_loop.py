import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.checkpoint.head import load_head
from peagle_jax.train import loop
from peagle_jax.train.loop import MetricsLog, acceptance_lengths, ratios, total_steps, train
from peagle_jax.train.prepare import compute_features
from peagle_jax.train.recipe import TrainError
from tests.tiny import TARGET
from tests.train import tiny_run


def lines(folder):
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return {r["step"]: r["loss"] for r in lines(folder) if "loss" in r}


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_training_lowers_the_loss_and_exports_a_head_that_loads(prepared, tiny_target, console, method):
    sections = {
        "optimizer": {"steps": 30, "learning_rate": 1e-2},
        "run": {"validate_every": 15},
        "loss": {"ttt_steps": 3},
        "method": method,
    }
    folder = train(tiny_run.recipe(prepared, **sections), console)
    found = losses(prepared)
    early, late = np.mean([found[s] for s in range(1, 6)]), np.mean([found[s] for s in range(26, 31)])
    assert late < 0.6 * early
    held = [r for r in lines(prepared) if "validation_loss" in r]
    assert [r["step"] for r in held] == [15, 30]
    assert len(held[-1]["acceptance_length"]) == len(held[-1]["validation_accuracy"]) == 3
    assert held[-1]["validation_loss"] < 0.8 * early and held[-1]["acceptance_length"][-1] > 1.2

    cfg, params = load_head(str(folder), TARGET, tiny_target.params)
    assert (cfg.method, cfg.taps, cfg.draft_vocab_size) == (method, (1, 3, 5), 47)
    assert cfg.mask_token_id == (tiny_run.SPARE if method == "peagle" else None)
    assert params.embed is tiny_target.params.embed
    described = json.loads((folder / "config.json").read_text())["peagle_jax"]
    assert described["step"] == 30 and described["recipe"]["data"]["files"] == ["data.jsonl"]
    assert str(prepared) not in (folder / "config.json").read_text()


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(prepared, console, monkeypatch):
    straight = tiny_run.recipe(prepared, output=str(prepared / "straight"))
    train(straight, console)
    expected = [json.loads(x) for x in (prepared / "straight" / "metrics.jsonl").read_text().splitlines()]

    calls = []

    def stopping(*args, **kwargs):
        step = loop_make_step(*args, **kwargs)

        def wrapped(*inner):
            calls.append(1)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(*inner)

        return wrapped

    loop_make_step = loop.make_step
    monkeypatch.setattr(loop, "make_step", stopping)
    train(tiny_run.recipe(prepared), console)
    assert "stopped after step 5 of 8; the same command goes on from there" in console.file.getvalue()
    assert (prepared / "out" / "head" / "config.json").exists()
    monkeypatch.setattr(loop, "make_step", loop_make_step)
    train(tiny_run.recipe(prepared), console)
    assert "going on after step 5" in console.file.getvalue()
    found = losses(prepared)
    assert len(calls) == 5 and sorted(found) == list(range(1, 9))
    for record in expected:
        if "loss" in record:
            assert found[record["step"]] == pytest.approx(record["loss"], rel=1e-6)
    held = {r["step"]: r["validation_loss"] for r in lines(prepared) if "validation_loss" in r}
    assert held[8] == pytest.approx(expected[-1]["validation_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [("head", {"num_depths": 2}, "head"), ("cod", {"ratio": 0.8}, "cod"), ("seed", 4, "seed")],
)
def test_a_checkpoint_of_another_run_is_refused(prepared, console, section, change, named):
    train(tiny_run.recipe(prepared, optimizer={"steps": 1}), console)
    with pytest.raises(TrainError, match=f"holds a run with another {named}"):
        train(tiny_run.recipe(prepared, **{section: change}), console)


def test_a_longer_schedule_may_go_on(prepared, console):
    train(tiny_run.recipe(prepared, optimizer={"steps": 2}), console)
    train(tiny_run.recipe(prepared, optimizer={"steps": 3}), console)
    assert sorted(losses(prepared)) == [1, 2, 3]


def test_a_loss_that_is_not_finite_stops_with_the_step_and_keeps_the_last_checkpoint(
    prepared, console, monkeypatch
):
    original = loop.training_batches

    def poisoned(*args):
        for number, batch in enumerate(original(*args), 1):
            if number == 6:
                batch = batch.replace(features=batch.features * np.inf)
            yield batch

    monkeypatch.setattr(loop, "training_batches", poisoned)
    with pytest.raises(TrainError, match=r"step 6: loss nan is not finite, first in the gradient of \.fc"):
        train(tiny_run.recipe(prepared), console)
    assert sorted(int(p.name) for p in (prepared / "out" / "checkpoints").iterdir() if p.name.isdigit()) == [
        4
    ]
    assert max(losses(prepared)) == 5


def test_micro_batches_train_the_same(prepared, console):
    """Four rows at once over the four test devices, against one row after another on one device."""
    assert jax.device_count() == 4
    train(tiny_run.recipe(prepared, optimizer={"batch_rows": 4, "steps": 4}), console)
    whole = losses(prepared)
    one_by_one = {"batch_rows": 4, "steps": 4, "micro_rows": 1}
    train(tiny_run.recipe(prepared, output=str(prepared / "parts"), optimizer=one_by_one), console)
    parts = [json.loads(x) for x in (prepared / "parts" / "metrics.jsonl").read_text().splitlines()]
    for record in parts:
        if "loss" in record:
            assert record["loss"] == pytest.approx(whole[record["step"]], rel=1e-4)


def test_a_saved_head_can_be_trained_on(prepared, console):
    folder = train(tiny_run.recipe(prepared), console)
    init = {"source": "head", "head": str(folder)}
    train(tiny_run.recipe(prepared, output=str(prepared / "more"), init=init), console)
    more = [json.loads(x) for x in (prepared / "more" / "metrics.jsonl").read_text().splitlines()]
    assert more[0]["loss"] < losses(prepared)[1]
    with pytest.raises(TrainError, match="differs from the recipe in num_layers: 1, not 2"):
        train(
            tiny_run.recipe(prepared, output=str(prepared / "x"), init=init, head={"num_layers": 2}), console
        )


def test_a_saved_head_keeps_its_vocabulary_on_other_data(prepared, tiny_target, conversations, console):
    folder = train(tiny_run.recipe(prepared, optimizer={"steps": 1}), console)
    tiny_run.write_data(prepared / "few.jsonl", conversations[:8])
    changes = {
        "data": {"files": [str(prepared / "few.jsonl")]},
        "features": {"folder": str(prepared / "few"), "also": [str(prepared / "features")]},
        "init": {"source": "head", "head": str(folder)},
        "output": str(prepared / "more"),
        "optimizer": {"steps": 1},
    }
    recipe = tiny_run.recipe(prepared, **changes)
    compute_features(recipe, console)
    more = train(recipe, console)
    first, second = (load_head(str(f), TARGET, tiny_target.params)[1] for f in (folder, more))
    np.testing.assert_array_equal(first.draft_to_target, second.draft_to_target)


def test_a_frozen_output_table_stays_the_targets(prepared, tiny_target, console):
    folder = train(tiny_run.recipe(prepared, head={"train_lm_head": False}), console)
    cfg, params = load_head(str(folder), TARGET, tiny_target.params)
    expected = tiny_target.params.lm_head[params.draft_to_target].astype(jnp.bfloat16)
    np.testing.assert_array_equal(params.lm_head, expected.astype(jnp.float32))
    assert cfg.num_layers == 1


def test_features_of_another_target_do_not_train(prepared, tiny_target, console):
    tiny_target.params = tiny_run.target(seed=9).params
    with pytest.raises(TrainError, match="other weights than tiny"):
        train(tiny_run.recipe(prepared), console)


def test_a_target_that_does_not_match_its_stored_states_is_refused(prepared, console):
    for path in (prepared / "features").glob("train-*/hidden.npy"):
        stored = np.load(path)
        np.save(path, np.random.default_rng(0).normal(size=stored.shape).astype(stored.dtype) * 3)
    with pytest.raises(TrainError, match="no better than chance"):
        train(tiny_run.recipe(prepared), console)


def test_depths_that_the_sampling_never_reaches_are_refused(prepared, console):
    with pytest.raises(
        TrainError, match="keeps no row past depth 2 in rows of 32 tokens, but head.num_depths is 4"
    ):
        train(tiny_run.recipe(prepared, cod={"ratio": 0.3}, head={"num_depths": 4}), console)


def test_accuracy_without_rows_is_not_available():
    assert ratios([3.0, 0.0], [5.0, 0.0]) == [0.6, None]
    shards = [([0.0], [0.0]), ([3.0], [5.0])]  # sums first, then one division
    assert ratios(sum(np.array(c) for c, _ in shards), sum(np.array(n) for _, n in shards)) == [0.6]
    assert acceptance_lengths([0.5, 0.5, None]) == [1.5, 1.75, 1.75]


def test_epochs_become_steps(tmp_path):
    assert total_steps(tiny_run.recipe(tmp_path, optimizer={"steps": 0, "epochs": 2.5}), 10) == 9
    assert total_steps(tiny_run.recipe(tmp_path, optimizer={"steps": 3}), 10) == 3


def test_log_lines_past_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(1, 6)))
    MetricsLog(path, 3).write({"step": 4, "again": True})
    assert [json.loads(x) for x in path.read_text().splitlines()] == [
        {"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": True}
    ]  # fmt: skip


def test_signals_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with loop.stop_requests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(1)
        assert signal.getsignal(signal.SIGTERM) is before  # a second signal acts as usual
    assert signal.getsignal(signal.SIGTERM) is before
