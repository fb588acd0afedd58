"""The training loop: batches, steps, validation, checkpoints, exports, and a clean stop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from peagle_jax.train.checkpoints import Checkpoints
from peagle_jax.train.data import Prefetched, training_batches, validation_batches
from peagle_jax.train.export import export_head
from peagle_jax.train.losses import Metrics
from peagle_jax.train.partition import Batch
from peagle_jax.train.progress import progress_bar
from peagle_jax.train.recipe import Recipe, TrainError, recipe_dict
from peagle_jax.train.setup import Setup, build
from peagle_jax.train.step import StepReport, TrainState, make_evaluation, make_optimizer, make_step, schedule


def total_steps(recipe: Recipe, rows: int) -> int:
    """Steps of the whole run."""
    if recipe.optimizer.steps > 0:
        return recipe.optimizer.steps
    return max(math.ceil(recipe.optimizer.epochs * rows / recipe.optimizer.batch_rows), 1)


def ratios(total: Any, count: Any) -> list[float | None]:
    """total / count by depth; None where nothing was counted."""
    return [
        float(t) / float(c) if c > 0 else None
        for t, c in zip(np.asarray(total), np.asarray(count), strict=True)
    ]


def acceptance_lengths(accuracy: list[float | None]) -> list[float]:
    """Estimated tokens a round for K = 1, 2, ...: 1 + sum over j of the product of accuracies to j.

    It takes the depths as independent, given that the earlier drafts were right.
    """
    out, product, length = [], 1.0, 1.0
    for value in accuracy:
        product *= value or 0.0
        length += product
        out.append(length)
    return out


def row_mesh(micro: int) -> Mesh | None:
    """A mesh of all local devices where ``micro`` rows spread over them evenly, else None: one device."""
    devices = jax.local_devices()
    return Mesh(np.array(devices), ("data",)) if len(devices) > 1 and micro % len(devices) == 0 else None


def place_batches(micro: int) -> Callable[[Batch], Batch]:
    """Splits a host batch into micro-batches of ``micro`` rows and puts it on the devices.

    Rows spread over all local devices where their number divides; the step then runs data-parallel.
    """
    mesh = row_mesh(micro)
    if mesh is not None:
        rows = NamedSharding(mesh, PartitionSpec(None, "data"))
        rollouts = NamedSharding(mesh, PartitionSpec(None, None, "data"))
    else:
        rows = rollouts = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def split(x: np.ndarray, axis: int) -> np.ndarray:
        x = x.reshape(*x.shape[:axis], x.shape[axis] // micro, micro, *x.shape[axis + 1 :])
        return np.moveaxis(x, axis, 0)

    def place(batch: Batch) -> Batch:
        values = {}
        for field in dataclasses.fields(batch):
            on_rollouts = field.name in ("anchors", "lengths")
            value = split(np.asarray(getattr(batch, field.name)), 1 if on_rollouts else 0)
            values[field.name] = jax.device_put(value, rollouts if on_rollouts else rows)
        return Batch(**values)

    return place


def replicated(tree: Any, micro: int) -> Any:
    """The tree on every device that ``place_batches`` uses."""
    mesh = row_mesh(micro)
    shared = jax.local_devices()[0] if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.device_put(tree, shared)


@contextlib.contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second signal acts as usual."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: Any) -> None:
        event.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, request)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class MetricsLog:
    """JSON lines. Lines past ``step`` (of a run that died after its last checkpoint) are dropped."""

    def __init__(self, path: Path, step: int):
        kept = []
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
        path.write_text("".join(line + "\n" for line in kept))
        self.path = path

    def write(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


@dataclasses.dataclass
class Window:
    """Sums since the last line of the log."""

    started: float
    steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    loss_sum: Any = 0.0
    correct: Any = 0.0
    count: Any = 0.0

    def add(self, report: StepReport, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.loss += float(report.loss)
        for name in ("loss_sum", "correct", "count"):
            setattr(self, name, getattr(self, name) + np.asarray(getattr(report.metrics, name), np.float64))

    def record(self, step: int, rate: float) -> dict[str, Any]:
        return {
            "step": step,
            "loss": self.loss / self.steps,
            "learning_rate": rate,
            "tokens_per_second": self.tokens / (time.monotonic() - self.started),
            "accuracy": ratios(self.correct, self.count),
            "depth_loss": ratios(self.loss_sum, self.count),
            "count": [int(c) for c in np.asarray(self.count)],
        }


def _shown(values: list[float | None]) -> str:
    return " ".join("n/a" if v is None else f"{v:.3f}" for v in values)


def check_finite(report: StepReport, state: TrainState, step: int) -> None:
    """Raises TrainError naming the step and the first weight whose gradient is not finite."""
    squares = np.asarray(report.squares)
    if math.isfinite(float(report.loss)) and np.isfinite(squares).all():
        return
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]
    bad = next((path for path, s in zip(paths, squares, strict=True) if not np.isfinite(s)), None)
    where = f"first in the gradient of {bad}" if bad else "in the loss alone"
    raise TrainError(
        f"step {step}: loss {float(report.loss)} is not finite, {where}; the last checkpoint is kept. "
        "Lower optimizer.learning_rate, or set head.norm_before_fc"
    )


def validate(
    setup: Setup, evaluate: Callable[..., Metrics], params: Any, frozen: Any, micro: int
) -> dict[str, Any]:
    """Loss, accuracy by depth and estimated acceptance lengths on held-out rows."""
    assert setup.heldout is not None
    run = setup.recipe.run
    rows = min(micro, len(setup.heldout))
    place = place_batches(rows)
    total: Metrics | None = None
    for batch in validation_batches(setup.heldout, run.validate_rows, rows, setup.recipe.seed, setup.cod):
        metrics = evaluate(params, frozen, jax.tree.map(lambda x: x[0], place(batch)))
        total = metrics if total is None else total + metrics
    assert total is not None
    accuracy = ratios(total.correct, total.count)
    return {
        "validation_loss": float(total.loss_sum.sum() / jnp.maximum(total.count.sum(), 1.0)),
        "validation_accuracy": accuracy,
        "validation_depth_loss": ratios(total.loss_sum, total.count),
        "acceptance_length": acceptance_lengths(accuracy),
    }


def head_metadata(setup: Setup, step: int, steps: int, results: dict[str, Any]) -> dict[str, Any]:
    """What an exported head says about itself; folders of the machine are left out."""
    recipe = recipe_dict(setup.recipe)
    recipe["data"]["files"] = [Path(f).name for f in recipe["data"]["files"]]
    del recipe["output"], recipe["features"]["folder"]
    return {"target": setup.target.name, "step": step, "steps": steps, "recipe": recipe, **results}


def train(recipe: Recipe, console: Console) -> Path:
    """Trains, or goes on with a run that was stopped; returns the exported head's folder.

    Raises TrainError (also for a loss that is not finite), CheckpointError, ConfigError.
    """
    setup = build(recipe)
    for note in setup.notes:
        console.print(note, highlight=False)
    output = Path(recipe.output)
    output.mkdir(parents=True, exist_ok=True)
    steps = total_steps(recipe, len(setup.train))
    rows = recipe.optimizer.batch_rows
    micro = recipe.optimizer.micro_rows or rows
    dtype = setup.frozen.embed.dtype

    optimizer = make_optimizer(recipe.optimizer, steps)
    params = jax.tree.map(jnp.copy, setup.params)  # the state is donated; the target may share arrays
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    state, frozen = replicated((state, setup.frozen), micro)
    checkpoints = Checkpoints(output / "checkpoints", recipe.run.keep_checkpoints, setup.identity)
    if checkpoints.latest is not None:
        state = checkpoints.restore(state)
        console.print(f"going on after step {int(state.step)} of {output}")
    start = int(state.step)
    log = MetricsLog(output / "metrics.jsonl", start)
    rate = schedule(recipe.optimizer, steps)
    step_function = make_step(optimizer, setup.objective, dtype)
    evaluate = make_evaluation(setup.objective, dtype)
    place = place_batches(micro)

    def prepared() -> Iterator[tuple[int, Batch]]:
        for batch in training_batches(setup.train, start, rows, recipe.seed, setup.cod):
            yield int((np.asarray(batch.segment_ids) >= 0).sum()), place(batch)

    results: dict[str, Any] = {}
    head = output / "head"

    def save(step: int) -> None:
        checkpoints.save(step, state)
        metadata = head_metadata(setup, step, steps, results)
        export_head(head, setup.cfg, setup.target.config, state.params, frozen, setup.draft_ids, metadata)

    batches = Prefetched(prepared())
    window = Window(time.monotonic())
    pending: tuple[int, int, StepReport] | None = None
    done = start
    with stop_requests() as stop, progress_bar(console, "steps") as bar, contextlib.closing(batches):
        task = bar.add_task("training", total=steps, completed=start, note="")

        def settle() -> None:
            """Reads the last dispatched step's results."""
            nonlocal pending, window
            if pending is None:
                return
            number, tokens, report = pending
            pending = None
            check_finite(report, state, number)
            window.add(report, tokens)
            bar.update(task, completed=number)
            if number % recipe.run.log_every == 0 or number == steps:
                record = window.record(number, float(rate(number - 1)))
                log.write(record)
                line = (
                    f"loss {record['loss']:.4f} accuracy {_shown(record['accuracy'])} "
                    f"{record['tokens_per_second']:,.0f} tokens/s"
                )
                bar.update(task, note=line)
                if not console.is_terminal:
                    console.print(f"step {number}/{steps} {line}", highlight=False)
                window = Window(time.monotonic())

        for step in range(start, steps):
            tokens, batch = next(batches)
            state, report = step_function(state, frozen, batch)
            settle()
            pending = (step + 1, tokens, report)
            done = step + 1
            every, check = recipe.run.checkpoint_every, recipe.run.validate_every
            if setup.heldout is not None and ((check and done % check == 0) or done == steps):
                settle()
                results = validate(setup, evaluate, state.params, frozen, micro)
                log.write({"step": done, **results})
                console.print(
                    f"step {done}: held-out loss {results['validation_loss']:.4f} accuracy "
                    f"{_shown(results['validation_accuracy'])}; estimated acceptance length "
                    f"{_shown(results['acceptance_length'])} for K = 1..{setup.depths}",
                    highlight=False,
                )
                window.started = time.monotonic() if window.steps == 0 else window.started
            if (every and done % every == 0) or stop.is_set():
                settle()
                save(done)
            if stop.is_set():
                break
        settle()
    save(done)
    checkpoints.close()
    if done < steps:
        console.print(f"stopped after step {done} of {steps}; the same command goes on from there")
    else:
        console.print(f"trained {steps} steps; the head is in {head}")
    return head
