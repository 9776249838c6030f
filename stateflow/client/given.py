"""Checks of what callers of a stream pass: rows, source names, batch numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stateflow.errors import InvalidArgument
from stateflow.runtime.layout import REAL_TIME
from stateflow.runtime.positions import INITIAL, RESERVED
from stateflow.types import LABEL, SEQUENCE_MAX, shown

#: largest number that a caller may pass, so that as many numbers follow it. Microseconds since 1970 are far below
GIVEN_MAX = SEQUENCE_MAX // 2


def rows_given(rows: object) -> list[Mapping[str, Any]]:
    """Returns the rows as a list. Raises InvalidArgument, naming the first that is no row."""
    found = list(iterable_given(rows))
    for index, row in enumerate(found):
        if not isinstance(row, Mapping):
            raise InvalidArgument(f"{shown(row)} is not a row", remedy="send dicts: column → value", row=index)
        wrong = next((name for name in row if not isinstance(name, str)), None)
        if wrong is not None:
            raise InvalidArgument(f"{shown(wrong)} is not a column name", remedy="use strings", row=index)
    return found


def iterable_given(rows: object) -> Iterable[Any]:
    """Checks that rows are an iterable of rows. Raises InvalidArgument."""
    if isinstance(rows, Mapping):
        raise InvalidArgument("this is one row, not a list of rows", remedy="send [row]")
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes):
        raise InvalidArgument(f"{shown(rows)} is not a list of rows", remedy="send a list of dicts")
    return rows


def source_given(source: object) -> str:
    """Checks the name of a source. Raises InvalidArgument; the source of first state is allowed."""
    if not isinstance(source, str):
        raise InvalidArgument(f"{shown(source)} is not a source name", remedy=LABEL.how)
    if source.startswith((RESERVED, REAL_TIME)) and source != INITIAL:
        raise InvalidArgument(f"{source!r} is a reserved name", remedy="choose another name for the source")
    return LABEL.check(source, "source name")


def number_given(number: object, what: str = "sequence") -> int:
    """Checks the number of a batch. Raises InvalidArgument."""
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= GIVEN_MAX:
        raise InvalidArgument(
            f"{shown(number)} is not a batch number",
            remedy=f"use an int from 0 to {GIVEN_MAX}, which leaves numbers for later batches",
            argument=what,
        )
    return number
