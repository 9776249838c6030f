"""Who decides by a ledger: one at a time, for a while, with a term that rises by one with every change.

A hold is a row. Whoever takes it gets the next term; every write of a ledger that was opened to decide looks, in its
own transaction, whether the row still has its term and its holder. So one that was stopped, or cut off, and does not
know that another one holds it by now, writes nothing. The row is locked while it is looked at: whoever takes the hold
waits for a write that was let through, and reads what it wrote.

A hold ends when it was not renewed for its lease, by the database's clock, or by the clock of whoever waits for it and
has looked: the database's may have been put back by an hour. It ends, too, when its holder gave it back; or when its
holder was a process of this machine and is gone. The first two are liveness only, clocks step: what the former holder
granted, it may go on granting for the rest of its lease, by its own clock. ``Hold.grace_s`` says for how long.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Select, select, update

from stateflow.errors import HoldLost, LedgerCorrupt, LedgerReplaced
from stateflow.ledger.schema import HOLD, IDENTITY, now_us


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that may decide. ``boot``, ``namespace``, ``pid`` and ``started`` tell whether it is gone, to whom can
    see its processes. ``address``: where it is asked."""

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
class Hold:
    """``left_s``: until it ends, by the database's clock, when it was read. ``until_us``: the same as a time of that
    clock, another one after each renewal; it says nothing else to whoever has another clock. ``grace_s``: whoever had
    it before may go on with what it may do for so long after it was taken, by any clock."""

    term: int
    holder: Holder
    since_us: int
    lease_s: float
    left_s: float
    grace_s: float = 0.0
    until_us: int = 0


def identity(connection: Connection) -> str:
    """The ledger's id, made once. Raises LedgerCorrupt."""
    found = connection.execute(select(IDENTITY.c.id)).scalar()
    if found is None:
        raise LedgerCorrupt("the ledger has lost its id", remedy="restore its tables from a backup")
    return str(found)


def current(connection: Connection) -> Hold:
    """As it is; of NOBODY where none is held."""
    row = connection.execute(_hold()).one()
    return _of(row)


def take(
    connection: Connection, holder: Holder, lease_s: float, gone: Callable[[Holder], bool], over_us: int | None = None
) -> Hold:
    """The hold, taken if it can be; else that of whoever has it."""
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
    return Hold(before.term + 1, holder, 0, lease_s, lease_s, 0.0 if clean else before.lease_s)


def renew(connection: Connection, term: int, holder: str, lease_s: float) -> None:
    """Raises HoldLost."""
    mine = (HOLD.c.term == term) & (HOLD.c.holder == holder)
    renewed = update(HOLD).where(mine).values(until_us=now_us() + round(lease_s * 1e6))
    if connection.execute(renewed).rowcount != 1:
        raise lost(connection, term)


def give_back(connection: Connection, term: int, holder: str) -> None:
    """Nothing, where it is not held any more."""
    mine = (HOLD.c.term == term) & (HOLD.c.holder == holder)
    connection.execute(update(HOLD).where(mine).values(holder="", until_us=0))


def check(connection: Connection, ledger: str, term: int, holder: str) -> None:
    """In the transaction of a write: it is this ledger, and held by the writer. Raises LedgerReplaced, HoldLost."""
    if identity(connection) != ledger:
        raise replaced(ledger)
    held = select(HOLD.c.term, HOLD.c.holder).with_for_update(read=True)
    found = connection.execute(held.with_hint(HOLD, "WITH (HOLDLOCK, ROWLOCK)", "mssql")).one()
    if (found.term, found.holder) != (term, holder):
        raise lost(connection, term)


def replaced(ledger: str) -> LedgerReplaced:
    return LedgerReplaced(
        "there is another ledger now where this one was opened",
        remedy="put it back, or start again to use the one that is there; nothing was written",
        ledger=ledger,
    )


def lost(connection: Connection, term: int) -> HoldLost:
    now = current(connection)
    return HoldLost(
        f"the hold on the ledger was taken by {now.holder}" if now.holder.id else "the hold on the ledger ended",
        remedy="ask the one that has it",
        term=term,
        newest=now.term,
        leader=now.holder.address or None,
    )


def _hold() -> Select[Any]:
    return select(HOLD, (HOLD.c.until_us - now_us()).label("left_us"))


def _of(row: Any) -> Hold:
    holder = Holder(**json.loads(row.about)) if row.holder else NOBODY
    return Hold(row.term, holder, row.since_us, row.lease_us / 1e6, row.left_us / 1e6, until_us=row.until_us)
