"""Rows of several partitions that arrived in one record batch, decoded together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from stateflow.runtime.rows import NOT_PYTHONS, RowReader

#: rows of neighbouring parts decoded to Python at a time; a single part is decoded whole, however many rows it has
WINDOW_ROWS = 2048


class Arriving:
    """Rows of one record batch, read part by part and decoded in windows of several parts.

    Args:
        rows: validated rows of all parts.
        stops: for each part the index after its last row, ascending.
    """

    def __init__(self, reader: RowReader, rows: pa.RecordBatch, stops: Sequence[int]) -> None:
        self.reader = reader
        self._rows, self._stops = reader.keyed(rows), stops
        self._has_null_keys = any(rows.column(column).null_count for column in reader.key)
        self._first = 0
        self._keys: list[Any] = []
        self._window: list[Any] = []  # the rows of these keys
        # some value has no Python equivalent: parts are then decoded one by one, so that it affects its own part only
        self._alone = False

    def columns(self, start: int, stop: int) -> pa.RecordBatch:
        """Returns the rows from ``start`` to before ``stop`` as a record batch. Raises NullKey."""
        part = self._rows.slice(start, stop - start)
        if self._has_null_keys:
            self.reader.check_keys(part)
        return part

    def read(self, start: int, stop: int) -> tuple[list[Any], Iterable[Any]]:
        """Returns (keys, rows) from ``start`` to before ``stop``. Raises NullKey, and InvalidArgument for a key without
        a Python equivalent."""
        if self._has_null_keys:
            self.columns(start, stop)
        if not self._first <= start <= stop <= self._first + len(self._keys):
            reach = 0 if self._alone else bisect_right(self._stops, start + WINDOW_ROWS)
            end = self._stops[reach - 1] if reach else stop
            if end <= stop:  # the window holds no other part's rows
                return self._part(start, stop)
            try:
                self._keys, rows = self.reader.read(self._rows.slice(start, end - start))
            except NOT_PYTHONS:
                self._alone = True
                return self._part(start, stop)
            self._first, self._window = start, list(rows)
        part = slice(start - self._first, stop - self._first)
        return self._keys[part], self._window[part]

    def _part(self, start: int, stop: int) -> tuple[list[Any], Iterable[Any]]:
        return self.reader.read_each(self._rows.slice(start, stop - start))


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows of one partition among those that arrived together."""

    arriving: Arriving
    start: int
    stop: int

    @property
    def reader(self) -> RowReader:
        return self.arriving.reader

    def read(self) -> tuple[list[Any], Iterable[Any]]:
        return self.arriving.read(self.start, self.stop)

    def columns(self) -> pa.RecordBatch:
        return self.arriving.columns(self.start, self.stop)


def alone(reader: RowReader, rows: pa.RecordBatch) -> Arrived:
    """Wraps rows that all belong to one partition."""
    return Arrived(Arriving(reader, rows, [rows.num_rows]), 0, rows.num_rows)
