"""Tests the operator without a cluster and without Spark: run `pytest`."""

from __future__ import annotations

from enrichment import Customer, Enriched

from stateflow.testing import OperatorHarness


def order(number: str, customer: str, amount: float) -> dict[str, object]:
    return {"customer": customer, "order": number, "amount": amount, "name": None, "tier": None}


def customer(key: str, name: str, tier: str) -> dict[str, object]:
    return {"customer": key, "order": None, "amount": None, "name": name, "tier": tier}


def test_an_order_of_a_known_customer_goes_on_at_once() -> None:
    harness = OperatorHarness(Enriched)
    assert harness.send([customer("c1", "Ann", "gold")]) == []
    out = harness.send([order("o1", "c1", 12.5), customer("c1", "Ann", "basic"), order("o2", "c1", 3.0)])
    assert [tuple(row.values()) for row in out] == [
        ("o1", "c1", 12.5, "Ann", "gold"),
        ("o2", "c1", 3.0, "Ann", "basic"),
    ]


def test_an_order_waits_for_its_customer() -> None:
    harness = OperatorHarness(Enriched)
    assert harness.send([order("o1", "c1", 1.0), order("o2", "c1", 2.0), order("o3", "c2", 3.0)]) == []
    out = harness.send([customer("c1", "Ann", "gold")])
    assert [(row["order"], row["name"]) for row in out] == [("o1", "Ann"), ("o2", "Ann")], "in the order of arrival"
    assert not harness.state("c1").waiting
    assert harness.state("c2").waiting == [("o3", 3.0)]


def test_customers_may_be_there_before_the_first_order() -> None:
    known = [{"customer": "c1", "known": {"name": "Ann", "tier": "gold"}}]
    harness = OperatorHarness(Enriched, initial_state=known)
    assert harness.state("c1").known.value == Customer("Ann", "gold")
    assert [row["tier"] for row in harness.send([order("o1", "c1", 1.0)])] == ["gold"]
