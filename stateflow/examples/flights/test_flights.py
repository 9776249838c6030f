"""Tests the operator without a cluster and without Spark: run `pytest`."""

from __future__ import annotations

from flights import AircraftDelays

from stateflow.testing import OperatorHarness


def flight(tailnum: str, dest: str, delay: float | None, carrier: str = "UA") -> dict[str, object]:
    return {"tailnum": tailnum, "dest": dest, "arr_delay": delay, "carrier": carrier}


def test_an_aircraft_is_followed_from_flight_to_flight() -> None:
    harness = OperatorHarness(AircraftDelays)
    out = harness.send([flight("N1", "IAH", 11.0), flight("N1", "ORD", 20.0, "AA"), flight("N1", "IAH", -4.0)])
    assert [tuple(row.values()) for row in out] == [
        ("N1", 1, 11.0, "IAH", ["UA"]),
        ("N1", 2, 15.5, "ORD", ["AA", "UA"]),
        ("N1", 3, 9.0, "ORD", ["AA", "UA"]),  # 11 + 20 - 4 minutes of three flights
    ]
    assert harness.state("N1").delay_by_dest == {"IAH": 7.0, "ORD": 20.0}


def test_a_cancelled_flight_counts_and_has_no_delay() -> None:
    harness = OperatorHarness(AircraftDelays)
    harness.send([flight("N1", "IAH", None), flight("N2", "IAH", 30.0)])
    (row,) = harness.send([flight("N1", "IAH", 8.0)])
    assert (row["flights"], row["mean_delay"]) == (2, 4.0)
    assert harness.state("N2").flights.value == 1, "each aircraft has a state of its own"
