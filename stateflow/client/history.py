"""What the client of a sparse source knows of its partitions, and what is to be sent again after a loss. Sans-io.

A sparse source sends a batch to the partitions that have rows in it, so a partition cannot tell by a batch's number
whether it lacks one before it. The client tells it: with every part goes the newest batch, up to this one, that the
partition must contain. For a new batch that is the newest it *acknowledged*, in a rewind the newest that it is known to
*contain*. A partition that has less refuses, and is asked, as all of them are, what it has. What is missing is sent
again in the order it was sent first; a loss in the middle of that is a refusal like any other.

A client that starts again must know what its predecessor was acknowledged, of all partitions, also of those that lost
it. So each batch carries that, rewinds too, and every partition of the batch keeps it with its position: any of them
may be the only one left that knows::

    msgpack [2, generation, id, batch, zlib of msgpack [[batch - acknowledged of partition 0, …], (0 or 1, …)]]

where the last is a byte for each partition, 1 for those of the batch.

The newest that is found counts. A batch that some of its partitions contain and others lack was perhaps acknowledged,
and perhaps its client died over it. Either way the successor sends it again before any other. Where all partitions that
a batch was sent to lost it, and no other followed, only the application can tell that it was acknowledged.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgpack

from stateflow.errors import DecodeError, PositionGap
from stateflow.rpc.rows import BatchRows
from stateflow.runtime.layout import Session

KNOWN_VERSION = 2
#: batches whose partitions are remembered, with or without their rows
LOGGED_MAX = 65_536
#: bytes of the inner part of what a predecessor left, when it is unpacked
INNER_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch as it was sent."""

    number: int
    rows: BatchRows
    watermark_us: int | None = None


class History:
    """Args:
    bytes_max: rows of acknowledged batches that are kept.
    """

    def __init__(self, operator: str, source: str, partitions: int, bytes_max: int) -> None:
        self.operator, self.source, self.partitions = operator, source, partitions
        self.position = -1  # the newest number that was used
        self.lost: set[int] = set()  # partitions that lack what they acknowledged, as far as it is known
        self._acknowledged = [-1] * partitions
        self._contained = [-1] * partitions
        self._log: dict[int, tuple[int, ...]] = {}  # acknowledged batch → its partitions
        self._since = 0  # every batch that was acknowledged from this one on is in the log
        self._kept: dict[int, Sent] = {}
        self._kept_bytes, self._bytes_max = 0, bytes_max
        self._rewound: int | None = None  # rewinding by hand: everything up to here was sent again
        self._unsure: tuple[int, int] | None = None  # batches (from, up to) of a predecessor, nobody knows where
        self._half: _Half | None = None  # the last batch of a predecessor, which some of its partitions lack
        self._before = [-1] * partitions  # the last batch of whoever came before
        self._taken: dict[int, int] = {}  # partition → the last batch of another client that was let in since

    # -- from partitions and predecessors ------------------------------------------------------------------

    def resume(self, contained: Mapping[int, int], known: Iterable[bytes], acknowledged: int | None = None) -> None:
        """Start behind a predecessor. What a partition contains counts as acknowledged: it may have been.

        Args:
            acknowledged: the newest batch that was, as far as the application knows.
        """
        self.heard(contained)
        self._before = self._contained[:]
        none = _Known(Session(0, ""), -1, [-1] * self.partitions, [])
        newest = max((_decoded(each, self.partitions) for each in set(known)), default=none)
        self._acknowledged = [max(pair) for pair in zip(newest.acknowledged, self._contained, strict=True)]
        if acknowledged is not None:
            if acknowledged >= newest.number:
                for partition in newest.partitions:
                    self._acknowledged[partition] = max(newest.number, self._acknowledged[partition])
            if acknowledged > newest.number:
                self._unsure = newest.number + 1, acknowledged
        self.position = max(newest.number, *self._acknowledged, -1 if acknowledged is None else acknowledged)
        self._since = self.position + 1
        self._find_lost()
        lacking = {p for p in newest.partitions if self._contained[p] < newest.number}
        if 0 < len(lacking) < len(newest.partitions) and (acknowledged is None or acknowledged < newest.number):
            self._half = _Half(newest.number, newest.partitions, lacking)

    @property
    def contained(self) -> Sequence[int]:
        """By partition, its newest batch as it said last, or acknowledged since; -1: none."""
        return self._contained

    @property
    def taken(self) -> frozenset[int]:
        """Partitions that another client was let into again, see :meth:`heard`."""
        return frozenset(self._taken)

    @property
    def incomplete(self) -> bool:
        """Is something missing that was acknowledged, as far as it is known?"""
        return bool(self.lost) or bool(self._taken) or self._unsure is not None or self._half is not None

    def finishes(self, number: int) -> bool:
        """Is ``number`` the batch that a predecessor left in some of its partitions, and all that is missing?"""
        return self._half is not None and self._half.number == self._oldest_missing() == number

    def heard(self, contained: Mapping[int, int], others: Collection[int] = ()) -> None:
        """What all partitions contain now; those that have none of this source are left out.

        Args:
            others: partitions whose last batch is another client's. Where that is newer than what was there in the
                beginning, one that came before was let in again, by a copy that knew of nobody newer: whatever this
                client sent there is lost, and part of its numbers are taken.
        """
        self._contained = [contained.get(partition, -1) for partition in range(self.partitions)]
        self._taken = {p: self._contained[p] for p in others if self._contained[p] > self._before[p]}
        self._rewound = None
        self._find_lost()
        if self._half is not None:
            self._reached({p: self._contained[p] for p in self._half.lacking})

    def _reached(self, contained: Mapping[int, int]) -> None:
        half = self._half
        if half is not None:
            lacking = {p for p in half.lacking if contained.get(p, -1) < half.number}
            self._half = half._replace(lacking=lacking) if lacking else None

    def _find_lost(self) -> None:
        pairs = enumerate(zip(self._contained, self._acknowledged, strict=True))
        self.lost = {partition for partition, (contained, acknowledged) in pairs if contained < acknowledged}

    def known(self, session: Session, number: int, partitions: Iterable[int]) -> bytes:
        """Returns what a successor needs to know, to be sent with batch ``number`` to these partitions.

        An older batch that is sent again is none that a successor would have to finish: with it goes what is known
        since, under the newest number. Its partitions are named where a predecessor left it in some of them only.
        """
        if number < self.position:
            number, half = self.position, self._half
            partitions = half.partitions if half is not None and half.number == number else ()
        behind = [number - acknowledged for acknowledged in self._acknowledged]
        among = bytearray(self.partitions)
        for partition in partitions:
            among[partition] = 1
        inner = zlib.compress(msgpack.packb([behind, among]), 1)
        packed: bytes = msgpack.packb([KNOWN_VERSION, session.generation_us, session.id, number, inner])
        return packed

    # -- batches -------------------------------------------------------------------------------------------

    def after(self, number: int, partitions: Iterable[int], rewind: bool) -> dict[int, int]:
        """Partition → newest batch, up to ``number``, that it must contain before it takes this one.

        Where that is ``number`` itself, it can only be a replay.
        """
        needed = self._contained if rewind else self._acknowledged
        return {p: min(needed[p], number) for p in partitions if needed[p] >= 0}

    def lacks(self, batch: Sent) -> bool:
        """Is there a partition that has acknowledged neither it nor anything newer, and so may take it now?"""
        return any(self._acknowledged[partition] < batch.number for partition in batch.rows)

    def acknowledged(self, batch: Sent) -> None:
        number = batch.number
        for partition in batch.rows:
            self._acknowledged[partition] = max(number, self._acknowledged[partition])
            self._contained[partition] = max(number, self._contained[partition])
            if self._contained[partition] == self._acknowledged[partition]:
                self.lost.discard(partition)
        self.position = max(self.position, number)
        self._reached(dict.fromkeys(batch.rows, number))
        if number >= self._since:
            self._keep(batch)
        if self._rewound is not None:
            self._rewound = max(self._rewound, number)
            if self._unsure is not None and self._rewound >= self._unsure[1]:
                self._unsure = None

    def _keep(self, batch: Sent) -> None:
        number = batch.number
        if number in self._log:  # again, or to other partitions, or only to those that lost it
            self._log[number] = tuple({*self._log[number], *batch.rows})
            if (before := self._kept.get(number)) is None:
                return
            self._kept_bytes -= before.rows.size
            merged = before.rows.merged(batch.rows)
            if merged is None:  # mended, with other columns: whoever has all of it has to send it again
                del self._kept[number]
                return
            batch = replace(before, rows=merged)
        else:
            self._log[number] = tuple(batch.rows)
        self._kept[number] = batch
        self._kept_bytes += batch.rows.size
        while self._kept_bytes > self._bytes_max:
            oldest = next(iter(self._kept))
            self._kept_bytes -= self._kept.pop(oldest).rows.size
        while len(self._log) > LOGGED_MAX:
            oldest = next(iter(self._log))
            del self._log[oldest]
            self._since = max(self._since, oldest + 1)

    def let_go(self) -> None:
        """Of rows: from here on nothing can be sent again."""
        self._kept.clear()
        self._kept_bytes = 0

    # -- rewinds -------------------------------------------------------------------------------------------

    def missing(self) -> list[Sent]:
        """What is to be sent again, in order, each batch to the partitions that lack it. Raises PositionGap when some
        of it is no longer kept."""
        oldest = self._oldest_missing()
        if oldest is None:
            return []
        if self._taken or self._half is not None or oldest < self._since:
            raise self.gap(oldest)
        found = []
        for number in sorted(number for number in self._log if number >= oldest):
            lacking = [p for p in self._log[number] if p in self.lost and self._contained[p] < number]
            if not lacking:
                continue
            if number not in self._kept:
                raise self.gap(oldest)
            kept = self._kept[number]
            found.append(replace(kept, rows=kept.rows.only(lacking)))
        return found

    def rewinding(self, number: int) -> None:
        """Batch ``number`` is about to be sent again by hand: none may be left out. Raises PositionGap for the one
        that comes first."""
        oldest = self._oldest_missing()
        if oldest is None:
            return
        if self._taken:
            raise self.gap(oldest)
        if self._rewound is None:
            self._rewound = oldest - 1
        due = self._rewound + 1
        if number > due and (due < self._since or any(due <= each < number for each in self._log)):
            raise self.gap(due)

    def accept_loss(self) -> int | None:
        """What is lost need not come back. Returns the oldest batch that was lost, None: nothing was."""
        oldest = self._oldest_missing()
        self._forget_lost()
        self._acknowledged = self._contained[:]
        self.lost.clear()
        for partition, batch in self._taken.items():
            self._before[partition] = batch
            self.position = max(self.position, batch)
        self._taken.clear()
        self._rewound = self._unsure = self._half = None
        return oldest

    def _forget_lost(self) -> None:
        """A later loss must not bring it back: it may have been sent again under other numbers, and where it was not,
        nothing asks for it."""
        from_ = {p: self._contained[p] + 1 for p in self.lost}
        from_ |= {p: self._before[p] + 1 for p in self._taken}  # what is there now is another client's

        def stays(number: int, partition: int) -> bool:
            return number < from_.get(partition, number + 1)

        for number, partitions in list(self._log.items()):
            left = tuple(p for p in partitions if stays(number, p))
            if len(left) == len(partitions):
                continue
            kept = self._kept.pop(number, None) if not left else self._kept.get(number)
            if left:
                self._log[number] = left
            else:
                del self._log[number]
            if kept is not None:
                self._kept_bytes -= kept.rows.size
                if left:
                    self._kept[number] = replace(kept, rows=kept.rows.only(left))
                    self._kept_bytes += self._kept[number].rows.size

    def _oldest_missing(self) -> int | None:
        """By its number; where the log does not reach back, the number behind what the partition has."""
        first = [] if self._unsure is None else [self._unsure[0]]
        first += [] if self._half is None else [self._half.number]
        first += [self._before[partition] + 1 for partition in self._taken]
        for partition in self.lost:
            start = self._contained[partition] + 1
            if start >= self._since:
                logged = (n for n, partitions in self._log.items() if n >= start and partition in partitions)
                start = min(logged, default=start)
            first.append(start)
        return min(first, default=None)

    def gap(self, expected: int) -> PositionGap:
        if self._taken:
            newest = max(self._taken.values())
            return PositionGap(
                f"batches from {expected} on are lost, those of a former client, up to {newest}, came in their place",
                remedy="call accept_loss(), and send again under new numbers what the state lacks",
                operator=self.operator,
                source=self.source,
                expected=expected,
                partitions=",".join(map(str, sorted(self._taken)[:20])),
            )
        if self.finishes(expected):
            assert self._half is not None
            return PositionGap(
                f"batch {expected}, the last of the client before, is in some of its partitions and not in others",
                remedy=f"send the same rows again with sequence={expected}; or call accept_loss() to go on without",
                operator=self.operator,
                source=self.source,
                expected=expected,
                partitions=",".join(map(str, sorted(self._half.lacking)[:20])),
            )
        return PositionGap(
            f"batches that were acknowledged are lost, from {expected} on",
            remedy=f"send every batch from {expected} on again, in order and with rewind=True; "
            "or call accept_loss() where they are gone for good",
            operator=self.operator,
            source=self.source,
            expected=expected,
            partitions=",".join(map(str, sorted(self.lost)[:20])) or None,
        )


class _Half(NamedTuple):
    """Batch ``number``, its partitions, and those of them that lack it."""

    number: int
    partitions: list[int]
    lacking: set[int]


class _Known(NamedTuple):
    """What came with batch ``number`` for its ``partitions``: what each partition had ``acknowledged`` before."""

    session: Session
    number: int
    acknowledged: list[int]
    partitions: list[int]


def _decoded(known: bytes, partition_count: int) -> _Known:
    """Raises DecodeError for what no client of this operator can have written."""
    try:
        version, generation_us, session_id, number, *rest = msgpack.unpackb(known)
        if version == KNOWN_VERSION:
            (inner,) = rest
            behind, among = msgpack.unpackb(zlib.decompressobj().decompress(inner, INNER_MAX))
            if len(among) != partition_count:
                raise ValueError(f"partitions of {len(among)} instead of {partition_count}")
            partitions = [partition for partition, is_there in enumerate(among) if is_there]
        elif version == 1:
            behind, partitions = rest
        else:
            raise ValueError(f"version {version}")
        whole = (generation_us, number, *behind, *partitions)
        if not isinstance(session_id, str) or any(type(each) is not int for each in whole):
            raise ValueError("types that no client writes")
        if len(behind) != partition_count or not all(0 <= each < partition_count for each in partitions):
            raise ValueError(f"other partitions than the {partition_count} there are")
        acknowledged = [number - each for each in behind]
        if not -1 <= max(acknowledged) <= number or min(acknowledged) < -1:
            raise ValueError("batches that there cannot be")
        return _Known(Session(generation_us, session_id), number, acknowledged, partitions)
    except (ValueError, TypeError, zlib.error, msgpack.UnpackException) as error:
        raise DecodeError(
            f"what the source's last client left cannot be read ({error})",
            remedy="run the stateflow version of that client, or use another source name",
        ) from error
