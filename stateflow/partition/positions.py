"""Positions of sources: which batches a partition contains, and therefore whether an incoming batch is applied, skipped
or refused.

For a partition, a source is in one of these states:

* *unknown*: the partition contains no batch of it. Its first batch has number 0, or any number if the source is
  *sparse*.
* *known*: the partition contains its batches up to its position, and has the output of the newest one. If that batch is
  sent again, it is a replay: its rows are checked, and the stored output is the answer. A run of a batch DataFrame may
  send any of its batches again. The next number is applied; only a sparse source may skip numbers. Older batches are
  skipped in a rewind, and otherwise refused.
* *retired*: there is a tombstone in place of its position and its output.

A source costs a partition its position, and the whole output of its newest batch. A run of a batch DataFrame costs the
output of all its batches, and a query in real-time mode costs the output of all batches that Spark may request again. A
source that has been idle for long, or that is one of too many, is therefore retired: its output is removed, its
watermark holds no other source back, and a tombstone of a few bytes records its last batch. A retired source may return
at any time and continues after that batch; only the output of that batch is gone. Only the newest tombstones are kept.
Once a tombstone was dropped, an unknown source that cannot be new is refused, because the dropped tombstone may be its
own.

A retirement is part of a commit, and moves with the partition. Memory follows the commit: callers notify
:class:`Positions` of a change once it is committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

import msgpack

from stateflow.changes import Mutations
from stateflow.errors import (
    BatchChanged,
    InvalidArgument,
    OperatorUsedTwice,
    PositionGap,
    SourceRetired,
    SourceTaken,
    StaleBatch,
    TasksMerged,
)
from stateflow.operator.timers import to_datetime
from stateflow.partition import layout
from stateflow.partition.layout import BATCH_RUN, UNKNOWN_ATTEMPT, Attempt, Piece, Position, Session
from stateflow.state.cells import LATEST_US
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId

# -- Retirement of sources that send no more -------------------------------------------------------------------------

#: if there are too many sources, only those silent for this long are retired, µs; until then a stopped query may
#: request its last batch again, and a batch DataFrame (second value) may be evaluated again
SPARED_US, SPARED_RUN_US = 86_400_000_000, 600_000_000
#: maximum number of sources that one batch retires, and that it examines
PER_BATCH, LOOKED_AT = 8, 64
#: share of the limit that is freed in addition when tombstones are too many
SLACK = 0.25


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits on what a partition keeps of its sources.

    Args:
        idle_us: a source silent for this long is retired, µs; 0: never.
        sources_max: maximum number of sources of one partition; if there are more, those silent for longest are
            retired.
        retired_max: maximum number of tombstones of one partition.
        watermark_idle_us: the watermark of a source silent for this long does not count any more, µs; 0: always counts.
    """

    idle_us: int = 7 * 86_400 * 1_000_000
    sources_max: int = 64
    retired_max: int = 1000
    watermark_idle_us: int = 86_400 * 1_000_000


@dataclass(frozen=True, slots=True)
class Retired:
    """Tombstone of a source. ``batch`` is the last batch contained (-1: none), and ``at_us`` the time of its
    arrival."""

    batch: int
    at_us: int
    session: Session | None = None
    event_us: int | None = None

    @classmethod
    def of(cls, position: Position, session: Session | None) -> Retired:
        return cls(position.batch, position.at_us, session, position.event_us)

    @property
    def position(self) -> Position:
        client = "" if self.session is None else self.session.id
        us = self.event_us
        return Position(self.batch, event_us=us, event_before_us=us, at_us=self.at_us, client=client)

    def encode(self) -> bytes:
        session = None if self.session is None else [self.session.generation_us, self.session.id]
        packed: bytes = msgpack.packb([layout.VERSION, self.batch, self.at_us, session, self.event_us])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Retired:
        with layout.decoding("a retired source"):
            version, batch, at_us, session, event_us = msgpack.unpackb(data)
            layout.check_version(version)
            known = None if session is None else layout.typed(Session(*session), int, str)
            if type(batch) is not int or type(at_us) is not int or type(event_us) not in (int, type(None)):
                raise ValueError("a field is not a number")
            return cls(batch, at_us, known, event_us)


def idle(sources: Iterable[tuple[str, Position]], count: int, now_us: int, retention: Retention) -> list[str]:
    """Returns the sources to retire now.

    Args:
        sources: the first few of ``count`` sources, in order of their last batch's arrival.
    """
    found: list[str] = []
    excess = count - retention.sources_max
    for source, position in sources:
        silent_us = now_us - position.at_us
        aged = 0 < retention.idle_us <= silent_us
        if len(found) == PER_BATCH or (not aged and silent_us < SPARED_RUN_US):
            break
        spared = silent_us < (SPARED_RUN_US if source.startswith(layout.BATCH_RUN) else SPARED_US)
        # a source with a watermark holds the others back on purpose, so only its age retires it
        promises = position.watermark_us is not None and position.watermark_us < LATEST_US
        if aged or (excess > len(found) and not promises and not spared):
            found.append(source)
    return found


class Tombstones:
    """Tombstones of one partition, in its store."""

    def __init__(self, store: PartitionStore, most: int) -> None:
        self._store, self._most = store, most
        self._count: int | None = None  # not counted yet
        forgotten = store.get(layout.FORGOTTEN)
        #: when the newest of the dropped sources had its last batch, µs; None: none was dropped
        self.forgotten_us = None if forgotten is None else int.from_bytes(forgotten, "big", signed=True)

    @property
    def any(self) -> bool:
        """Tells whether a source has ever been retired here."""
        return self.forgotten_us is not None or next(iter(self._store.scan(layout.RETIRED)), None) is not None

    def of(self, source: str) -> Retired | None:
        stored = self._store.get(layout.RETIRED + source.encode())
        return None if stored is None else Retired.decode(stored)

    def bury(self, sources: Mapping[str, Retired], mutations: Mutations) -> None:
        """Adds the retirement of sources to ``mutations``, and drops the oldest tombstones if there are too many."""
        for source, retired in sources.items():
            name = source.encode()
            kinds = (layout.POSITION, layout.OUTPUT, layout.SESSION, layout.LAPSED)
            mutations.deletes += [kind + name for kind in kinds]
            if source.startswith(layout.KEPT):
                mutations.clears.append(layout.piece_keys(source))
            mutations.puts.append((layout.RETIRED + name, retired.encode()))
        if self._count is None:
            self._count = sum(1 for _ in self._store.scan(layout.RETIRED))
        self._count += len(sources)
        if self._count > self._most:
            self._drop(mutations, len(sources))

    def _drop(self, mutations: Mutations, added: int) -> None:
        stored = sorted((Retired.decode(value).at_us, key) for key, value in self._store.scan(layout.RETIRED))
        self._count = len(stored) + added
        dropped = stored[: max(0, self._count - int(self._most * (1 - SLACK)))]
        if self._count <= self._most or not dropped:
            return
        mutations.deletes += [key for _, key in dropped]
        self.forgotten_us = max(self.forgotten_us or 0, dropped[-1][0])
        mutations.puts.append((layout.FORGOTTEN, self.forgotten_us.to_bytes(8, "big", signed=True)))
        self._count = None


@dataclass(frozen=True, slots=True)
class SourceView:
    """State of a source in a partition.

    Attributes:
        batch: the last batch contained; -1: none.
        at_us: when that batch arrived; without a batch, when the client began.
        bytes: size of the source's outputs and position.
        session: its newest client; None: none is known.
    """

    source: str
    batch: int
    at_us: int
    bytes: int
    watermark_us: int | None = None
    retired: bool = False
    session: Session | None = None


def sources_in(store: PartitionStore, held: Mapping[str, Position] = MappingProxyType({})) -> list[SourceView]:
    """Returns all sources that a partition knows.

    Args:
        held: positions of batches that skipped the partition, which replace its own.
    """
    sessions = {key[len(layout.SESSION) :].decode(): Session.decode(v) for key, v in store.scan(layout.SESSION)}
    outputs = {key[len(layout.OUTPUT) :].decode(): len(value) for key, value in store.scan(layout.OUTPUT)}
    found: list[SourceView] = []
    for key, value in store.scan(layout.POSITION):
        source = key[len(layout.POSITION) :].decode()
        position = held.get(source) or Position.decode(value)
        size, session = len(value) + outputs.get(source, 0), sessions.pop(source, None)
        if source.startswith(layout.REAL_TIME):
            size += sum(len(piece.output) for _, piece in layout.pieces(store, source, -1))
        elif (piece := store.get(layout.piece_key(source, position.batch))) is not None:
            size += Piece.decode(piece).bytes_up_to
        found.append(SourceView(source, position.batch, position.at_us, size, position.watermark_us, False, session))
    for key, value in store.scan(layout.RETIRED):
        retired = Retired.decode(value)
        source = key[len(layout.RETIRED) :].decode()
        found.append(SourceView(source, retired.batch, retired.at_us, len(value), None, True, retired.session))
    return found + [
        SourceView(source, -1, session.generation_us, 0, session=session) for source, session in sessions.items()
    ]


# -- Positions. Sans-io ----------------------------------------------------------------------------------------------

#: prefix of source names that users may not choose
RESERVED = "stateflow:"
#: the source whose rows are not processed but become the operator's first state
INITIAL = "stateflow:initial"
#: the source of the change set that migrates a partition's state; its number is the new state version
MIGRATION = "stateflow:migration"


_NONE = Position(-1)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a source, apart from its rows.

    Attributes:
        number: rises by one per batch; a *sparse* source may skip numbers.
        watermark_us: this source promises no older rows from its next batch on, µs; None: it makes no promise;
            LATEST_US: it ends here, as a run of a batch DataFrame does with its last piece.
        attempt: the attempt that sends the batch, if known.
        event_us: newest event time among the batch's rows for all partitions, µs; in a run of a batch DataFrame less
            the allowed lateness.
        rewind: an older batch is sent again, for partitions that lost it. Partitions that contain it skip it, and no
            longer have its output.
        session: the client's session, if the source belongs to one client at a time. The rows must then be the same
            every time the batch is sent.
        known: the client's entry for its successor.
        site: origin of the rows, used only for statistics.
        site_column: column with the origin of each row.
        traceparent: id of the span that sends the batch, see :mod:`stateflow.tracing`; not compared between batches.
    """

    source: str
    number: int
    sparse: bool = False
    watermark_us: int | None = None
    attempt: Attempt = UNKNOWN_ATTEMPT
    event_us: int | None = None
    rewind: bool = False
    session: Session | None = None
    known: bytes = b""
    site: str = ""
    site_column: str = ""
    traceparent: str = field(default="", compare=False)

    @property
    def is_piece(self) -> bool:
        """Tells whether the batch is one of a run of a batch DataFrame. A batch with a client session never is,
        whatever its source's name."""
        return self.session is None and self.source.startswith(BATCH_RUN)


def check_source(source: str) -> None:
    """Checks that a source name is not reserved. Raises InvalidArgument for a name that the caller may not use."""
    if source.startswith(RESERVED) and source != INITIAL:
        raise InvalidArgument(f"{source!r} is a reserved name", remedy="choose another name for the source")


class Positions:
    """Positions of one partition, by source."""

    def __init__(
        self,
        partition: PartitionId,
        known: Mapping[str, Position],
        sessions: Mapping[str, Session] | None = None,
        lapsed: Iterable[str] = (),
        stopped_us: int = -1,
    ) -> None:
        self.partition = partition
        self._sessions = dict(sessions or {})
        self._stopped_us = stopped_us  # clients that began at this time or before are refused
        self._lapsed = set(lapsed)  # sources that their client must open again
        opened = {s: Position(-1, at_us=session.generation_us) for s, session in self._sessions.items()}
        #: sources in the order in which their last batch arrived; if a client has sent nothing yet, its start counts
        self._known = dict(sorted({**opened, **known}.items(), key=lambda each: each[1].at_us))
        self._recalled: set[str] = set()
        #: processing time of the newest batch, None before the first one; and the time since when batches have arrived
        #: without a longer pause
        self._latest_us: int | None = None
        self._since_us = 0

    def last(self, source: str) -> int | None:
        """Returns the last batch of ``source`` that the partition contains; None: it contains none."""
        known = self._known.get(source)
        return None if known is None or known.batch < 0 else known.batch

    def knows(self, source: str) -> bool:
        return source in self._known

    def recall(self, source: str, retired: Retired) -> None:
        """Makes a retired source known again. Its tombstone stays until a batch is committed."""
        self._known[source] = retired.position
        self._recalled.add(source)
        self._lapsed.add(source)
        if retired.session is not None:
            self._sessions[source] = max(retired.session, self._sessions.get(source, retired.session))

    def session(self, source: str) -> Session | None:
        """Returns the newest client of the source; None: none is known."""
        return self._sessions.get(source)

    def is_recalled(self, source: str) -> bool:
        return source in self._recalled

    def refuse_forgotten(self, batch: Batch, after: int | None, forgotten_us: int) -> None:
        """Checks that a batch of an unknown source does not come from a source with a dropped tombstone.

        The newest of the dropped sources had its last batch at ``forgotten_us``. Raises SourceRetired if the batch
        cannot be the first of a new source.
        """
        later = batch.number > 0 and not batch.sparse
        older = batch.session is not None and batch.session.generation_us <= forgotten_us
        if later or older or after is not None:
            raise SourceRetired(
                "the source was retired too long ago to tell which of its batches were applied",
                remedy="send new batches under another source name",
                operator=self.partition.operator,
                partition=self.partition.partition,
                source=batch.source,
            )

    def idle(self, now_us: int, retention: Retention, serving: str) -> dict[str, Retired]:
        """Returns the sources to retire with a batch of ``serving``, as tombstones."""
        oldest = next(iter(self._known.values()), None)
        count = len(self._known) + (serving not in self._known)
        if oldest is None or (count <= retention.sources_max and not 0 < retention.idle_us <= now_us - oldest.at_us):
            return {}
        if oldest.at_us == 0:  # written before positions had a time: its idle time begins now
            stamped = {s: p if p.at_us else p._replace(at_us=now_us) for s, p in self._known.items()}
            self._known = dict(sorted(stamped.items(), key=lambda each: each[1].at_us))
            return {}
        found = idle(islice(self._known.items(), LOOKED_AT), count, now_us, retention)
        spared = {serving, INITIAL} | self._recalled
        return {source: self.tombstone(source) for source in found if source not in spared}

    @property
    def count(self) -> int:
        """Number of sources that are not retired."""
        return len(self._known)

    def tombstone(self, source: str) -> Retired:
        return Retired.of(self._known[source], self._sessions.get(source))

    def retired(self, sources: Iterable[str]) -> None:
        """Forgets ``sources`` after the commit of their retirement."""
        for source in sources:
            self._known.pop(source, None)
            self._sessions.pop(source, None)
            self._recalled.discard(source)
            self._lapsed.discard(source)

    def reached_by(self, source: str) -> Position | None:
        return self._known.get(source)

    def is_newer(self, source: str, session: Session) -> bool:
        """Returns whether ``session`` must be stored as the source's newest client. Raises SourceTaken for a client
        that has a newer successor, or that a restore has stopped."""
        present = self._sessions.get(source)
        if session.generation_us <= self._stopped_us:
            raise SourceTaken(
                "the partition was restored from a checkpoint, which stopped all clients from before "
                f"{to_datetime(self._stopped_us):%Y-%m-%d %H:%M:%S} UTC",
                remedy="start a new client; it continues after the batches in the checkpoint",
                operator=self.partition.operator,
                partition=self.partition.partition,
                source=source,
                generation_us=max(self._stopped_us, 0 if present is None else present.generation_us),
            )
        if present is None or session > present:
            return True
        if session == present:
            return source in self._lapsed
        since = to_datetime(present.generation_us)
        raise SourceTaken(
            f"a newer client took over the source at {since:%Y-%m-%d %H:%M:%S} UTC",
            remedy="send under another source name, or start a new client to take the source back",
            operator=self.partition.operator,
            partition=self.partition.partition,
            source=source,
            generation_us=present.generation_us,
        )

    def check_client(self, source: str, session: Session) -> None:
        """Checks the client of a batch. Raises SourceTaken for a client that has a newer successor.

        Raises PositionGap for a client that has opened the source but is not known here: this copy is older than the
        copy that admitted the client. Copies of other partitions may be older as well, and may have lost a newer client
        or batches in the same way. The client has to open the source at all partitions first.
        """
        if self.is_newer(source, session):
            last = self.last(source)
            raise PositionGap(
                "the partition does not know this client, and may have lost its batches",
                remedy="open the source at every partition, and resend the batches they lack",
                expected=0 if last is None else last + 1,
                operator=self.partition.operator,
                partition=self.partition.partition,
                source=source,
            )

    def taken(self, source: str, session: Session) -> None:
        """Sets the source's newest client, after the commit that stored it."""
        self._sessions[source] = session
        self._lapsed.discard(source)
        self._known.setdefault(source, Position(-1, at_us=session.generation_us))

    def contains(self, batch: Batch) -> bool:
        """Tells whether ``batch`` belongs to a rewind and is older than the last batch of its source here."""
        last = self.last(batch.source)
        return batch.rewind and last is not None and batch.number < last

    @property
    def others(self) -> bool:
        """Tells whether the partition contains rows other than initial state."""
        return any(source != INITIAL and position.batch >= 0 for source, position in self._known.items())

    def is_replay(self, batch: Batch, after: int | None, started: bool = False) -> bool:
        """Tells whether the batch was applied before. Only the newest batch of a source, and any batch of a batch
        DataFrame, can be sent again.

        ``after``: see :meth:`~stateflow.partition.processor.PartitionProcessor.run`.

        Args:
            started: whether the operator has processed rows; it then takes no initial state any more.

        Raises StaleBatch, PositionGap, SourceRetired, OperatorUsedTwice or TasksMerged.
        """
        last = self.last(batch.source)
        if batch.source == INITIAL and started:
            if last is not None and batch.number <= last:
                return True
            raise StaleBatch(
                "the operator has already processed rows",
                remedy="load initial state before the first query or stream starts",
                operator=self.partition.operator,
                partition=self.partition.partition,
            )
        contained = batch.number == last or (last is not None and batch.number < last and batch.is_piece)
        if contained and batch.source in self._recalled:
            raise self.output_is_gone(batch)
        if batch.number == last:
            self._refuse_others(self._known[batch.source].attempt, batch.attempt)
        if contained:
            return True
        where = {
            "operator": self.partition.operator,
            "partition": self.partition.partition,
            "source": batch.source,
        }
        if last is not None and batch.number < last:
            raise StaleBatch(
                f"batch {batch.number} was sent after batch {last}",
                remedy="only the newest batch can be replayed; start the query from its latest checkpoint",
                **where,
            )
        expected = 0 if last is None else last + 1
        if batch.number != expected and not batch.sparse:
            raise PositionGap(
                f"batch {batch.number} was sent, the state expects batch {expected}",
                remedy=f"rewind the source to batch {expected}",
                expected=expected,
                **where,
            )
        if after is not None and after >= expected:  # a sparse source may skip numbers, but no acknowledged batch
            raise PositionGap(
                f"batch {after} was acknowledged, the state contains no batch after {expected - 1}",
                remedy=f"resend the batches from {expected} on, with rewind=True",
                expected=expected,
                **where,
            )
        return False

    def output_is_gone(self, batch: Batch) -> SourceRetired:
        """Returns the error for a batch that was applied, but has no stored output any more."""
        remedy = f"continue with batch {batch.number + 1}"
        if batch.is_piece:
            remedy = "its state is kept; pass another source= to apply the frame again"
        return SourceRetired(
            f"batch {batch.number} was applied, but its output is gone since its source was retired",
            remedy=f"{remedy} (a higher STATEFLOW_REPLICA_SOURCE_IDLE_S keeps outputs longer)",
            operator=self.partition.operator,
            partition=self.partition.partition,
            source=batch.source,
        )

    def _refuse_others(self, earlier: Attempt, now: Attempt) -> None:
        """Checks that a repeated batch is a retry. A retry gets the stored output; another sender would have other
        rows."""
        if not now.run or earlier.run != now.run:
            return
        if earlier.use != now.use:
            raise OperatorUsedTwice(
                "the operator is applied twice in one query",
                remedy="pass a different source= to each apply_operator",
                operator=self.partition.operator,
            )
        if earlier.task == now.task and earlier.call != now.call:
            raise TasksMerged(
                "Spark merged several tasks of the operator into one, as it does for a coalesce directly after it",
                remedy="put .repartition(n) between the operator and the coalesce",
                operator=self.partition.operator,
            )

    def check_rows(self, batch: Batch, then: int, now: int) -> None:
        """Checks the number of rows of a replay: ``then`` rows when the batch was applied, and ``now`` rows in the
        replay.

        The stored output belongs to the rows that were applied. If Spark received it for other rows, those would be
        lost silently. A query's replay may lack rows, because its source may skip data that is gone; a run of a batch
        DataFrame may not. Raises BatchChanged.
        """
        if now > then or (now < then and batch.is_piece):
            raise self._changed(batch, f"batch {batch.number} had {then} row(s) when it was applied, and has {now} now")

    def check_digest(self, batch: Batch, then: int | None, now: int | None) -> None:
        """Checks the rows of a replay by their digest. Raises BatchChanged if other rows were applied.

        Digests of different kinds are not compared: a former version of stateflow applied the batch.
        """
        if now is not None and then is not None and now != then and comparable(now, then):
            raise self._changed(batch, f"batch {batch.number} was applied with other rows")

    def _changed(self, batch: Batch, what: str) -> BatchChanged:
        remedy = "send other rows as a new batch, under the next number"
        if batch.session is None:
            remedy = (
                "make the source and the stages after it replay the same rows, a batch DataFrame of several pieces "
                "with as many tasks= as before; for other rows use another source= or query"
            )
        where = {"operator": self.partition.operator, "partition": self.partition.partition, "source": batch.source}
        return BatchChanged(what, remedy=remedy, **where)

    def silent(self, now_us: int, idle_us: int, serving: str) -> dict[str, Position]:
        """Returns the positions, without watermarks, of sources that were silent for ``idle_us`` when a batch of
        ``serving`` arrives.

        A silent source's watermark does not count until the source sends another one.

        Time in which no source sent is not silence, nor is time before the partition was opened here: a cluster that
        was down, or restored, must wait for each of its sources.
        """
        if self._latest_us is None or now_us - self._latest_us >= idle_us:
            self._since_us = now_us
        self._latest_us = now_us
        if idle_us <= 0:
            return {}
        return {
            source: position._replace(watermark_us=None)
            for source, position in self._known.items()
            if position.watermark_us is not None
            and source != serving
            and idle_us <= now_us - max(position.at_us, self._since_us)
        }

    def silenced(self, sources: Mapping[str, Position]) -> None:
        """Adopts the positions of silent sources after their commit."""
        self._known.update(sources)

    def watermark_us(self, batch: Batch, without: Collection[str] = ()) -> int | None:
        """Returns the minimum of the watermarks that all sources except ``without`` have after ``batch``; None: no
        source has one; LATEST_US: the batch ends a run, and no other source has one."""
        oldest = watermark_of(self._known, {*without, batch.source})
        known = None if batch.source in without else self._known.get(batch.source)
        before = None if known is None or known.watermark_us == LATEST_US else known.watermark_us
        promised = _later(before, batch.watermark_us)
        return promised if oldest is None else oldest if promised is None else min(oldest, promised)

    def newest_us(self, batch: Batch) -> int | None:
        """Returns the newest event time that the source of ``batch`` has after it; None: there is none."""
        return _later(self._known.get(batch.source, _NONE).event_us, batch.event_us)

    def overlaid(self, held: Mapping[str, Position]) -> dict[str, Position]:
        """Returns all known positions, with held ones in place of older ones. Callable from any thread."""
        return {**self._known, **held}

    def behind(self, batch: Batch, rows: int, now_us: int, digest: int | None = None) -> Position:
        """Returns the source's position as it will be after the batch."""
        return behind(self._known.get(batch.source, _NONE), batch, rows, now_us, digest)

    def reached(self, source: str, position: Position) -> None:
        """Sets a source's position after its commit."""
        self._known.pop(source, None)
        self._known[source] = position  # at the end, because its last batch arrived last
        self._recalled.discard(source)


def comparable(one: int, other: int) -> bool:
    """Tells whether two digests are of the same kind.

    Former versions digested the Arrow message, whose bytes may differ for equal values. Digests of values are negative,
    so that stored digests of the two kinds can be told apart.
    """
    return (one < 0) == (other < 0)


def behind(before: Position, batch: Batch, rows: int, now_us: int, digest: int | None = None) -> Position:
    """Returns a source's position as it will be after a batch."""
    return Position(
        batch.number,
        _later(before.watermark_us, batch.watermark_us),
        rows,
        batch.attempt,
        _later(before.event_us, batch.event_us),
        before.event_before_us if before.batch == batch.number else before.event_us,
        now_us,
        digest,
        batch.known or before.known,
        "" if batch.session is None else batch.session.id,
    )


def watermark_of(positions: Mapping[str, Position], without: Collection[str] = ()) -> int | None:
    """Returns the minimum watermark of all sources except ``without``; None: no source has one.

    A source that has ended, with ``LATEST_US``, counts as one without a watermark. Its end is no point in event time.
    """
    promised = (
        each.watermark_us
        for source, each in positions.items()
        if each.watermark_us is not None and each.watermark_us != LATEST_US and source not in without
    )
    return min(promised, default=None)


def adopted(held: Mapping[str, Position], watermark_us: int | None) -> dict[bytes, bytes]:
    """Returns the entries of positions that were held for a partition, and of its watermark after them."""
    entries = {} if watermark_us is None else {layout.WATERMARK: watermark_us.to_bytes(8, "big", signed=True)}
    for source, position in held.items():
        name = source.encode()
        entries |= {layout.POSITION + name: position.encode(), layout.OUTPUT + name: b""}
    return entries


def watermark_after(store: PartitionStore, held: Mapping[str, Position]) -> int | None:
    """Returns the watermark of the partition in ``store`` after the batches of which it has only held positions."""
    stored = {k[len(layout.POSITION) :].decode(): Position.decode(v) for k, v in store.scan(layout.POSITION)}
    return _later(layout.read_watermark(store), watermark_of({**stored, **held}))


def _later(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)
