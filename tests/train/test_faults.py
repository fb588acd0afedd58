import numpy as np
import pytest

from peagle_jax.train.faults import check_finite, row_names
from peagle_jax.train.losses import Metrics
from peagle_jax.train.recipe import TrainError
from peagle_jax.train.step import StepReport


def report(loss, squares):
    return StepReport(np.float32(loss), Metrics(0.0, 0.0, 0.0), np.array(squares))


def test_rows_are_named_with_their_shards():
    assert row_names([6, 7, 0], np.array([0, 7, 14, 16])) == (
        "6 (shard 0, its row 6), 7 (shard 1, its row 0), 0 (shard 0, its row 0)"
    )


@pytest.mark.parametrize(
    ("loss", "squares", "where"),
    [(np.nan, [1.0, np.inf], r"first in the gradient of \['b'\]"), (np.inf, [1.0, 1.0], "in the loss alone")],
)
def test_a_loss_that_is_not_finite_names_step_weight_and_rows(loss, squares, where):
    with pytest.raises(TrainError, match=f"step 7: .*{where}; the batch was training rows of 7;") as raised:
        check_finite(report(loss, squares), {"a": 1, "b": 2}, 7, lambda step: f"of {step}")
    assert "\n" not in str(raised.value)


def test_a_finite_step_passes():
    check_finite(report(1.0, [1.0]), {"a": 1}, 7, lambda step: "")
