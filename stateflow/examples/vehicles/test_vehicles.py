"""Tests the operator without a cluster: run `pytest`."""

from __future__ import annotations

from vehicles import Trips

from stateflow.testing import OperatorHarness


def test_a_trip_is_one_trip_whichever_site_hears_of_it() -> None:
    harness = OperatorHarness(Trips)
    told = [("north", 0.5), ("north", 1.5), ("south", 2.0), ("north", 0.25)]
    out = harness.send([{"vehicle": "V1", "site": site, "km": km} for site, km in told])
    assert out[1] == {"vehicle": "V1", "readings": 2, "km": 2.0, "sites": ["north"]}
    assert out[-1] == {"vehicle": "V1", "readings": 4, "km": 4.25, "sites": ["north", "south", "north"]}


def test_its_state_goes_on_after_it_was_stored_and_read_elsewhere() -> None:
    """Restores the operator in another harness from stored data alone, as a move does."""
    harness = OperatorHarness(Trips)
    harness.send([{"vehicle": "V1", "site": "north", "km": 3.0}])
    elsewhere = OperatorHarness.restore(Trips, harness.checkpoint())
    assert elsewhere.send([{"vehicle": "V1", "site": "south", "km": 1.0}]) == [
        {"vehicle": "V1", "readings": 2, "km": 4.0, "sites": ["north", "south"]}
    ]
