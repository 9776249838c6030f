"""Stages as data: their columns, the order of their actions, and the state of their items. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from stateflow.errors import InvalidArgument
from stateflow.ledger import rules
from stateflow.ledger.records import ITEM_ID_MAX, RecordState
from stateflow.ledger.schema import microseconds, to_time
from stateflow.types import shown


class Action(StrEnum):
    """Actions of a stage, in this order. ``sinking pre-pull`` and ``sinking post-pull`` are understood as the two push
    actions."""

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
RECORD_STATE = {
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
#: columns that insert_state, update_state and get_current_state return
ANSWER = (
    *("state_id", "job_id", "correlation_id_in", "correlation_id_out", "source_entity", "source_filter"),
    *TIMES,
    *("first_record_pulled", "last_record_pulled", "record_count", "run_id", "manifest_name"),
    *("source_name", "sink_name"),
)


def named(positional: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments by their names. Raises InvalidArgument."""
    if len(positional) > len(POSITIONS):
        raise InvalidArgument(
            f"a stage takes {len(POSITIONS)} positional arguments, not {len(positional)}",
            remedy=f"they are {', '.join(POSITIONS)}",
        )
    placed = dict(zip(POSITIONS, positional, strict=False))
    twice = sorted(set(placed) & set(given))
    if twice:
        raise InvalidArgument(f"{twice[0]} is given twice", remedy="pass it once, by name or by position")
    return {**placed, **given}


def changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that these keyword arguments set, as they are stored; None sets nothing.

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
    if isinstance(value, datetime) and name in ("first_record_pulled", "last_record_pulled"):
        return value.isoformat()
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise InvalidArgument(f"{name} cannot be {shown(value)}", remedy="use text")
    text = str(value)
    if name in _LENGTHS and not rules.is_id(text, _LENGTHS[name]):
        raise InvalidArgument(
            f"{name} must have 1 to {_LENGTHS[name]} characters, no control character and no trailing space",
            remedy="choose another",
            given=shown(value),
        )
    if name in _IDS and not rules.is_item_id(text):
        raise InvalidArgument(
            f"{name} must have 1 to {ITEM_ID_MAX:,} bytes in UTF-8, without NUL or a trailing space",
            remedy="choose another",
            given=shown(value),
        )
    if not 0 < len(text) <= _TEXT_MAX or not rules.is_text(text):
        raise InvalidArgument(
            f"{name} must have 1 to {_TEXT_MAX:,} characters, without NUL or lone surrogates",
            remedy="correct it",
            given=shown(value),
        )
    return text


def columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all 26 columns, times as datetimes in UTC."""
    return {name: to_time(row[name]) if name in (*TIMES, "updated_on", "created_on") else row[name] for name in COLUMNS}


def answer(row: Mapping[str, Any]) -> dict[str, Any]:
    named = columns(row) | {"record_count": row["row_count"]}
    return {name: named[name] for name in ANSWER}


def is_done(row: Mapping[str, Any]) -> bool:
    """Tells whether everything was pulled and pushed."""
    return (row["action"], row["status"]) == (Action.POST_PUSH, Status.SUCCESS)
