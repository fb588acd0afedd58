"""The training loop: batches, steps, validation, checkpoints, the exported head, and a clean stop."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from filelock import FileLock, Timeout
from rich.console import Console

from peagle_jax.processes import check_agreement, is_main
from peagle_jax.train.checkpoints import Checkpoints, Progress
from peagle_jax.train.data import BatchLoader, indices_of_step
from peagle_jax.train.evaluation import DecodeEvaluation, validate
from peagle_jax.train.export import export_head
from peagle_jax.train.faults import check_finite, check_weights, row_names
from peagle_jax.train.metrics import MetricsLog, Window, open_board, read_lines, shown
from peagle_jax.train.placement import Placement, make_placement
from peagle_jax.train.places import check_writable
from peagle_jax.train.processes import StopVote, all_failed
from peagle_jax.train.progress import progress_bar
from peagle_jax.train.recipe import Recipe, TrainError, recipe_dict
from peagle_jax.train.records import file_names
from peagle_jax.train.setup import Setup, build
from peagle_jax.train.step import StepReport, TrainState, make_evaluation, make_optimizer, make_step, schedule

LOG = "metrics.jsonl"
LOCK = "run.lock"


def total_steps(recipe: Recipe, rows: int) -> int:
    """Steps of the whole run."""
    if recipe.optimizer.steps > 0:
        return recipe.optimizer.steps
    return max(math.ceil(recipe.optimizer.epochs * rows / recipe.optimizer.batch_rows), 1)


class StopRequest(threading.Event):
    """Set by a signal; ``signal`` is its number."""

    signal = 0


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """An event that SIGINT and SIGTERM set; a second signal acts as usual."""
    event = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: Any) -> None:
        event.signal = number
        event.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, request)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def head_metadata(setup: Setup, step: int, steps: int, results: dict[str, Any]) -> dict[str, Any]:
    """What an exported head says about itself; folders of the machine are left out."""
    recipe = recipe_dict(setup.recipe)
    recipe["data"]["files"] = file_names(recipe["data"]["files"])
    recipe["init"]["head"] = recipe["init"]["head"] and Path(recipe["init"]["head"]).name
    del recipe["output"], recipe["features"]["folder"], recipe["features"]["also"]
    return {"target": setup.target.name, "step": step, "steps": steps, "recipe": recipe, **results}


def batch_rows(setup: Setup, step: int) -> str:
    """The training rows of the batch of ``step``, counted from 1 as the console and the logs do."""
    recipe, count = setup.recipe, len(setup.train)
    rows, _ = indices_of_step(step - 1, recipe.optimizer.batch_rows, count, recipe.seed)
    return row_names(rows.tolist(), setup.train.starts)


def check_output(recipe: Recipe) -> None:
    """Raises TrainError unless everything that a run writes can be written; creates nothing."""
    output = Path(recipe.output)
    folders = [output, output / "checkpoints", output / "head"]
    if recipe.run.tensorboard:
        folders.append(output / "tensorboard")
    for folder in folders:
        check_writable("output", folder, "a folder")
    check_writable("output", output / LOG, "a file")
    read_lines(output / LOG)


def lock_output(output: Path) -> FileLock:
    """Keeps other runs out of the folder until it is released or the process ends, however it does.

    Raises TrainError: another run is in it.
    """
    lock = FileLock(output / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise TrainError(
            f"another run writes to {output} now; wait until it has ended, stop it, or choose another output"
        ) from error
    return lock


class Training:
    """One run, from its start or its last checkpoint on. ``state`` is donated to every step.

    Raises TrainError: the checkpoints in the output folder are of another run, or further than the
    recipe's steps, or cannot be read.
    """

    def __init__(self, setup: Setup, console: Console, placement: Placement):
        recipe, run = setup.recipe, setup.recipe.run
        self.setup, self.console, self.placement = setup, console, placement
        self.output = Path(recipe.output)
        self.output.mkdir(parents=True, exist_ok=True)
        self.lock = lock_output(self.output) if is_main() else None
        self.steps = total_steps(recipe, len(setup.train))
        check_agreement(
            "recipe, target or data",
            (recipe_dict(recipe), setup.identity),
            "give all of them the same recipe and files",
        )
        dtype = setup.frozen.embed.dtype
        if run.patience and setup.heldout is None:
            raise TrainError("run.patience needs held-out rows, and there is none; raise data.heldout")
        self.decoding = DecodeEvaluation(setup, placement) if run.decode_every else None

        optimizer = make_optimizer(recipe.optimizer, self.steps)
        with placement.assembling():
            params = jax.tree.map(jnp.copy, setup.params)  # the target may share arrays
            state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
        self.state, self.frozen = placement.place((state, setup.frozen))
        setup.frozen = self.frozen  # one copy
        self.checkpoints = Checkpoints(
            self.output / "checkpoints", run.keep_checkpoints, setup.identity, run.keep_best
        )
        self.progress = Progress()
        if self.checkpoints.latest is not None:
            self.state, self.progress = self.checkpoints.restore(self.state)
        self.done = int(self.state.step)
        if self.done > self.steps:
            raise TrainError(
                f"{self.output} holds a run of {self.done} steps, but the recipe asks for {self.steps}; set "
                f"optimizer.steps to {self.done} or more, or choose another output"
            )
        if self.done:
            console.print(f"going on after step {self.done} of {self.output}")
        rows = recipe.optimizer.batch_rows
        own = placement.own_batch_rows(rows)
        self.batches = BatchLoader(setup.train, rows, recipe.seed, setup.cod, placement.place_batch, own)
        if self.progress.position:
            self.batches.restore(self.progress.position)
        self.log = MetricsLog(self.output / LOG if is_main() else None, self.done, self._board())
        self.window = Window.restored(self.progress.window)
        self.rate = schedule(recipe.optimizer, self.steps)
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        self.step = make_step(optimizer, setup.objective, dtype, placement, shardings)
        self.evaluate = make_evaluation(setup.objective, dtype, placement)
        self.pending: tuple[int, int, StepReport] | None = None
        self.advance: Callable[..., None] = lambda **fields: None

    def _board(self) -> Any:
        if not self.setup.recipe.run.tensorboard or not is_main():
            return None
        board = open_board(self.output / "tensorboard", self.done)
        if board is None:
            self.console.print(
                "no TensorBoard files: the package tensorboardX is not installed "
                "(pip install 'peagle_jax[train]', or set run.tensorboard: false)",
                markup=False,
            )
        return board

    @property
    def exhausted(self) -> bool:
        """Whether the recipe's patience is at its end."""
        patience = self.setup.recipe.run.patience
        return patience > 0 and self.progress.worse >= patience

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to train."""
        return self.done >= self.steps or self.exhausted

    def run(self, stop: threading.Event) -> None:
        """Trains until the last step, the end of patience or ``stop``; the last state is saved."""
        every, vote = self.setup.recipe.run.checkpoint_every, StopVote(stop)
        self.console.print("compiling a step; on a CPU that takes a minute or so", highlight=False)
        with progress_bar(self.console, "steps") as bar:
            task = bar.add_task("training", total=self.steps, completed=self.done, note="")
            self.advance = lambda **fields: bar.update(task, **fields)
            while not (self.complete or vote.is_set()):
                tokens, batch = next(self.batches)
                self.state, report = self.step(self.state, self.frozen, batch)
                self.settle()
                self.done += 1
                self.pending = (self.done, tokens, report)
                if self.measure() or (every and self.done % every == 0):
                    self.save()
            self.save()

    def settle(self) -> None:
        """Reads the last dispatched step's results. Raises TrainError: they are not finite."""
        if self.pending is None:
            return
        number, tokens, report = self.pending
        self.pending = None
        check_finite(report, self.state.params, number, lambda step: batch_rows(self.setup, step))
        self.window.add(report, tokens)
        self.advance(completed=number)
        if number % self.setup.recipe.run.log_every and number != self.steps:
            return
        record = self.window.record(number, float(self.rate(number - 1)))
        self.log.write(record)
        self.window = Window()
        loss, speed = record["loss"], record["tokens_per_second"]
        self.advance(note=f"loss {loss:.3f} length {record['acceptance_length'][-1]:.2f} {speed:,.0f} tok/s")
        if not self.console.is_terminal:
            self.console.print(
                f"step {number}/{self.steps} loss {loss:.4f} accuracy {shown(record['accuracy'])} "
                f"{speed:,.0f} tokens/s",
                highlight=False,
            )

    def _due(self, every: int, at_the_end: bool) -> bool:
        return (every > 0 and self.done % every == 0) or (at_the_end and self.done == self.steps)

    def measure(self) -> bool:
        """Validates and decodes where that is due; returns whether the best head so far was found."""
        run, better = self.setup.recipe.run, False
        validates = self.setup.heldout is not None and self._due(run.validate_every, True)
        decodes = self.decoding is not None and self._due(run.decode_every, True)
        if not (validates or decodes):
            return False
        self.settle()
        before, found = time.monotonic(), {}
        if decodes:
            assert self.decoding is not None
            decoded = self.decoding(self.state.params, self.frozen)
            self.log.write({"step": self.done, **decoded}, "decode")
            self.console.print(
                f"step {self.done}: acceptance length {decoded['decode_acceptance_length']:.3f} decoding "
                f"{decoded['decode_prompts']} held-out prompts with K = {self.decoding.drafts}; accepted "
                f"by position {shown(decoded['decode_acceptance_rates'])}",
                highlight=False,
            )
            found |= decoded
        if validates:
            results = validate(self.setup, self.evaluate, self.state.params, self.frozen, self.placement)
            self.log.write({"step": self.done, **results}, "validation")
            self.console.print(
                f"step {self.done}: held-out loss {results['validation_loss']:.4f} accuracy "
                f"{shown(results['validation_accuracy'])}; estimated acceptance length "
                f"{shown(results['acceptance_length'])} for K = 1..{self.setup.depths}",
                highlight=False,
            )
            better = self.progress.validated(self.done, found | results)
        self.window.started += time.monotonic() - before
        return better and run.keep_best

    def save(self) -> None:
        """Starts to write a checkpoint of the state after the last step. Raises TrainError: it cannot be
        written, or is not worth it, with weights that are not finite."""
        self.settle()
        check_weights(self.state.params, self.done)
        self.log.flush()
        self.progress.window, self.progress.position = self.window.saved(), self.batches.state()
        self.checkpoints.save(self.done, self.state, self.progress)

    def finish(self) -> Path:
        """Waits for the checkpoints, exports the head, says how the run ended; returns the head's folder."""
        self.checkpoints.wait()
        head, step, progress, which = self.output / "head", self.done, self.progress, ""
        best = progress.best_step if self.setup.recipe.run.keep_best else None
        if best is not None and self.checkpoints.holds(best):
            step, which = best, f", the best with a held-out loss of {progress.best_loss:.4f}"
            if step != self.done:
                like = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
                del self.state  # there may be no room for two
                self.state, progress = self.checkpoints.restore(like, step)
        metadata = head_metadata(self.setup, step, self.steps, progress.results)
        setup = self.setup
        trained = self.placement.whole(self.state.params), self.placement.whole(self.frozen.lm_head)
        if is_main():
            params, frozen = trained[0], self.frozen.replace(lm_head=trained[1])
            export_head(head, setup.cfg, setup.target.config, params, frozen, setup.draft_ids, metadata)
        exported = f"the head in {head} is that of step {step}{which}"
        if self.done >= self.steps:
            self.console.print(f"trained {self.steps} steps; {exported}")
        elif self.exhausted:
            self.console.print(
                f"stopped early after step {self.done} of {self.steps}: validations without a lower loss: "
                f"{self.progress.worse} (run.patience); {exported}"
            )
        else:
            self.console.print(
                f"stopped after step {self.done} of {self.steps}; the same command goes on from there; "
                f"{exported}"
            )
        return head

    def close(self) -> None:
        """Stops the loader, waits for what is being written, and closes the logs."""
        self.batches.close()
        self.checkpoints.close()
        self.log.close()
        if self.lock is not None:
            self.lock.release()


def train_until_stopped(recipe: Recipe, console: Console) -> tuple[Path, int]:
    """As ``train``; returns the head's folder, and the signal that ended the run before its last step
    (0 if none did)."""
    check_output(recipe)
    placement = make_placement(recipe)
    with placement.assembling():
        setup = build(recipe)
    for note in filter(None, (*setup.notes, placement.line())):
        console.print(note, highlight=False)
    with stop_requests() as stop:
        training = Training(setup, console, placement)
        try:
            training.run(stop)
            head = training.finish()
        except BaseException:
            if all_failed():  # processes that still train would not come to close anything
                training.close()
            raise
        training.close()
        # Another process of the run may be the one that was told to stop.
        return head, 0 if training.complete else stop.signal or signal.SIGTERM


def train(recipe: Recipe, console: Console) -> Path:
    """Trains, or goes on with a run that was stopped; returns the exported head's folder.

    Raises TrainError (also for a loss that is not finite), CheckpointError, ConfigError.
    """
    return train_until_stopped(recipe, console)[0]
