"""What the ledger tells of reconfigurations that are over."""

from __future__ import annotations

from dataclasses import replace

from reconfig.controller.book import PlannedMove
from reconfig.controller.history import past
from stateflow.ledger import App, Record, RecordState
from stateflow.types import PartitionId


def ended(reconfiguration: str, partition: int, **payload: object) -> tuple[PlannedMove, Record]:
    planned = PlannedMove(reconfiguration, PartitionId("Op", partition), "a", "b", 1, 2, 0.0, "warm-up")
    record = Record(
        partition, planned.item_id, 2, App("x", "1"), RecordState.PROCESSED, 1, "me", 1000 + partition, "", payload
    )
    return planned, record


def test_newest_first_without_those_that_are_known_and_standbys() -> None:
    standby, record = ended("s", 5, report={})
    records = [
        ended("old", 1, report={"pause_ms": 3.0, "predicted_pause_ms": None}),  # no bound was known
        ended("known", 2, report={}),
        (replace(standby, strategy="standby"), record),
        ended("new", 3, error={"code": "move_aborted", "what": "w", "remedy": "r", "where": {}}, report={}),
        ended("new", 4, report={"rounds": 2}),
    ]
    new, old = past(records, {"known"})
    assert (new.id, new.state, [move.phase for move in new.moves]) == ("new", "FAILED", ["COMPLETED", "ABORTED"])
    assert (old.id, old.state, old.moves[0].pause_ms, old.moves[0].predicted_pause_ms) == ("old", "COMPLETED", 3.0, 0.0)
    assert [message.id for message in past(records, set(), 1)] == ["new"]
