"""A client asks all partitions while some of them have no owner that may serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.client import stream
from stateflow.clock import ManualClock
from stateflow.errors import LeaseLost, NotOwner, StateflowError, Unavailable
from stateflow.partition.layout import Position
from stateflow.settings import RouterSettings


class Owners:
    """Owners of two partitions, at one address. They answer with ``error`` until ``back_at_s``."""

    def __init__(self, patch: pytest.MonkeyPatch, error: type[StateflowError], back_at_s: float) -> None:
        self.clock, self.asked = ManualClock(), list[list[int]]()
        self._error, self._back_at_s = error, back_at_s
        patch.setattr(stream, "ReplicaClient", lambda _: SimpleNamespace(positions=self._answer))
        patch.setattr(stream, "sleep", self.clock.advance)

    def _answer(self, _operator: str, _source: str, partitions: list[int]) -> dict[int, Position]:
        self.asked.append(partitions)
        if self.clock.monotonic() < self._back_at_s:
            raise self._error("not now", remedy="ask again")
        return dict.fromkeys(partitions, Position(7))

    def positions(self) -> dict[int, Position]:
        routes = [SimpleNamespace(address="a"), SimpleNamespace(address="a")]
        table = SimpleNamespace(routes=routes, unserved={})
        settings = RouterSettings(unavailable_timeout_s=30)
        router: Any = SimpleNamespace(
            operator="Op", table=table, settings=settings, clock=self.clock, refresh=lambda: None
        )
        return stream.look(router, "s")


@pytest.mark.parametrize("error", [LeaseLost, NotOwner, Unavailable])
def test_an_owner_that_was_away_is_asked_again(error: type[StateflowError], monkeypatch: pytest.MonkeyPatch) -> None:
    owners = Owners(monkeypatch, error, back_at_s=0.05)
    assert owners.positions() == {0: Position(7), 1: Position(7)}
    assert owners.asked == [[0, 1], [0], [0], [0], [0], [1]]


def test_an_owner_is_waited_for_as_long_as_a_batch_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Owners(monkeypatch, Unavailable, back_at_s=29).positions() == {0: Position(7), 1: Position(7)}
    gone = Owners(monkeypatch, Unavailable, back_at_s=60)
    with pytest.raises(Unavailable):
        gone.positions()
    assert 30 <= gone.clock.monotonic() < 31
