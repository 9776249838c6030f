"""SQL statements that read and write records and their projections, and the conversion of rows.

``rules`` decides what may be written. :func:`append` takes these steps in the caller's transaction:

1. Lock the heads of the items, and call the guard.
2. Lock the row of writers, so that ids of records are in the order of commits.
3. Resolve the expired locks of items that are to be acquired, and insert all records, each checked.
4. Write heads, verdicts, leases and views.

Every query that selects items for a call over many items is served by an index.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    CompoundSelect,
    Connection,
    Row,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    insert,
    literal,
    or_,
    select,
    union_all,
    update,
)

from stateflow.errors import IllegalRecord, InvalidPayload, LedgerCorrupt, Locked
from stateflow.ledger import records, rules
from stateflow.ledger import records as payloads
from stateflow.ledger.records import (
    ARCHIVE,
    EVERYONE,
    IDENTITY,
    ITEM,
    LEASE,
    RECORD,
    SCHEMA,
    STAGE,
    VERDICT,
    App,
    Entry,
    Head,
    ItemId,
    Kind,
    Record,
    RecordState,
    Who,
    now_us,
)
from stateflow.ledger.rules import VIEWS

PAGE = 1000
CHUNK = 500
SHORT_PAGE = 200
_BIGGEST = 2**63 - 1


# -- Reads of records, heads and schemas -----------------------------------------------------------------------------

# -- rows -----------------------------------------------------------------------------------------------------


def record_of(row: Row[Any] | Mapping[str, Any], *, strict: bool = True) -> Record:
    """Converts a row to a record. Raises LedgerCorrupt for values that no ``put`` can have written; if not ``strict``,
    keeps such values unchanged."""
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


def writer_lock() -> Select[Any]:
    """Selects, and locks until the commit, the row that each writer locks before it numbers its records. Ids are
    therefore in the order of commits: a reader that has seen an id has seen all lower ones. SQLite allows only one
    writer at a time anyway."""
    query = select(IDENTITY.c.only).where(IDENTITY.c.only == 1).with_for_update()
    return query.with_hint(IDENTITY, "WITH (UPDLOCK, ROWLOCK)", "mssql")


def load_heads(connection: Connection, ids: Iterable[str], *, for_update: bool = False) -> dict[str, Head]:
    """Returns the heads of the items in ``ids`` that exist. With ``for_update`` it locks them, and raises IllegalRecord
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


def records_of(ids: list[str]) -> CompoundSelect[Any]:
    """Selects the records of items, with ``archived`` (0 or 1). One statement reads both tables, so that an item which
    is archived meanwhile is found once."""
    parts = [
        select(table, literal(archived).label("archived")).where(table.c.item_id.in_(ids))
        for table, archived in ((RECORD, 0), (ARCHIVE, 1))
    ]
    return union_all(*parts)


def page_of_records(after: int, *, archived: bool) -> Select[Any]:
    """Selects a page of records, in the order of their ids. One statement reads the archive, too, so that a record that
    moves there is never missed."""

    def some(table: Any) -> Select[Any]:
        return select(table).where(table.c.record_id > after).order_by(table.c.record_id).limit(PAGE)

    return _of_both(some, "record_id") if archived else some(RECORD)


def page_of_item(item_id: str, after: int) -> Select[Any]:
    """Selects a page of an item's records, archived or not, in their order, as ``page_of_records`` does."""
    return _of_both(
        lambda table: (
            select(table).where(table.c.item_id == item_id, table.c.seq > after).order_by(table.c.seq).limit(PAGE)
        ),
        "seq",
    )


def _of_both(some: Callable[[Any], Select[Any]], order: str) -> Select[Any]:
    both = union_all(select(some(RECORD).subquery()), select(some(ARCHIVE).subquery())).subquery()
    return select(both).order_by(both.c[order]).limit(PAGE)


def load_schema(connection: Connection, name: str) -> Mapping[str, Any] | None:
    """Returns a schema; None: it is not registered. Raises LedgerCorrupt if the stored text is not a JSON object."""
    if name in records.BUILTIN:
        return records.BUILTIN[name]
    body = connection.execute(select(SCHEMA.c.body).where(SCHEMA.c.name == name)).scalar()
    if body is None:
        return None
    try:
        schema = json.loads(body)
    except ValueError:
        schema = None
    if not isinstance(schema, dict):
        raise LedgerCorrupt(
            "a stored schema cannot be read", remedy=f"restore its row of {SCHEMA.name} from a backup", schema=name
        )
    return schema


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


# -- Queries of the items of calls over many items -------------------------------------------------------------------


def _instances(who: Who) -> list[str]:
    return ["", who.instance] if who.instance else [""]


def _has(verdict: RecordState, *names: ColumnElement[bool]) -> ColumnElement[bool]:
    mark = VERDICT
    return exists(
        select(mark.c.item_id).where(mark.c.item_id == ITEM.c.item_id, mark.c.verdict == verdict.value, or_(*names))
    )


def _covering(who: Who) -> ColumnElement[bool]:
    return and_(VERDICT.c.app_name == who.name, VERDICT.c.app_instance.in_(_instances(who)))


def _listed() -> Select[Any]:
    return select(ITEM.c.item_id, ITEM.c.blocking_record_id).where(ITEM.c.kind == Kind.ITEM.value, ITEM.c.archived == 0)


def _processed(query: Select[Any], who: Who) -> Select[Any]:
    marked = select(VERDICT.c.item_id).where(VERDICT.c.verdict == RecordState.PROCESSED.value, _covering(who))
    return query.where(ITEM.c.item_id.in_(marked))


def unprocessed(prepared_by: Who | None, requester: Who | None) -> Select[Any]:
    """Selects ids and blocking records of the items that ``prepared_by`` has processed (None: all items), and that
    ``requester`` has not processed and need not skip."""
    query = _listed()
    if prepared_by is not None:
        query = _processed(query, prepared_by)
    skips = [VERDICT.c.app_name == EVERYONE]
    if requester is not None:
        query = query.where(~_has(RecordState.PROCESSED, _covering(requester)))
        skips.append(_covering(requester))
    return query.where(~_has(RecordState.SKIPPED, *skips)).order_by(ITEM.c.item_id)


def ready(prepared_by: Who | None, requester: Who | None) -> tuple[Select[Any], Select[Any]]:
    """Returns two queries for unprocessed items that can be acquired now: items that no record blocks, and items whose
    holder's lease has ended."""
    query = unprocessed(prepared_by, requester)
    silent = select(LEASE.c.item_id).where(LEASE.c.until_us <= now_us())
    return query.where(ITEM.c.blocking_record_id.is_(None)), query.where(ITEM.c.item_id.in_(silent))


def fetched(processed_by: Who | None, state: RecordState | None) -> Select[Any]:
    query = _listed().order_by(ITEM.c.item_id)
    if processed_by is not None:
        query = _processed(query, processed_by)
    if state is RecordState.SKIPPED:
        marked = select(VERDICT.c.item_id).where(VERDICT.c.verdict == state.value)
        return query.where(ITEM.c.item_id.in_(marked))
    return query if state is None else query.where(ITEM.c.state == state.value)


def archivable(before_us: int, limit: int) -> Select[Any]:
    """Selects items that are done and not blocked, and that have no record since ``before_us``. A stage is done at
    its last action."""
    unfinished = exists(
        select(STAGE.c.state_id).where(
            STAGE.c.state_id == ITEM.c.item_id,
            or_(STAGE.c.action.is_(None), STAGE.c.action != "sinking post-push"),
        )
    )
    return (
        select(ITEM.c.item_id)
        .where(
            ITEM.c.archived == 0,
            ITEM.c.state == RecordState.PROCESSED.value,
            ITEM.c.updated_us < before_us,
            ~and_(ITEM.c.kind == Kind.STAGE.value, unfinished),
        )
        .order_by(ITEM.c.updated_us)
        .limit(limit)
    )


# -- Writes of records and projections -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stamp:
    """Fields that all records of one transaction share. ``lease_s``: lease, in seconds, of locks whose entries name no
    lease."""

    author: str
    run_id: str
    timestamp_us: int
    lease_s: float


# -- rows --------------------------------------------------------------------------------------------------------


def verdicts_of(head: Head) -> set[tuple[RecordState, Who]]:
    return {(RecordState.PROCESSED, who) for who in head.processed} | {
        (RecordState.SKIPPED, who) for who in head.skipped
    }


def head_row(head: Head) -> dict[str, Any]:
    return {
        "item_id": head.item_id,
        "kind": head.kind.value,
        "seq": head.seq,
        "state": str(head.state),
        "newest_record_id": head.newest_record_id,
        "blocking_record_id": head.blocking_record_id,
        "blocking_state": None if head.blocking_state is None else str(head.blocking_state),
        "created_us": head.created_us,
        "updated_us": head.updated_us,
    }


def verdict_row(item_id: str, verdict: RecordState, who: Who) -> dict[str, Any]:
    return {
        "item_id": item_id,
        "verdict": verdict.value,
        "app_name": who.name,
        "app_instance": who.instance or "",
    }


# -- writing --------------------------------------------------------------------------------------------------

Guard = Callable[[Mapping[str, Head]], None]


def unchanged(seen: Mapping[str, int]) -> Guard:
    """Returns a guard that raises Locked unless each item's newest record still has the number given in ``seen``."""

    def check(heads: Mapping[str, Head]) -> None:
        for item_id, seq in seen.items():
            if heads[item_id].seq != seq:
                raise Locked("another writer changed the item first", remedy="read the item again", item=item_id)

    return check


def append(connection: Connection, entries: Sequence[Entry], stamp: Stamp, guard: Guard | None = None) -> list[Record]:
    """Appends records and updates their projections in the caller's transaction, which must be rolled back when this
    raises.

    ``guard`` is called with the items' heads, locked, before anything is written, and may raise.
    Raises IllegalRecord, InvalidPayload, Locked, LeaseLost.
    """
    before = load_heads(connection, {entry.item_id for entry in entries}, for_update=True)
    if guard is not None:
        guard(before)
    resolutions = _resolve_expired(connection, entries, before)
    connection.execute(writer_lock()).all()  # last of the locks: its holder waits for no other writer
    return _Append(connection, stamp, before).run([*resolutions, *entries])[len(resolutions) :]


def _resolve_expired(connection: Connection, entries: Sequence[Entry], heads: Mapping[str, Head]) -> list[Entry]:
    """Returns entries that resolve the expired locks of items that are to be acquired. Failures are never resolved
    here."""
    wanted = {
        entry.item_id: entry
        for entry in entries
        if entry.state == RecordState.PROCESSING
        and entry.item_id in heads
        and heads[entry.item_id].blocking_state is RecordState.PROCESSING
    }
    found: list[Entry] = []
    for some in chunks(wanted):
        for item_id, record_id in connection.execute(expired_leases(some)):
            if record_id == heads[item_id].blocking_record_id:
                found.append(lease_ended(item_id, record_id, wanted[item_id].app))
    return found


def lease_ended(item_id: str, record_id: int, app: App) -> Entry:
    return Entry(item_id, app, RecordState.RESOLVED, record_id, {"note": "the lease of its holder ended"})


class _Append:
    """Writes entries in runs in which no item occurs twice: one statement inserts a run's records, if the database and
    the size of the payloads allow it."""

    def __init__(self, connection: Connection, stamp: Stamp, before: dict[str, Head]) -> None:
        self._connection, self._stamp, self._before = connection, stamp, before
        self._heads = dict(before)
        self._schemas: dict[str, Mapping[str, Any] | None] = {}
        self._known: dict[int, Record] = {}
        self._written: dict[int, Record] = {}  # by id() of the entry
        self._leases: dict[str, tuple[int, float]] = {}

    def run(self, entries: Sequence[Entry]) -> list[Record]:
        named = (_id_of(entry.previous) for entry in entries)
        self._known = load_records(self._connection, {each for each in named if each is not None and 0 < each < 2**63})
        records: list[Record] = []
        start = 0
        while start < len(entries):
            end, seen = start, set[str]()
            while end < len(entries) and entries[end].item_id not in seen:
                seen.add(entries[end].item_id)
                end += 1
            records += self._insert(entries[start:end])
            start = end
        self._write_heads()
        self._write_leases()
        self._write_views(records)
        return records

    def _insert(self, entries: Sequence[Entry]) -> list[Record]:
        rows = [self._row(entry) for entry in entries]
        keys = [key for some in _portions(rows) for key in self._insert_rows(some)]
        records = [record_of(row | {"record_id": key}) for row, key in zip(rows, keys, strict=True)]
        for entry, record in zip(entries, records, strict=True):
            self._written[id(entry)] = record
            self._heads[entry.item_id] = rules.advance(self._heads.get(entry.item_id), record)
            if record.state is RecordState.PROCESSING:
                lease_s = self._stamp.lease_s if entry.lease_s is None else entry.lease_s
                self._leases[entry.item_id] = record.record_id, lease_s
        return records

    def _insert_rows(self, rows: list[dict[str, Any]]) -> list[int]:
        if len(rows) > 1 and self._connection.dialect.insert_executemany_returning_sort_by_parameter_order:
            statement = insert(RECORD).returning(RECORD.c.record_id, sort_by_parameter_order=True)
            return list(self._connection.execute(statement, rows).scalars())
        keys = (self._connection.execute(insert(RECORD).values(row)).inserted_primary_key for row in rows)
        return [int(key[0]) for key in keys if key is not None]

    def _row(self, entry: Entry) -> dict[str, Any]:
        rules.check_item_id(entry.item_id)
        try:
            state = RecordState(entry.state)
        except ValueError:
            raise IllegalRecord(
                f"unknown state {entry.state!r}", remedy=f"use {', '.join(RecordState)}", item=entry.item_id
            ) from None
        rules.check_app(entry.app, state)
        head, previous = self._heads.get(entry.item_id), self._previous(entry)
        kind = Kind.of(entry.payload_schema)
        if head is not None and head.kind is not kind:
            raise IllegalRecord(
                f"the item is of kind {head.kind}, the record of kind {kind}",
                remedy="use the methods for its kind",
                item=entry.item_id,
            )
        try:
            rules.check(head, entry.item_id, entry.app, state, previous)
        except Locked as error:
            if state in rules.RELEASES and previous is not None and self._was_resolved(previous):
                raise rules.lease_lost(previous, error.where.get("blocking_record")) from None
            if head is not None and head.blocking_record_id is not None:
                blocking = self._known.get(head.blocking_record_id) or self._written_as(head.blocking_record_id)
                error.blocking_record = blocking or load_records(self._connection, [head.blocking_record_id]).get(
                    head.blocking_record_id
                )
            raise
        return {
            "item_id": entry.item_id,
            "seq": 0 if head is None else head.seq + 1,
            "app_name": entry.app.name,
            "app_version": entry.app.version,
            "app_instance": entry.app.instance,
            "state": state.value,
            "previous_record_id": None if previous is None else previous.record_id,
            "author": self._stamp.author,
            "timestamp_us": self._stamp.timestamp_us,
            "run_id": self._stamp.run_id,
            "payload": self._payload(entry),
            "payload_schema": entry.payload_schema,
        }

    def _was_resolved(self, lock: Record) -> bool:
        """Tells whether a RESOLVED has answered this lock; the item may have another holder since."""
        answers = select(RECORD.c.record_id).where(
            RECORD.c.item_id == lock.item_id,
            RECORD.c.previous_record_id == lock.record_id,
            RECORD.c.state == RecordState.RESOLVED.value,
        )
        written = (r.previous_record_id for r in self._written.values() if r.state is RecordState.RESOLVED)
        return lock.record_id in written or self._connection.execute(answers).first() is not None

    def _written_as(self, record_id: int) -> Record | None:
        return next((record for record in self._written.values() if record.record_id == record_id), None)

    def _previous(self, entry: Entry) -> Record | None:
        if isinstance(entry.previous, Entry):
            try:
                return self._written[id(entry.previous)]
            except KeyError:
                raise IllegalRecord(
                    "the previous entry comes later in the list or is missing from it",
                    remedy="list it first",
                    item=entry.item_id,
                ) from None
        record_id = _id_of(entry.previous)
        if record_id is None:
            return None
        try:
            return self._known[record_id]
        except KeyError:
            raise IllegalRecord(
                "the previous record does not exist", remedy="read the item again", item=entry.item_id, record=record_id
            ) from None

    def _payload(self, entry: Entry) -> str | None:
        text, name = payloads.encode(entry.payload, entry.item_id), entry.payload_schema
        if name is not None:
            if not rules.is_id(name, 128):
                raise InvalidPayload(
                    "a schema name must have 1 to 128 characters, no control character and no trailing space",
                    remedy="choose another",
                    item=entry.item_id,
                )
            if name not in self._schemas:
                self._schemas[name] = load_schema(self._connection, name)
            payloads.check(None if text is None else json.loads(text), name, self._schemas[name], entry.item_id)
        return text

    # -- projections --------------------------------------------------------------------------------------

    def _write_heads(self) -> None:
        changed = [head for item_id, head in self._heads.items() if head != self._before.get(item_id)]
        fresh = [head_row(head) | {"archived": 0} for head in changed if head.item_id not in self._before]
        moved = [
            {f"new_{column}": value for column, value in head_row(head).items()}
            for head in changed
            if head.item_id in self._before
        ]
        if fresh:
            self._connection.execute(insert(ITEM), fresh)
        if moved:
            self._connection.execute(UPDATE_HEAD, moved)
        verdicts = []
        for head in changed:
            known = self._before.get(head.item_id)
            for verdict, who in verdicts_of(head) - (verdicts_of(known) if known else set()):
                verdicts.append(verdict_row(head.item_id, verdict, who))
        if verdicts:
            self._connection.execute(insert(VERDICT), verdicts)

    def _write_leases(self) -> None:
        released = [
            {"gone": item_id}
            for item_id, head in self._before.items()
            if head.blocking_state is RecordState.PROCESSING
            and self._heads[item_id].blocking_record_id != head.blocking_record_id
        ]
        if released:
            self._connection.execute(DELETE_LEASE, released)
        for item_id, (record_id, lease_s) in self._leases.items():
            if self._heads[item_id].blocking_record_id == record_id and not math.isinf(lease_s):
                self._connection.execute(grant_lease(item_id, record_id, lease_s))

    def _write_views(self, records: Sequence[Record]) -> None:
        for kind, view in VIEWS.items():
            mine = [record for record in records if self._heads[record.item_id].kind is kind]
            if not mine:
                continue
            key = view.table.c[view.key]
            known: dict[str, dict[str, Any]] = {}
            for some in chunks({record.item_id for record in mine} & self._before.keys()):
                for row in self._connection.execute(select(view.table).where(key.in_(some))).mappings():
                    known[row[view.key]] = dict(row)
            now: dict[str, dict[str, Any]] = dict(known)
            for record in mine:
                now[record.item_id] = view.apply(now.get(record.item_id), record)
            fresh = [row for item_id, row in now.items() if item_id not in known]
            moved = [{f"new_{name}": value for name, value in now[item_id].items()} for item_id in known]
            if fresh:
                self._connection.execute(insert(view.table), fresh)
            if moved:
                self._connection.execute(update_view(kind), moved)


def _portions(rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields portions of rows, one for each statement; the payloads of a portion together stay within the limit of one
    payload."""
    start = size = 0
    for place, row in enumerate(rows):
        bytes_ = payloads.stored_bytes(row["payload"]) if row["payload"] else 0
        if size + bytes_ > payloads.PAYLOAD_BYTES_MAX and place > start:
            yield rows[start:place]
            start, size = place, 0
        size += bytes_
    yield rows[start:]


def _id_of(previous: Record | int | Entry | None) -> int | None:
    if previous is None or isinstance(previous, Entry):
        return None
    return previous.record_id if isinstance(previous, Record) else int(previous)


_HEAD_COLUMNS = (
    *("seq", "state", "newest_record_id", "blocking_record_id"),
    *("blocking_state", "updated_us"),
)
UPDATE_HEAD = (
    update(ITEM)
    .where(ITEM.c.item_id == bindparam("new_item_id"))
    .values({name: bindparam(f"new_{name}") for name in _HEAD_COLUMNS})
)
DELETE_LEASE = delete(LEASE).where(LEASE.c.item_id == bindparam("gone"))


def update_view(kind: Kind) -> Any:
    view = VIEWS[kind]
    return (
        update(view.table)
        .where(view.table.c[view.key] == bindparam(f"new_{view.key}"))
        .values({each.name: bindparam(f"new_{each.name}") for each in view.table.columns if each.name != view.key})
    )


def grant_lease(item_id: str, record_id: int, lease_s: float) -> Any:
    until = select(literal(item_id, ItemId()), literal(record_id), now_us() + literal(round(lease_s * 1e6)))
    return insert(LEASE).from_select(["item_id", "record_id", "until_us"], until)


def renew_lease(item_id: str, record_id: int, lease_s: float) -> Any:
    return (
        update(LEASE)
        .where(LEASE.c.item_id == item_id, LEASE.c.record_id == record_id)
        .values(until_us=now_us() + literal(round(lease_s * 1e6)))
    )


# -- Archive of the records of items that are done -------------------------------------------------------------------


def archive(connection: Connection, before_us: int) -> int:
    """Archives up to 200 items that are done and have no record since ``before_us``, in the caller's transaction.

    Returns the number of archived items; 0: there are no more to archive.
    """
    found = archivable(before_us, 200)
    ids = list(connection.execute(found).scalars())
    locked = {row.item_id for row in connection.execute(heads_for_update(ids))} if ids else set()
    ids = sorted(locked & set(connection.execute(found).scalars())) if ids else []
    if ids:
        columns = RECORD.columns.keys()
        records = select(RECORD).where(RECORD.c.item_id.in_(ids))
        connection.execute(insert(ARCHIVE).from_select(columns, records))
        connection.execute(delete(RECORD).where(RECORD.c.item_id.in_(ids)))
        connection.execute(update(ITEM).where(ITEM.c.item_id.in_(ids)).values(archived=1))
    return len(ids)
