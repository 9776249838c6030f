"""Entries of a partition store beside the cells: everything under the byte ``m``.

========  =============================================================================
key       value
========  =============================================================================
``ms``    sequence of the last commit, 8 bytes big endian
``mp``+s  position of source *s*: msgpack ``[version, batch, watermark in µs or nil, rows, newest event time, the same
          before that batch, attempt…]``; version 1 has no event times
``mo``+s  output of that batch, see :mod:`stateflow.runtime.output`
``mk``    watermark of the partition: µs, 8 bytes big endian, signed
``mw``    ownership: msgpack ``[version, replica, state, epoch, move id, target…]``
``mx``    declared state schema, JSON
========  =============================================================================

All but ``mw`` belong to the partition and move with it. ``mw`` says what *this copy* is: a copy whose ``mw``
names another replica is an unfinished transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from stateflow.errors import DecodeError
from stateflow.storage import PartitionStore

VERSION = 1
POSITION_VERSION = 2
SEQUENCE = b"ms"
POSITION = b"mp"
OUTPUT = b"mo"
OWNERSHIP = b"mw"
SCHEMA = b"mx"
WATERMARK = b"mk"


@dataclass(frozen=True, slots=True)
class Attempt:
    """Who sent a batch, to tell a retry from somebody else under the same name.

    ``run``: of the query; ``use``: one application of the operator in it; ``task``: one attempt of one task;
    ``call``: one pass of that task over its rows.
    """

    run: str = ""
    use: str = ""
    task: str = ""
    call: str = ""


UNKNOWN_ATTEMPT = Attempt()


@dataclass(frozen=True, slots=True)
class Position:
    """The last batch of a source that a partition contains, the watermark (µs) it had then if any, how many rows
    it brought here, and who sent it.

    ``event_us``: the newest event time (µs) the source has told of up to this batch, ``event_before_us`` up to the one
    before: what a watermark for this batch is made of, however often it is sent.
    """

    batch: int
    watermark_us: int | None = None
    rows: int = 0
    attempt: Attempt = UNKNOWN_ATTEMPT
    event_us: int | None = None
    event_before_us: int | None = None

    def encode(self) -> bytes:
        a = self.attempt
        fields = [POSITION_VERSION, self.batch, self.watermark_us, self.rows, self.event_us, self.event_before_us]
        packed: bytes = msgpack.packb([*fields, a.run, a.use, a.task, a.call])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Position:
        version, batch, watermark_us, rows, *rest = msgpack.unpackb(data)
        if version == POSITION_VERSION:
            event_us, event_before_us, *attempt = rest
            return cls(batch, watermark_us, rows, Attempt(*attempt), event_us, event_before_us)
        _check(version)
        return cls(batch, watermark_us, rows, Attempt(*rest))


def positions(store: PartitionStore) -> dict[str, int]:
    """Source → last batch that a partition contains."""
    return {key[len(POSITION) :].decode(): Position.decode(value).batch for key, value in store.scan(POSITION)}


@dataclass(frozen=True, slots=True)
class Ownership:
    """Durable part of a partition's lifecycle on one replica. ``state`` is OWNED or SEALED.

    For OWNED ``epoch`` is the one it is owned at; for SEALED the one granted to the target.
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
        version, *fields = msgpack.unpackb(data)
        _check(version)
        return cls(*fields)


def _check(version: int) -> None:
    if version != VERSION:
        raise DecodeError(
            f"partition data has layout {version}, this program reads {VERSION}",
            remedy="run a newer stateflow",
        )
