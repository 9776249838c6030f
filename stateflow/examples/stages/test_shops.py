"""Tests the operators without a cluster and without Spark: run `pytest`."""

from __future__ import annotations

from datetime import UTC, datetime

from shops import Leader, Sold

from stateflow.testing import OperatorHarness

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_a_shop_goes_on_from_what_it_has_sold() -> None:
    harness = OperatorHarness(Sold)
    sold = [{"at": NOON, "region": "west", "shop": "Bonn", "amount": amount} for amount in (0.1, 0.2, 10.0)]
    assert [row["total"] for row in harness.send(sold)] == [0.1, 0.3, 10.3]


def test_only_another_leader_is_told() -> None:
    harness = OperatorHarness(Leader)
    totals = [("Bonn", 10.0), ("Aachen", 9.0), ("Bonn", 11.0), ("Aachen", 11.5), ("Bonn", 12.0)]
    out = harness.send([{"at": NOON, "region": "west", "shop": shop, "total": total} for shop, total in totals])
    assert [(row["leader"], row["total"]) for row in out] == [("Bonn", 10.0), ("Aachen", 11.5), ("Bonn", 12.0)]
    assert harness.state("west").totals == {"Aachen": 11.5, "Bonn": 12.0}
