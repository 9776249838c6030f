"""Tests the operator without a cluster and without Spark: run `pytest`."""

from ops import Alarms

from stateflow.testing import OperatorHarness


def celsius(sensor: str, *values: float) -> list[dict[str, object]]:
    return [{"sensor": sensor, "celsius": value} for value in values]


def test_what_is_usual_is_no_alarm() -> None:
    harness = OperatorHarness(Alarms)
    out = harness.send(celsius("a", 20.0, 21.0, 20.5, 19.5, 20.0, 21.0, 20.0))
    assert not any(row["alarm"] for row in out)


def test_what_is_much_hotter_is_one_and_does_not_become_usual() -> None:
    harness = OperatorHarness(Alarms)
    harness.send(celsius("a", *[20.0] * 6))
    (hot,) = harness.send(celsius("a", 31.0))
    assert hot["alarm"]
    assert hot["usual"] == 20.0
    assert harness.state("a").recent == [20.0, 20.0, 31.0]
    (other,) = harness.send(celsius("b", 31.0))
    assert not other["alarm"], "each sensor has a state of its own"
