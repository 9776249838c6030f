"""Positions that a replica holds for partitions which a source's batches skipped, and how they are stored. Sans-io.

A position is held for a partition at one epoch and sequence. Nearly all partitions that skip a batch skip the next one,
too, and have the same position before and after it. :class:`HeldPositions` therefore keeps each distinct position once,
with the partitions that share it. A batch replaces a shared position at once for all of them. Only partitions that
begin or cease to share it cost something each: those that the batch visits, and those that the batch before it visited.

In the database a source has one *whole* entry and the *changes* since, in order. If the changes would become larger
than the whole entry, a new whole entry is written instead of another change, so that all writes take at most about
twice the bytes of the changes. After a clean shutdown there are only whole entries, which the previous release reads,
too. A change contains the positions that it replaces, and for each of its partitions the new position, epoch and
sequence. Both kinds of entries are msgpack. Keys::

    operator 00 source                                  whole entry; this is the name of the source
    00, length of the name, name, number                change; 8 and 16 hexadecimal digits; numbers begin at 0

All changes of one batch are in one write of the database. So after a crash or a power loss, the entries describe the
moment after one of the batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np

from stateflow.changes import Mutations
from stateflow.errors import DecodeError
from stateflow.partition import layout
from stateflow.partition.layout import Position

#: remedy if stored positions of skipped batches cannot be used
RESENT = "no action is needed: sources send the missing batches again"
#: bytes of changes that a source may have, however small its whole entry is
CHANGES_MIN = 1 << 10
_CHANGE = b"\0"
_UNUSED = Position(-1)


@dataclass(slots=True)
class HeldPositions:
    """Positions held for the partitions of one source.

    Attributes:
        kinds: the distinct positions.
        kind: index in ``kinds`` of each partition's position, by partition number.
        epoch, sequence: for each partition, the epoch and sequence at which its position is valid; epoch 0: no position
            is held.
        count: number of partitions for which a position is held.
        stale: partitions whose position is no longer held, but is still in the database.
        whole_bytes: size of the whole entry; 0: the next entry must be a whole one.
        changes, changes_bytes: number and size of the changes since the whole entry.
    """

    kinds: list[Position] = field(default_factory=list)
    kind: Any = field(default_factory=lambda: np.zeros(0, np.uint32))
    epoch: Any = field(default_factory=lambda: np.zeros(0, np.uint64))
    sequence: Any = field(default_factory=lambda: np.zeros(0, np.uint64))
    count: int = 0
    stale: set[int] = field(default_factory=set)
    whole_bytes: int = 0
    changes: int = 0
    changes_bytes: int = 0

    def copy(self) -> HeldPositions:
        arrays = {"kind": self.kind.copy(), "epoch": self.epoch.copy(), "sequence": self.sequence.copy()}
        return replace(self, kinds=list(self.kinds), stale=set(self.stale), **arrays)

    # -- what is held -------------------------------------------------------------------------------------

    def at(self, number: int, epoch: int, sequence: int) -> Position | None:
        """Returns the position held for a partition that is at this epoch and sequence; None: there is none."""
        if number >= len(self.epoch) or (self.epoch[number], self.sequence[number]) != (epoch, sequence):
            return None
        found: Position = self.kinds[self.kind[number]]
        return found

    def partitions(self, up_to_epoch: int | None = None) -> list[int]:
        """Returns the partitions for which a position is held. ``up_to_epoch``: only at this epoch and older ones."""
        held = self.epoch > 0
        found: list[int] = np.flatnonzero(held if up_to_epoch is None else held & (self.epoch <= up_to_epoch)).tolist()
        return found

    def advance(
        self, numbers: Any, kinds: Any, positions: Sequence[Position], epochs: Any, sequences: Any
    ) -> tuple[list[int], Any]:
        """Replaces the positions held for some partitions. Returns the indices in :attr:`kinds` and the partitions that
        have changed.

        Args:
            numbers: the partitions.
            kinds: for each partition, the index of its new position in ``positions``.
            epochs, sequences: for each partition, its present epoch and sequence.
        """
        self._reach(int(numbers.max()) + 1)
        goes_on = (self.epoch[numbers] == epochs) & (self.sequence[numbers] == sequences)
        replaced: set[int] = set()
        changed = []
        for index, position in enumerate(positions):
            these = kinds == index
            here, went_on = numbers[these], goes_on[these]
            kind = self._shared(here[went_on])
            others = (self.kind == kind) & (self.epoch > 0)
            others[here] = False
            left = np.flatnonzero(others)
            if len(left):  # they keep the position, under another index
                other = self._unused()
                self.kinds[other], self.kind[left] = self.kinds[kind], other
                replaced.add(other)
            changed += [left, here[~(went_on & (self.kind[here] == kind))]]
            self.kinds[kind] = position
            self.kind[here], self.epoch[here], self.sequence[here] = kind, epochs[these], sequences[these]
            replaced.add(kind)
        self.count = int(np.count_nonzero(self.epoch))
        return sorted(replaced), np.concatenate(changed)

    def _shared(self, numbers: Any) -> int:
        """Returns the index of a position that can be replaced for these partitions at once, because most partitions
        that share it are among them. If there is no such position, returns an unused index."""
        if len(numbers):
            gains = 2 * np.bincount(self.kind[numbers], minlength=len(self.kinds)) - self._sharing()
            kind = int(gains.argmax())
            if gains[kind] > 0:
                return kind
        return self._unused()

    def _sharing(self) -> Any:
        """Returns the number of partitions that share each position."""
        return np.bincount(self.kind[self.epoch > 0], minlength=len(self.kinds))

    def _unused(self) -> int:
        """Returns the index of a position that is held for no partition."""
        unused = np.flatnonzero(self._sharing() == 0)
        if len(unused):
            return int(unused[0])
        self.kinds.append(_UNUSED)
        return len(self.kinds) - 1

    def discard(self, numbers: Iterable[int]) -> None:
        """Drops the positions held for some partitions. The next entry drops them in the database, too."""
        for number in numbers:
            if number < len(self.epoch) and self.epoch[number]:
                self.epoch[number] = 0
                self.stale.add(number)
                self.count -= 1

    def _reach(self, partitions: int) -> None:
        if partitions > len(self.kind):
            more = partitions - len(self.kind)
            self.kind, self.epoch, self.sequence = (
                np.concatenate([each, np.zeros(more, each.dtype)]) for each in (self.kind, self.epoch, self.sequence)
            )

    # -- its entries --------------------------------------------------------------------------------------

    def store(self, name: bytes, kinds: list[int], numbers: Any, mutations: Mutations) -> None:
        """Adds the source's next entry to ``mutations``: a change, or a whole entry.

        Args:
            kinds, numbers: the result of :meth:`advance` since the last entry; empty if it was not called.
        """
        stale = np.array(sorted(self.stale), np.int64)
        change = self._change(kinds, np.union1d(numbers, stale).astype(np.uint32))
        if self.whole_bytes and self.changes_bytes + len(change) <= max(self.whole_bytes, CHANGES_MIN):
            mutations.puts.append((_changes_of(name) + b"%016x" % self.changes, change))
            self.changes, self.changes_bytes = self.changes + 1, self.changes_bytes + len(change)
        else:
            self._drop_unused()
            whole = self._whole()
            mutations.clears.append(range_of(name))
            mutations.puts.append((name, whole))
            self.whole_bytes, self.changes, self.changes_bytes = len(whole), 0, 0
        self.stale.clear()

    def _drop_unused(self) -> None:
        held = self.epoch > 0
        used, places = np.unique(self.kind[held], return_inverse=True)
        self.kinds = [self.kinds[each] for each in used.tolist()]
        self.kind[~held] = 0
        self.kind[held] = places

    def _whole(self) -> bytes:
        kinds = [position.encode() for position in self.kinds]
        arrays = [each.tobytes() for each in (self.kind, self.epoch, self.sequence)]
        packed: bytes = msgpack.packb([layout.VERSION, kinds, *arrays])
        return packed

    def _change(self, kinds: list[int], numbers: Any) -> bytes:
        positions = [self.kinds[each].encode() for each in kinds]
        arrays = [each[numbers].tobytes() for each in (self.kind, self.epoch, self.sequence)]
        packed: bytes = msgpack.packb([layout.VERSION, kinds, positions, numbers.tobytes(), *arrays])
        return packed

    @classmethod
    def decode(cls, whole: bytes, changes: Sequence[bytes] = ()) -> HeldPositions:
        """Decodes a whole entry and its changes. Raises DecodeError."""
        try:
            version, kinds, kind, epoch, sequence = msgpack.unpackb(whole)
            layout.check_version(version)
            found = cls(
                [Position.decode(each) for each in kinds],
                np.frombuffer(kind, np.uint32).copy(),
                np.frombuffer(epoch, np.uint64).copy(),
                np.frombuffer(sequence, np.uint64).copy(),
            )
            for change in changes:
                found._follow(change)
        except (ValueError, TypeError, IndexError) as error:
            raise DecodeError(f"the held positions of a source cannot be read: {error}", remedy=RESENT) from error
        alike = len(found.kind) == len(found.epoch) == len(found.sequence)
        if not alike or (found.kind[found.epoch > 0] >= len(found.kinds)).any():
            raise DecodeError("the held positions of a source do not match its partitions", remedy=RESENT)
        found.count = int(np.count_nonzero(found.epoch))
        found.whole_bytes, found.changes, found.changes_bytes = len(whole), len(changes), sum(map(len, changes))
        return found

    def _follow(self, change: bytes) -> None:
        version, kinds, positions, packed, kind, epoch, sequence = msgpack.unpackb(change)
        layout.check_version(version)
        for index, position in zip(kinds, positions, strict=True):  # ascending; a new index is the next one
            self.kinds[index : index + 1] = [Position.decode(position)]
        numbers = np.frombuffer(packed, np.uint32)
        if len(numbers):
            self._reach(int(numbers.max()) + 1)
        self.kind[numbers] = np.frombuffer(kind, np.uint32)
        self.epoch[numbers] = np.frombuffer(epoch, np.uint64)
        self.sequence[numbers] = np.frombuffer(sequence, np.uint64)


# -- Keys ------------------------------------------------------------------------------------------------------------


def name_of(operator: str, source: str) -> bytes:
    """Returns the name of a source, the key of its whole entry."""
    return f"{operator}\0{source}".encode()


def range_of(name: bytes) -> tuple[bytes, bytes]:
    """Returns the range of the keys of a source's changes."""
    start = _changes_of(name)
    return start, start + b"g"  # above every digit


def _changes_of(name: bytes) -> bytes:
    return _CHANGE + b"%08x" % len(name) + name


def read(entries: Iterable[tuple[bytes, bytes]]) -> dict[tuple[str, str], HeldPositions]:
    """Returns the held positions in a database, by operator and source. Raises DecodeError.

    Args:
        entries: all entries, in the order of their keys, so that changes come before whole entries.
    """
    found: dict[tuple[str, str], HeldPositions] = {}
    changes: dict[bytes, list[bytes]] = {}
    for key, value in entries:
        if key.startswith(_CHANGE):
            changes.setdefault(key[9:-16], []).append(value)
        else:
            try:
                operator, _, source = key.decode().partition("\0")
            except UnicodeDecodeError as error:
                raise DecodeError("held positions are of a source whose name is no text", remedy=RESENT) from error
            found[operator, source] = HeldPositions.decode(value, changes.pop(key, ()))
    if changes:
        raise DecodeError("changes of held positions lack the entry that they change", remedy=RESENT)
    return found
