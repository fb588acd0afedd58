import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.checkpoint.head import load_head
from peagle_jax.train import loop
from peagle_jax.train.data import indices_of_step
from peagle_jax.train.loop import lock_output, total_steps, train
from peagle_jax.train.prepare import compute_features
from peagle_jax.train.recipe import TrainError
from tests.tiny import TARGET
from tests.train import tiny_run

ROOT = Path(__file__).resolve().parents[2]
MEASURED = {
    "tokens_per_second",
    "step_seconds",
    "peak_host_bytes",
    "peak_device_bytes",
}  # what no two runs share


def lines(folder, output="out"):
    return [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]


def saved_steps(folder):
    return sorted(int(p.name) for p in (folder / "out" / "checkpoints").iterdir() if p.name.isdigit())


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
    expected = lines(prepared, "straight")

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
    _, number = loop.train_until_stopped(tiny_run.recipe(prepared), console)
    assert number == signal.SIGTERM
    assert "stopped after step 5 of 8; the same command goes on from there" in console.file.getvalue()
    assert (prepared / "out" / "head" / "config.json").exists()
    monkeypatch.setattr(loop, "make_step", loop_make_step)
    assert loop.train_until_stopped(tiny_run.recipe(prepared), console)[1] == 0
    assert "going on after step 5" in console.file.getvalue()
    found = losses(prepared)
    assert len(calls) == 5 and sorted(found) == list(range(1, 9))
    for record in expected:
        if "loss" in record:
            assert found[record["step"]] == pytest.approx(record["loss"], rel=1e-6)
    held = {r["step"]: r["validation_loss"] for r in lines(prepared) if "validation_loss" in r}
    assert held[8] == pytest.approx(expected[-1]["validation_loss"], rel=1e-6)


def test_weights_that_are_not_finite_are_never_saved_or_exported(prepared, console):
    wild = {"learning_rate": 1e30, "weight_decay": 1e30, "clip": 0.0, "steps": 1}
    with pytest.raises(
        TrainError, match=r"step 1: .* is not finite after its update; .* optimizer.weight_decay"
    ):
        train(tiny_run.recipe(prepared, optimizer=wild), console)
    assert saved_steps(prepared) == []
    assert not list(prepared.rglob("head/model.safetensors"))


def test_two_runs_never_write_to_one_folder(prepared, console):
    recipe = tiny_run.recipe(prepared, optimizer={"steps": 1})
    Path(recipe.output).mkdir()
    lock = lock_output(Path(recipe.output))
    with pytest.raises(TrainError, match="another run writes to .* choose another output"):
        train(recipe, console)
    assert not list(Path(recipe.output).glob("checkpoints/*"))
    lock.release()
    train(recipe, console)
    lock_output(Path(recipe.output)).release()  # the run has let go of it


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("head", {"num_depths": 2}, r"head\.num_depths \d, not 2"),
        ("cod", {"ratio": 0.8}, r"cod\.ratio .*, not 0.8"),
        ("seed", 4, r"seed \d, not 4"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(prepared, console, section, change, named):
    train(tiny_run.recipe(prepared, optimizer={"steps": 1}), console)
    with pytest.raises(TrainError, match=f"holds another run: {named}"):
        train(tiny_run.recipe(prepared, **{section: change}), console)


def test_a_checkpoint_without_a_position_in_the_data_is_refused(prepared, console):
    train(tiny_run.recipe(prepared, optimizer={"steps": 1}), console)
    (path,) = (prepared / "out" / "checkpoints" / "1" / "run").glob("metadata*")
    found = json.loads(path.read_text())
    assert found["progress"].pop("position") == {"next_index": 1}
    path.write_text(json.dumps(found))
    with pytest.raises(TrainError, match="checkpoint 1 .* holds no position in the data"):
        train(tiny_run.recipe(prepared), console)


def test_a_longer_schedule_may_go_on_and_a_shorter_one_may_not(prepared, console):
    train(tiny_run.recipe(prepared, optimizer={"steps": 2}), console)
    train(tiny_run.recipe(prepared, optimizer={"steps": 3}), console)
    assert sorted(losses(prepared)) == [1, 2, 3]
    message = "out holds a run of 3 steps, but the recipe asks for 1; set optimizer.steps to 3 or more"
    with pytest.raises(TrainError, match=message):
        train(tiny_run.recipe(prepared, optimizer={"steps": 1}), console)
    assert sorted(losses(prepared)) == [1, 2, 3] and saved_steps(prepared) == [2, 3]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "checkpoints",
            "x",
            "out/checkpoints is a file, expected a folder; move it away or choose",
        ),
        ("head", "x", "out/head is a file, expected a folder"),
        ("tensorboard", "x", "out/tensorboard is a file, expected a folder"),
        ("metrics.jsonl", None, "out/metrics.jsonl is a folder, expected a file"),
        ("metrics.jsonl", "\udcff\n", "out/metrics.jsonl is not UTF-8 text at byte 0"),
    ],
)
def test_what_is_in_the_way_of_a_run_is_told_before_anything_loads(
    tmp_path, console, monkeypatch, name, content, words
):
    monkeypatch.setattr(loop, "build", None)
    path = tmp_path / "out" / name
    path.parent.mkdir()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(TrainError, match=words):
        train(tiny_run.recipe(tmp_path), console)
    assert list((tmp_path / "out").iterdir()) == [path]


def test_a_loss_that_is_not_finite_stops_with_the_step_and_keeps_the_last_checkpoint(
    prepared, console, monkeypatch
):
    class Poisoned(loop.BatchLoader):
        taken = 0

        def __next__(self):
            tokens, batch = super().__next__()
            self.taken += 1
            return tokens, batch.replace(features=batch.features * (np.inf if self.taken == 6 else 1))

    monkeypatch.setattr(loop, "BatchLoader", Poisoned)
    with pytest.raises(
        TrainError, match=r"step 6: loss nan is not finite, first in the gradient of \.fc"
    ) as raised:
        train(tiny_run.recipe(prepared), console)
    assert saved_steps(prepared) == [4]
    assert max(losses(prepared)) == 5
    count = sum(json.loads((prepared / "features" / "manifest.json").read_text())["shards"]["train"])
    for row in indices_of_step(5, 3, count, 0)[0]:  # shards hold seven rows
        assert f"{row} (shard {row // 7}, its row {row % 7})" in str(raised.value)


def test_patience_ends_a_run_and_its_best_head_is_kept_and_exported(prepared, console, monkeypatch):
    original, scripted = loop.validate, iter([3.0, 1.0, 2.0, 2.5])

    def validate(*args):
        return original(*args) | {"validation_loss": next(scripted)}

    monkeypatch.setattr(loop, "validate", validate)
    run = {"validate_every": 2, "patience": 2, "checkpoint_every": 0, "keep_checkpoints": 1}
    recipe = tiny_run.recipe(prepared, optimizer={"steps": 12}, run=run)
    folder = train(recipe, console)
    said = console.file.getvalue()
    assert "stopped early after step 8 of 12: validations without a lower loss: 2 (run.patience)" in said
    assert "is that of step 4, the best with a held-out loss of 1.0000" in said
    assert saved_steps(prepared) == [4, 8]
    described = json.loads((folder / "config.json").read_text())["peagle_jax"]
    assert (described["step"], described["validation_loss"], described["validation_step"]) == (4, 1.0, 4)

    train(recipe, console)  # the same command again finds nothing left to do, and the same head
    assert max(losses(prepared)) == 8
    assert console.file.getvalue().count("is that of step 4, the best") == 2

    monkeypatch.setattr(loop, "validate", original)
    short = tiny_run.recipe(prepared, output=str(prepared / "short"), optimizer={"steps": 4})
    other = train(short, console)
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_without_keep_best_the_last_head_is_exported(prepared, console, monkeypatch):
    original, scripted = loop.validate, iter([1.0, 2.0])
    monkeypatch.setattr(loop, "validate", lambda *a: original(*a) | {"validation_loss": next(scripted)})
    run = {"keep_best": False, "tensorboard": False, "keep_checkpoints": 1}
    train(tiny_run.recipe(prepared, run=run), console)
    assert "trained 8 steps; the head in" in console.file.getvalue()
    assert "is that of step 8\n" in console.file.getvalue()
    assert saved_steps(prepared) == [8]
    assert not (prepared / "out" / "tensorboard").exists()


def test_a_killed_run_goes_on_exactly(prepared, console):
    """SIGKILL of a process, once with a checkpoint half written and once between two."""
    settings = {"run": {"checkpoint_every": 5, "log_every": 2}, "optimizer": {"steps": 11}}
    train(tiny_run.recipe(prepared, output=str(prepared / "straight"), **settings), console)
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def run(die_at, waiting_for=0):
        words = [str(prepared), json.dumps(settings), str(die_at), str(waiting_for)]
        return subprocess.run(
            [sys.executable, "-m", "tests.train.killed_run", *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )

    assert run(6).returncode == -signal.SIGKILL
    assert run(8, waiting_for=5).returncode == -signal.SIGKILL
    last = run(0)
    assert last.returncode == 0, last.stderr
    assert "going on after step 5" in last.stdout
    expected, found = (
        [{k: v for k, v in record.items() if k not in MEASURED} for record in lines(prepared, output)]
        for output in ("straight", "out")
    )
    assert [r["step"] for r in found if "loss" in r] == [2, 4, 6, 8, 10, 11]
    assert found == expected


def test_micro_batches_train_the_same(prepared, console):
    """Four rows at once over the four test devices, against one row after another on one device."""
    assert jax.device_count() == 4
    train(tiny_run.recipe(prepared, optimizer={"batch_rows": 4, "steps": 4}), console)
    whole = losses(prepared)
    one_by_one = {"batch_rows": 4, "steps": 4, "micro_rows": 1}
    train(tiny_run.recipe(prepared, output=str(prepared / "parts"), optimizer=one_by_one), console)
    for record in lines(prepared, "parts"):
        if "loss" in record:
            assert record["loss"] == pytest.approx(whole[record["step"]], rel=1e-4)


def test_a_saved_head_can_be_trained_on(prepared, console):
    folder = train(tiny_run.recipe(prepared), console)
    init = {"source": "head", "head": str(folder)}
    train(tiny_run.recipe(prepared, output=str(prepared / "more"), init=init), console)
    assert lines(prepared, "more")[0]["loss"] < losses(prepared)[1]
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
    assert str(prepared) not in (more / "config.json").read_text()  # folders mean nothing elsewhere
    first, second = (load_head(str(f), TARGET, tiny_target.params)[1] for f in (folder, more))
    np.testing.assert_array_equal(first.draft_to_target, second.draft_to_target)


def test_a_frozen_output_table_stays_the_targets(prepared, tiny_target, console):
    folder = train(tiny_run.recipe(prepared, head={"train_lm_head": False}), console)
    cfg, params = load_head(str(folder), TARGET, tiny_target.params)
    expected = tiny_target.params.lm_head[params.draft_to_target].astype(jnp.bfloat16)
    np.testing.assert_array_equal(params.lm_head, expected.astype(jnp.float32))
    assert cfg.num_layers == 1


def test_a_trained_embedding_is_the_heads_own_and_goes_on_from_there(prepared, tiny_target, console):
    settings = {"head": {"train_embed": True}, "optimizer": {"steps": 4, "learning_rate": 1e-2}}
    folder = train(tiny_run.recipe(prepared, **settings), console)
    _, params = load_head(str(folder), TARGET, tiny_target.params)
    moved = jnp.abs(params.embed - tiny_target.params.embed).max(-1)
    assert moved[tiny_run.SPARE] > 0.01  # the mask token's row is in every deeper row
    again = {"output": str(prepared / "again"), "init": {"source": "head", "head": str(folder)}}
    settings |= {"optimizer": {"steps": 1, "learning_rate": 1e-9}}
    _, second = load_head(
        str(train(tiny_run.recipe(prepared, **settings, **again), console)), TARGET, tiny_target.params
    )
    np.testing.assert_allclose(second.embed, params.embed, atol=1e-2)


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


def test_epochs_become_steps(tmp_path):
    assert total_steps(tiny_run.recipe(tmp_path, optimizer={"steps": 0, "epochs": 2.5}), 10) == 9
    assert total_steps(tiny_run.recipe(tmp_path, optimizer={"steps": 3}), 10) == 3


def test_signals_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with loop.stop_requests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(1)
        assert signal.getsignal(signal.SIGTERM) is before  # a second signal acts as usual
    assert signal.getsignal(signal.SIGTERM) is before


def test_fewer_validation_rows_than_a_batch_are_validated(prepared, console):
    train(tiny_run.recipe(prepared, run={"validate_rows": 2}, optimizer={"steps": 4}), console)
    assert [r["step"] for r in lines(prepared) if "validation_loss" in r] == [4]
