"""Leases in a ledger: the leader lease on all of it, and the lock of an item while work on it runs.

One process at a time has the leader lease, and decides by the ledger.

The leader lease is one row, with a term that rises by one each time it is taken. Every write of a ledger that was
opened to decide checks, in its own transaction, that the row still has the writer's term and id. So a former holder
that was suspended or cut off, and does not know that it was replaced, writes nothing. The check locks the row: a
process that takes the lease waits for every write that passed the check, and then reads what these wrote.

A leader lease ends in one of these ways:

- It was not renewed: by the database's clock, or by the clock of a process that waits for the lease and has watched the
  row, because the database's clock may have been put back by an hour.
- Its holder gave it back.
- Its holder was a process of this machine and is gone.

Its end serves liveness only, because clocks step: by its own clock, the former holder may go on with what it was
granted for the rest of its lease. ``LeaderLease.grace_s`` says for how long.

The lock of an item is renewed while the work runs, and released however the work ends.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sqlalchemy import Connection, Select, select, update

from stateflow.errors import (
    ApplicationError,
    HoldLost,
    LeaseLost,
    LedgerCorrupt,
    LedgerReplaced,
    Locked,
    StateflowError,
)
from stateflow.ledger import records
from stateflow.ledger.records import HOLD, IDENTITY, App, Item, Record, RecordState, now_us


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that may decide. By ``boot``, ``namespace``, ``pid`` and ``started`` processes of the same machine can
    tell whether it is gone. ``address``: address at which it takes requests."""

    id: str
    host: str = ""
    address: str = ""
    pid: int = 0
    started: int = 0
    boot: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        where = f" at {self.address}" if self.address else ""
        return f"process {self.pid} on {self.host}{where}" if self.pid else f"{self.id}{where}"


NOBODY = Holder("")


@dataclass(frozen=True, slots=True)
class LeaderLease:
    """The leader lease of a ledger when it was read. ``left_s``: seconds until it ends, by the database's clock.
    ``until_us``: its end by that clock, which each renewal changes; a process with another clock can only compare it.
    ``grace_s``: seconds after it was taken in which the former holder may still decide, by any clock."""

    term: int
    holder: Holder
    since_us: int
    lease_s: float
    left_s: float
    grace_s: float = 0.0
    until_us: int = 0


def identity(connection: Connection) -> str:
    """Returns the ledger's id, which is made once. Raises LedgerCorrupt if it is missing."""
    found = connection.execute(select(IDENTITY.c.id)).scalar()
    if found is None:
        raise LedgerCorrupt("the ledger's id is missing", remedy="restore its tables from a backup")
    return str(found)


def current(connection: Connection) -> LeaderLease:
    """Returns the present leader lease; its holder is NOBODY if no process has it."""
    row = connection.execute(_hold()).one()
    return _of(row)


def take(
    connection: Connection, holder: Holder, lease_s: float, gone: Callable[[Holder], bool], over_us: int | None = None
) -> LeaderLease:
    """Takes the leader lease if it is free or over. Returns the lease afterwards: the caller's, or the present
    holder's."""
    row = connection.execute(_hold().with_for_update().with_hint(HOLD, "WITH (UPDLOCK, ROWLOCK)", "mssql")).one()
    before = _of(row)
    clean = not before.holder.id or before.holder.id == holder.id or gone(before.holder)
    if not clean and before.left_s > 0 and before.until_us != over_us:
        return before
    lease_us = round(lease_s * 1e6)
    taken = update(HOLD).values(
        term=before.term + 1,
        holder=holder.id,
        about=json.dumps(asdict(holder)),
        since_us=now_us(),
        until_us=now_us() + lease_us,
        lease_us=lease_us,
    )
    connection.execute(taken)
    return LeaderLease(before.term + 1, holder, 0, lease_s, lease_s, 0.0 if clean else before.lease_s)


def renew(connection: Connection, term: int, holder: str, lease_s: float) -> None:
    """Renews the leader lease. Raises HoldLost."""
    mine = (HOLD.c.term == term) & (HOLD.c.holder == holder)
    renewed = update(HOLD).where(mine).values(until_us=now_us() + round(lease_s * 1e6))
    if connection.execute(renewed).rowcount != 1:
        raise lost(connection, term)


def give_back(connection: Connection, term: int, holder: str) -> None:
    """Gives the leader lease back. Does nothing when this holder no longer has it."""
    mine = (HOLD.c.term == term) & (HOLD.c.holder == holder)
    connection.execute(update(HOLD).where(mine).values(holder="", until_us=0))


def check(connection: Connection, ledger: str, term: int, holder: str) -> None:
    """Checks, in the transaction of a write, that the ledger is still the same one and that the writer has the leader
    lease. Raises LedgerReplaced, HoldLost."""
    if identity(connection) != ledger:
        raise replaced(ledger)
    held = select(HOLD.c.term, HOLD.c.holder).with_for_update(read=True)
    found = connection.execute(held.with_hint(HOLD, "WITH (HOLDLOCK, ROWLOCK)", "mssql")).one()
    if (found.term, found.holder) != (term, holder):
        raise lost(connection, term)


def replaced(ledger: str) -> LedgerReplaced:
    return LedgerReplaced(
        "the ledger was replaced by another one after it was opened",
        remedy="put it back, or restart to use the new one; nothing was written",
        ledger=ledger,
    )


def lost(connection: Connection, term: int) -> HoldLost:
    now = current(connection)
    return HoldLost(
        f"the leader lease was taken by {now.holder}" if now.holder.id else "the leader lease has ended",
        remedy="ask the current leader",
        term=term,
        newest=now.term,
        leader=now.holder.address or None,
    )


def _hold() -> Select[Any]:
    return select(HOLD, (HOLD.c.until_us - now_us()).label("left_us"))


def _of(row: Any) -> LeaderLease:
    holder = Holder(**json.loads(row.about)) if row.holder else NOBODY
    return LeaderLease(row.term, holder, row.since_us, row.lease_us / 1e6, row.left_us / 1e6, until_us=row.until_us)


log = logging.getLogger(__name__)
MESSAGE_MAX, STACK_MAX = 2048, 8192


class Ledger(Protocol):
    """The part of :class:`stateflow.ledger.Ledger` that work needs."""

    run_id: str
    lease_s: float

    def item(self, item_id: str) -> Item | None: ...

    def put(
        self, item_id: str, app: App, state: RecordState, previous: Record | None = None, payload: Any = None
    ) -> Record: ...

    def renew(self, lock: Record) -> bool: ...


def held(ledger: Ledger, lock: Record, work: Callable[[Item], Any]) -> Record:
    """Calls ``work(item)``, then releases the lock. Returns the PROCESSED record. Raises ApplicationError, LeaseLost.

    After LeaseLost, another application may do the work again.
    """
    item = ledger.item(lock.item_id)
    assert item is not None
    try:
        with renewed(ledger, lock):
            payload = work(item)
        records.encode(payload, lock.item_id)  # work whose result cannot be recorded has failed
    except BaseException as error:
        failure = ApplicationError(
            f"work on the item raised {type(error).__name__}: {_message(error)[:300]}",
            remedy="fix the cause, then resolve the item",
            item=lock.item_id,
            app=lock.app.name,
            run=ledger.run_id,
        )
        _record_failure(ledger, lock, error, failure)
        if not isinstance(error, Exception):  # Ctrl-C and exit stay what they are
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
def renewed(ledger: Ledger, lock: Record) -> Iterator[None]:
    """Renews the lock's lease three times per lease, in a thread, until the block is left."""
    if math.isinf(ledger.lease_s):
        yield
        return
    done = threading.Event()

    def renew() -> None:
        while not done.wait(ledger.lease_s / 3):
            try:
                if not ledger.renew(lock):
                    log.warning("lock on %s lost, the result of its work will be refused", lock.item_id)
                    return
            except StateflowError as error:  # if the lease ends, the release reports it
                log.warning("lock on %s could not be renewed: %s", lock.item_id, error)

    thread = threading.Thread(target=renew, name=f"lease of {lock.item_id[:40]}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
