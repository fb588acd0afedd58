import jax
import numpy as np
import pytest

from peagle_jax.train.evaluation import DecodeEvaluation, heldout_prompts
from peagle_jax.train.loop import train
from peagle_jax.train.recipe import TrainError
from peagle_jax.train.setup import build
from tests.train import tiny_run
from tests.train.test_loop import lines
from tests.train.test_metrics import events


class Rows:
    """Two rows: a document with a prompt of 2, the rest of another; a prompt of 3, and padding."""

    def __init__(self):
        self.arrays = {
            "tokens": np.arange(12).reshape(2, 6),
            "segment_ids": np.array([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1]]),
            "flags": np.array([[0, 0, 1, 1, 0, 1], [0, 0, 0, 1, 0, 0]]),
        }
        self.array = self.arrays.__getitem__

    def __len__(self):
        return 2


def test_a_prompt_ends_where_the_first_answer_begins():
    assert heldout_prompts(Rows(), 9, 3) == [[0, 1], [6, 7, 8]]
    assert heldout_prompts(Rows(), 9, 2) == [[0, 1]]
    assert heldout_prompts(Rows(), 1, 3) == [[0, 1]]


def settings(**changes):
    return {"run": {"decode_every": 3, "decode_prompts": 2, "decode_tokens": 12, **changes}}


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_other_weights_are_measured_without_another_compilation(prepared, method):
    setup = build(tiny_run.recipe(prepared, method=method, loss={"ttt_steps": 2}, **settings()))
    other = jax.tree.map(lambda w: w[::-1], setup.params)
    evaluation = DecodeEvaluation(setup)
    assert evaluation.drafts == (3 if method == "peagle" else 2)
    first = evaluation(setup.params, setup.frozen)
    compiled = evaluation.decoder.compilations
    second = evaluation(other, setup.frozen)
    assert evaluation.decoder.compilations == compiled
    assert second != first == evaluation(setup.params, setup.frozen)
    assert first["decode_prompts"] == 2 and 2 <= first["decode_tokens"] <= 24
    rates = first["decode_acceptance_rates"]
    assert first["decode_acceptance_length"] == pytest.approx(1 + sum(rates))
    assert all(1 >= a >= b >= 0 for a, b in zip(rates, rates[1:], strict=False))


def test_a_run_decodes_when_it_is_due_and_writes_it_to_both_logs(prepared, console):
    train(tiny_run.recipe(prepared, **settings(log_every=4)), console)
    decoded = [r for r in lines(prepared) if "decode_acceptance_length" in r]
    assert [r["step"] for r in decoded] == [3, 6, 8]
    assert console.file.getvalue().count("decoding 2 held-out prompts with K = 3") == 3
    board = events(prepared / "out" / "tensorboard")
    for record in decoded:
        length = ("decode/acceptance_length", record["step"])
        (found,) = [value for tag, step, value in board if (tag, step) == length]
        assert found == pytest.approx(record["decode_acceptance_length"])
    tags = {tag for tag, step, _ in board if step == 8}
    train_tags = {"loss", "learning_rate", "tokens_per_second", "step_seconds", "peak_host_bytes"}
    train_tags |= {f"{k}/{d}" for k in ("accuracy", "acceptance_length", "depth_loss") for d in (1, 2, 3)}
    assert {f"train/{t}" for t in train_tags} <= tags
    assert {"validation/loss", "validation/acceptance_length/3", "decode/acceptance_rates/3"} <= tags


def test_decoding_without_held_out_documents_is_refused(prepared):
    setup = build(tiny_run.recipe(prepared, **settings()))
    setup.heldout = None
    with pytest.raises(TrainError, match=r"run.decode_every needs held-out documents with a prompt"):
        DecodeEvaluation(setup)
