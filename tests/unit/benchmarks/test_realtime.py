"""REALTIME: a move that did not complete is a failure, and has no pause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import realtime
from stateflow.client import MoveReport


def test_moves_that_do_not_complete_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = [
        MoveReport("m", 0, "a", "b", "COMPLETED", "warm-up", pause_ms=4.0),
        MoveReport("n", 1, "a", "b", "ROLLED_BACK", "warm-up"),
    ]
    wait = SimpleNamespace(wait=lambda: SimpleNamespace(state="FAILED", moves=moves))
    local: Any = SimpleNamespace(cluster=SimpleNamespace(migrate=lambda *_: wait))
    monkeypatch.setattr(realtime, "time", SimpleNamespace(time=iter([0.0, 1.0, 2.0]).__next__))
    failures: list[str] = []
    assert realtime._pauses(local, 2.0, failures) == [4.0, 4.0]
    assert failures == ["the move of partition 1 to b ended ROLLED_BACK: no error"] * 2
