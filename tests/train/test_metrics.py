import json
import struct
import sys

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from peagle_jax.train.losses import Metrics
from peagle_jax.train.metrics import (
    MetricsLog,
    Window,
    acceptance_lengths,
    open_board,
    peak_memory,
    ratios,
    scalars,
)
from peagle_jax.train.recipe import TrainError
from peagle_jax.train.step import StepReport


def events(folder):
    """(tag, step, value) of every scalar, without those that a later purge takes back."""
    found = []
    for path in sorted(folder.glob("events.*"), key=lambda p: p.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            if event.HasField("session_log"):
                found = [f for f in found if f[1] < event.step]
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    return found


def report(value):
    sums = [np.array([value, 2 * value]), np.array([value / 4, 0.0]), np.array([value, 0.0])]
    return StepReport(np.float32(value), Metrics(*sums), np.zeros(1))


def test_accuracy_without_rows_is_not_available():
    assert ratios([3.0, 0.0], [5.0, 0.0]) == [0.6, None]
    shards = [([0.0], [0.0]), ([3.0], [5.0])]  # sums first, then one division
    assert ratios(sum(np.array(c) for c, _ in shards), sum(np.array(n) for _, n in shards)) == [0.6]
    assert acceptance_lengths([0.5, 0.5, None]) == [1.5, 1.75, 1.75]


def test_a_window_goes_on_from_its_saved_form():
    whole, part = Window(), Window()
    for window in (whole, part):
        window.add(report(0.1), 5)
    part = Window.restored(json.loads(json.dumps(part.saved())))
    for window in (whole, part):
        window.add(report(0.7), 6)
    timed = {"tokens_per_second", "step_seconds", "peak_host_bytes"}
    records = [w.record(2, 1e-3) for w in (whole, part)]
    assert {k: v for k, v in records[0].items() if k not in timed} == {
        k: v for k, v in records[1].items() if k not in timed
    }
    assert records[1]["loss"] == pytest.approx(0.4) and records[1]["accuracy"] == [0.25, None]
    assert records[1]["step_seconds"] * 2 == pytest.approx(11 / records[1]["tokens_per_second"])
    assert Window.restored({}).steps == 0


def test_memory_is_that_of_this_process():
    before = peak_memory()["peak_host_bytes"]
    block = np.ones(40_000_000, np.uint8)
    assert peak_memory()["peak_host_bytes"] >= before > 10_000_000
    assert block.sum() < peak_memory()["peak_host_bytes"] < 2**40


def test_log_lines_past_the_checkpoint_and_lines_cut_by_a_crash_are_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(1, 6)) + '{"step": 3, "lo')
    MetricsLog(path, 3).write({"step": 4, "again": True})
    assert [json.loads(x) for x in path.read_text().splitlines()] == [
        {"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": True}
    ]  # fmt: skip


def test_a_record_becomes_scalars_by_group_and_depth():
    record = {"step": 3, "validation_loss": 0.5, "acceptance_length": [1.5, None, 2.0], "none": []}
    assert list(scalars(record, "validation")) == [
        ("validation/loss", 0.5),
        ("validation/acceptance_length/1", 1.5),
        ("validation/acceptance_length/3", 2.0),
    ]


def test_the_board_holds_what_the_lines_hold_and_a_resumed_run_takes_back_the_rest(tmp_path):
    for start, value in ((0, 0.25), (2, 0.5)):
        log = MetricsLog(tmp_path / "m.jsonl", start, open_board(tmp_path / "board", start))
        for step in range(start + 1, start + 4):
            log.write({"step": step, "loss": value, "accuracy": [value]})
        log.close()
    lines = [json.loads(x) for x in (tmp_path / "m.jsonl").read_text().splitlines()]
    expected = [("train/loss", r["step"], r["loss"]) for r in lines]
    assert [e for e in events(tmp_path / "board") if e[0] == "train/loss"] == expected
    assert [r["loss"] for r in lines] == [0.25, 0.25, 0.5, 0.5, 0.5]
    assert ("train/accuracy/1", 5, 0.5) in events(tmp_path / "board")


def test_without_its_package_there_is_no_board(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert open_board(tmp_path / "board", 0) is None


def test_a_log_that_is_no_text_is_named_and_left_as_it_was(tmp_path):
    path = tmp_path / "m.jsonl"
    content = b'{"step": 1}\n{"step": 2, "\xff"}\n'
    path.write_bytes(content)
    with pytest.raises(TrainError, match="m.jsonl is not UTF-8 text at byte 25, .*; move it away or choose"):
        MetricsLog(path, 3)
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]


def test_lines_that_are_no_records_are_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    odd = ["[]", "5", "{}", '{"step": "x"}', '{"step": null}', "[" * 100_000]
    path.write_text("\n".join(['{"step": 1}', *odd]) + "\n")
    MetricsLog(path, 3)
    assert path.read_text() == '{"step": 1}\n'
