"""Entries of a partition store other than cells: everything under the byte ``m``.

========  =============================================================================
key       value
========  =============================================================================
``ms``    sequence of the last commit, 8 bytes big endian
``mp``+s  position of source *s*: msgpack ``[version, batch, watermark in µs or nil, rows, newest event time, the same
          before that batch, attempt…, when it was committed in µs, digest of the rows or nil, what the client knew,
          id of that client]``; version 1 has no event times, version 2 ends with the attempt
``mo``+s  output of that batch, see :mod:`stateflow.operator.output`
``mq``+s  in place of ``mo`` where *s* is a run of a batch DataFrame, or of a query in real-time mode: the output of
          each of its batches, see :class:`Piece`
``mf``+s  the newest client of source *s*: msgpack ``[version, generation, id]``
``ml``+s  this copy may lack what clients know to be committed: the client of *s* must open the source again
``mr``+s  tombstone of a retired source: msgpack ``[version, batch, when it arrived in µs, [generation, id] of its
          client or nil, newest event time]``; the source then has none of the entries above
``mz``    tombstones were dropped: when the newest of them had its last batch, µs, 8 bytes big endian
``mn``    clients of sources are refused if they began no later than this: µs, 8 bytes big endian
``mk``    watermark of the partition: µs, 8 bytes big endian, signed
``mw``    ownership: msgpack ``[version, replica, state, epoch, move id, target…]``
``mx``    declared state schema, JSON
========  =============================================================================

All entries except ``mw`` belong to the partition and move with it. ``mw`` describes *this copy*: a copy whose ``mw``
names another replica is an unfinished transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

import msgpack

from stateflow.errors import DecodeError
from stateflow.storage import PartitionStore

VERSION = 1
POSITION_VERSION = 3
SEQUENCE = b"ms"
POSITION = b"mp"
OUTPUT = b"mo"
PIECE = b"mq"
SESSION = b"mf"
LAPSED = b"ml"
RETIRED = b"mr"
FORGOTTEN = b"mz"
STOPPED = b"mn"
OWNERSHIP = b"mw"
SCHEMA = b"mx"
WATERMARK = b"mk"

#: prefix of the source of one run of a batch DataFrame
BATCH_RUN = "batch:"
#: prefix of the sources of a query in real-time mode, whose clients say up to which batch outputs can be dropped
REAL_TIME = "real-time:"
#: sources with these prefixes keep the output of every batch
KEPT = (BATCH_RUN, REAL_TIME)


T = TypeVar("T")


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turns errors of decoding an entry into DecodeError. Entries may be invalid: a copy may come from another
    process."""
    try:
        yield
    except (ValueError, TypeError) as error:
        why = str(error)[:120]
        raise DecodeError(
            f"{what} of a partition cannot be read: {why}", remedy="restore it from a checkpoint"
        ) from error


def typed(found: T, *kinds: type) -> T:
    for each, kind in zip(fields(found), kinds, strict=True):  # type: ignore[arg-type]
        if type(getattr(found, each.name)) is not kind:
            raise ValueError(f"{each.name} is not of type {kind.__name__}")
    return found


@dataclass(frozen=True, slots=True)
class Attempt:
    """Sender of a batch; it distinguishes a retry from another sender under the same source name.

    ``run``: run of the query; ``use``: one application of the operator in it; ``task``: one attempt of one task;
    ``call``: one pass of that task over its rows.
    """

    run: str = ""
    use: str = ""
    task: str = ""
    call: str = ""


UNKNOWN_ATTEMPT = Attempt()


@dataclass(frozen=True, slots=True, order=True)
class Session:
    """One client of a source. The largest session is the newest, and partitions refuse the others.

    ``generation_us``: start time of the client, µs, increased if necessary to be later than that of every client before
    it; ``id`` distinguishes two clients that began at the same time.
    """

    generation_us: int
    id: str

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb([VERSION, self.generation_us, self.id])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Session:
        with decoding("a session"):
            version, *values = msgpack.unpackb(data)
            check_version(version)
            return typed(cls(*values), int, str)


class Position(NamedTuple):
    """The last batch of a source that a partition contains, with the source's watermark at that batch (µs; None: none),
    the number of its rows here, and its sender.

    ``event_us``: newest event time (µs) that the source has reported up to this batch; ``event_before_us``: up to the
    batch before. The watermark for this batch is computed from these, with the same result each time it is sent.

    ``at_us``: when the batch was committed. ``digest``: digest of the rows, if the same batch must bring the same rows;
    None: unknown. ``known``: the client's entry for its successor, see :mod:`stateflow.client.history`; ``client``: id
    of the client.
    """

    batch: int
    watermark_us: int | None = None
    rows: int = 0
    attempt: Attempt = UNKNOWN_ATTEMPT
    event_us: int | None = None
    event_before_us: int | None = None
    at_us: int = 0
    digest: int | None = None
    known: bytes = b""
    client: str = ""

    def encode(self) -> bytes:
        batch, watermark_us, rows, a, event_us, event_before_us, *end = self
        packed: bytes = msgpack.packb(
            [POSITION_VERSION, batch, watermark_us, rows, event_us, event_before_us, a.run, a.use, a.task, a.call, *end]
        )
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Position:
        with decoding("a position"):
            version, batch, watermark_us, rows, *rest = msgpack.unpackb(data)
            if type(batch) is not int:
                raise ValueError("its batch is not a number")
            if version in (POSITION_VERSION, POSITION_VERSION - 1):
                event_us, event_before_us, run, use, task, call, *newer = rest
                attempt = Attempt(run, use, task, call)
                return cls(batch, watermark_us, rows, attempt, event_us, event_before_us, *newer)
            check_version(version)
            return cls(batch, watermark_us, rows, Attempt(*rest))


@dataclass(frozen=True, slots=True)
class Piece:
    """One batch of a source that keeps the outputs of several batches. ``bytes_up_to``: bytes of all outputs up to this
    one, in a run of a batch DataFrame.

    The key is ``mq``, the length of the source's name (2 bytes), the name, the batch number (8 bytes), both numbers big
    endian. The value is msgpack ``[version, rows, digest or nil, bytes up to here, output]``.
    """

    rows: int
    digest: int | None
    bytes_up_to: int
    output: bytes

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb([VERSION, self.rows, self.digest, self.bytes_up_to, self.output])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Piece:
        with decoding("an output"):
            version, *values = msgpack.unpackb(data)
            check_version(version)
            return cls(*values)


def piece_key(source: str, number: int) -> bytes:
    return _pieces_of(source) + number.to_bytes(8, "big")


def piece_keys(source: str) -> tuple[bytes, bytes]:
    """Returns the key range of a source's outputs: from the first key to before the second."""
    prefix = _pieces_of(source)
    return prefix, prefix + b"\xff" * 9


def pieces(store: PartitionStore, source: str, after: int) -> Iterator[tuple[int, Piece]]:
    """Yields (batch number, kept output) of a source's batches later than ``after``, in order."""
    prefix = _pieces_of(source)
    for key, value in store.scan_from(piece_key(source, max(0, after + 1)), piece_keys(source)[1]):
        yield int.from_bytes(key[len(prefix) :], "big"), Piece.decode(value)


def _pieces_of(source: str) -> bytes:
    name = source.encode()
    return PIECE + len(name).to_bytes(2, "big") + name


def positions(store: PartitionStore) -> dict[str, int]:
    """Returns the last batch of each source that a partition contains, by source."""
    return {key[len(POSITION) :].decode(): Position.decode(value).batch for key, value in store.scan(POSITION)}


def lapsing(store: PartitionStore) -> list[tuple[bytes, bytes]]:
    """Returns the entries to write to a copy that is served in place of a newer, perhaps lost one.

    The newer copy may have known a newer client of a source; without that knowledge, the former client would be
    accepted. So the copy accepts no client of a source until that client has opened the source on all partitions again:
    other partitions know the newer client, and refuse the former one.
    """
    return [(LAPSED + key[len(SESSION) :], b"") for key, _ in store.scan(SESSION)]


def stopping(stores: Iterable[PartitionStore], now_us: int) -> list[tuple[bytes, bytes]]:
    """Returns the entries to write to a copy that must refuse every client so far, including a client whose clock is
    ahead, if one of the partition's ``stores`` knows it. An earlier stop is never lowered."""
    known_us = [now_us]
    for store in stores:
        known_us += [Session.decode(value).generation_us for _, value in store.scan(SESSION)]
        known_us.append(int.from_bytes(store.get(STOPPED) or b"", "big"))
    return [(STOPPED, max(known_us).to_bytes(8, "big"))]


@dataclass(frozen=True, slots=True)
class Ownership:
    """Durable part of a partition's lifecycle on one replica. ``state`` is OWNED or SEALED.

    ``epoch``: for OWNED the epoch at which the partition is owned; for SEALED the epoch granted to the target.
    """

    replica: str
    state: str
    epoch: int
    move_id: str = ""
    target: str = ""
    target_site: str = ""
    target_address: str = ""
    digest: str = ""

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb(
            [
                VERSION,
                self.replica,
                self.state,
                self.epoch,
                self.move_id,
                self.target,
                self.target_site,
                self.target_address,
                self.digest,
            ]
        )
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Ownership:
        with decoding("the ownership record"):
            version, *values = msgpack.unpackb(data)
            check_version(version)
            return typed(cls(*values), str, str, int, *[str] * 5)


def check_version(version: int) -> None:
    if version != VERSION:
        raise DecodeError(
            f"partition data has layout {version}, this program reads {VERSION}",
            remedy="run a newer stateflow",
        )
