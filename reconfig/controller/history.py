"""Reports of past reconfigurations, made from the ledger's records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from reconfig.controller.batch_book import Recorded
from reconfig.controller.cluster_state import ClusterState
from reconfig.decisions import failover as f
from reconfig.decisions import migration as m
from reconfig.decisions.work import Change, Planned, PlannedMove, PlannedTakeover
from stateflow.errors import from_wire
from stateflow.ledger import Record, RecordState
from stateflow.reports import MoveReport, Reconfiguration
from stateflow.status import MaintenanceReport

ENDED = frozenset({RecordState.PROCESSED, RecordState.FAILED})
_FIELDS = frozenset(each.name for each in fields(MoveReport))


def report_to_record(report: MoveReport) -> dict[str, Any]:
    """Returns a report as a payload. A number that is not finite becomes None, as JSON cannot express it."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in report.to_dict().items()
    }


def progress_of(recorded: Recorded, now_us: int) -> dict[str, Any]:
    """Returns the fields of a report that describe its batch: limits, seconds worked, and who asked for it."""
    batch = recorded.batch
    worked_s = 0.0 if batch is None else batch.worked_s(now_us)
    return recorded.limits.to_payload() | {"worked_s": worked_s, "by": recorded.by}


def past(recorded: Recorded) -> Reconfiguration:
    planned, _ = next(iter(recorded.moves.values()))
    moves = [move_of(planned, record) for planned, record in recorded.moves.values()]
    if recorded.stood_ms is not None:
        moves = [stood(move, recorded.stood_ms) for move in moves]
    return Reconfiguration(
        id=planned.reconfiguration,
        operator=planned.partition.operator,
        state=recorded.state,
        max_pause_ms=planned.max_pause_ms,
        created_us=recorded.created_us,
        kind=planned.cause,
        strategy=planned.strategy,
        moves=tuple(moves),
        **progress_of(recorded, recorded.created_us),
    )


def move_of(planned: Change, record: Record) -> MoveReport:
    """Returns the report of a move, made from its last record. Earlier versions recorded only a part of it."""
    begun = planned_report(planned)
    if record.state not in ENDED:
        return begun
    payload: Mapping[str, Any] = record.payload or {}
    told: dict[str, Any] = {
        name: math.inf if value is None else value
        for name, value in payload.get("report", {}).items()
        if name in _FIELDS
    }
    owned = record.state is RecordState.PROCESSED
    error = payload.get("error")
    told["state"] = ended_as(planned, owned)
    told["epoch"] = planned.granted_epoch if owned else 0
    told["fault"] = from_wire(error) if isinstance(error, dict) else None
    return replace(begun, **told)


def maintained(cluster: ClusterState) -> tuple[MaintenanceReport, ...]:
    """Returns the nodes that are in maintenance, by name."""
    return tuple(
        MaintenanceReport(node, each.one_of, each.since_us, each.until_us)
        for node, each in sorted(cluster.roster.maintenance.items())
        if node in cluster.maintained()
    )


def stood(move: MoveReport, pause_ms: float) -> MoveReport:
    """Returns the report of a move whose operator was stopped for ``pause_ms``; if the move completed, that was its
    pause.

    A reconfiguration that another term resumes knows only how long the operator was stopped in that term.
    """
    completed = move.state == m.Phase.COMPLETED
    return replace(move, pause_ms=max(move.pause_ms, pause_ms)) if completed else move


def planned_report(planned: Planned) -> MoveReport:
    """Returns the report of a move that has not begun."""
    return MoveReport(
        planned.move_id,
        planned.partition.partition,
        planned.source,
        planned.target,
        f.Phase.PLANNED if isinstance(planned, PlannedTakeover) else m.Phase.WAITING,
        planned.strategy,
        reason=planned.reason if isinstance(planned, PlannedMove) else "",
    )


def ended_as(planned: Planned, owned: bool) -> str:
    if isinstance(planned, PlannedTakeover):
        return f.Phase.COMPLETED if owned else f.Phase.ABANDONED
    return m.Phase.COMPLETED if owned else m.Phase.ABORTED
