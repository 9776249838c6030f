"""Finished reconfigurations, as the ledger tells of them."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from reconfig.controller import steps
from reconfig.controller.executor import Running, RunRegistry
from reconfig.controller.history import Recorded, past
from reconfig.decisions.plan import PlannedMove, PlannedStandby, StrategyName
from stateflow.errors import MoveConflict, MoveUnknown
from stateflow.ledger import App, Ledger, Record, RecordState
from stateflow.reports import Reconfiguration
from stateflow.types import MoveOptions, OperatorSpec, PartitionId
from tests.writing import Written, deploy, write

SPEC = OperatorSpec("Op", "m:Op", 9, ("k",), b"", "[]")


def ended(reconfiguration: str, partition: int, **payload: object) -> tuple[PlannedMove, Record]:
    planned = PlannedMove(reconfiguration, PartitionId("Op", partition), "a", "b", 1, 2, StrategyName.WARM_UP)
    record = Record(
        partition,
        planned.item_id,
        2,
        App("x", "1"),
        RecordState.FAILED if "error" in payload else RecordState.PROCESSED,
        1,
        "me",
        1000 + partition,
        "",
        payload,
    )
    return planned, record


def told(*moves: tuple[PlannedMove, Record]) -> Reconfiguration:
    return past(Recorded(1003, {planned.item_id: (planned, record) for planned, record in moves}))


def test_what_is_told_of_one() -> None:
    old = told(ended("old", 1, report={"pause_ms": 3.0, "predicted_pause_ms": None}))  # no bound was known
    error = {"code": "move_aborted", "what": "w", "remedy": "r", "where": {}}
    new = told(ended("new", 3, error=error, report={}), ended("new", 4, report={"rounds": 2}))
    assert (new.id, new.state, [move.state for move in new.moves]) == ("new", "FAILED", ["ABORTED", "COMPLETED"])
    assert new.created_us == 1003
    assert (old.id, old.state, old.moves[0].pause_ms, old.moves[0].predicted_pause_ms) == (
        "old",
        "COMPLETED",
        3.0,
        math.inf,
    )


def test_newest_first_without_those_that_are_known_and_standbys(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    cluster = Written(ledger)
    deploy(cluster, SPEC, dict.fromkeys(range(9), "a"))
    plans = {
        name: [PlannedMove(name, PartitionId("Op", n), "a", "b", 1, 2, StrategyName.WARM_UP) for n in numbers]
        for name, numbers in (("old", (1, 4)), ("known", (2,)), ("new", (3,)))
    }
    for moves in plans.values():
        write(cluster, steps.plan_moves, moves)
    for planned in (plans["old"][0], *plans["known"], *plans["new"], plans["old"][1]):
        write(cluster, steps.move_owned, planned, {})
    copy = PlannedStandby("standby", PartitionId("Op", 5), "a", "b", 1)
    write(cluster, steps.plan_moves, [copy])
    write(cluster, steps.move_aborted, copy, {"code": "move_aborted", "what": "w", "remedy": "r", "where": {}}, {})
    runs = RunRegistry(cluster)
    runs.keep(Running(Reconfiguration("known", "Op", "COMPLETED", (), 0.0)))
    assert [message.id for message in runs.history()] == ["known", "old", "new"]
    assert [move.partition for move in runs.found("old").report().moves] == [1, 4]
    assert [message.id for message in runs.history(2)] == ["known", "old"]
    assert runs.found("known").report().state == "COMPLETED"
    with pytest.raises(MoveUnknown):
        runs.found("standby")
    ledger.close()


def test_commands_know_what_an_earlier_process_began(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    cluster = Written(ledger)
    deploy(cluster, SPEC, dict.fromkeys(range(9), "a"))
    moves = [
        PlannedMove(
            "old", PartitionId("Op", n), "a", "b", 1, 2, StrategyName.WARM_UP, MoveOptions(25.0, patience_s=5.0), 5.0
        )
        for n in (0, 1)
    ]
    write(cluster, steps.plan_moves, moves)
    write(cluster, steps.move_owned, moves[0], {})
    write(cluster, steps.move_aborted, moves[1], {"code": "move_aborted", "what": "w", "remedy": "r", "where": {}}, {})
    runs = RunRegistry(cluster)
    assert runs.failed("old") == [moves[1]]
    with pytest.raises(MoveConflict, match="has already ended, and is FAILED"):
        runs.unfinished("old")
    assert [move.state for move in runs.cancel("old").moves] == ["COMPLETED", "ABORTED"]

    async def watched() -> list[str]:
        return [message.state async for message in runs.watch("old")]

    assert asyncio.run(watched()) == ["FAILED"]
    ledger.close()
