"""A client asks all partitions while some of them have no owner that may serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.client import stream
from stateflow.errors import LeaseLost, NotOwner, StateflowError, Unavailable
from stateflow.runtime.layout import Position


@pytest.mark.parametrize("error", [LeaseLost, NotOwner, Unavailable])
def test_an_owner_that_was_away_is_asked_again(error: type[StateflowError], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def answer(_router: Any, _source: str, partitions: list[int], _session: Any = None) -> dict[int, Position]:
        asked.append(partitions)
        if len(asked) < 4:
            raise error("not now", remedy="ask again")
        return dict.fromkeys(partitions, Position(7))

    monkeypatch.setattr(stream, "_positions_of", answer)
    monkeypatch.setattr(stream, "sleep", lambda _: None)
    routes = [SimpleNamespace(address="a"), SimpleNamespace(address="a")]
    router: Any = SimpleNamespace(table=SimpleNamespace(routes=routes, unserved={}), refresh=lambda: None)
    assert stream._positions(router, "s") == {0: Position(7), 1: Position(7)}
    assert asked == [[0, 1], [0], [0], [0], [1]]
