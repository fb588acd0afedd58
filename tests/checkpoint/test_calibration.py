"""A head's calibration beside its weights."""

import json

import numpy as np
import pytest

from peagle_jax.checkpoint.calibration import CALIBRATION, for_depths, read_calibration, write_calibration
from peagle_jax.checkpoint.errors import CheckpointError

ROWS = np.float32([[1.25, -0.5], [0.75, 0.25], [0.5, 0.0]])


def test_what_is_written_is_read(tmp_path):
    assert read_calibration(str(tmp_path)) is None
    path = write_calibration(tmp_path, ROWS, prompts=7)
    np.testing.assert_array_equal(read_calibration(str(tmp_path)), ROWS)
    assert json.loads(path.read_text())["prompts"] == 7


def test_depths_past_the_last_one_are_like_it():
    assert for_depths(ROWS, 2).tolist() == ROWS[:2].tolist()
    assert for_depths(ROWS, 5).tolist() == [*ROWS.tolist(), ROWS[2].tolist(), ROWS[2].tolist()]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"calibration": []}',
        '{"calibration": [[1, 2, 3]]}',
        '{"calibration": [[0, 1]]}',
        '{"calibration": [["a", 1]]}',
        '{"calibration": [[NaN, 0]]}',
    ],
)
def test_a_file_that_is_no_calibration_is_refused_in_one_line(tmp_path, text):
    (tmp_path / CALIBRATION).write_text(text)
    with pytest.raises(CheckpointError, match="is no calibration; expected") as error:
        read_calibration(str(tmp_path))
    assert "\n" not in str(error.value)
