"""Two real processes on one machine, two CPU devices each, against one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from peagle_jax.train.loop import train
from peagle_jax.train.recipe import recipe_dict
from tests.train import tiny_run

ROOT = Path(__file__).resolve().parents[2]
MESH = {"mesh": {"fsdp": 2}}  # data takes the other two
SETTINGS = {
    "optimizer": {"batch_rows": 4, "steps": 6},
    "run": {"validate_every": 3, "validate_rows": 6, "checkpoint_every": 3},
}


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def start(recipe, path, happenings):
    """A process for each happening (what, at which step) of distributed_run."""
    path.write_text(yaml.safe_dump(recipe_dict(recipe)))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=2")
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    module = [sys.executable, "-m", "tests.train.distributed_run", str(path)]
    others = ["--coordinator-address", address, "--num-processes", str(len(happenings)), "--process-id"]
    return [
        subprocess.Popen(
            [*module, what, str(step), *others, str(i)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, (what, step) in enumerate(happenings)
    ]


def finish(processes, seconds=200):
    try:
        said = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], said


def test_two_processes_train_as_one_and_stop_and_go_on_together(prepared, console):
    train(tiny_run.recipe(prepared, output=str(prepared / "alone"), **SETTINGS), console)
    together = tiny_run.recipe(prepared, **SETTINGS, **MESH)
    path = prepared / "recipe.yaml"

    status, said = finish(start(together, path, [("nothing", 0), ("term", 2)]))
    assert status == [143, 143], said
    stopped = records(prepared / "out")[-1]["step"]
    assert 2 <= stopped < 5 and f"stopped after step {stopped} of 6" in said[0][0]
    assert "mesh data 2 x fsdp 2 x sequence 1: 4 devices, in 2 processes" in said[0][0]
    assert "step" not in said[1][0]
    saved = [p.name for p in (prepared / "out" / "checkpoints").iterdir() if p.name.isdigit()]
    assert str(stopped) in saved

    status, said = finish(start(together, path, [("nothing", 0)] * 2))
    assert status == [0, 0], said
    assert f"going on after step {stopped}" in said[0][0]
    for one, both in zip(records(prepared / "alone"), records(prepared / "out"), strict=True):
        assert one["step"] == both["step"]
        for key in ("loss", "count", "accuracy", "validation_loss", "validation_accuracy"):
            if key in one:
                assert both[key] == pytest.approx(one[key], rel=1e-4)
    heads = [load_file(prepared / run / "head" / "model.safetensors") for run in ("alone", "out")]
    assert heads[0].keys() == heads[1].keys()
    for name in heads[0]:
        np.testing.assert_allclose(*(h[name].astype(np.float32) for h in heads), rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("happening", ["error", "killed"])
def test_a_process_that_fails_does_not_leave_the_other_waiting(prepared, happening):
    recipe = tiny_run.recipe(prepared, **SETTINGS, **MESH)
    happenings = [("nothing", 0), (happening, 3)]
    status, said = finish(start(recipe, prepared / "recipe.yaml", happenings))
    assert status[0] not in (0, None) and status[1] not in (0, None)
    if happening == "error":
        assert said[1][1].splitlines()[-1] == "error: this process alone failed" and status[1] == 2
