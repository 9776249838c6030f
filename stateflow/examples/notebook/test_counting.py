"""Tests the operator without a cluster: run `pytest`."""

from __future__ import annotations

from counting import Counting

from stateflow.testing import OperatorHarness


def test_readings_are_counted_and_their_mean_is_kept() -> None:
    harness = OperatorHarness(Counting)
    told = [("a", 1.0), ("b", 10.0), ("a", 2.0), ("a", 6.0)]
    out = harness.send([{"sensor": sensor, "celsius": celsius} for sensor, celsius in told])
    assert sorted(tuple(row.values()) for row in out) == [("a", 1, 1.0), ("a", 2, 1.5), ("a", 3, 3.0), ("b", 1, 10.0)]
    assert harness.state("b").total.value == 10.0
