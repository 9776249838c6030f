"""SQL statements that read records, heads and schemas, and the conversion of rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Column, Connection, Row, Select, select, union_all

from stateflow.errors import IllegalRecord, LedgerCorrupt
from stateflow.ledger import payloads
from stateflow.ledger.records import App, Head, Kind, Record, RecordState, Who
from stateflow.ledger.schema import ARCHIVE, IDENTITY, ITEM, LEASE, RECORD, SCHEMA, VERDICT, now_us

PAGE = 1000
CHUNK = 500
SHORT_PAGE = 200
_BIGGEST = 2**63 - 1


# -- rows -----------------------------------------------------------------------------------------------------


def record_of(row: Row[Any] | Mapping[str, Any], *, strict: bool = True) -> Record:
    """Converts a row. Raises LedgerCorrupt for values that no ``put`` wrote; when not ``strict``, keeps them as they
    are."""
    it: Any = row if isinstance(row, Mapping) else row._mapping
    state, payload = it["state"], it["payload"]
    try:
        state = RecordState(state)
        payload = None if payload is None else json.loads(payload)
    except ValueError as error:
        if strict:
            raise LedgerCorrupt(
                "a record cannot be read",
                remedy="list every fault with `stateflow ledger verify`",
                item=it["item_id"],
                record=it["record_id"],
            ) from error
    return Record(
        it["record_id"],
        it["item_id"],
        it["seq"],
        App(it["app_name"], it["app_version"], it["app_instance"]),
        state,
        it["previous_record_id"],
        it["author"],
        it["timestamp_us"],
        it["run_id"],
        payload,
        it["payload_schema"],
    )


def chunks(ids: Iterable[Any]) -> Iterator[list[Any]]:
    ordered = sorted(set(ids))
    for start in range(0, len(ordered), CHUNK):
        yield ordered[start : start + CHUNK]


# -- reading --------------------------------------------------------------------------------------------------


def heads_for_update(ids: list[str]) -> Select[Any]:
    query = select(ITEM).where(ITEM.c.item_id.in_(ids)).order_by(ITEM.c.item_id)
    return query.with_for_update().with_hint(ITEM, "WITH (UPDLOCK, ROWLOCK)", "mssql")


def turn() -> Select[Any]:
    """Locks a row that each writer locks until its commit before it numbers its records. Ids are therefore in the order
    of commits: a reader that has seen one has seen all below it. SQLite has one writer at a time by itself."""
    query = select(IDENTITY.c.only).where(IDENTITY.c.only == 1).with_for_update()
    return query.with_hint(IDENTITY, "WITH (UPDLOCK, ROWLOCK)", "mssql")


def load_heads(connection: Connection, ids: Iterable[str], *, for_update: bool = False) -> dict[str, Head]:
    """Returns the heads of those of these items that exist. With ``for_update`` it locks them, and raises IllegalRecord
    for an archived item."""
    heads: dict[str, Head] = {}
    for some in chunks(ids):
        query = heads_for_update(some) if for_update else select(ITEM).where(ITEM.c.item_id.in_(some))
        rows = connection.execute(query).all()
        found: dict[str, dict[str, set[Who]]] = {}
        if rows:
            marks = connection.execute(select(VERDICT).where(VERDICT.c.item_id.in_([row.item_id for row in rows])))
            for mark in marks:
                who = Who(mark.app_name, mark.app_instance or None)
                found.setdefault(mark.item_id, {}).setdefault(mark.verdict, set()).add(who)
        for row in rows:
            if for_update and row.archived:
                raise IllegalRecord("the item is archived", remedy="use another id", item=row.item_id)
            verdicts = found.get(row.item_id, {})
            heads[row.item_id] = Head(
                row.item_id,
                Kind(row.kind),
                row.seq,
                RecordState(row.state),
                row.newest_record_id,
                row.blocking_record_id,
                None if row.blocking_state is None else RecordState(row.blocking_state),
                row.created_us,
                row.updated_us,
                frozenset(verdicts.get("PROCESSED", ())),
                frozenset(verdicts.get("SKIPPED", ())),
            )
    return heads


def load_records(connection: Connection, record_ids: Iterable[int]) -> dict[int, Record]:
    found: dict[int, Record] = {}
    for some in chunks(record_ids):
        for row in connection.execute(select(RECORD).where(RECORD.c.record_id.in_(some))):
            found[row.record_id] = record_of(row)
    return found


def page_of_records(after: int, *, archived: bool, until: int | None = None) -> Select[Any]:
    """Selects a page of records, in the order of their ids. One statement reads the archive, too, so that a record that
    moves there is never missed."""

    def some(table: Any) -> Select[Any]:
        query = select(table).where(table.c.record_id > after)
        if until is not None:
            query = query.where(table.c.record_id <= until)
        return query.order_by(table.c.record_id).limit(PAGE)

    if not archived:
        return some(RECORD)
    both = union_all(select(some(RECORD).subquery()), select(some(ARCHIVE).subquery())).subquery()
    return select(both).order_by(both.c.record_id).limit(PAGE)


def page_of_item(item_id: str, after: int, *, archived: bool) -> Select[Any]:
    table = ARCHIVE if archived else RECORD
    return select(table).where(table.c.item_id == item_id, table.c.seq > after).order_by(table.c.seq).limit(PAGE)


def load_schema(connection: Connection, name: str) -> Mapping[str, Any] | None:
    if name in payloads.BUILTIN:
        return payloads.BUILTIN[name]
    body = connection.execute(select(SCHEMA.c.body).where(SCHEMA.c.name == name)).scalar()
    return None if body is None else dict(json.loads(body))


def expired_leases(ids: list[str] | None = None) -> Select[Any]:
    """Selects the locks whose lease has ended, by the database's own clock."""
    query = select(LEASE.c.item_id, LEASE.c.record_id).where(LEASE.c.until_us <= now_us())
    return query if ids is None else query.where(LEASE.c.item_id.in_(ids))


def newest_first(
    connection: Connection, query: Select[Any], number: Column[int], limit: int | None
) -> Iterator[dict[str, Any]]:
    """Yields rows by descending ``number``, a unique column with an index, in pages so short that the index serves
    them."""
    left, before = _BIGGEST if limit is None else limit, _BIGGEST
    while left > 0:
        size = min(SHORT_PAGE, left)
        rows = connection.execute(query.where(number < before).order_by(number.desc()).limit(size)).mappings().all()
        yield from (dict(row) for row in rows)
        if len(rows) < size:
            return
        before, left = rows[-1][number.name], left - size
