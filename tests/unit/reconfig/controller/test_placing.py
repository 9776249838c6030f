"""Rates, from what replicas count."""

from __future__ import annotations

from typing import Any

from reconfig.controller.placing import seen_of
from reconfig.placement import Seen
from stateflow.runtime.lifecycle import State
from stateflow.runtime.view import PartitionView
from stateflow.types import PartitionId

P = PartitionId("Op", 0)


def view(epoch: int = 1, **counted: Any) -> PartitionView:
    return PartitionView(P, State.OWNED, epoch, 7, **counted)


def test_two_looks_tell_a_rate() -> None:
    before = 10.0, view(rows=100, row_bytes=1000, origins={"edge": 40})
    now = view(bytes=5, rows=300, row_bytes=5000, origins={"edge": 40, "cloud": 20})
    assert seen_of(now, 12.0, before, None) == Seen(5, 100.0, 2000.0, {"cloud": 10.0})


def test_what_is_counted_from_nothing_keeps_the_rate_that_was_known() -> None:
    known = Seen(1, 50.0, 500.0, {"edge": 50.0})
    for before in (
        None,
        (10.0, view(rows=100)),  # its replica was started anew
        (10.0, view(epoch=2, rows=0)),  # it has moved
        (12.0, view(rows=0)),
    ):
        assert seen_of(view(bytes=9, rows=30), 12.0, before, known) == Seen(9, 50.0, 500.0, {"edge": 50.0})


def test_nothing_is_made_up_of_what_was_never_seen_twice() -> None:
    assert seen_of(view(bytes=9, rows=30), 12.0, None, None) == Seen(9)
