"""History of a sparse source's client: which batches its partitions contain, and which to send again after a loss.
Sans-io.

A sparse source sends a batch only to the partitions that have rows in it, so a partition cannot tell by a batch's
number whether it lacks an earlier batch. Therefore the client sends, with a batch's rows for a partition, the number of
the newest batch that the partition must already contain. For a new batch, that is the newest batch that the partition
*acknowledged*; in a rewind, the newest batch that the partition is known to *contain*. A partition that lacks that
batch refuses the rows. The client then asks all partitions what they contain, and sends the missing batches again, in
the original order. If a partition loses more batches in the middle of this, it refuses rows again, and the client
repeats the procedure.

A new client must know which batches every partition acknowledged to its predecessor, including partitions that lost
these batches. So the client sends an entry with this knowledge with each batch, in rewinds too, and every partition of
the batch stores the entry with its position. One surviving partition is enough to recover it::

    msgpack [1, generation, id, batch, [batch - acknowledged of partition 0, …], [partition of the batch, …]]
    msgpack [2, generation, id, batch, zlib of msgpack [[batch - acknowledged of partition 0, …], (0 or 1, …)]]

The last list of the second form has a byte for each partition: 1 if the batch was sent to it. The second form is for
operators of more than ``PLAIN_MAX`` partitions, because every partition of a batch stores the entry. Release 0.1 reads
only the first form.

The new client uses the newest entry that it finds. A batch that some of its partitions contain and others lack may have
been acknowledged, or its client may have died before the acknowledgement. In both cases the new client sends the batch
again before any other. If all partitions of a batch lost it, and no other batch followed, only the application can tell
that it was acknowledged.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgpack
import pyarrow as pa

from stateflow.errors import DecodeError, PositionGap
from stateflow.operator.arrow import read_schema
from stateflow.partition.layout import Session
from stateflow.rpc.apply import PART_BYTES, BatchRows
from stateflow.types import shown

KNOWN_VERSION = 2
#: maximum number of partitions for an entry that is not compressed
PLAIN_MAX = 128
#: maximum number of batches whose partitions are remembered, with or without their rows
LOGGED_MAX = 65_536
#: maximum memory for their partitions, in bytes, and the memory for a batch beside two bytes for each of its partitions
LOG_BYTES_MAX, LOG_BATCH_BYTES = 32 << 20, 160
#: memory for a kept batch beside its rows, in bytes, as measured
KEPT_BATCH_BYTES = 384
#: maximum size of the inner part of a predecessor's entry, unpacked, in bytes
INNER_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch as it was sent."""

    number: int
    rows: BatchRows
    watermark_us: int | None = None


class History:
    """State of a source's client across all partitions.

    Args:
        bytes_max: maximum memory for the rows of acknowledged batches that are kept, in bytes.
        log_bytes_max: maximum memory for the partitions of acknowledged batches, in bytes.
        only: the only partition to which the client sends, for a client that has a history for each partition. It
            leaves no entry for a successor, and gets none: the partition itself shows all that such an entry could say.
            None: the client sends to all partitions.
    """

    def __init__(
        self,
        operator: str,
        source: str,
        partitions: int,
        bytes_max: int,
        log_bytes_max: int = LOG_BYTES_MAX,
        only: int | None = None,
    ) -> None:
        self.operator, self.source, self.partitions = operator, source, partitions
        self.position = -1  # the newest number that was used
        self.lost: set[int] = set()  # partitions known to lack batches that they acknowledged
        self._only = only
        self._acknowledged = dict.fromkeys(range(partitions) if only is None else [only], -1)  # by partition
        self._contained = self._acknowledged.copy()
        self._log: dict[int, array[int]] = {}  # acknowledged batch → its partitions
        self._log_bytes, self._log_bytes_max = 0, log_bytes_max
        self._since = 0  # number from which on the log contains every acknowledged batch
        self._kept: dict[int, _Kept] = {}
        self._kept_bytes, self._bytes_max = 0, bytes_max
        self._rewound: int | None = None  # in a rewind by hand: number up to which all batches were sent again
        self._unsure: tuple[int, int] | None = None  # batches (from, to) of a predecessor, in unknown partitions
        self._half: _Half | None = None  # last batch of a predecessor, which some of its partitions lack
        self._before = self._acknowledged.copy()  # last batch of former clients
        self._taken: dict[int, int] = {}  # partition → last batch that it accepted from another client since the start

    # -- from partitions and predecessors ------------------------------------------------------------------

    def resume(self, contained: Mapping[int, int], known: Iterable[bytes], acknowledged: int | None = None) -> None:
        """Continues a source after a predecessor.

        A batch that a partition contains counts as acknowledged, because the predecessor may have received the
        acknowledgement.

        Args:
            contained: partition → its newest batch.
            known: entries of predecessors that partitions have stored.
            acknowledged: the newest acknowledged batch, as far as the application knows; None: unknown.
        """
        self.heard(contained)
        self._before = self._contained.copy()
        none = _Known(Session(0, ""), -1, [], [])
        newest = max((_decoded(each, self.partitions) for each in set(known)), default=none)
        told = dict(enumerate(newest.acknowledged))
        self._acknowledged = {p: max(told.get(p, -1), number) for p, number in self._contained.items()}
        if acknowledged is not None:
            if acknowledged >= newest.number:
                for partition in newest.partitions:
                    self._acknowledged[partition] = max(newest.number, self._acknowledged[partition])
            if acknowledged > newest.number:
                self._unsure = newest.number + 1, acknowledged
        self.position = max(newest.number, *self._acknowledged.values(), -1 if acknowledged is None else acknowledged)
        self._since = self.position + 1
        self._find_lost()
        lacking = {p for p in newest.partitions if self._contained[p] < newest.number}
        if 0 < len(lacking) < len(newest.partitions) and (acknowledged is None or acknowledged < newest.number):
            self._half = _Half(newest.number, newest.partitions, lacking)

    @property
    def contained(self) -> list[int]:
        """Newest batch of each partition, by its last report or a later acknowledgement; -1: none."""
        return list(self._contained.values())

    @property
    def sent_last(self) -> set[int]:
        """Partitions of the batch :attr:`position`, as far as partitions contain it, or report it of each other."""
        half = self._half
        if half is not None and half.number == self.position:
            return set(half.partitions)
        return {partition for partition, number in self._contained.items() if number == self.position}

    @property
    def taken(self) -> frozenset[int]:
        """Partitions that accepted a batch of a former client, after a restore from a copy older than this client."""
        return frozenset(self._taken)

    @property
    def incomplete(self) -> bool:
        """True if an acknowledged batch is known to be missing."""
        return bool(self.lost) or bool(self._taken) or self._unsure is not None or self._half is not None

    def finishes(self, number: int) -> bool:
        """Tells whether ``number`` is a predecessor's incomplete batch, and no other batch is missing.

        Some partitions of an incomplete batch contain it, and others lack it.
        """
        return self._half is not None and self._half.number == self._oldest_missing() == number

    def heard(self, contained: Mapping[int, int], others: Collection[int] = ()) -> None:
        """Records what all partitions contain now.

        Args:
            contained: partition → its newest batch; partitions without a batch of this source are left out.
            others: partitions whose newest batch was sent by another client. If that batch is newer than the
                partition's batch at the start of this client, the partition was restored from a copy that did not know
                this client, and then accepted a former client again. All batches that this client sent to the partition
                are then lost, and batches of the former client have some of their numbers.
        """
        self._contained = {partition: contained.get(partition, -1) for partition in self._contained}
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
        acknowledged = self._acknowledged
        self.lost = {partition for partition, newest in self._contained.items() if newest < acknowledged[partition]}

    def known(self, session: Session, number: int, partitions: Iterable[int]) -> bytes:
        """Returns the entry for a successor, which is sent with batch ``number`` to ``partitions``.

        If an older batch is sent again, the entry has the newest batch's number instead, because a successor need not
        finish the older batch. In this case the entry names no partitions, with one exception: if a predecessor's
        newest batch is in only some of its partitions, the entry names the partitions of that batch.
        """
        if self._only is not None:
            return b""
        if number < self.position:
            number, half = self.position, self._half
            partitions = half.partitions if half is not None and half.number == number else ()
        behind = [number - acknowledged for acknowledged in self._acknowledged.values()]
        packed: bytes
        if self.partitions <= PLAIN_MAX:
            packed = msgpack.packb([1, session.generation_us, session.id, number, behind, list(partitions)])
            return packed
        among = bytearray(self.partitions)
        for partition in partitions:
            among[partition] = 1
        inner = zlib.compress(msgpack.packb([behind, among]), 1)
        packed = msgpack.packb([KNOWN_VERSION, session.generation_us, session.id, number, inner])
        return packed

    # -- batches -------------------------------------------------------------------------------------------

    def after(self, number: int, partitions: Iterable[int], rewind: bool) -> dict[int, int]:
        """Returns partition → batch that the partition must contain before it accepts batch ``number``.

        That batch is the newest one that the partition acknowledged (in a rewind: contains), but at most ``number``;
        then the batch can only be a replay there. Partitions without a batch are left out.
        """
        needed = self._contained if rewind else self._acknowledged
        return {p: min(needed[p], number) for p in partitions if needed[p] >= 0}

    def lacks(self, batch: Sent) -> bool:
        """Tells whether some partition has acknowledged neither this batch nor a newer one, and so may apply it now."""
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
        if number >= self._since and batch.rows.partitions:  # no partition can lose a batch that went to none
            self._keep(batch)
        if self._rewound is not None:
            self._rewound = max(self._rewound, number)
            if self._unsure is not None and self._rewound >= self._unsure[1]:
                self._unsure = None

    def _keep(self, batch: Sent) -> None:
        number = batch.number
        if number in self._log:  # it was sent again, to other partitions, or only to those that lost it
            self._note(number, {*self._log[number], *batch.rows})
            if (before := self._kept.get(number)) is None:
                return
            merged = before.sent(number).rows.merged(batch.rows)
            # the corrected rows have other columns: only the application has the whole batch, and can send it again
            if merged is None:
                self._drop(number)
                return
            batch = replace(batch, rows=merged, watermark_us=before.watermark_us)
        else:
            self._note(number, batch.rows)
        self._pack(batch)
        while self._kept_bytes > self._bytes_max:
            self._drop(next(iter(self._kept)))
        while len(self._log) > LOGGED_MAX or self._log_bytes > self._log_bytes_max:
            oldest = next(iter(self._log))
            self._note(oldest, ())
            self._since = max(self._since, oldest + 1)
            self._drop(oldest)

    def _pack(self, batch: Sent) -> None:
        """Keeps a batch, in place of the one with its number. A batch for which there is no room displaces all others,
        and is not packed."""
        if batch.rows.size > self._bytes_max:
            self.let_go()
            return
        former, like = self._kept.get(batch.number), next(reversed(self._kept.values()), None)
        kept = self._kept[batch.number] = _Kept.of(batch, None if like is None else like.schema)
        self._kept_bytes += kept.size - (0 if former is None else former.size)

    def _drop(self, number: int) -> None:
        if (kept := self._kept.pop(number, None)) is not None:
            self._kept_bytes -= kept.size

    def _note(self, number: int, partitions: Iterable[int]) -> None:
        """Logs the partitions of a batch, in place of those logged before; none: removes the batch from the log."""
        before, now = self._log.get(number, ()), array("H", partitions)
        self._log_bytes += 2 * (len(now) - len(before)) + LOG_BATCH_BYTES * (bool(now) - bool(before))
        if now:
            self._log[number] = now
        else:
            self._log.pop(number, None)

    def let_go(self) -> None:
        """Drops all kept rows: no batch can be sent again afterwards."""
        self._kept.clear()
        self._kept_bytes = 0

    # -- rewinds -------------------------------------------------------------------------------------------

    def missing(self) -> list[Sent]:
        """Returns the batches to send again, in order, each with the partitions that lack it.

        Raises PositionGap if some of them are no longer kept.
        """
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
            kept = self._kept[number].sent(number)
            found.append(replace(kept, rows=kept.rows.only(lacking)))
        return found

    def rewinding(self, number: int) -> None:
        """Checks that batch ``number`` is the next one to send again by hand, because no batch may be left out.

        Raises PositionGap, which names the batch that must be sent first, if it is not.
        """
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
        """Gives up all lost batches. Returns the oldest of them; None: nothing was lost."""
        oldest = self._oldest_missing()
        self._forget_lost()
        self._acknowledged = self._contained.copy()
        self.lost.clear()
        for partition, batch in self._taken.items():
            self._before[partition] = batch
            self.position = max(self.position, batch)
        self._taken.clear()
        self._rewound = self._unsure = self._half = None
        return oldest

    def _forget_lost(self) -> None:
        """Removes the lost batches from the log, so that a later loss does not bring them back.

        The application may have sent some of them again under other numbers, and has given up the others.
        """
        from_ = {p: self._contained[p] + 1 for p in self.lost}
        from_ |= {p: self._before[p] + 1 for p in self._taken}  # the newest batch there is another client's

        def stays(number: int, partition: int) -> bool:
            return number < from_.get(partition, number + 1)

        for number, partitions in list(self._log.items()):
            left = tuple(p for p in partitions if stays(number, p))
            if len(left) == len(partitions):
                continue
            self._note(number, left)
            if (kept := self._kept.get(number)) is None:
                continue
            self._kept_bytes -= kept.size
            if left:
                batch = kept.sent(number)
                self._kept[number] = _Kept.of(replace(batch, rows=batch.rows.only(left)), kept.schema)
                self._kept_bytes += self._kept[number].size
            else:
                del self._kept[number]

    def _oldest_missing(self) -> int | None:
        """Returns the number of the oldest missing batch; None: none is missing.

        If the log does not reach back far enough, returns the number after the partition's last batch.
        """
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
                f"batches from {expected} on are lost, and batches of an earlier client have their numbers "
                f"up to {newest}",
                remedy="call accept_loss(), then resend what the state lacks under new numbers",
                operator=self.operator,
                source=self.source,
                expected=expected,
                partitions=",".join(map(str, sorted(self._taken)[:20])),
            )
        if self.finishes(expected):
            assert self._half is not None
            return PositionGap(
                f"batch {expected}, the last of the previous client, was applied by only some of its partitions",
                remedy=f"resend the same rows with sequence={expected}, or call accept_loss() to continue without them",
                operator=self.operator,
                source=self.source,
                expected=expected,
                partitions=",".join(map(str, sorted(self._half.lacking)[:20])),
            )
        return PositionGap(
            f"acknowledged batches from {expected} on are lost",
            remedy=f"resend every batch from {expected} on, in order and with rewind=True; "
            "or call accept_loss() if they are gone for good",
            operator=self.operator,
            source=self.source,
            expected=expected,
            partitions=",".join(map(str, sorted(self.lost)[:20])) or None,
        )


class _Kept(NamedTuple):
    """A batch that may be sent again, packed: an Arrow batch would take 1 KiB more, and 0.7 KiB for each column.

    ``rows``: Arrow record batch message; ``b""``: no partition has rows. ``size``: memory in bytes.
    """

    schema: bytes
    rows: bytes
    partitions: Sequence[int]
    ends: Sequence[int]
    digests: Sequence[int]
    watermark_us: int | None
    size: int

    @classmethod
    def of(cls, batch: Sent, schema: bytes | None) -> _Kept:
        """Packs a batch. ``schema``: schema of a kept batch, which is shared if the batch has the same; None: none."""
        given = batch.rows
        rows = b"" if given.rows is None else given.rows.serialize().to_pybytes()
        size = KEPT_BATCH_BYTES + len(rows) + PART_BYTES * len(given)
        if given.schema != schema:
            schema, size = given.schema, size + len(given.schema)
        return cls(schema, rows, given.partitions, given.ends, given.digests, batch.watermark_us, size)

    def sent(self, number: int) -> Sent:
        rows = pa.ipc.read_record_batch(pa.py_buffer(self.rows), read_schema(self.schema)) if self.rows else None
        return Sent(number, BatchRows(self.schema, rows, self.partitions, self.ends, self.digests), self.watermark_us)


class _Half(NamedTuple):
    """A batch that some of its ``partitions`` contain, and that others (``lacking``) lack."""

    number: int
    partitions: list[int]
    lacking: set[int]


class _Known(NamedTuple):
    """An entry that was sent with batch ``number`` to ``partitions``.

    ``acknowledged``: the newest batch that each partition of the operator had acknowledged before.
    """

    session: Session
    number: int
    acknowledged: list[int]
    partitions: list[int]


def _decoded(known: bytes, partition_count: int) -> _Known:
    """Decodes an entry. Raises DecodeError for one that no client of this operator can have written."""
    try:
        version, generation_us, session_id, number, *rest = msgpack.unpackb(known)
        if version == KNOWN_VERSION:
            (inner,) = rest
            behind, among = msgpack.unpackb(zlib.decompressobj().decompress(inner, INNER_MAX))
            if len(among) != partition_count:
                raise ValueError(f"{len(among)} partitions instead of {partition_count}")
            partitions = [partition for partition, is_there in enumerate(among) if is_there]
        elif version == 1:
            behind, partitions = rest
        else:
            raise ValueError(f"version {shown(version)}")
        whole = (generation_us, number, *behind, *partitions)
        if not isinstance(session_id, str) or any(type(each) is not int for each in whole):
            raise ValueError("unexpected types")
        if len(behind) != partition_count or not all(0 <= each < partition_count for each in partitions):
            raise ValueError(f"partitions that do not match the operator's {partition_count}")
        acknowledged = [number - each for each in behind]
        if not -1 <= max(acknowledged) <= number or min(acknowledged) < -1:
            raise ValueError("impossible batch numbers")
        return _Known(Session(generation_us, session_id), number, acknowledged, partitions)
    except (ValueError, TypeError, zlib.error, msgpack.UnpackException) as error:
        raise DecodeError(
            f"the record of the source's last client cannot be read ({error})",
            remedy="run the stateflow version of that client, or use another source name",
        ) from error
