"""What is made of a watched server's latency and memory, and a look at this very process."""

from __future__ import annotations

import os
import time

import pytest
from watch import Watcher, in_milliseconds, memory_report, resident_bytes

from tests.serve.conftest import running
from tests.serve.engine_double import says

MIB = 2**20


def test_latencies_are_summed_up_in_milliseconds():
    found = in_milliseconds([0.001] * 98 + [0.002, 0.5])
    assert found["median"] == pytest.approx(1)
    assert found["max"] == pytest.approx(500)
    assert 2 < found["p99"] < 500
    assert in_milliseconds([]) == {}


def test_growth_is_counted_from_when_the_server_has_settled():
    # 100 MiB at first, 150 after half a minute, and then a MiB a minute.
    memory = [(float(t), (100 if t < 30 else 150 + t // 60) * MIB) for t in range(601)]
    found = memory_report(memory, settled=60)
    assert (found["start"], found["end"]) == (100, 160)
    assert found["minutes"] == [100, *(150 + m for m in range(1, 11))]
    # Seconds 60 to 120 and 540 to 600.
    assert (found["growth"], found["growth_counted_from_s"]) == (159 - 151, 60)
    assert memory_report([], settled=60) == {}
    assert memory_report([(0.1, MIB)], settled=60)["growth"] == 0


def test_a_watcher_sees_health_and_memory_from_outside():
    with running(says("x")) as server:
        watcher = Watcher(server.url, os.getpid(), every=0.05)
        time.sleep(0.3)
        sight = watcher.seen()
    assert len(sight.health) == len(sight.late) > 1
    assert sight.failures == []
    assert all(0 < seconds < 30 for seconds in sight.health)
    assert sight.memory[0][1] > 10 * MIB
    assert resident_bytes(os.getpid()) > 10 * MIB
    assert resident_bytes(2**22 + 1) is None


def test_a_server_that_is_not_healthy_is_told():
    watcher = Watcher("http://127.0.0.1:9", None, every=0.05)
    time.sleep(0.1)
    sight = watcher.seen()
    assert sight.memory == []
    assert all(failure.startswith("ConnectError after") for failure in sight.failures)
