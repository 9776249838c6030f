"""Status machines of batches, their entities and jobs, and the ledger's views. Pure.

``board`` keeps batches, entities and jobs in the ledger::

    batch   WAITING_FOR_JOB → NEW → GENERATE_IID → IN_PROGRESS → DONE | FAILED | CANCELLED | PAUSED
    entity  WAITING → IN_PROGRESS → COMPLETED | FAILED | CANCELLED
    job     WAITING → IN_PROCESS → PROCESSED | FAILED | TERMINATED

GENERATE_IID lists the entities. FAILED means that the batch itself failed: a failed entity is only counted, and the
batch goes on. An entity may end without having been IN_PROGRESS.

Stages, batches, entities and jobs are views (:data:`VIEWS`): one row per item; each record sets some of its columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import Table

from stateflow.errors import InvalidArgument, InvalidTransition
from stateflow.ledger import schema
from stateflow.ledger.records import Kind, Record, RecordState
from stateflow.schedule import Remaining
from stateflow.types import shown


class BatchStatus(StrEnum):
    WAITING_FOR_JOB = "WAITING_FOR_JOB"
    NEW = "NEW"
    GENERATE_IID = "GENERATE_IID"
    IN_PROGRESS = "IN_PROGRESS"
    PAUSED = "PAUSED"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class EntityStatus(StrEnum):
    WAITING = "WAITING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def over(self) -> bool:
        return self not in (EntityStatus.WAITING, EntityStatus.IN_PROGRESS)


class JobStatus(StrEnum):
    WAITING = "WAITING"
    IN_PROCESS = "IN_PROCESS"
    PROCESSED = "PROCESSED"
    FAILED = "FAILED"
    TERMINATED = "TERMINATED"


_B, _E, _J = BatchStatus, EntityStatus, JobStatus
#: from a status to the statuses that may follow it; those after an end are for retries
BATCH: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    _B.WAITING_FOR_JOB: frozenset({_B.NEW, _B.CANCELLED, _B.FAILED}),
    _B.NEW: frozenset({_B.GENERATE_IID, _B.CANCELLED, _B.PAUSED, _B.FAILED}),
    _B.GENERATE_IID: frozenset({_B.IN_PROGRESS, _B.CANCELLED, _B.PAUSED, _B.FAILED}),
    _B.IN_PROGRESS: frozenset({_B.DONE, _B.FAILED, _B.CANCELLED, _B.PAUSED}),
    _B.PAUSED: frozenset({_B.GENERATE_IID, _B.IN_PROGRESS, _B.CANCELLED}),
    _B.FAILED: frozenset({_B.GENERATE_IID, _B.IN_PROGRESS, _B.CANCELLED}),
    _B.DONE: frozenset({_B.IN_PROGRESS}),
    _B.CANCELLED: frozenset({_B.GENERATE_IID, _B.IN_PROGRESS}),
}
ENTITY: Mapping[EntityStatus, frozenset[EntityStatus]] = {
    _E.WAITING: frozenset({_E.IN_PROGRESS, _E.COMPLETED, _E.FAILED, _E.CANCELLED}),
    _E.IN_PROGRESS: frozenset({_E.WAITING, _E.COMPLETED, _E.FAILED, _E.CANCELLED}),
    _E.FAILED: frozenset({_E.WAITING}),
    _E.CANCELLED: frozenset({_E.WAITING}),
    _E.COMPLETED: frozenset(),
}
JOB: Mapping[JobStatus, frozenset[JobStatus]] = {
    _J.WAITING: frozenset({_J.IN_PROCESS, _J.TERMINATED}),
    _J.IN_PROCESS: frozenset({_J.PROCESSED, _J.FAILED, _J.TERMINATED, _J.WAITING}),
    _J.FAILED: frozenset({_J.WAITING}),
    _J.PROCESSED: frozenset(),
    _J.TERMINATED: frozenset({_J.WAITING}),
}
#: record state of an item, by its status; RESOLVED is free to be taken up: neither done, failed nor running
RECORD_STATE: Mapping[StrEnum, RecordState] = {
    _B.GENERATE_IID: RecordState.PROCESSING,
    _B.IN_PROGRESS: RecordState.PROCESSING,
    _B.DONE: RecordState.PROCESSED,
    _B.FAILED: RecordState.FAILED,
    _B.WAITING_FOR_JOB: RecordState.RESOLVED,
    _B.NEW: RecordState.RESOLVED,
    _B.PAUSED: RecordState.RESOLVED,
    _B.CANCELLED: RecordState.RESOLVED,
}
ENTITY_RECORD_STATE: Mapping[EntityStatus, RecordState] = {
    _E.WAITING: RecordState.RESOLVED,
    _E.IN_PROGRESS: RecordState.PROCESSING,
    _E.COMPLETED: RecordState.PROCESSED,
    _E.FAILED: RecordState.FAILED,
    _E.CANCELLED: RecordState.FAILED,
}
JOB_RECORD_STATE: Mapping[JobStatus, RecordState] = {
    _J.WAITING: RecordState.RESOLVED,
    _J.IN_PROCESS: RecordState.PROCESSING,
    _J.PROCESSED: RecordState.PROCESSED,
    _J.FAILED: RecordState.FAILED,
    _J.TERMINATED: RecordState.RESOLVED,
}


S = TypeVar("S", bound=StrEnum)


def check_ready(bid: str, to: BatchStatus, *, listed: bool, open: int) -> None:
    """Checks that the batch's entities allow this status. Raises InvalidTransition."""
    if to is BatchStatus.IN_PROGRESS and not listed:
        raise InvalidTransition(
            "the batch's list of entities is incomplete",
            remedy="list the rest in GENERATE_IID, with complete=True",
            batch=bid,
        )
    if to is BatchStatus.DONE and open:
        raise InvalidTransition(
            f"{open} entities of the batch have not ended",
            remedy="end them, or pause or cancel the batch",
            batch=bid,
        )


def check_transition(what: str, name: str, table: Mapping[S, frozenset[S]], now: S, to: S) -> None:
    """Checks that ``to`` may follow ``now``. Raises InvalidTransition."""
    if to not in table[now]:
        allowed = ", ".join(sorted(table[now])) or "nothing"
        raise InvalidTransition(
            f"a {what} that is {now} cannot become {to}", remedy=f"it may become {allowed}", **{what: name}
        )


# -- retries --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RetryPlan:
    """Plan of a retry. ``relist``: the stored list is incomplete and must be made again. ``entities``: statuses of the
    entities that are tried again."""

    relist: bool
    entities: frozenset[EntityStatus]


def plan_retry(bid: str, status: BatchStatus, *, listed: bool, allow_cancelled: bool = False) -> RetryPlan:
    """Decides what a retry of this batch does. Raises InvalidTransition if a batch in this status is not retried."""
    cancelled = frozenset({EntityStatus.CANCELLED} if allow_cancelled else ())
    if status is BatchStatus.DONE:
        return RetryPlan(False, cancelled | {EntityStatus.FAILED})
    if status in (BatchStatus.PAUSED, BatchStatus.FAILED) or (status is BatchStatus.CANCELLED and allow_cancelled):
        return RetryPlan(not listed, cancelled | {EntityStatus.WAITING, EntityStatus.IN_PROGRESS, EntityStatus.FAILED})
    remedy = "pass allow_cancelled" if status is BatchStatus.CANCELLED else "wait until it has ended"
    raise InvalidTransition(f"a batch that is {status} cannot be retried", remedy=remedy, batch=bid)


# -- progress -------------------------------------------------------------------------------------------------


def worked_us(worked: int | None, resumed_us: int | None, now_us: int) -> int:
    """Returns how long a batch has been IN_PROGRESS, in microseconds, without listing, pauses, and the time between an
    end and a retry.

    Args:
        worked: time that it had been IN_PROGRESS when it last stopped; None: never.
        resumed_us: time at which it resumed; None while it is stopped.
    """
    return (worked or 0) + (0 if resumed_us is None else max(0, now_us - resumed_us))


def eta_us(now_us: int, remaining: Remaining | None) -> tuple[int, int, int] | None:
    """Estimates the end of a batch: expected time, and earliest and latest time with 95 % confidence; None: unknown."""
    if remaining is None:
        return None
    expected, low, high = (now_us + round(each * 1e6) for each in (remaining.s, remaining.low_s, remaining.high_s))
    return expected, low, high


# -- where a job may run, and when ----------------------------------------------------------------------------


_AFFINITY = re.compile(
    r"(?P<place>[^\s:]+)(?::(?P<low>\d{1,9})(?:-(?P<high>\d{1,9}))?)?(?:\s+(?P<mode>hard|soft)(?:\s+(?P<s>[\d.]{1,9}))?)?",
    re.ASCII,
)


def check_affinity(text: str) -> None:
    """Checks which nodes a job may run on: ``place[:recommended[-at most]] [hard | soft seconds]``. With ``label:2-4
    soft 30`` those are 2 nodes with the label, at most 4, and after 30 s any node. Raises InvalidArgument.
    """
    match = _AFFINITY.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        low = int(match["low"]) if match["low"] else None
        high = int(match["high"]) if match["high"] else low
        after = float(match["s"]) if match["s"] else None
        soft = match["mode"] == "soft"
        if (low is not None and high is not None and not 1 <= low <= high) or soft != (after is not None):
            raise ValueError
    except ValueError:
        raise InvalidArgument(
            f"{shown(text)} is not a valid affinity", remedy="write edge-1, gpu:2-4 or gpu:2-4 soft 30"
        ) from None


# -- Views of the ledger ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class View:
    """Table of a view. ``created`` and ``updated``: the columns that hold the time of the first and of the newest
    record."""

    table: Table
    key: str
    created: str | None = None
    updated: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)

    def apply(self, row: dict[str, Any] | None, record: Record) -> dict[str, Any]:
        """Returns the row after one more record. Pure."""
        if row is None:
            row = dict.fromkeys(self.table.columns.keys())
            row |= {self.key: record.item_id, "first_record_id": record.record_id} | self.defaults
            if self.created:
                row[self.created] = record.timestamp_us
        changes = record.payload["set"]
        row = row | {column: changes[column] for column in changes if column in self.table.columns}
        if self.updated:
            row[self.updated] = record.timestamp_us
        return row

    def fold(self, records: list[Record]) -> dict[str, Any]:
        row = None
        for record in records:
            row = self.apply(row, record)
        assert row is not None
        return row


VIEWS: dict[Kind, View] = {
    Kind.STAGE: View(schema.STAGE, "state_id", created="created_on", updated="updated_on"),
    Kind.BATCH: View(schema.BATCH, "bid", created="created_us", defaults={"listed": 0}),
    Kind.ENTITY: View(schema.ENTITY, "item_id"),
    Kind.JOB: View(schema.JOB, "job_id", defaults={"tries": 0}),
}
