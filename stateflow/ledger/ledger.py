"""The ledger as programs use it: items, their records, and work on them.

:class:`Ledger` adds records in transactions that check them against ``rules``. Once a ledger has taken the leader lease
(``database``), each transaction also checks that the ledger still has it.

Work on an item runs under the item's lock, a PROCESSING record with a lease. The lock is renewed while the work runs,
and released however the work ends.
"""

from __future__ import annotations

import logging
import math
import random  # noqa: TID251 - the default of an argument
import threading
import traceback
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, Literal, TypeVar

from sqlalchemy import insert, select

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import (
    ApplicationError,
    HoldLost,
    IllegalRecord,
    InvalidArgument,
    InvalidPayload,
    LeaseLost,
    Locked,
    StateflowError,
)
from stateflow.ledger import database, rules, statements
from stateflow.ledger import records as payloads
from stateflow.ledger.database import Database, Holder, LeaderLease
from stateflow.ledger.records import (
    RECORD,
    SCHEMA,
    App,
    Entry,
    Fault,
    Head,
    Item,
    Kind,
    Record,
    RecordState,
    Who,
    microseconds,
)
from stateflow.ledger.schema import prepare
from stateflow.ledger.verify import Schemas, faults_of, load_schemas, payload_faults, rebuild, verify
from stateflow.types import shown

T = TypeVar("T")
OnBlocked = Literal["skip", "raise"]
Work = Callable[[Item], Any]
log = logging.getLogger(__name__)
LEASE_S = 300.0
#: in seconds: a hundred years
LEASE_MAX_S = 3_155_760_000
#: application of the records that a person or the ledger itself adds to an item
SELF = App("stateflow.ledger")


# -- Items from their rows -------------------------------------------------------------------------------------------


def item_of(item_id: str, rows: list[Any], schemas: Schemas) -> Item:
    """Builds an item from its rows, and checks it."""
    records = tuple(statements.record_of(row, strict=False) for row in rows)
    faults = [*faults_of(item_id, records)]
    for row in rows:
        faults += payload_faults(row, schemas)
    return Item(
        item_id,
        records,
        rules.state_of(records),
        rules.blocking(records),
        tuple(faults),
        any(row.archived for row in rows),
        Kind.of(records[0].payload_schema),
    )


def locked(item: Item) -> Locked:
    assert item.blocking is not None
    error = Locked(
        f"the item is {item.blocking.state}, so it is blocked",
        remedy="wait for its holder, or resolve it",
        item=item.item_id,
        blocking_record=item.blocking.record_id,
    )
    error.blocking_record = item.blocking
    return error


# -- The ledger ------------------------------------------------------------------------------------------------------


class Ledger:
    """Opens a ledger. Safe to use from several threads.

    Args:
        url: an SQLAlchemy URL: ``sqlite:///ledger.db``, ``postgresql://…``, ``mariadb://…``, ``mssql://…``.
        author: author named in every record.
        run_id: id of one run of a program; None: a random one.
        lease_s: seconds after which a lock whose holder is silent may be taken over.
        create: makes a missing ledger and upgrades an older one; ``opened`` says what was done. Otherwise the database
            is left unchanged.

    Raises InvalidArgument if the ledger cannot be opened or does not exist, LedgerTooNew, LedgerTooOld, LedgerReadOnly.
    """

    def __init__(
        self,
        url: str,
        *,
        author: str = "stateflow",
        run_id: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
        lease_s: float = LEASE_S,
        busy_timeout_s: float = 5.0,
        rng: random.Random | None = None,
        create: bool = True,
    ) -> None:
        self.run_id = uuid.uuid4().hex if run_id is None else run_id
        if not rules.is_id(author, 128) or (self.run_id and not rules.is_id(self.run_id, 64)):
            raise InvalidArgument(
                "an author must have 1 to 128 characters, a run id at most 64, and neither may have control characters "
                "or a trailing space",
                remedy="choose others",
            )
        self._author, self._clock, self.lease_s = author, clock, _lease(lease_s)
        self.database = Database(url, rng=rng or random.Random(), busy_timeout_s=busy_timeout_s)
        self._held: tuple[int, str] | None = None  # term and holder
        try:
            self.opened = prepare(self.database, create=create)
            with self.database.reading() as connection:
                self.id = database.identity(connection)
            self.database.check_file()
        except BaseException:
            self.database.close()
            raise

    @property
    def clock(self) -> Clock:
        return self._clock

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing ------------------------------------------------------------------------------------------

    def put(
        self,
        item_id: str,
        app: App,
        state: RecordState | str,
        previous: Record | int | None = None,
        payload: Any = None,
        *,
        payload_schema: str | None = None,
        lease_s: float | None = None,
    ) -> Record:
        """Appends one record, durably.

        Args:
            previous: the record that this one answers, or its id; see the table in ``rules``.
            payload_schema: a registered schema that the payload must satisfy.
            lease_s: lease of a PROCESSING record, in seconds. None: the ledger's default; ``math.inf``: the lock has no
                lease, and only a record ends it.

        Raises, without having written anything, IllegalRecord, InvalidPayload, Locked if another application holds the
        item or ``previous`` has an answer already, LeaseLost, Unavailable.
        """
        return self.put_many([Entry(item_id, app, state, previous, payload, payload_schema, lease_s)])[0]

    def put_many(
        self, entries: Iterable[Entry], term: int | None = None, check: Callable[[], None] | None = None
    ) -> list[Record]:
        """Appends records in this order in one transaction, all of them or none. Raises the error of the first record
        that is refused.

        Args:
            term: the leader's term in which the records were decided; None: any. Raises HoldLost if that term is over,
                even if this ledger has taken the leader lease again since.
            check: called within the transaction, which may have waited long for other writers; if it raises, nothing is
                written.
        """
        ordered = list(entries)
        for entry in ordered:
            if Kind.of(entry.payload_schema) is not Kind.ITEM:
                raise InvalidPayload(
                    f"the schema {entry.payload_schema!r} is reserved for the ledger",
                    remedy="use another schema",
                    item=entry.item_id,
                )
        return self.append(ordered, None if check is None else lambda _: check(), term)

    def append(
        self,
        entries: Sequence[Entry],
        guard: statements.Guard | None = None,
        term: int | None = None,
        author: str = "",
    ) -> list[Record]:
        """Appends records as ``put_many`` does, including records of this package's views, which have kinds of their
        own.

        Args:
            author: author of these records; empty: this ledger's.
        """
        for entry in entries:
            rules.check_item_id(entry.item_id)
            if entry.lease_s is not None:
                _lease(entry.lease_s)
        if not entries:
            return []
        stamp = statements.Stamp(author or self._author, self.run_id, self._clock.now_us(), self.lease_s)
        return self._write(lambda connection: statements.append(connection, entries, stamp, guard), term)

    def _write(self, work: Callable[[Any], T], term: int | None = None) -> T:
        """Runs ``work`` in a transaction. A ledger that has taken the leader lease writes only while it has the lease.
        Raises HoldLost, LedgerReplaced."""
        held = self._held
        if term is not None and (held is None or held[0] != term):
            raise HoldLost(
                "a decision of an earlier term cannot be recorded", remedy="read the ledger again", term=term
            )
        if held is None:
            return self.database.write(work)

        def guarded(connection: Any) -> T:
            database.check_lease(connection, self.id, *held)
            return work(connection)

        return self.database.write(guarded)

    def resolve(self, item_id: str, note: str) -> Record:
        """Resolves a blocked item after a person has removed the cause. Raises IllegalRecord if nothing blocks it."""
        item = self._known(item_id)
        if item.blocking is None:
            raise IllegalRecord("nothing blocks the item", remedy="see `stateflow ledger show`", item=item_id)
        return self._put_by_hand(item, SELF, RecordState.RESOLVED, item.blocking, note)

    def skip(self, item_id: str, app: App | str = "*", note: str | None = None) -> Record:
        """Records that an application must skip the item from now on; ``*`` stands for every application."""
        item = self._known(item_id)
        who = App(app) if isinstance(app, str) else app
        return self._put_by_hand(item, who, RecordState.SKIPPED, None, note)

    def _put_by_hand(
        self, item: Item, who: App, state: RecordState, previous: Record | None, note: str | None
    ) -> Record:
        """Appends a record to an item of any kind. The record changes no column of a view."""
        payload: dict[str, Any] = {} if note is None else {"note": note}
        schema = None
        if item.kind is not Kind.ITEM:
            payload, schema = payload | {"set": {}}, item.kind.payload_schema
        return self.append([Entry(item.item_id, who, state, previous, payload or None, schema)])[0]

    def renew(self, lock: Record, lease_s: float | None = None) -> bool:
        """Renews the lease of a lock, counted from now. Returns False when the lock is no longer held, or
        has no lease."""
        seconds = self.lease_s if lease_s is None else _lease(lease_s)
        if math.isinf(seconds):
            return False
        statement = statements.renew_lease(lock.item_id, lock.record_id, seconds)
        return self._write(lambda connection: int(connection.execute(statement).rowcount)) == 1

    def register_schema(self, name: str, schema: Mapping[str, Any]) -> None:
        """Registers a schema, so that payloads may name it. Raises InvalidArgument for an invalid schema or name, and
        for a name that has another schema already."""
        body = payloads.check_schema(name, schema)
        if not rules.is_id(name, 128):
            raise InvalidArgument(
                "a schema name must have 1 to 128 characters, no control character and no trailing space",
                remedy="choose another",
            )

        def register(connection: Any) -> Mapping[str, Any]:
            known = statements.load_schema(connection, name)
            if known is None:
                connection.execute(insert(SCHEMA).values(name=name, body=body))
            return schema if known is None else known

        if self.database.write(register) != schema:
            raise InvalidArgument(
                "the name is already registered with another schema", remedy="choose a new name", schema=name
            )

    # -- who decides --------------------------------------------------------------------------------------

    def hold(self) -> LeaderLease:
        """Returns the present leader lease of this ledger; the holder's id is empty if no process has the lease."""
        with self.database.reading() as connection:
            return database.present_lease(connection)

    def take_leadership(
        self,
        holder: Holder,
        lease_s: float,
        gone: Callable[[Holder], bool] = lambda _: False,
        over_us: int | None = None,
    ) -> LeaderLease:
        """Takes the leader lease of this ledger for ``lease_s`` seconds, if no other process has it.

        Returns the lease afterwards: the caller's, whose term is greater than all earlier ones, or the present
        holder's. Once the caller has it, every transaction of this ledger checks that it still has the lease.

        Args:
            gone: tells whether a former holder is a process that has ended.
            over_us: ``until_us`` of a lease that has ended, whatever the database's clock says; None: no such lease.
        """
        self._held = None

        def take(connection: Any) -> LeaderLease:
            if database.identity(connection) != self.id:
                raise database.replaced(self.id)
            return database.take_lease(connection, holder, lease_s, gone, over_us)

        hold = self.database.write(take)
        if hold.holder.id == holder.id:
            self._held = hold.term, holder.id
        return hold

    def renew_leadership(self, lease_s: float) -> None:
        """Renews the leader lease. Raises HoldLost, Unavailable, LedgerReplaced."""
        held = self._mine()
        self._write(lambda connection: database.renew_lease(connection, *held, lease_s))

    def give_back_leadership(self) -> None:
        """Gives the leader lease back. Does nothing if this ledger has not taken it."""
        if self._held is not None:
            held, self._held = self._held, None
            self.database.write(lambda connection: database.give_back_lease(connection, *held))

    def _mine(self) -> tuple[int, str]:
        if self._held is None:
            raise HoldLost("the leader lease of this ledger was not taken", remedy="call take_leadership first")
        return self._held

    # -- reading ------------------------------------------------------------------------------------------

    def item(self, item_id: str) -> Item | None:
        """Returns an item with its records, checked; None when there is none."""
        return next(iter(self.items([item_id])), None)

    def _known(self, item_id: str) -> Item:
        rules.check_item_id(item_id)
        item = self.item(item_id)
        if item is None:
            raise IllegalRecord("there is no such item", remedy="see `stateflow ledger show`", item=item_id)
        return item

    def items(self, ids: Iterable[str]) -> list[Item]:
        """Returns the items with these ids that exist, in the order of their ids."""
        found: list[Item] = []
        with self.database.reading() as connection:
            schemas: dict[str, Mapping[str, Any] | None] = {}
            for some in statements.chunks(filter(rules.is_item_id, ids)):  # no item has an invalid id
                rows = sorted(
                    connection.execute(statements.records_of(some)), key=lambda row: (str(row.item_id), row.seq)
                )
                schemas |= load_schemas(connection, {row.payload_schema for row in rows} - schemas.keys() - {None})
                found += [
                    item_of(item_id, list(group), schemas)
                    for item_id, group in groupby(rows, lambda row: str(row.item_id))
                ]
        return found

    def records(self, item_id: str | None = None, *, after: int = 0, archived: bool = False) -> Iterator[Record]:
        """Yields records in the order they were written; no transaction stays open between two pages.

        Args:
            item_id: yields only this item's records, archived or not.
            after: yields only records with a higher id. Ids are in the order in which records became visible: a reader
                that continues after its last id misses none.
            archived: yields archived records, too.

        Raises LedgerCorrupt at a record that cannot be read.
        """
        if item_id is not None:
            if rules.is_item_id(item_id):
                yield from self._records_of(item_id, after)
            return
        while True:
            with self.database.reading() as connection:
                rows = connection.execute(statements.page_of_records(after, archived=archived)).all()
            yield from map(statements.record_of, rows)
            if len(rows) < statements.PAGE:
                return
            after = rows[-1].record_id

    def _records_of(self, item_id: str, after: int) -> Iterator[Record]:
        seq = -1
        while True:
            with self.database.reading() as connection:
                rows = connection.execute(statements.page_of_item(item_id, seq)).all()
            yield from (statements.record_of(row) for row in rows if row.record_id > after)
            if len(rows) < statements.PAGE:
                return
            seq = rows[-1].seq

    def newest(self, count: int) -> list[Record]:
        """Returns the last ``count`` records, oldest first. Ids may have gaps, because some writers gave up."""
        query = select(RECORD).order_by(RECORD.c.record_id.desc()).limit(count)
        with self.database.reading() as connection:
            rows = connection.execute(query).all()
        return [statements.record_of(row) for row in reversed(rows)]

    def query(self, prepared_by: App | str | None = None, requester: App | str | None = None) -> list[str]:
        """Returns the ids, in order, of items that ``prepared_by`` has processed (None: all items), and that
        ``requester`` may process now."""
        with self.database.reading() as connection:
            free, silent = statements.ready(_who(prepared_by), _who(requester))
            return sorted({*connection.execute(free).scalars(), *connection.execute(silent).scalars()})

    def fetch(self, processed_by: App | str | None = None, state: RecordState | str | None = None) -> list[str]:
        """Returns the ids, in order, of the items that ``processed_by`` has processed and that are in ``state``; None:
        any."""
        wanted = None if state is None else _state(state)
        with self.database.reading() as connection:
            return list(connection.execute(statements.fetched(_who(processed_by), wanted)).scalars())

    def unprocessed(
        self,
        prepared_by: App | str | None = None,
        requester: App | str | None = None,
        predicate: Callable[[Item], bool] | None = None,
        on_blocked: OnBlocked = "skip",
    ) -> list[Item]:
        """Returns the items that ``prepared_by`` has processed (None: all items), and that ``requester`` still has to
        process. Leaves out blocked items, or raises Locked for them if ``on_blocked`` is "raise".
        """
        if on_blocked not in ("skip", "raise"):
            raise InvalidArgument(f"on_blocked cannot be {on_blocked!r}", remedy="use 'skip' or 'raise'")
        with self.database.reading() as connection:
            _, silent = statements.ready(_who(prepared_by), _who(requester))
            query = statements.unprocessed(_who(prepared_by), _who(requester))
            if on_blocked == "skip":
                query, _ = statements.ready(_who(prepared_by), _who(requester))
            free = set(connection.execute(silent).scalars())
            ids = {*connection.execute(query).scalars(), *free}
        items = [item for item in self.items(ids) if predicate is None or predicate(item)]
        for item in items:
            if on_blocked == "raise" and item.blocking is not None and item.item_id not in free:
                raise locked(item)
        return items

    # -- work ---------------------------------------------------------------------------------------------

    def process_new_item(self, item_id: str, app: App, work: Work, acquire_payload: Any = None) -> Record:
        """Adds an item and works on it; see ``process_item``. Raises IllegalRecord if the item already exists."""
        new = Entry(item_id, app, RecordState.NEW)
        lock = self.append([new, Entry(item_id, app, RecordState.PROCESSING, new, acquire_payload)])[1]
        return work_locked(self, lock, work)

    def process_item(self, item_id: str, app: App, work: Work, acquire_payload: Any = None) -> Record:
        """Acquires an item, calls ``work(item)`` and records the outcome, even if this application has processed the
        item before.

        The payload that ``work`` returns becomes that of the PROCESSED record, which this method returns. The lock is
        renewed while ``work`` runs.

        Raises Locked if the item is held, IllegalRecord if it must be skipped or does not exist, ApplicationError
        if ``work`` raised (FAILED is recorded), LeaseLost if the lock was resolved while ``work`` ran.
        """
        return work_locked(self, self.put(item_id, app, RecordState.PROCESSING, None, acquire_payload), work)

    def process_all(
        self,
        app: App,
        predicate: Callable[[Item], bool] | None,
        work: Work,
        acquire_payload: Any = None,
        on_blocked: OnBlocked = "skip",
        *,
        prepared_by: App | str | None = None,
    ) -> list[Record]:
        """Runs ``process_item`` for every item that this application has not processed. Each item is processed once,
        even if several processes call this method.

        An item whose work fails, or whose lock is lost, does not stop the others. When all were tried, the first
        failure is raised: ApplicationError, or LeaseLost for work that another process may do again.
        """
        done: list[Record] = []
        failures: list[Exception] = []
        for item in self.unprocessed(prepared_by, app, predicate, on_blocked):
            try:
                lock = self._acquire_unprocessed(item.item_id, app, acquire_payload)
            except Locked:
                if on_blocked == "raise":
                    raise
                continue
            if lock is None:
                continue
            try:
                done.append(work_locked(self, lock, work))
            except (ApplicationError, LeaseLost) as failure:
                failures.append(failure)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(str(other))
            raise failures[0]
        return done

    def _acquire_unprocessed(self, item_id: str, app: App, payload: Any) -> Record | None:
        """Acquires an item. Returns None if another process of this application finished it first, or the application
        must skip it by now."""
        done = False

        def still_to_do(heads: Mapping[str, Head]) -> None:
            nonlocal done
            done = any(rules.covers(who, Who.of(app)) for who in heads[item_id].processed) or any(
                rules.skips(who, Who.of(app)) for who in heads[item_id].skipped
            )
            if done:
                raise IllegalRecord(
                    "the item is already processed or skipped", remedy="process other items", item=item_id
                )

        try:
            return self.append([Entry(item_id, app, RecordState.PROCESSING, None, payload)], still_to_do)[0]
        except IllegalRecord:
            if done:
                return None
            raise

    # -- keeping ------------------------------------------------------------------------------------------

    def resolve_expired(self) -> list[Record]:
        """Resolves every lock whose lease has ended, so that no item of a dead holder stays blocked."""
        with self.database.reading() as connection:
            silent = connection.execute(statements.expired_leases()).all()
        resolved: list[Record] = []
        for item_id, record_id in silent:
            try:
                resolved += self.append([statements.lease_ended(item_id, record_id, SELF)])
            except Locked:
                continue  # its holder or another writer was first
        return resolved

    def verify(self) -> list[Fault]:
        """Returns every fault of the ledger: of records, of payloads, and of projections. Writes nothing, and holds up
        no writer."""
        with self.database.reading(one_moment=True) as connection:
            return list(verify(connection))

    def rebuild(self) -> int:
        """Rebuilds the projections from the records. Returns the number of items. Raises LedgerCorrupt."""
        return self.database.write(rebuild)

    # -- bundles ------------------------------------------------------------------------------------------

    def put_bundle_part(self, digest: str, number: int, count: int, body: bytes) -> None:
        """Stores a part of an operator's code bundle, see :func:`.database.put_bundle_part`."""
        self.database.write(lambda connection: database.put_bundle_part(connection, digest, number, count, body))

    def bundle_part(self, digest: str, number: int) -> tuple[bytes, int] | None:
        """Returns (body of a part, number of parts of the bundle); None when the part is not stored."""
        with self.database.reading() as connection:
            return database.bundle_part(connection, digest, number)

    def drop_other_bundles(self, digests: Collection[str], older_than: timedelta) -> int:
        """Deletes bundles older than ``older_than``, except those in ``digests``. Returns how many parts it deleted."""
        older_us = round(older_than / timedelta(microseconds=1))
        return self.database.write(lambda connection: database.drop_other_bundles(connection, digests, older_us))

    def archive(self, older_than: timedelta | datetime) -> int:
        """Archives items that are done and whose newest record is older than ``older_than``. Returns the number of
        these items.

        Open items stay: new, held, failed, resolved but not done since, or a stage before its last action. Archived
        items keep their ids, and are read by ``item`` and ``records(archived=True)``; no record can be added to them.
        """
        if isinstance(older_than, timedelta):
            before_us = self._clock.now_us() - round(older_than / timedelta(microseconds=1))
        else:
            before_us = microseconds("older_than", older_than)
        total = 0
        while moved := self.database.write(lambda connection: statements.archive(connection, before_us)):
            total += moved
        return total


def _who(app: App | str | None) -> Who | None:
    if app is None:
        return None
    rules.check_app(App(app) if isinstance(app, str) else app, RecordState.SKIPPED)  # a SKIPPED may name everyone
    return Who.of(app)


def _state(state: RecordState | str) -> RecordState:
    try:
        return RecordState(state)
    except ValueError:
        raise InvalidArgument(f"unknown state {state!r}", remedy=f"use {', '.join(RecordState)}") from None


def _lease(seconds: float) -> float:
    if not (0 < seconds <= LEASE_MAX_S or seconds == math.inf):
        raise InvalidArgument(
            f"a lease cannot last {shown(seconds)} s", remedy=f"use more than 0 and up to {LEASE_MAX_S:,}, or math.inf"
        )
    return seconds


# -- Work under a lock -----------------------------------------------------------------------------------------------

MESSAGE_MAX, STACK_MAX = 2048, 8192


def work_locked(ledger: Ledger, lock: Record, work: Callable[[Item], Any]) -> Record:
    """Calls ``work(item)``, then releases the lock. Returns the PROCESSED record. Raises ApplicationError, LeaseLost.

    After LeaseLost, another application may do the work again.
    """
    item = ledger.item(lock.item_id)
    assert item is not None
    try:
        with renewing(ledger, lock):
            payload = work(item)
        payloads.encode(payload, lock.item_id)  # work whose result cannot be recorded has failed
    except BaseException as error:
        failure = ApplicationError(
            f"work on the item raised {type(error).__name__}: {_message(error)[:300]}",
            remedy="fix the cause, then resolve the item",
            item=lock.item_id,
            app=lock.app.name,
            run=ledger.run_id,
        )
        _record_failure(ledger, lock, error, failure)
        if not isinstance(error, Exception):  # Ctrl-C and exit are not wrapped
            raise
        raise failure from error
    try:
        return ledger.put(lock.item_id, lock.app, RecordState.PROCESSED, lock, payload)
    except Locked as error:
        raise LeaseLost(
            "another process released the lock while its holder worked", remedy="read the item again", **error.where
        ) from error


def error_payload(error: BaseException | str) -> dict[str, Any]:
    if isinstance(error, str):  # as another process reported it
        return {"error": {"type": "", "message": error[:MESSAGE_MAX], "stack": error[-STACK_MAX:]}}
    stack = "".join(traceback.format_exception(error))
    return {"error": {"type": type(error).__name__, "message": _message(error), "stack": stack[-STACK_MAX:]}}


def _message(error: BaseException) -> str:
    return str(error)[:MESSAGE_MAX]


def _record_failure(ledger: Ledger, lock: Record, error: BaseException, failure: ApplicationError) -> None:
    try:
        ledger.put(lock.item_id, lock.app, RecordState.FAILED, lock, error_payload(error))
    except StateflowError as second:
        failure.add_note(f"and FAILED could not be recorded: {second}")


@contextmanager
def renewing(ledger: Ledger, lock: Record) -> Iterator[None]:
    """Renews the lock's lease three times per lease, in a thread, until the block is left."""
    if math.isinf(ledger.lease_s):
        yield
        return
    done = threading.Event()

    def renew() -> None:
        while not done.wait(ledger.lease_s / 3):
            try:
                if not ledger.renew(lock):
                    log.warning("lock on item %s lost, the result of the work will be refused", lock.item_id)
                    return
            except StateflowError as error:  # if the lease ends, the release reports it
                log.warning("lock on item %s could not be renewed: %s", lock.item_id, error)

    thread = threading.Thread(target=renew, name=f"lease of {lock.item_id[:40]}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
