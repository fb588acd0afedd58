import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.train.checkpoints import Checkpoints, Progress, checksums
from peagle_jax.train.recipe import TrainError
from peagle_jax.train.step import TrainState


def state(value):
    return TrainState(jnp.array(value, jnp.int32), {"w": jnp.full((3, 5), float(value))}, {"m": jnp.ones(2)})


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path, 2, {"seed": 1}, keep_best=True)
    yield made
    made.close()


def steps(folder):
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def test_the_latest_and_the_best_are_kept(checkpoints, tmp_path):
    progress = Progress()
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.0, 2.0], 1):
        assert progress.validated(step, {"validation_loss": loss}) == (step <= 2)
        checkpoints.save(step, state(step), progress)
    checkpoints.wait()
    assert steps(tmp_path) == [2, 4, 5]
    assert checkpoints.latest == 5 and checkpoints.holds(2) and not checkpoints.holds(3)
    like = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding), state(0))
    found, saved = checkpoints.restore(like, progress.best_step)
    np.testing.assert_array_equal(found.params["w"], state(2).params["w"])
    assert saved == Progress(2, 1.0, 0, {"validation_step": 2, "validation_loss": 1.0})
    latest, saved = checkpoints.restore(state(0))
    assert int(latest.step) == 5 and saved.worse == 3 and saved.best_step == 2


def test_a_validation_that_is_not_a_number_is_no_improvement():
    progress = Progress()
    assert not progress.validated(1, {"validation_loss": float("nan")})
    assert progress.validated(2, {"validation_loss": 4.0})
    assert (progress.best_step, progress.worse) == (2, 0)


def test_training_goes_on_while_a_checkpoint_is_written(checkpoints, tmp_path, monkeypatch):
    free, finalize = threading.Event(), type(checkpoints.manager)._finalize
    monkeypatch.setattr(
        type(checkpoints.manager), "_finalize", lambda *args: free.wait(60) and finalize(*args)
    )
    before = state(4)
    expected = jax.tree.map(np.array, before)
    checkpoints.save(4, before, Progress())
    assert checkpoints.manager.is_saving_in_progress()  # save came back first
    step = jax.jit(lambda s: jax.tree.map(lambda w: w * 3, s), donate_argnums=0)
    step(step(before))
    free.set()
    checkpoints.wait()
    found, _ = checkpoints.restore(state(0))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_step_is_saved_once(checkpoints):
    checkpoints.save(4, state(4), Progress())
    checkpoints.save(4, state(9), Progress())
    checkpoints.wait()
    assert int(checkpoints.restore(state(0))[0].step) == 4


def test_a_disk_that_refuses_is_told_in_one_line(checkpoints, tmp_path, monkeypatch):
    def full():
        raise OSError(28, "No space left\non device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.manager, "wait_until_finished", full)
        with pytest.raises(TrainError, match="No space left on device") as raised:
            checkpoints.wait()
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


TOO_LARGE = """
import resource, signal, sys
import numpy as np
from peagle_jax.train.checkpoints import Checkpoints, Progress
from peagle_jax.train.errors import TrainError
from peagle_jax.train.step import TrainState
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
checkpoints = Checkpoints(sys.argv[1], 2, {})
noise = np.random.default_rng(0).random(100_000).astype(np.float32)  # nothing that compresses
try:
    checkpoints.save(1, TrainState(np.int32(1), {"w": noise}, {}), Progress())
    checkpoints.wait()
except TrainError as error:
    print(error)
"""


def test_a_write_that_the_system_refuses_is_its_reason_and_no_traceback_of_the_writers(tmp_path):
    done = subprocess.run([sys.executable, "-c", TOO_LARGE, tmp_path], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        f"a checkpoint in {tmp_path} cannot be written: File too large; the ones before it are kept"
    ]
    assert "Traceback" not in done.stderr


def test_damage_is_told_in_one_line(checkpoints, tmp_path):
    checkpoints.save(3, state(3), Progress())
    ruined = state(4).replace(params={"w": jnp.full((3, 5), np.nan)})
    checkpoints.save(4, ruined, Progress())
    checkpoints.wait()
    with pytest.raises(TrainError, match=r"checkpoint 4 .* \['w'\] is not finite in it; delete its folder"):
        checkpoints.restore(state(0), 4)
    for path in (tmp_path / "3" / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = Checkpoints(tmp_path, 2, {"seed": 1})
    with pytest.raises(TrainError, match=r"checkpoint 3 .* cannot be read: .*; delete its folder"):
        again.restore(state(0), 3)
    again.close()


def test_a_changed_bit_is_noticed(checkpoints, tmp_path):
    small = state(4).replace(params={"w": jnp.full((3, 5), 0.5), "b": jnp.zeros(3, jnp.bfloat16)})
    changed = small.replace(params={**small.params, "w": small.params["w"].at[1, 2].set(0.50000006)})
    before, after = (np.array(checksums(s)) for s in (small, changed))
    assert (before != after).sum() == 1
    checkpoints.save(4, small, Progress())
    checkpoints.wait()
    checkpoints.restore(small, 4)
    (run,) = [p for p in (tmp_path / "4" / "run").iterdir() if "checksums" in p.read_text()]
    run.write_text(run.read_text().replace(str(before[1]), str(before[1] + 1)))
    with pytest.raises(
        TrainError, match=r"checkpoint 4 .*: its arrays are not those that were saved; delete"
    ):
        checkpoints.restore(small, 4)


def test_a_folder_that_is_no_checkpoint_is_told_in_one_line(checkpoints, tmp_path):
    checkpoints.save(1, state(1), Progress())
    checkpoints.wait()
    (tmp_path / "7").mkdir()
    again = Checkpoints(tmp_path, 2, {"seed": 1})
    with pytest.raises(TrainError, match=r"checkpoint 7 .* cannot be read: .*; delete its folder"):
        again.restore(state(0), 7)
    again.close()
