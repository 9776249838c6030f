"""Moves the records of items that are done to the archive."""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, select, update

from stateflow.ledger import queries, reading
from stateflow.ledger.schema import ARCHIVE, ITEM, RECORD


def archive(connection: Connection, before_us: int) -> int:
    """Archives up to 200 items that are older, in the caller's transaction. Returns how many; 0 when there are no
    more."""
    found = queries.archivable(before_us, 200)
    ids = list(connection.execute(found).scalars())
    locked = {row.item_id for row in connection.execute(reading.heads_for_update(ids))} if ids else set()
    ids = sorted(locked & set(connection.execute(found).scalars())) if ids else []
    if ids:
        columns = RECORD.columns.keys()
        records = select(RECORD).where(RECORD.c.item_id.in_(ids))
        connection.execute(insert(ARCHIVE).from_select(columns, records))
        connection.execute(delete(RECORD).where(RECORD.c.item_id.in_(ids)))
        connection.execute(update(ITEM).where(ITEM.c.item_id.in_(ids)).values(archived=1))
    return len(ids)
