"""Counts of limits that were reached."""

from __future__ import annotations

from stateflow.metrics.limits import LimitHits


def test_a_count_begins_at_0_and_grows() -> None:
    hits = LimitHits()
    assert hits.counts() == {}
    hits.watch("calls", "followers")
    hits.note("calls")
    hits.note("sources", 3)
    hits.watch("calls")
    assert hits.counts() == {("calls",): 1, ("followers",): 0, ("sources",): 3}
    assert (hits.count("calls"), hits.count("waiting_bytes")) == (1, 0)
