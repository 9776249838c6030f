"""A ledger in memory with the rules of the real one, as a simulation cannot wait for a database.

A record is durable when ``put`` returns. Each controller has its own handle, which simulates outages: the ledger cannot
be reached or is read-only, so nothing is written; or a commit succeeds and the controller does not learn that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from enum import Enum
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

from stateflow.errors import HoldLost, IllegalRecord, LedgerReadOnly, Locked, Unavailable, WriteUncertain
from stateflow.ledger import App, Entry, Holder, LeaderLease, Record, RecordState
from stateflow.ledger.rules import LEGAL_PREVIOUS, blocking

T = TypeVar("T")
#: share of the commits that succeed without an answer: outside of outages, and in an UNCERTAIN outage
UNCERTAIN, UNCERTAIN_IN_OUTAGE = 0.002, 0.3


class Outage(Enum):
    AWAY = "away"  # the database is stopped, locked or full
    READ_ONLY = "read-only"
    UNCERTAIN = "uncertain"  # connections are cut before, during or after a commit


class MemoryLedger:
    """A ledger in memory.

    Args:
        now: the clock of the database, in seconds.
        id: the id of the ledger.
    """

    def __init__(self, now: Callable[[], float], id: str = "ledger") -> None:
        self.id, self.now = id, now
        self.term, self.holder, self.until, self.lease_s = 0, Holder(""), 0.0, 0.0
        self._records: list[Record] = []
        self._heads: dict[str, Record] = {}

    def put(
        self,
        item_id: str,
        app: App,
        state: RecordState,
        previous: Record | None = None,
        payload: Any = None,
        payload_schema: str | None = None,
    ) -> Record:
        if (None if previous is None else previous.state) not in LEGAL_PREVIOUS[state]:
            raise IllegalRecord("it cannot follow", remedy="-", item=item_id)
        if previous is not None and previous.item_id != item_id:
            raise IllegalRecord("the previous record belongs to another item", remedy="-", item=item_id)
        newest = self._heads.get(item_id)
        if newest is None and previous is not None:
            raise Locked("the item has no records here", remedy="-", item=item_id)
        if newest is not None:
            if previous is None and state is RecordState.NEW:
                raise IllegalRecord("the item already exists", remedy="-", item=item_id)
            if previous is not None and previous.seq != newest.seq:
                raise Locked("another writer changed the item first", remedy="-", item=item_id)
            if state is RecordState.PROCESSING and blocking(list(self.records(item_id))):
                raise Locked("the item is held", remedy="-", item=item_id)
        record = Record(
            len(self._records) + 1,
            item_id,
            0 if newest is None else newest.seq + 1,
            app,
            state,
            previous.record_id if previous else None,
            "simulation",
            0,
            "",
            None if payload is None else json.loads(json.dumps(payload)),
            payload_schema,
        )
        self._records.append(record)
        self._heads[item_id] = record
        return record

    def records(self, item_id: str | None = None, *, after: int = 0, archived: bool = False) -> Iterator[Record]:
        return iter([record for record in self._records[max(after, 0) :] if item_id in (None, record.item_id)])

    def put_many(self, entries: Sequence[Entry]) -> list[Record]:
        """Appends all entries, or none if an entry is refused."""
        before, heads = len(self._records), dict(self._heads)
        written: dict[int, Record] = {}
        try:
            for entry in entries:
                previous = entry.previous
                known = written[id(previous)] if isinstance(previous, Entry) else previous
                made = self.put(entry.item_id, entry.app, entry.state, known, entry.payload, entry.payload_schema)  # type: ignore[arg-type]
                written[id(entry)] = made
        except BaseException:
            del self._records[before:]
            self._heads = heads
            raise
        return list(written.values())

    def head(self, item_id: str) -> Record:
        return self._heads[item_id]

    def close(self) -> None:
        pass


class Handle:
    """A controller's handle on the ledger, a double of stateflow.ledger.Ledger.

    Args:
        meets: tells whether this controller now has an outage of the given kind.
        step: called where another process may run first.
        random: decides which commits fail.
    """

    def __init__(
        self, ledger: MemoryLedger, meets: Callable[[Outage], bool], step: Callable[[], None], random: Random
    ) -> None:
        self._ledger, self._meets, self._step, self._random = ledger, meets, step, random
        self.id = ledger.id
        self.clock = SimpleNamespace(now_us=lambda: round(ledger.now() * 1e6))
        self._held: tuple[int, str] | None = None

    # -- records ------------------------------------------------------------------------------------------

    def append(
        self, entries: Sequence[Entry], guard: Callable[[Any], None], term: int | None = None, author: str = ""
    ) -> list[Record]:
        def append() -> list[Record]:
            if term is not None and (self._held is None or self._held[0] != term):
                raise HoldLost("another term began here", remedy="-")
            self._check()
            guard(None)
            return self._ledger.put_many(entries)

        return self._write(append)

    def records(self, item_id: str | None = None, *, after: int = 0, archived: bool = False) -> Iterator[Record]:
        self._reach()
        return self._ledger.records(item_id, after=after, archived=archived)

    # -- the hold -----------------------------------------------------------------------------------------

    def hold(self) -> LeaderLease:
        self._reach()
        at = self._ledger
        return LeaderLease(at.term, at.holder, 0, at.lease_s, at.until - at.now(), until_us=round(at.until * 1e6))

    def take_leadership(
        self, holder: Holder, lease_s: float, gone: Callable[[Holder], bool], over_us: int | None = None
    ) -> LeaderLease:
        self._held = None

        def take() -> LeaderLease:
            at, before = self._ledger, self.hold()
            clean = before.holder.id in ("", holder.id) or gone(before.holder)
            if not clean and before.left_s > 0 and before.until_us != over_us:
                return before
            at.term, at.holder, at.until, at.lease_s = at.term + 1, holder, at.now() + lease_s, lease_s
            return LeaderLease(at.term, holder, 0, lease_s, lease_s, 0.0 if clean else before.lease_s)

        hold = self._write(take)
        if hold.holder.id == holder.id:
            self._held = hold.term, holder.id
        return hold

    def renew_leadership(self, lease_s: float) -> None:
        def renew() -> None:
            self._check()
            self._ledger.until = self._ledger.now() + lease_s

        self._write(renew)

    def give_back_leadership(self) -> None:
        if self._held is not None and (self._ledger.term, self._ledger.holder.id) == self._held:
            self._ledger.holder = Holder("")
        self._held = None

    # -- plumbing -----------------------------------------------------------------------------------------

    def _check(self) -> None:
        if (self._ledger.term, self._ledger.holder.id) != self._held:
            raise HoldLost("another one has the hold", remedy="-")

    def _reach(self) -> None:
        if self._meets(Outage.AWAY):
            raise Unavailable("the ledger is away", remedy="-")

    def _write(self, work: Callable[[], T]) -> T:
        self._step()
        self._reach()
        if self._meets(Outage.READ_ONLY):
            raise LedgerReadOnly("the ledger is read-only", remedy="-")
        if (cut := self._meets(Outage.UNCERTAIN)) and self._random.random() < UNCERTAIN_IN_OUTAGE:
            raise self._random.choice((Unavailable, WriteUncertain))("the ledger went away before a commit", remedy="-")
        done = work()
        self._step()
        if self._meets(Outage.AWAY) or self._random.random() < (UNCERTAIN_IN_OUTAGE if cut else UNCERTAIN):
            raise WriteUncertain("the ledger went away during a commit", remedy="-")
        return done

    def drop_other_bundles(self, digests: Collection[str], older_than: timedelta) -> int:
        """Drops nothing, as this ledger has no bundles."""
        return 0

    def close(self) -> None:
        pass
