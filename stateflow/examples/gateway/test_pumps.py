"""Tests the operator without a cluster: run `pytest`."""

from __future__ import annotations

from pumps import Pumps

from stateflow.testing import OperatorHarness


def test_the_third_fall_in_a_row_is_an_alarm() -> None:
    harness = OperatorHarness(Pumps)
    out = harness.send([{"pump": "P1", "bar": bar} for bar in (5.0, 4.9, 4.8, 4.8, 4.7, 4.6, 4.5, 4.4, 6.0)])
    assert [row["alarm"] for row in out] == [False] * 6 + [True, True, False]
    assert [row["reading"] for row in out] == list(range(1, 10))


def test_each_pump_falls_by_itself() -> None:
    harness = OperatorHarness(Pumps)
    pumps = ("P1", "P2", "P1", "P2", "P1", "P2")
    out = harness.send([{"pump": pump, "bar": 5.0 - number / 10} for number, pump in enumerate(pumps)])
    assert not any(row["alarm"] for row in out)
    (row,) = harness.send([{"pump": "P2", "bar": 1.0}])
    assert row["alarm"]
