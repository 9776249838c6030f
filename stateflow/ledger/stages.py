"""Stages as data: their columns, the order of their actions, and what a change of one means for its item. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from stateflow.errors import InvalidArgument
from stateflow.ledger.records import RecordState


class Action(StrEnum):
    """In this order."""

    PRE_PULL = "sourcing pre-pull"
    POST_PULL = "sourcing post-pull"
    PRE_PUSH = "sinking pre-push"
    POST_PUSH = "sinking post-push"


class Status(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    IN_PROGRESS = "in_progress"


#: what a status says about the stage's item
RECORD_STATE = {
    Status.SUCCESS: RecordState.PROCESSED,
    Status.FAILURE: RecordState.FAILED,
    Status.IN_PROGRESS: RecordState.PROCESSING,
}
TIMES = ("sourcing_start_time", "sourcing_end_time", "sinking_start_time", "sinking_end_time")
_LENGTHS = {
    "state_id": 255,
    "run_id": 64,
    "job_id": 255,
    "correlation_id_in": 255,
    "correlation_id_out": 255,
    "source_entity": 255,
    "sink_entity": 255,
    "git_sha": 64,
}
_TEXTS = (
    *("source_name", "source_type", "sink_name", "sink_type", "source_filter", "sink_filter"),
    *("first_record_pulled", "last_record_pulled", "manifest_name"),
)
COLUMNS = (
    *("state_id", "run_id", "job_id", "correlation_id_in", "correlation_id_out", "action", "status"),
    *("source_name", "source_type", "sink_name", "sink_type"),
    *("source_entity", "source_filter", "sink_entity", "sink_filter"),
    *("first_record_pulled", "last_record_pulled", "git_sha"),
    *TIMES,
    *("updated_on", "row_count", "created_on", "manifest_name"),
)
#: what a caller may set; ``record_count`` is stored as ``row_count``
SETTABLE = (*(column for column in COLUMNS if column not in ("updated_on", "row_count", "created_on")), "record_count")
#: what insert_state, update_state and get_current_state return
ANSWER = (
    *("state_id", "job_id", "correlation_id_in", "correlation_id_out", "source_entity", "source_filter"),
    *TIMES,
    *("first_record_pulled", "last_record_pulled", "record_count", "run_id", "manifest_name"),
    *("source_name", "sink_name"),
)


def changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that these keyword arguments set, as they are stored; None sets nothing.

    Raises InvalidArgument for a name or a value that is none.
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
            raise InvalidArgument(f"record_count cannot be {value!r}", remedy="use a whole number from 0 on")
        return value
    if name in ("action", "status"):
        kind: type[StrEnum] = Action if name == "action" else Status
        try:
            return kind(value).value
        except ValueError:
            raise InvalidArgument(f"{name} cannot be {value!r}", remedy=f"use {' | '.join(kind)}") from None
    if isinstance(value, datetime) and name in ("first_record_pulled", "last_record_pulled"):
        return value.isoformat()
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise InvalidArgument(f"{name} cannot be {value!r}", remedy="use text")
    text, at_most = str(value), _LENGTHS.get(name, 2**20)
    if not 0 < len(text) <= at_most or "\0" in text:
        raise InvalidArgument(f"{name} has 1 to {at_most} characters", remedy="shorten it")
    return text


def microseconds(name: str, value: Any) -> int:
    """A time with its zone, as datetime or ISO 8601 text, or microseconds since 1970-01-01 UTC."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        at = datetime.fromisoformat(value) if isinstance(value, str) else value
        if isinstance(at, datetime) and at.tzinfo is not None:
            return round(at.timestamp() * 1e6)
    except ValueError:
        pass
    raise InvalidArgument(
        f"{name} cannot be {value!r}",
        remedy="use a datetime or ISO text with its zone, e.g. datetime.now(timezone.utc)",
    )


def to_time(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else datetime.fromtimestamp(microseconds / 1e6, UTC)


def columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """All 26, times as datetimes in UTC."""
    return {name: to_time(row[name]) if name in (*TIMES, "updated_on", "created_on") else row[name] for name in COLUMNS}


def answer(row: Mapping[str, Any]) -> dict[str, Any]:
    named = columns(row) | {"record_count": row["row_count"]}
    return {name: named[name] for name in ANSWER}


def is_done(row: Mapping[str, Any]) -> bool:
    """Whether everything was pulled and pushed."""
    return (row["action"], row["status"]) == (Action.POST_PUSH, Status.SUCCESS)
