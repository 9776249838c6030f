"""Reconfigurations in the ledger: the entries that record them, their fold, and the reports made from their records.

A reconfiguration is a batch of the ledger's board: an item ``reconfiguration/<id>``. Its entities are the items of its
moves; each of these items also describes its move. So one list holds all work, and ``stateflow batch`` shows
reconfigurations as well as the batches of users. The record that ends a move contains its report. Every controller
therefore reports a past reconfiguration (:func:`past`) exactly as the controller that carried it out. The module does
no I/O.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any

from reconfig.decisions import failover as f
from reconfig.decisions import migration as m
from reconfig.decisions.plan import (
    NONE,
    Change,
    Limits,
    Planned,
    PlannedMove,
    PlannedRestore,
    PlannedTakeover,
    ReconfigurationState,
    to_payload,
)
from stateflow.errors import MoveCancelled, from_wire
from stateflow.ledger.records import App, Entry, Kind, Record, RecordState
from stateflow.ledger.rules import BATCH_RECORD_STATE, BatchStatus, EntityStatus, path, worked_us
from stateflow.partition.control import TakenOver
from stateflow.reports import MoveReport, Reconfiguration
from stateflow.types import How

APP = App("reconfig.controller", "1")
#: records that other releases may skip: a release reads records of this application only if it knows their kind, and
#: release 0.1 reads none of them
OPTIONAL = App("reconfig.controller.optional", "1")
APPS = frozenset({APP.name, OPTIONAL.name})
OPEN = (RecordState.NEW, RecordState.PROCESSING)
ENDED = frozenset({RecordState.PROCESSED, RecordState.FAILED})
_FIELDS = frozenset(each.name for each in fields(MoveReport))


# -- Entries and their fold --------------------------------------------------------------------------------------------


def batch_item(reconfiguration: str) -> str:
    return f"reconfiguration/{reconfiguration}"


def entry(
    item: str,
    state: RecordState,
    previous: Record | Entry | None,
    payload: Any = None,
    schema: str | None = None,
) -> Entry:
    # the controller's locks have no lease: a restarted controller continues its own moves
    return Entry(item, APP, state, previous, payload, schema, lease_s=math.inf)


@dataclass(slots=True)
class Batch:
    """A batch: its newest record, and its columns as of that record."""

    record: Record
    columns: dict[str, Any]

    def fold(self, record: Record) -> None:
        self.record = record
        self.columns |= record.payload["set"]

    @property
    def status(self) -> BatchStatus:
        return BatchStatus(self.columns["status"])

    def worked_s(self, now_us: int) -> float:
        """Returns the seconds for which the batch has been IN_PROGRESS."""
        return worked_us(self.columns.get("worked_us"), self.columns.get("resumed_us"), now_us) / 1e6

    def to(self, status: BatchStatus, now_us: int) -> list[Entry]:
        worked = worked_us(self.columns.get("worked_us"), self.columns.get("resumed_us"), now_us)
        columns: dict[str, Any] = {"status": status.value, "worked_us": worked, "resumed_us": None}
        if status is BatchStatus.IN_PROGRESS:
            columns["resumed_us"] = now_us
        elif status is not BatchStatus.PAUSED:
            columns["ended_us"] = now_us
        steps = path(self.record.state, BATCH_RECORD_STATE[status])
        entries: list[Entry] = []
        for number, step in enumerate(steps):
            before: Record | Entry | None = entries[-1] if entries else self.record
            if step is RecordState.PROCESSING:
                before = None
            payload = {"set": columns if number == len(steps) - 1 else {}}
            entries.append(entry(self.record.item_id, step, before, payload, Kind.BATCH.payload_schema))
        return entries


@dataclass(slots=True)
class Recorded:
    """A reconfiguration, as recorded.

    Attributes:
        created_us: UNIX time at which it was planned, in microseconds.
        moves: its moves in the order of the plan, each with its newest record.
        downtime_ms: milliseconds for which its operator was stopped; None: not stopped, or still stopped.
        batch: its batch; None: an earlier version planned it.
        cancelled: a command cancelled it.
        by: author of the plan, see :func:`reconfig.controller.context.author`.
    """

    created_us: int
    moves: dict[str, tuple[Change, Record]] = field(default_factory=dict)  # by item id
    downtime_ms: float | None = None
    batch: Batch | None = None
    limits: Limits = NONE
    cancelled: bool = False
    by: str = ""

    @property
    def failed(self) -> list[Change]:
        """Moves that failed, including those that were cancelled."""
        return [planned for planned, record in self.moves.values() if record.state is RecordState.FAILED]

    @property
    def withdrawn(self) -> list[Change]:
        """Moves that ended because they were cancelled."""
        return [planned for planned, record in self.moves.values() if was_cancelled(record)]

    @property
    def state(self) -> ReconfigurationState:
        if any(record.state in OPEN for _, record in self.moves.values()):
            return ReconfigurationState.RUNNING
        if self.cancelled and self.withdrawn:
            return ReconfigurationState.CANCELLED
        return ReconfigurationState.FAILED if self.failed else ReconfigurationState.COMPLETED

    def is_last(self, item: str) -> bool:
        """Tells whether every other move of the reconfiguration has ended."""
        return not any(record.state in OPEN for other, (_, record) in self.moves.items() if other != item)


def because(planned: PlannedMove, reason: str) -> str:
    """Joins the reason of a move and the reason of its new target. The move's reason is first, because it identifies
    the moves of a job's run."""
    return f"{planned.reason}; {reason}" if planned.reason else reason


def was_cancelled(record: Record) -> bool:
    error = (record.payload or {}).get("error") or {}
    return record.state is RecordState.FAILED and error.get("code") == MoveCancelled.code


def is_waiting(record: Record) -> bool:
    """Tells whether a move waits for its turn. A move that an earlier version recorded does not wait."""
    return record.state is RecordState.NEW and record.payload_schema is not None


def begun(moves: Iterable[Change], now_us: int) -> list[Entry]:
    """Returns the entries of a plan: its batches and their moves. A takeover begins as soon as it is planned, so its
    begin is among them.
    """
    entries: list[Entry] = []
    batches: set[str] = set()
    for planned in moves:
        batch = batch_item(planned.reconfiguration)
        if batch not in batches:
            batches.add(batch)
            entries += begun_batch(batch, planned.partition.operator, planned.cause, now_us)
        entries.append(new := entity(batch, planned))
        if not isinstance(planned, PlannedMove):
            entries.append(taken_up(new))
    return entries


def begun_batch(item: str, name: str, command: str, now_us: int, more: Mapping[str, Any] | None = None) -> list[Entry]:
    """Returns the two entries by which a batch is planned and begins; both set columns of the batch.

    ``more``: further payload of the first entry.
    """
    schema = Kind.BATCH.payload_schema
    named = {"name": name, "command": str(command), "owner": APP.name, "status": BatchStatus.NEW.value}
    new = entry(item, RecordState.NEW, None, {**(more or {}), "set": named}, schema)
    columns = {
        "status": BatchStatus.IN_PROGRESS.value,
        "listed": 1,
        "started_us": now_us,
        "worked_us": 0,
        "resumed_us": now_us,
    }
    return [new, entry(item, RecordState.PROCESSING, new, {"set": columns}, schema)]


def entity(batch: str, planned: Change | PlannedRestore) -> Entry:
    columns = {"bid": batch, "entity": str(planned.partition.partition), "status": EntityStatus.WAITING.value}
    payload = {**to_payload(planned), "set": columns}
    return entry(planned.item_id, RecordState.NEW, None, payload, Kind.ENTITY.payload_schema)


def taken_up(before: Record | Entry) -> Entry:
    """Returns the entry by which a move begins. For a move that an early version recorded, the entry sets no column."""
    schema = before.payload_schema
    payload = None if schema is None else {"set": {"status": EntityStatus.IN_PROGRESS.value}}
    return entry(before.item_id, RecordState.PROCESSING, before, payload, schema)


def retaken(end: Entry) -> list[Entry]:
    """Returns entries that end an item although a person has resolved it by hand: before ``end``, another entry sets
    the item back to PROCESSING.
    """
    payload: Any = None if end.payload_schema is None else {"set": {}}
    again = entry(end.item_id, RecordState.PROCESSING, None, payload, end.payload_schema)
    return [again, replace(end, previous=again)]


def ended(record: Record, payload: Mapping[str, Any], state: RecordState) -> dict[str, Any]:
    """Returns the payload of the record that ends a move or restore."""
    if record.payload_schema is None:
        return dict(payload)
    report, error = payload.get("report", {}), payload.get("error")
    if state is RecordState.PROCESSED:
        told = ("pause_ms", "bytes", "epoch")
        status, result = EntityStatus.COMPLETED, {name: report[name] for name in told if name in report}
    else:
        cancelled = (error or {}).get("code") == MoveCancelled.code
        status = EntityStatus.CANCELLED if cancelled else EntityStatus.FAILED
        result = {"error": f"{(error or {}).get('code')}: {(error or {}).get('what')}"}
    columns = {
        "status": status.value,
        "ms": round(1e3 * (report.get("duration_s") or 0.0)),
        "result": json.dumps(result),
    }
    return {**payload, "set": columns}


# -- Reports -----------------------------------------------------------------------------------------------------------


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
    if recorded.downtime_ms is not None:
        moves = [with_downtime(move, recorded.downtime_ms) for move in moves]
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
    """Returns the report of a move, made from its last record. Earlier versions recorded only a part of the report."""
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


def with_downtime(move: MoveReport, downtime_ms: float) -> MoveReport:
    """Returns the report of a move whose operator was stopped for ``downtime_ms``. If the move completed, its pause is
    at least that long.

    If a new leader resumes a reconfiguration, ``downtime_ms`` covers only the time for which that leader stopped the
    operator.
    """
    completed = move.state == m.Phase.COMPLETED
    return replace(move, pause_ms=max(move.pause_ms, downtime_ms)) if completed else move


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


def takeover_note(planned: PlannedTakeover, taken: TakenOver) -> str:
    """Returns a note on a new owner's state: its origin, and what it lacks."""
    positions = [f"{source} up to {batch}" for source, batch in sorted(taken.positions.items())]
    contained = ", ".join(positions) or "nothing"
    match planned.how:
        case How.LOCAL:
            return f"the former owner's own copy, complete; it contains {contained}"
        case How.STANDBY:
            return (
                f"the copy of {planned.standby_move} at sequence {taken.sequence}; it contains {contained}; "
                "batches acknowledged later without the standby are lost and requested again with position_gap"
            )
        case How.CHECKPOINT:
            if (origin := taken.checkpoint) is None:  # the target was the owner when it was asked again
                which = "a checkpoint"
            else:
                at = datetime.fromtimestamp(origin.created_us / 1e6, UTC).isoformat(timespec="seconds")
                which = f"the checkpoint of {at}, epoch {origin.epoch}, sequence {origin.sequence}"
            lost = "later batches are lost and requested again with position_gap"
            return f"{which}; it contains {contained}; {lost}"
