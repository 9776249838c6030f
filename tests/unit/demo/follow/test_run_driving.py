"""Events beside the drive happen at their moment and in order, and an error is reported."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.demo.follow.fleet import Told
from stateflow.demo.follow.run import SCHEMA, Beside, Gateways, in_time, write_telemetry


class Waiting(threading.Event):
    """An event whose wait takes no time but the clock's."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self.clock.advance(timeout or 0.0)
        return self.is_set()


def told(at_s: float, site: str = "east") -> Told:
    return Told(at_s, site, [{"seq": round(at_s * 10), "vehicle": "v"}])


def test_each_at_its_moment_and_what_is_late_at_once() -> None:
    clock = ManualClock()
    began, moments = clock.monotonic(), []
    for each in in_time([told(0.0), told(1.0), told(1.5), told(5.0)], began, Waiting(clock), clock):
        moments.append((each.at_s, clock.monotonic() - began))
        if each.at_s == 1.0:
            clock.advance(2.0)
    assert moments == [(0.0, 0.0), (1.0, 1.0), (1.5, 3.0), (5.0, 5.0)]


def test_it_ends_when_it_is_over() -> None:
    clock = ManualClock()
    over = Waiting(clock)
    found = []
    for each in in_time([told(0.0), told(1.0)], clock.monotonic(), over, clock):
        found.append(each.at_s)
        over.set()
    assert found == [0.0]


class Stream:
    """A stream that answers after ``takes_s`` with the rows it was sent."""

    def __init__(self, clock: ManualClock, takes_s: float) -> None:
        self._clock, self._takes_s = clock, takes_s

    def send(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        self._clock.advance(self._takes_s)
        return [dict(row) for row in rows]


def test_a_gateway_measures_from_the_send_to_the_answer_and_the_near_one_serves() -> None:
    clock = ManualClock()
    gateways = Gateways({("east", 2): Stream(clock, 0.04), ("west", 2): Stream(clock, 0.3)}, clock)
    readings = [told(0.1), told(0.2, "west"), told(0.3)]
    gateways.serve(2, readings, clock.monotonic(), Waiting(clock))
    assert [(round(s.at_s, 6), round(s.took_ms, 6), s.convoy, s.site, s.rows) for s in gateways.samples] == [
        (0.1, 40.0, 2, "east", 1),
        (0.2, 300.0, 2, "west", 1),
        (0.5, 40.0, 2, "east", 1),
    ]
    assert [row["seq"] for row in gateways.outputs] == [1, 2, 3]


def test_an_error_beside_is_raised_by_whoever_looks() -> None:
    with Beside() as beside:
        beside.start(lambda: beside.over.wait() and None)
        assert beside.go_on()
        failing = threading.Event()

        def fail() -> None:
            try:
                raise ValueError("no")
            finally:
                failing.set()

        beside.start(fail)
        failing.wait()
        with pytest.raises(ValueError, match="no"):
            until = SYSTEM_CLOCK.monotonic() + 10
            while SYSTEM_CLOCK.monotonic() < until:
                beside.go_on()
    assert beside.over.is_set()


def test_a_file_is_there_as_a_whole(tmp_path: Path) -> None:
    row = {"seq": 1, "vehicle": "v", "way": "telemetry", "site": "east", "x": 1, "y": -2, "metres": 3}
    write_telemetry(tmp_path, 7, Told(0.0, "", [row]))
    (file,) = tmp_path.iterdir()
    assert file.name == "000007.parquet"
    found = pq.read_table(file)
    assert found.schema.equals(SCHEMA)
    assert found.to_pylist() == [row]
