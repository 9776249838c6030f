"""Checks a whole ledger for faults, and rebuilds its projections from the records.

The check and the rebuild walk over all items in the order of their ids, archived records included. The check assumes
nothing to be correct: it compares each item's records with the rules, with the schemas of their payloads, and with the
projections that follow from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Integer, delete, insert, literal, select, text, union_all

from stateflow.errors import LedgerCorrupt, StateflowError
from stateflow.ledger import records as payloads
from stateflow.ledger import rules
from stateflow.ledger.records import (
    ARCHIVE,
    ITEM,
    LEASE,
    PROJECTIONS,
    RECORD,
    SCHEMA,
    VERDICT,
    Fault,
    Head,
    Kind,
    Record,
    RecordState,
    is_time,
)
from stateflow.ledger.rules import TIMES, VIEWS, View
from stateflow.ledger.statements import PAGE, head_row, load_schema, record_of, verdict_row, verdicts_of

#: schemas by name; None stands for a stored schema that cannot be read
Schemas = Mapping[str, Mapping[str, Any] | None]
_STATES = frozenset(RecordState)


# -- Rebuild of the projections --------------------------------------------------------------------------------------


def rows_by_item(connection: Connection) -> Iterator[tuple[str, list[Any], bool]]:
    """Yields (item id, its rows with archived ones, whether any of them is archived), in the order of item ids."""
    for item_id, group in groupby(_rows(connection), key=lambda row: row.item_id):
        rows = list(group)
        yield item_id, rows, any(row.archived for row in rows)


def _rows(connection: Connection) -> Iterator[Any]:
    at: tuple[str, int] | None = None
    while True:
        parts = []
        for table, archived in ((RECORD, 0), (ARCHIVE, 1)):
            query = select(table, literal(archived).label("archived"))
            if at is not None:
                # the index serves this form; an OR of both cases would read, and sort, all remaining rows
                query = query.where(table.c.item_id >= at[0], (table.c.item_id > at[0]) | (table.c.seq > at[1]))
            parts.append(select(query.order_by(table.c.item_id, table.c.seq).limit(PAGE).subquery()))
        both = union_all(*parts).subquery()
        page = connection.execute(select(both).order_by(both.c.item_id, both.c.seq).limit(PAGE)).all()
        yield from page
        if len(page) < PAGE:
            return
        at = page[-1].item_id, page[-1].seq


def rebuild(connection: Connection) -> int:
    """Rebuilds the projections in the caller's transaction. Returns the number of items. Raises LedgerCorrupt.

    Writers wait for it. PostgreSQL needs a lock of the whole table for that: a statement that has waited for a deleted
    row there does not see the row that replaced it, and its writer would take the item for a missing one.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"LOCK TABLE {ITEM.name} IN EXCLUSIVE MODE"))
    for table in PROJECTIONS:
        connection.execute(delete(table))
    count = 0
    for _, rows, archived in rows_by_item(connection):
        records = [record_of(row) for row in rows]
        _write(connection, records, archived)
        count += 1
    return count


def _write(connection: Connection, records: list[Record], archived: bool) -> None:
    head = rules.fold(records)
    connection.execute(insert(ITEM), [head_row(head) | {"archived": int(archived)}])
    verdicts = [verdict_row(head.item_id, verdict, who) for verdict, who in verdicts_of(head)]
    if verdicts:
        connection.execute(insert(VERDICT), verdicts)
    if head.kind is not Kind.ITEM:
        view = VIEWS[head.kind]
        row = view.fold(records)
        wrong = row_problem(view, head.item_id, row)
        if wrong is not None:
            raise LedgerCorrupt(
                f"an item's columns cannot be stored: {wrong}",
                remedy="list every fault with `stateflow ledger verify`",
                item=head.item_id,
            )
        connection.execute(insert(view.table), [row])


def row_problem(view: View, item_id: str, row: Mapping[str, Any]) -> str | None:
    """Returns, in words, why the view's table cannot hold the row of an item; None: it can. Pure."""
    for column in view.table.columns:
        value = row[column.name]
        if column.name == view.key:
            fits = value == item_id
        elif value is None:
            fits = bool(column.nullable)
        else:
            fits = isinstance(value, int | float if isinstance(column.type, Integer) else str)
        if not fits:
            return f"{column.name} cannot be {value!r}"[:200]
    return None


# -- Faults ----------------------------------------------------------------------------------------------------------

# -- records, purely ------------------------------------------------------------------------------------------


def faults_of(item_id: str, records: Sequence[Record]) -> list[Fault]:
    """Returns the faults of one item's records. The records are in the order of their sequence numbers; their states
    and payloads may have any value.
    """
    found: list[Fault] = []

    def fault(code: str, what: str, record: Record | None = None) -> None:
        found.append(Fault(code, what, item_id, record.record_id if record else None))

    try:
        rules.check_item_id(item_id)
    except StateflowError as error:
        fault("bad_item_id", error.what)
    by_id = {record.record_id: record for record in records}
    kind = Kind.of(records[0].payload_schema) if records else Kind.ITEM
    head: Head | None = None
    legal: list[Record] = []
    for place, record in enumerate(records):
        if record.seq != place:
            fault("sequence_broken", f"sequence number {record.seq} where {place} is expected", record)
        if record.state not in _STATES:
            fault("unknown_state", f"unknown state {record.state!r}", record)
            continue
        if Kind.of(record.payload_schema) is not kind:
            fault("mixed_kinds", f"a record of kind {Kind.of(record.payload_schema)} in an item of kind {kind}", record)
        if not is_time(record.timestamp_us):
            fault("bad_time", f"its time, {record.timestamp_us} µs, is not within the years 2 to 9998", record)
        legal.append(record)
        if _may_stand(record, by_id, head, fault) and not found:
            head = rules.advance(head, record)
        else:
            head = rules.fold(legal)
    return found


def _may_stand(record: Record, by_id: Mapping[int, Record], head: Head | None, fault: Any) -> bool:
    """Tells whether the record may follow the records folded into ``head``."""
    try:
        rules.check_app(record.app, record.state)
    except StateflowError as error:
        fault("bad_app", error.what, record)
    previous = None
    if record.previous_record_id is not None:
        previous = by_id.get(record.previous_record_id)
        if previous is None:
            fault(
                "unknown_previous", f"previous record {record.previous_record_id} is not a record of this item", record
            )
            return False
        if previous.seq >= record.seq:
            fault("previous_is_later", f"previous record {previous.record_id} is not earlier", record)
            return False
    try:
        rules.check(head, record.item_id, record.app, record.state, previous)
    except StateflowError as error:
        fault("illegal_record", error.what, record)
        return False
    return True


def payload_faults(row: Any, schemas: Schemas) -> Iterator[Fault]:
    if row.payload is None and row.payload_schema is None:
        return
    try:
        payload = None if row.payload is None else json.loads(row.payload)
    except ValueError as error:
        yield Fault("invalid_payload", f"the payload is not JSON: {error}", row.item_id, row.record_id)
        return
    if row.payload_schema is None:
        return
    schema = schemas.get(row.payload_schema)
    if schema is None:
        stored = row.payload_schema in schemas
        what = f"its schema {row.payload_schema!r} {'cannot be read' if stored else 'is not registered'}"
        yield Fault("unreadable_schema" if stored else "unknown_schema", what, row.item_id, row.record_id)
        return
    wrong = payloads.problem(payload, schema)
    if wrong is not None:
        yield Fault("invalid_payload", wrong, row.item_id, row.record_id)


# -- the whole ledger -----------------------------------------------------------------------------------------


def verify(connection: Connection) -> Iterator[Fault]:
    names = connection.execute(select(SCHEMA.c.name)).scalars().all()
    schemas = load_schemas(connection, {*payloads.BUILTIN, *names})
    heads = _Cursor(connection, ITEM)
    verdicts = _Cursor(connection, VERDICT)
    for item_id, rows, archived in rows_by_item(connection):
        yield from _orphans(heads.before(item_id))
        yield from _stray_verdicts(verdicts.before(item_id))
        records = [record_of(row, strict=False) for row in rows]
        found = faults_of(item_id, records)
        yield from found
        unreadable = [fault for row in rows for fault in payload_faults(row, schemas)]
        yield from unreadable
        yield from _elsewhere(connection, item_id, found, records)
        if archived and not all(row.archived for row in rows):
            yield Fault("half_archived", "only some of its records are archived", item_id)
        yield from _head_faults(item_id, records, archived, heads.at(item_id), verdicts.at(item_id))
        if not found and not unreadable:
            yield from _view_faults(connection, records)
    yield from _orphans(heads.rest())
    yield from _stray_verdicts(verdicts.rest())
    yield from _stray_rows(connection)
    yield from _lease_faults(connection)


def load_schemas(connection: Connection, names: Iterable[str]) -> dict[str, Mapping[str, Any] | None]:
    """Returns those of the schemas that are registered."""
    found: dict[str, Mapping[str, Any] | None] = {}
    for name in names:
        try:
            schema = load_schema(connection, name)
        except LedgerCorrupt:
            found[name] = None
        else:
            found |= {} if schema is None else {name: schema}
    return found


def _elsewhere(
    connection: Connection, item_id: str, found: Sequence[Fault], records: Sequence[Record]
) -> Iterator[Fault]:
    """Yields a fault for each previous record that belongs to another item."""
    by_id = {record.record_id: record for record in records}
    for fault in found:
        if fault.code == "unknown_previous" and fault.record_id is not None:
            previous_id = by_id[fault.record_id].previous_record_id
            for table in (RECORD, ARCHIVE):
                query = select(table.c.item_id).where(table.c.record_id == previous_id)
                for other in connection.execute(query).scalars():
                    what = f"previous record {previous_id} belongs to item {other!r}"
                    yield Fault("previous_of_another_item", what, item_id, fault.record_id)


def _head_faults(
    item_id: str, records: Sequence[Record], archived: bool, head: Sequence[Any], verdicts: Sequence[Any]
) -> Iterator[Fault]:
    readable = [record for record in records if record.state in _STATES]
    if not head:
        yield Fault("head_missing", "the projection lacks the item", item_id)
    elif readable:
        wanted = head_row(rules.fold(readable)) | {"archived": int(archived)}
        wrong = sorted(name for name, value in wanted.items() if head[0]._mapping[name] != value)
        if wrong:
            yield Fault("head_differs", f"the projection differs from the records in {', '.join(wrong)}", item_id)
    if readable:
        folded = rules.fold(readable)
        right = {tuple(verdict_row(item_id, *each).values()) for each in verdicts_of(folded)}
        if right != {tuple(row) for row in verdicts}:
            yield Fault("verdicts_differ", "its verdicts in the projection differ from the records", item_id)


def _view_faults(connection: Connection, records: Sequence[Record]) -> Iterator[Fault]:
    kind = Kind.of(records[0].payload_schema)
    if kind is Kind.ITEM:
        return
    view = VIEWS[kind]
    wanted = view.fold(list(records))
    wrong = row_problem(view, records[0].item_id, wanted)
    if wrong is not None:
        yield Fault("invalid_payload", f"its columns cannot be stored: {wrong}", records[0].item_id)
        return
    row = connection.execute(select(view.table).where(view.table.c[view.key] == records[0].item_id)).mappings().first()
    if kind is Kind.STAGE:
        for record in records:
            changed = record.payload["set"]
            for name in TIMES:
                if changed.get(name) is not None and not is_time(changed[name]):
                    what = f"{name}, {changed[name]} µs, is not within the years 2 to 9998"
                    yield Fault("bad_time", what, record.item_id, record.record_id)
    if row is None or dict(row) != wanted:
        yield Fault("view_differs", f"the table of {kind} rows differs from the records", records[0].item_id)


def _stray_rows(connection: Connection) -> Iterator[Fault]:
    """Yields a fault for each row of a view whose item has no record of the view's kind."""
    for kind, view in VIEWS.items():
        key = view.table.c[view.key]
        query = select(key)
        for table in (RECORD, ARCHIVE):
            mine = select(table.c.item_id).where(table.c.item_id == key, table.c.payload_schema == kind.payload_schema)
            query = query.where(~mine.exists())
        for item_id in connection.execute(query).scalars():
            yield Fault("row_without_records", f"the table of {kind} rows has a row without records", item_id)


def _lease_faults(connection: Connection) -> Iterator[Fault]:
    held = select(ITEM.c.item_id).where(
        ITEM.c.item_id == LEASE.c.item_id,
        ITEM.c.blocking_record_id == LEASE.c.record_id,
        ITEM.c.blocking_state == RecordState.PROCESSING.value,
    )
    for row in connection.execute(select(LEASE).where(~held.exists())):
        yield Fault("stray_lease", "the lease is not that of a lock that holds the item", row.item_id, row.record_id)


def _orphans(rows: Iterator[Any]) -> Iterator[Fault]:
    for row in rows:
        yield Fault("head_without_records", "the projection has an item without records", row.item_id)


def _stray_verdicts(rows: Iterator[Any]) -> Iterator[Fault]:
    for row in rows:
        yield Fault("verdict_without_records", "the projection has a verdict on an item without records", row.item_id)


class _Cursor:
    """A cursor over a projection's rows in the order of item ids. It reads them in pages, and only moves forward, in
    step with the records."""

    def __init__(self, connection: Connection, table: Any) -> None:
        self._rows = self._pages(connection, table)
        self._next = next(self._rows, None)

    @staticmethod
    def _pages(connection: Connection, table: Any) -> Iterator[Any]:
        after = ""
        while True:
            ids = list(
                connection.execute(
                    select(table.c.item_id).where(table.c.item_id > after).order_by(table.c.item_id).limit(PAGE)
                ).scalars()
            )
            if not ids:
                return
            query = select(table).where(table.c.item_id > after, table.c.item_id <= ids[-1])
            yield from connection.execute(query.order_by(table.c.item_id)).all()
            after = ids[-1]

    def before(self, item_id: str) -> Iterator[Any]:
        while self._next is not None and self._next.item_id < item_id:
            yield self._next
            self._next = next(self._rows, None)

    def at(self, item_id: str) -> list[Any]:
        found = []
        while self._next is not None and self._next.item_id == item_id:
            found.append(self._next)
            self._next = next(self._rows, None)
        return found

    def rest(self) -> Iterator[Any]:
        while self._next is not None:
            yield self._next
            self._next = next(self._rows, None)
