"""A made-up drive that looks like a real one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from stateflow.demo.follow.fleet import Fleet
from stateflow.demo.follow.result import CLOUD, FollowResult, Sample
from stateflow.demo.result import Comparison, MoveRow

EQUAL = Comparison(True, 10, 0, 0, 0, [])


def move(partition: int, source: str, target: str, at_s: float, **changed: Any) -> MoveRow:
    """Makes a move that pauses its partition for 10 ms at ``at_s``, half a second after it started."""
    fields: dict[str, Any] = {
        "partition": partition,
        "source": f"{source}-0",
        "target": f"{target}-0",
        "started_s": at_s - 0.5,
        "pause_at_s": at_s,
        "duration_s": 0.6,
        "bytes_warm": 1000,
        "bytes_reused": 0,
        "bytes_delta": 10,
        "rounds": 1,
        "predicted_pause_ms": 8.0,
        "pause_ms": 10.0,
        "state": "COMPLETED",
        "error": "",
    }
    return MoveRow(**(fields | changed))


def drive(**changed: Any) -> FollowResult:
    """Makes a drive of two convoys whose state follows three seconds after each change.

    One move of the second convoy is aborted.
    """
    chance = Random(5)
    fleet = Fleet(chance, 2, 5, 30.0)
    moves, samples = [], []
    for convoy in range(2):
        before = CLOUD
        for change in [each for each in fleet.changes() if each.convoy == convoy]:
            moves.append(move(convoy, before, change.site, change.at_s + 3.0))
            before = change.site
    moves.append(move(1, "east", "west", 29.0, state="ABORTED", error="over_budget: no", pause_ms=0.0))
    for convoy, readings in enumerate(fleet.readings):
        for told in readings:
            near = any(
                each.partition == convoy and each.completed and 0 < told.at_s - each.pause_at_s < 7 for each in moves
            )
            took_ms = chance.uniform(3, 6) + (0 if near else 40)
            samples.append(Sample(told.at_s, took_ms, convoy, told.site, len(told.rows)))
    fields: dict[str, Any] = {
        "seconds": 30.0,
        "rtt_ms": 40.0,
        "budget_ms": 50.0,
        "convoys": 2,
        "vehicles": 5,
        "telemetry_rows": 600,
        "reading_rows": 1500,
        "changes": fleet.changes(),
        "samples": samples,
        "moves": moves,
        "state": EQUAL,
        "output": EQUAL,
        "answers": EQUAL,
        "settings": {"seed": 5},
        "versions": {"python": "3.12"},
    }
    return FollowResult(**(fields | changed))


@pytest.fixture
def driven() -> Callable[..., FollowResult]:
    return drive
