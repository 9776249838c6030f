"""Rebuilds the projections from the records."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, delete, insert, literal, select, union_all

from stateflow.ledger import rules
from stateflow.ledger.reading import PAGE, record_of
from stateflow.ledger.records import Kind, Record
from stateflow.ledger.schema import ARCHIVE, ITEM, PROJECTIONS, RECORD, VERDICT
from stateflow.ledger.views import VIEWS
from stateflow.ledger.writing import head_row, verdict_row, verdicts_of


def rows_by_item(connection: Connection) -> Iterator[tuple[str, list[Any], bool]]:
    """Yields, in the order of item ids: the id, its rows, archived ones included, and whether it has archived ones."""
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
                # in this form the index finds the place; an OR of both cases reads, and sorts, all the rest
                query = query.where(table.c.item_id >= at[0], (table.c.item_id > at[0]) | (table.c.seq > at[1]))
            parts.append(select(query.order_by(table.c.item_id, table.c.seq).limit(PAGE).subquery()))
        both = union_all(*parts).subquery()
        page = connection.execute(select(both).order_by(both.c.item_id, both.c.seq).limit(PAGE)).all()
        yield from page
        if len(page) < PAGE:
            return
        at = page[-1].item_id, page[-1].seq


def rebuild(connection: Connection) -> int:
    """Rebuilds the projections in the caller's transaction. Returns the number of items. Raises LedgerCorrupt."""
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
        connection.execute(insert(view.table), [view.fold(records)])
