"""Change sets: the tracked mutations of one committed batch on one partition.

Every part of the system that handles changes uses the same bytes: commits, warm-up of a move's target, standbys and
audits::

    msgpack [version, operator, partition, epoch, sequence, source, position, clears, deletes, puts]
    + xxh64 of that (8 bytes, big endian)

A change set holds *everything* that its commit wrote, including positions and the batch's stored output. So two stores
that applied the change sets 1…n without a gap have the same contents.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgpack
import xxhash

from stateflow.errors import TransferCorrupt

FORMAT_VERSION = 1


@dataclass(slots=True)
class Mutations:
    """Net writes to a partition store, applied atomically in this order: clears, deletes, puts."""

    puts: list[tuple[bytes, bytes]] = field(default_factory=list)
    deletes: list[bytes] = field(default_factory=list)
    #: half-open ranges ``[start, end)`` of cells to drop
    clears: list[tuple[bytes, bytes]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes or self.clears)


def net(several: Iterable[Mutations]) -> Mutations:
    """Returns the net effect of mutations applied one after the other.

    The result has the last write of each key, unless a later clear removed the key.
    """
    cleared: dict[tuple[bytes, bytes], int] = {}
    written: dict[bytes, tuple[int, bytes | None]] = {}
    for when, mutations in enumerate(several):
        cleared |= dict.fromkeys(mutations.clears, when)
        written |= dict.fromkeys(mutations.deletes, (when, None))
        written |= {key: (when, value) for key, value in mutations.puts}
    result = Mutations(clears=list(cleared))
    ranges = sorted(((start, end, when) for (start, end), when in cleared.items()), reverse=True)
    over: list[tuple[int, bytes]] = []  # (-when, end) of ranges that began before the key, the newest first
    for key in sorted(written):
        while ranges and ranges[-1][0] <= key:
            _, end, when = ranges.pop()
            heapq.heappush(over, (-when, end))
        while over and over[0][1] <= key:
            heapq.heappop(over)
        when, value = written[key]
        if over and -over[0][0] > when:
            continue
        if value is None:
            result.deletes.append(key)
        else:
            result.puts.append((key, value))
    return result


@dataclass(frozen=True, slots=True)
class ChangeSet:
    operator: str
    partition: int
    epoch: int
    sequence: int
    source: str
    position: int
    mutations: Mutations

    def encode(self) -> bytes:
        m = self.mutations
        body: bytes = msgpack.packb(
            [
                FORMAT_VERSION,
                self.operator,
                self.partition,
                self.epoch,
                self.sequence,
                self.source,
                self.position,
                m.clears,
                m.deletes,
                m.puts,
            ]
        )
        return body + xxhash.xxh64_digest(body)

    @classmethod
    def decode(cls, data: bytes) -> ChangeSet:
        """Parses a change set. Raises TransferCorrupt for a wrong checksum, another version, or contents of the wrong
        types."""
        body, checksum = data[:-8], data[-8:]
        if len(data) < 9 or xxhash.xxh64_digest(body) != checksum:
            raise TransferCorrupt(
                "a change set arrived with a wrong checksum",
                remedy="none needed: the transfer starts again from the base copy",
                bytes=len(data),
            )
        try:
            version, *fields = msgpack.unpackb(body, use_list=False)
        except (ValueError, TypeError) as error:
            raise _no_change_set(len(data)) from error
        if version != FORMAT_VERSION:
            raise TransferCorrupt(
                f"a change set has format {version}, this program reads {FORMAT_VERSION}",
                remedy="run the same stateflow version on both replicas",
            )
        if not _is_change_set(fields):
            raise _no_change_set(len(data))
        operator, partition, epoch, sequence, source, position, clears, deletes, puts = fields
        mutations = Mutations(list(puts), list(deletes), list(clears))
        return cls(operator, partition, epoch, sequence, source, position, mutations)


_FIELDS = (str, int, int, int, str, int, tuple, tuple, tuple)


def _is_change_set(fields: list[Any]) -> bool:
    """Tells whether the fields have the types of a change set's fields.

    A correct checksum does not prove this: the sender may be another program than a replica.
    """
    if len(fields) != len(_FIELDS) or not all(map(isinstance, fields, _FIELDS)):
        return False
    clears, deletes, puts = fields[-3:]
    return all(type(key) is bytes for key in deletes) and all(
        type(pair) is tuple and len(pair) == 2 and type(pair[0]) is bytes and type(pair[1]) is bytes
        for pair in (*clears, *puts)
    )


def _no_change_set(size: int) -> TransferCorrupt:
    return TransferCorrupt(
        "the received data is not a change set",
        remedy="check what runs at the source's address, and its version",
        bytes=size,
    )


def chain(previous: bytes, change_set: bytes) -> bytes:
    """Returns the digest of a transfer after one more change set: ``xxh3_128(previous + checksum)``.

    Both ends of a transfer compute this digest. Equal digests mean the same base and the same change sets in the same
    order.

    Args:
        previous: digest of the base and of the change sets before this one.
        change_set: the encoded change set.
    """
    return xxhash.xxh3_128_digest(previous + change_set[-8:])
