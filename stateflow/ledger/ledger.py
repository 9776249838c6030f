"""Items and their records in SQL: append-only, one writer per item at a time by compare-and-set.

The state of an item is nothing but its records. Legal predecessors are checked at write::

    NEW         first record of an item
    PROCESSING  first, or after NEW, PROCESSED or RESOLVED; previous: none or the NEW record
    PROCESSED   previous: its PROCESSING
    FAILED      previous: its PROCESSING
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    insert,
    select,
)
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import IllegalRecord, InvalidArgument, Locked, Unavailable


class RecordState(StrEnum):
    NEW = "NEW"
    PROCESSING = "PROCESSING"
    PROCESSED = "PROCESSED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class App:
    name: str
    version: str
    instance: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """Immutable. ``seq`` counts an item's records from 0; ``timestamp_us`` is UTC microseconds."""

    record_id: int
    item_id: str
    seq: int
    app: App
    state: RecordState
    previous_record_id: int | None
    author: str
    timestamp_us: int
    run_id: str
    payload: Any


_METADATA = MetaData()
_RECORDS = Table(
    "ledger_record",
    _METADATA,
    Column("record_id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("item_id", String(255), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("app_name", String(128), nullable=False),
    Column("app_version", String(64), nullable=False),
    Column("app_instance", String(128)),
    Column("state", String(16), nullable=False),
    Column("previous_record_id", BigInteger),
    Column("author", String(128), nullable=False),
    Column("timestamp_us", BigInteger, nullable=False),
    Column("run_id", String(64), nullable=False),
    Column("payload", Text),
    UniqueConstraint("item_id", "seq", name="ledger_record_item_seq"),
    sqlite_autoincrement=True,
)
_LEGAL: dict[RecordState, frozenset[RecordState | None]] = {
    RecordState.NEW: frozenset({None}),
    RecordState.PROCESSING: frozenset({None, RecordState.NEW}),
    RecordState.PROCESSED: frozenset({RecordState.PROCESSING}),
    RecordState.FAILED: frozenset({RecordState.PROCESSING}),
}
_BLOCKING = frozenset({RecordState.PROCESSING, RecordState.FAILED})


class Ledger:
    """Args: url: an SQLAlchemy URL, e.g. ``sqlite:///ledger.db``. Raises InvalidArgument when it cannot be opened."""

    def __init__(self, url: str, *, author: str = "stateflow", run_id: str = "", clock: Clock = SYSTEM_CLOCK) -> None:
        self._author, self._run_id, self._clock = author, run_id, clock
        try:
            self._engine: Engine = create_engine(url)
            if self._engine.dialect.name == "sqlite":
                event.listen(self._engine, "connect", _prepare_sqlite)
            _METADATA.create_all(self._engine)
        except (SQLAlchemyError, ImportError, ValueError) as error:
            raise InvalidArgument(
                f"the ledger cannot be opened: {str(error).splitlines()[0]}",
                remedy="name a writable SQLite file (sqlite:///path/ledger.db) or a reachable database",
                ledger=_without_secrets(url),
            ) from error

    def put(
        self, item_id: str, app: App, state: RecordState, previous: Record | None = None, payload: Any = None
    ) -> Record:
        """Append one record, durably.

        Raises IllegalRecord, Locked when another writer was first or holds the item, Unavailable when the database
        does not answer; nothing was written then.
        """
        if not item_id or len(item_id) > 255:
            raise IllegalRecord("an item id has 1 to 255 characters", remedy="choose another", item=item_id[:40])
        if (None if previous is None else previous.state) not in _LEGAL[state]:
            raise IllegalRecord(
                f"{state} cannot follow {previous.state if previous else 'nothing'}",
                remedy="read the item's records again",
                item=item_id,
            )
        if previous is not None and previous.item_id != item_id:
            raise IllegalRecord("the previous record is of another item", remedy="pass its own", item=item_id)
        values: dict[str, Any] = {
            "item_id": item_id,
            "app_name": app.name,
            "app_version": app.version,
            "app_instance": app.instance,
            "state": state.value,
            "previous_record_id": previous.record_id if previous else None,
            "author": self._author,
            "timestamp_us": self._clock.now_us(),
            "run_id": self._run_id,
            "payload": None if payload is None else json.dumps(payload, sort_keys=True),
        }
        try:
            with self._engine.begin() as connection:
                seq = self._next_seq(connection, item_id, state, previous)
                key = connection.execute(insert(_RECORDS).values(seq=seq, **values)).inserted_primary_key
        except IntegrityError as error:
            raise Locked("another writer was first", remedy="read the item again", item=item_id) from error
        except SQLAlchemyError as error:
            raise Unavailable(
                f"the ledger cannot be written: {str(error).splitlines()[0]}",
                remedy="see to its database; the record was not written",
                item=item_id,
            ) from error
        return Record(
            int(key[0]) if key else 0,
            item_id,
            seq,
            app,
            state,
            values["previous_record_id"],
            self._author,
            values["timestamp_us"],
            self._run_id,
            payload,
        )

    @staticmethod
    def _next_seq(connection: Connection, item_id: str, state: RecordState, previous: Record | None) -> int:
        newest = connection.execute(
            select(_RECORDS.c.record_id, _RECORDS.c.seq, _RECORDS.c.state)
            .where(_RECORDS.c.item_id == item_id)
            .order_by(_RECORDS.c.seq.desc())
            .limit(1)
        ).first()
        if newest is None and previous is None:
            return 0
        if newest is None:
            raise Locked("the item has no records here", remedy="read the item again", item=item_id)
        if previous is None and state is RecordState.NEW:
            raise IllegalRecord("the item is there already", remedy="read it", item=item_id)
        if previous is not None and previous.seq != newest.seq:
            raise Locked("another writer was first", remedy="read the item again", item=item_id, seq=newest.seq)
        if state is RecordState.PROCESSING and newest.state in _BLOCKING:
            raise Locked(
                f"the item is {newest.state}",
                remedy="wait for its holder, or resolve it",
                item=item_id,
                blocking_record=newest.record_id,
            )
        return int(newest.seq) + 1

    def records(self, item_id: str | None = None) -> Iterator[Record]:
        """In the order they were written."""
        query = select(_RECORDS).order_by(_RECORDS.c.record_id)
        if item_id is not None:
            query = query.where(_RECORDS.c.item_id == item_id)
        with self._engine.connect() as connection:
            for row in connection.execute(query).yield_per(1000):
                yield Record(
                    row.record_id,
                    row.item_id,
                    row.seq,
                    App(row.app_name, row.app_version, row.app_instance),
                    RecordState(row.state),
                    row.previous_record_id,
                    row.author,
                    row.timestamp_us,
                    row.run_id,
                    None if row.payload is None else json.loads(row.payload),
                )

    def close(self) -> None:
        self._engine.dispose()


def _without_secrets(url: str) -> str:
    """Enough of a URL to recognise it by."""
    if url.startswith("sqlite:"):
        return url
    scheme, found, _ = url.partition("://")
    return f"{scheme}://…" if found else "…"


def _prepare_sqlite(connection: Any, _: Any) -> None:
    """WAL with full sync: a record that was reported survives power loss; readers never block the writer."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.close()
