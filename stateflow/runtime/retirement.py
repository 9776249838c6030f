"""Retirement of sources that send no more: what is kept of them, and for how long.

A source costs a partition its position, and the whole output of its newest batch. A run of a batch DataFrame costs the
output of all its batches, a query in real-time mode that of all batches whose rows Spark may ask for again. A source
that has been idle for long, or that is one of too many, is *retired*: its output is removed, its watermark holds no
other source back, and a tombstone of some bytes says which batch is contained. A retired source may come back at any
time and goes on after that batch; only the output of that batch is gone. The newest tombstones are kept. Once any was
dropped, a source that is not known and cannot be new is refused, for it may be one of those.

A retirement is part of a commit, and moves with the partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgpack

from stateflow.changes import Mutations
from stateflow.runtime import layout
from stateflow.runtime.layout import Piece, Position, Session
from stateflow.state.cells import LATEST_US
from stateflow.storage import PartitionStore

#: of too many sources, only those silent for this long are retired, µs: their last batch may be asked for again, by a
#: query that stands still, or (runs of a batch DataFrame: the second) for a frame that is evaluated twice
SPARED_US, SPARED_RUN_US = 86_400_000_000, 600_000_000
#: sources retired with one batch, at most; and looked at
PER_BATCH, LOOKED_AT = 8, 64
#: share of the limit that is freed in addition when tombstones are too many
SLACK = 0.25


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits on what a partition keeps of its sources.

    Args:
        idle_us: a source silent for this long is retired, µs; 0: never for that.
        sources_max: sources of one partition; beyond it the longest silent ones are retired.
        retired_max: tombstones of one partition.
        watermark_idle_us: the watermark of a source silent for this long does not count any more, µs; 0: always counts.
    """

    idle_us: int = 7 * 86_400 * 1_000_000
    sources_max: int = 64
    retired_max: int = 1000
    watermark_idle_us: int = 86_400 * 1_000_000


@dataclass(frozen=True, slots=True)
class Retired:
    """Tombstone of a source. ``batch``: the last one contained, -1: none; ``at_us``: when it came."""

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
        sources: the first few of ``count``, in order of when their last batch came.
    """
    found: list[str] = []
    excess = count - retention.sources_max
    for source, position in sources:
        silent_us = now_us - position.at_us
        aged = 0 < retention.idle_us <= silent_us
        if len(found) == PER_BATCH or (not aged and silent_us < SPARED_RUN_US):
            break
        spared = silent_us < (SPARED_RUN_US if source.startswith(layout.BATCH_RUN) else SPARED_US)
        # a source with a watermark holds the others back on purpose: only its age ends that
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
        """Adds to ``mutations`` what retires sources, and drops the oldest tombstones when there are too many."""
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
    """State of a source in a partition. ``batch``: the last one contained, -1: none; ``at_us``: when it came;
    ``bytes``: of its output and position; ``session``: its newest client.
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
        held: positions held for the partition, beyond those it has itself.
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
