"""Rules of the ledger: which record may follow which, and how stages, batches, entities and jobs become records. Pure.

=============  ==================================================  =================================
state          means                                               previous record
=============  ==================================================  =================================
NEW            discovered; the first record of every item          none
PROCESSING     an application holds the item                       none, or the item's NEW
PROCESSED      released, done                                      the PROCESSING that holds it
FAILED         released, not done; the item stays blocked          the PROCESSING that holds it
RESOLVED       a person dealt with it; usable again                the FAILED or PROCESSING that blocks
SKIPPED        an application (``*``: all) must leave it alone     any of the item's, or none
=============  ==================================================  =================================

A PROCESSING record blocks its item until a PROCESSED, FAILED or RESOLVED record answers it. A FAILED record blocks its
item until a RESOLVED record answers it. If several records block an item, the earliest one counts. A blocked item
cannot be acquired. An application that was told to skip an item cannot acquire it either. A skip never unblocks an
item.

Stages, batches, entities and jobs are items of their own kinds, and views (:data:`VIEWS`): one row per item; each
record sets some of its columns. A status determines the state of its record. Statuses follow each other like this::

    batch   WAITING_FOR_JOB → NEW → GENERATE_IID → IN_PROGRESS → DONE | FAILED | CANCELLED | PAUSED
    entity  WAITING → IN_PROGRESS → COMPLETED | FAILED | CANCELLED
    job     WAITING → IN_PROCESS → PROCESSED | FAILED | TERMINATED

GENERATE_IID lists the entities. FAILED means that the batch itself failed: a failed entity is only counted, and the
batch continues. An entity may end without having been IN_PROGRESS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import Table

from stateflow.errors import IllegalRecord, InvalidArgument, InvalidTransition, LeaseLost, LedgerCorrupt, Locked
from stateflow.ledger.records import (
    BATCH,
    ENTITY,
    EVERYONE,
    ITEM_ID_MAX,
    JOB,
    STAGE,
    App,
    Head,
    Kind,
    Record,
    RecordState,
    Who,
    microseconds,
    to_time,
)
from stateflow.schedule import Remaining
from stateflow.types import shown

NEW, PROCESSING, PROCESSED, FAILED, RESOLVED, SKIPPED = RecordState

LEGAL_PREVIOUS: dict[RecordState, frozenset[RecordState | None]] = {
    NEW: frozenset({None}),
    PROCESSING: frozenset({None, NEW}),
    PROCESSED: frozenset({PROCESSING}),
    FAILED: frozenset({PROCESSING}),
    RESOLVED: frozenset({FAILED, PROCESSING}),
    SKIPPED: frozenset({None, *RecordState}),
}
#: states that end a block, by the state of the blocking record
ANSWERS: dict[RecordState, frozenset[RecordState]] = {
    PROCESSING: frozenset({PROCESSED, FAILED, RESOLVED}),
    FAILED: frozenset({RESOLVED}),
}
#: states that only the holder of a lock writes
RELEASES = frozenset({PROCESSED, FAILED})
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_NO_NAME = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]")
APP_NAME_MAX, APP_VERSION_MAX, APP_INSTANCE_MAX = 128, 64, 128


# -- Whom a record concerns ------------------------------------------------------------------------------------------


def covers(recorded: Who, asked: Who) -> bool:
    """Tells whether a record of ``recorded`` applies to ``asked``: the names are equal, and ``recorded`` names no
    instance, or the same one.
    """
    return recorded.name == asked.name and recorded.instance in (None, asked.instance)


def skips(recorded: Who, asked: Who) -> bool:
    return recorded.name == EVERYONE or covers(recorded, asked)


# -- What records amount to ------------------------------------------------------------------------------------------


def blocking(records: Sequence[Record]) -> Record | None:
    """Returns the record that blocks the item, or None. Defined for any list of records, legal or not."""
    answered = {
        (record.previous_record_id, blocked)
        for record in records
        for blocked, answers in ANSWERS.items()
        if record.state in answers
    }
    for record in records:
        if record.state in ANSWERS and (record.record_id, record.state) not in answered:
            return record
    return None


def state_of(records: Sequence[Record]) -> RecordState:
    """Returns the state of the newest record that is not a skip; SKIPPED when there is no other."""
    return next((record.state for record in reversed(records) if record.state != SKIPPED), SKIPPED)


def fold(records: Sequence[Record]) -> Head:
    """Folds all records of one item, in order, into its head."""
    blocked_by = blocking(records)
    return Head(
        item_id=records[0].item_id,
        kind=Kind.of(records[0].payload_schema),
        seq=records[-1].seq,
        state=state_of(records),
        newest_record_id=records[-1].record_id,
        blocking_record_id=blocked_by.record_id if blocked_by else None,
        blocking_state=blocked_by.state if blocked_by else None,
        created_us=records[0].timestamp_us,
        updated_us=records[-1].timestamp_us,
        processed=frozenset(Who.of(record.app) for record in records if record.state == PROCESSED),
        skipped=frozenset(Who.of(record.app) for record in records if record.state == SKIPPED),
    )


def advance(head: Head | None, record: Record) -> Head:
    """Returns ``fold(records + [record])``, given ``fold(records)`` and a record that ``check`` has accepted."""
    if head is None:
        return fold([record])
    who = frozenset({Who.of(record.app)})
    moved = replace(head, seq=record.seq, newest_record_id=record.record_id, updated_us=record.timestamp_us)
    if record.state == SKIPPED:
        return replace(moved, skipped=head.skipped | who)
    blocked = record.state in ANSWERS
    return replace(
        moved,
        state=record.state,
        blocking_record_id=record.record_id if blocked else None,
        blocking_state=record.state if blocked else None,
        processed=head.processed | who if record.state == PROCESSED else head.processed,
    )


# -- What may be written ---------------------------------------------------------------------------------------------


def is_id(value: object, at_most: int) -> bool:
    """Tells whether every supported database stores this id and distinguishes it from every other.

    Some databases compare texts as if they were padded with spaces: a text then sorts after the same text with a
    control character at its end. Some databases refuse a NUL.
    """
    if not isinstance(value, str) or not 0 < len(value) <= at_most or value.endswith(" "):
        return False
    return _NO_NAME.search(value) is None


def is_item_id(value: object) -> bool:
    """Tells whether every supported database stores this item id.

    Item ids are compared byte by byte, so they may hold control characters other than NUL, as keys of object stores do.
    """
    if not isinstance(value, str) or not 0 < len(value) <= ITEM_ID_MAX or value.endswith(" "):
        return False
    return is_text(value) and (value.isascii() or len(value.encode()) <= ITEM_ID_MAX)


def is_text(value: str) -> bool:
    """Tells whether every supported database stores this text."""
    return _NO_TEXT.search(value) is None


def check_item_id(item_id: object) -> None:
    """Checks an item's id. Raises IllegalRecord."""
    if not is_item_id(item_id):
        raise IllegalRecord(
            f"an item id must be text of 1 to {ITEM_ID_MAX:,} bytes in UTF-8, without NUL or a trailing space",
            remedy="choose another",
            item=repr(item_id)[:60],
        )


def check_app(app: App, state: RecordState) -> None:
    """Checks the application of a record in this state. Raises IllegalRecord."""
    if app.name == EVERYONE and state is not SKIPPED:
        raise IllegalRecord(
            f"{EVERYONE!r} is not an application", remedy="use it only to skip an item for all applications"
        )
    for what, text, at_most, may_lack in (
        ("name", app.name, APP_NAME_MAX, False),
        ("version", app.version, APP_VERSION_MAX, app.version == ""),
        ("instance", app.instance, APP_INSTANCE_MAX, app.instance is None),
    ):
        if not may_lack and not is_id(text, at_most):
            raise IllegalRecord(
                f"an application's {what} must have 1 to {at_most} characters, no control character and no trailing "
                "space",
                remedy="choose another",
                app=repr(app.name)[:60],
            )


def check(head: Head | None, item_id: str, app: App, state: RecordState, previous: Record | None) -> None:
    """Checks that this record may be the item's next record.

    Raises IllegalRecord for what the module's table forbids, Locked if another application holds the item or a record
    has answered ``previous`` already. The caller adds the blocking record to Locked, and raises LeaseLost instead if
    the answer is a RESOLVED record.
    """
    found = None if previous is None else previous.state
    if found not in LEGAL_PREVIOUS[state]:
        wanted = " or ".join(sorted("nothing" if each is None else str(each) for each in LEGAL_PREVIOUS[state]))
        raise IllegalRecord(
            f"a {state} record cannot follow {found or 'nothing'}, only {wanted}",
            remedy="read the item's records again",
            item=item_id,
        )
    if previous is not None and previous.item_id != item_id:
        raise IllegalRecord(
            "the previous record belongs to another item",
            remedy="pass a record of this item",
            item=item_id,
            other=previous.item_id,
        )
    if head is None and state is not NEW:
        raise IllegalRecord(
            "there is no such item, and the first record of an item must be NEW", remedy="put NEW first", item=item_id
        )
    if head is not None and state is NEW:
        raise IllegalRecord("the item already exists", remedy="use another id", item=item_id)
    if head is None or state is SKIPPED:
        return
    if state is PROCESSING:
        _check_acquire(head, app)
    else:
        assert previous is not None
        _check_answer(head, app, state, previous)


def lease_lost(lock: Record, blocking_record_id: int | None) -> LeaseLost:
    """Builds the error for the release of a lock that a RESOLVED has answered."""
    return LeaseLost(
        "the item was resolved before its holder released it",
        remedy="read the item again",
        item=lock.item_id,
        record=lock.record_id,
        blocking_record=blocking_record_id,
    )


def _check_acquire(head: Head, app: App) -> None:
    if head.blocking_record_id is not None:
        raise Locked(
            f"the item is {head.blocking_state}, so it is blocked",
            remedy="wait for its holder, or resolve it",
            item=head.item_id,
            blocking_record=head.blocking_record_id,
        )
    if any(skips(recorded, Who.of(app)) for recorded in head.skipped):
        raise IllegalRecord(
            "this application must skip the item",
            remedy="process other items: a skip is permanent",
            item=head.item_id,
            app=app.name,
        )


def _check_answer(head: Head, app: App, state: RecordState, previous: Record) -> None:
    if head.blocking_record_id != previous.record_id:
        where = {"item": head.item_id, "record": previous.record_id, "blocking_record": head.blocking_record_id}
        raise Locked("the previous record is already answered", remedy="read the item again", **where)
    if state is not RESOLVED and Who.of(app) != Who.of(previous.app):
        raise IllegalRecord(
            "only the application that holds an item may release it",
            remedy="release it as the application and instance that acquired it, or resolve it",
            item=head.item_id,
            app=app.name,
            holder=previous.app.name,
        )


# -- Sequences of records, and stages --------------------------------------------------------------------------------

_NEXT: dict[RecordState, tuple[RecordState, ...]] = {
    NEW: (PROCESSING,),
    PROCESSING: (RESOLVED, PROCESSED, FAILED),  # RESOLVED first: work that continues was not PROCESSED
    PROCESSED: (PROCESSING,),
    FAILED: (RESOLVED,),
    RESOLVED: (PROCESSING,),
}


def path(now: RecordState, to: RecordState) -> tuple[RecordState, ...]:
    """Returns the shortest legal sequence of one or more records after ``now`` whose last is ``to``.

    Raises ValueError if there is none: no sequence leads to NEW.
    """
    reached: list[tuple[RecordState, ...]] = [(each,) for each in _NEXT[now]]
    for sequence in reached:
        if sequence[-1] is to:
            return sequence
        reached.extend((*sequence, each) for each in _NEXT[sequence[-1]] if each not in sequence)
    raise ValueError(f"no sequence leads to {to}")


class Action(StrEnum):
    """Actions of a stage, in their order. ``sinking pre-pull`` and ``sinking post-pull`` are accepted as names of the
    two push actions."""

    PRE_PULL = "sourcing pre-pull"
    POST_PULL = "sourcing post-pull"
    PRE_PUSH = "sinking pre-push"
    POST_PUSH = "sinking post-push"

    @classmethod
    def _missing_(cls, value: object) -> Action | None:
        return {"sinking pre-pull": cls.PRE_PUSH, "sinking post-pull": cls.POST_PUSH}.get(str(value))


class Status(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    IN_PROGRESS = "in_progress"


#: record state of a stage's item, by its status
STAGE_RECORD_STATE = {
    Status.SUCCESS: RecordState.PROCESSED,
    Status.FAILURE: RecordState.FAILED,
    Status.IN_PROGRESS: RecordState.PROCESSING,
}
TIMES = ("sourcing_start_time", "sourcing_end_time", "sinking_start_time", "sinking_end_time")
_LENGTHS = {"run_id": 64, "job_id": 255, "correlation_id_in": 255, "correlation_id_out": 255, "git_sha": 64}
_IDS = ("state_id", "source_entity", "sink_entity")
_TEXT_MAX = 2**20
COLUMNS = (
    *("state_id", "run_id", "job_id", "correlation_id_in", "correlation_id_out", "action", "status"),
    *("source_name", "source_type", "sink_name", "sink_type"),
    *("source_entity", "source_filter", "sink_entity", "sink_filter"),
    *("first_record_pulled", "last_record_pulled", "git_sha"),
    *TIMES,
    *("updated_on", "row_count", "created_on", "manifest_name"),
)
#: columns that a caller may set; ``record_count`` is stored as ``row_count``
SETTABLE = (*(column for column in COLUMNS if column not in ("updated_on", "row_count", "created_on")), "record_count")
#: the order of arguments without names
POSITIONS = (
    *("source_entity", "source_filter", "action", "state_id", "status", "correlation_id_in", "correlation_id_out"),
    *("sink_entity", "sink_filter", *TIMES, "record_count", "first_record_pulled", "last_record_pulled"),
)
#: columns that empty text empties: a repeated stage may pull no records where its failed attempt pulled some
_EMPTIED = ("first_record_pulled", "last_record_pulled")
#: columns that insert_state, update_state and get_current_state return
ANSWER = (
    *("state_id", "job_id", "correlation_id_in", "correlation_id_out", "source_entity", "source_filter"),
    *TIMES,
    *("first_record_pulled", "last_record_pulled", "record_count", "run_id", "manifest_name"),
    *("source_name", "sink_name"),
)


def stage_fields(positional: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments by their names. Raises InvalidArgument."""
    if len(positional) > len(POSITIONS):
        raise InvalidArgument(
            f"a stage takes {len(POSITIONS)} positional arguments, not {len(positional)}",
            remedy=f"pass at most these: {', '.join(POSITIONS)}",
        )
    placed = dict(zip(POSITIONS, positional, strict=False))
    twice = sorted(set(placed) & set(given))
    if twice:
        raise InvalidArgument(f"{twice[0]} is given twice", remedy="pass it once, by name or by position")
    return {**placed, **given}


def stage_changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that these keyword arguments set, in their stored form. An argument that is None sets
    nothing; empty text empties the columns of ``_EMPTIED``.

    Raises InvalidArgument for an unknown name or an invalid value.
    """
    unknown = sorted(set(given) - set(SETTABLE))
    if unknown:
        raise InvalidArgument(f"a stage has no column {unknown[0]!r}", remedy=f"use {', '.join(SETTABLE)}")
    stored: dict[str, Any] = {}
    for name, value in given.items():
        if value is not None:
            stored["row_count" if name == "record_count" else name] = _stored(name, value)
    return stored


def _stored(name: str, value: Any) -> Any:
    if name in TIMES:
        return microseconds(name, value)
    if name == "record_count":
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise InvalidArgument(f"record_count cannot be {shown(value)}", remedy="use a whole number, 0 or more")
        return value
    if name in ("action", "status"):
        kind: type[StrEnum] = Action if name == "action" else Status
        try:
            return kind(value).value
        except ValueError:
            raise InvalidArgument(f"{name} cannot be {shown(value)}", remedy=f"use {' | '.join(kind)}") from None
    if name in _EMPTIED and (value == "" or isinstance(value, datetime)):
        return value.isoformat() if value else None
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise InvalidArgument(f"{name} cannot be {shown(value)}", remedy="use text")
    text = str(value)
    if name in _LENGTHS and not is_id(text, _LENGTHS[name]):
        raise InvalidArgument(
            f"{name} must have 1 to {_LENGTHS[name]} characters, no control character and no trailing space",
            remedy="choose another",
            given=shown(value),
        )
    if name in _IDS and not is_item_id(text):
        raise InvalidArgument(
            f"{name} must have 1 to {ITEM_ID_MAX:,} bytes in UTF-8, without NUL or a trailing space",
            remedy="choose another",
            given=shown(value),
        )
    if not 0 < len(text) <= _TEXT_MAX or not is_text(text):
        raise InvalidArgument(
            f"{name} must have 1 to {_TEXT_MAX:,} characters, without NUL or lone surrogates",
            remedy="shorten it, or remove those characters",
            given=shown(value),
        )
    return text


def stage_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all 26 columns of a stage, with times as datetimes in UTC."""
    return {name: to_time(row[name]) if name in (*TIMES, "updated_on", "created_on") else row[name] for name in COLUMNS}


def stage_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    named = stage_columns(row) | {"record_count": row["row_count"]}
    return {name: named[name] for name in ANSWER}


def is_done(row: Mapping[str, Any]) -> bool:
    """Tells whether a stage is done: everything was pulled and pushed."""
    return (row["action"], row["status"]) == (Action.POST_PUSH, Status.SUCCESS)


# -- Batches, their entities and jobs --------------------------------------------------------------------------------


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
BATCH_NEXT: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    _B.WAITING_FOR_JOB: frozenset({_B.NEW, _B.CANCELLED, _B.FAILED}),
    _B.NEW: frozenset({_B.GENERATE_IID, _B.CANCELLED, _B.PAUSED, _B.FAILED}),
    _B.GENERATE_IID: frozenset({_B.IN_PROGRESS, _B.CANCELLED, _B.PAUSED, _B.FAILED}),
    _B.IN_PROGRESS: frozenset({_B.DONE, _B.FAILED, _B.CANCELLED, _B.PAUSED}),
    _B.PAUSED: frozenset({_B.GENERATE_IID, _B.IN_PROGRESS, _B.CANCELLED}),
    _B.FAILED: frozenset({_B.GENERATE_IID, _B.IN_PROGRESS, _B.CANCELLED}),
    _B.DONE: frozenset({_B.IN_PROGRESS}),
    _B.CANCELLED: frozenset({_B.GENERATE_IID, _B.IN_PROGRESS}),
}
ENTITY_NEXT: Mapping[EntityStatus, frozenset[EntityStatus]] = {
    _E.WAITING: frozenset({_E.IN_PROGRESS, _E.COMPLETED, _E.FAILED, _E.CANCELLED}),
    _E.IN_PROGRESS: frozenset({_E.WAITING, _E.COMPLETED, _E.FAILED, _E.CANCELLED}),
    _E.FAILED: frozenset({_E.WAITING}),
    _E.CANCELLED: frozenset({_E.WAITING}),
    _E.COMPLETED: frozenset(),
}
JOB_NEXT: Mapping[JobStatus, frozenset[JobStatus]] = {
    _J.WAITING: frozenset({_J.IN_PROCESS, _J.TERMINATED}),
    _J.IN_PROCESS: frozenset({_J.PROCESSED, _J.FAILED, _J.TERMINATED, _J.WAITING}),
    _J.FAILED: frozenset({_J.WAITING}),
    _J.PROCESSED: frozenset(),
    _J.TERMINATED: frozenset({_J.WAITING}),
}
#: record state of a batch's item, by its status; RESOLVED: free to be acquired, neither done, failed nor running
BATCH_RECORD_STATE: Mapping[StrEnum, RecordState] = {
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
        allowed = ", ".join(sorted(table[now])) or "no other status"
        raise InvalidTransition(
            f"a {what} that is {now} cannot become {to}", remedy=f"it may become {allowed}", **{what: name}
        )


# -- Retries of batches ----------------------------------------------------------------------------------------------


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


# -- Progress of batches ---------------------------------------------------------------------------------------------


def worked_us(worked: int | None, resumed_us: int | None, now_us: int) -> int:
    """Returns how long a batch has been IN_PROGRESS, in microseconds. Listing, pauses, and the time between an end and
    a retry do not count.

    Args:
        worked: microseconds that the batch had been IN_PROGRESS when it last stopped; None: it never was.
        resumed_us: time at which the batch last became IN_PROGRESS; None: it is stopped.
    """
    return (worked or 0) + (0 if resumed_us is None else max(0, now_us - resumed_us))


def eta_us(now_us: int, remaining: Remaining | None) -> tuple[int, int, int] | None:
    """Estimates when a batch ends. Returns the expected time, and the earliest and latest with 95 % confidence, in
    microseconds; None: unknown."""
    if remaining is None:
        return None
    expected, low, high = (now_us + round(each * 1e6) for each in (remaining.s, remaining.low_s, remaining.high_s))
    return expected, low, high


# -- Where a job may run, and when -----------------------------------------------------------------------------------


_AFFINITY = re.compile(
    r"(?P<place>[^\s:]+)(?::(?P<low>\d{1,9})(?:-(?P<high>\d{1,9}))?)?(?:\s+(?P<mode>hard|soft)(?:\s+(?P<s>[\d.]{1,9}))?)?",
    re.ASCII,
)


def check_affinity(text: str) -> None:
    """Checks the text that says on which nodes a job may run: ``place[:recommended[-at most]] [hard | soft seconds]``.

    ``label:2-4 soft 30`` means 2 nodes with the label, at most 4, and after 30 s any node. Raises InvalidArgument.
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
        """Returns the row after all records. Pure. Raises LedgerCorrupt for a payload that sets no columns."""
        row = None
        for record in records:
            if not (isinstance(record.payload, dict) and isinstance(record.payload.get("set"), dict)):
                raise LedgerCorrupt(
                    "a record's payload cannot be read",
                    remedy="list every fault with `stateflow ledger verify`",
                    item=record.item_id,
                    record=record.record_id,
                )
            row = self.apply(row, record)
        assert row is not None
        return row


VIEWS: dict[Kind, View] = {
    Kind.STAGE: View(STAGE, "state_id", created="created_on", updated="updated_on"),
    Kind.BATCH: View(BATCH, "bid", created="created_us", defaults={"listed": 0}),
    Kind.ENTITY: View(ENTITY, "item_id"),
    Kind.JOB: View(JOB, "job_id", defaults={"tries": 0}),
}
