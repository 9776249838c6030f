"""Points in time as they are stored: microseconds since 1970-01-01 UTC, all of which a datetime can show."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from stateflow.errors import InvalidArgument
from stateflow.types import shown

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: a year short of datetime's range, so that every zone can show them
FIRST_US = (datetime(2, 1, 1, tzinfo=UTC) - _EPOCH) // _MICROSECOND
LAST_US = (datetime(9999, 1, 1, tzinfo=UTC) - _EPOCH) // _MICROSECOND - 1


def is_time(us: object) -> bool:
    return isinstance(us, int) and FIRST_US <= us <= LAST_US


def to_time(us: Any) -> Any:
    """Converts to a datetime in UTC. Other values, which only a damaged or an earlier ledger has, are returned
    unchanged."""
    return _EPOCH + us * _MICROSECOND if is_time(us) else us


def microseconds(name: str, value: Any) -> int:
    """Converts a datetime or ISO 8601 text with its zone to microseconds; microseconds are returned. Raises
    InvalidArgument."""
    us = value
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            pass
    if isinstance(value, datetime) and value.tzinfo is not None:
        us = (value - _EPOCH) // _MICROSECOND
    if isinstance(us, bool) or not isinstance(us, int):
        raise InvalidArgument(
            f"{name} cannot be {shown(value)}",
            remedy="use a datetime or ISO text with a time zone, e.g. datetime.now(timezone.utc)",
        )
    if not is_time(us):
        raise InvalidArgument(
            f"{name} cannot be {shown(value)}: not within the years 2 to 9998",
            remedy="pass whole numbers as microseconds since 1970-01-01 UTC",
        )
    return us
