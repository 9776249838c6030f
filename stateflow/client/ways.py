"""Decides which partitions rows may go to at once, which wait, and when those are tried again.

No I/O, no locks: callers lock. Of the partitions of an owner that does not answer, one is tried at a time, less and
less often. When it answers, the others follow at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from stateflow.errors import StateflowError, Unavailable

AGAIN_S, AGAIN_S_MAX = 0.25, 5.0


class State(Enum):
    IDLE = auto()  # nothing waits for it
    BUSY = auto()  # a thread sends to it
    AWAY = auto()  # batches wait for it, since it did not take one


@dataclass(slots=True)
class Way:
    """State of one partition.

    ``waiting``: number of batches stored for it. ``error``: why it took none last; None: it did. ``alone_to``: batches
    up to this number go one by one, as some that went together were refused. ``tried``: busy because of
    :meth:`Ways.due`.
    """

    state: State = State.IDLE
    waiting: int = 0
    alone_to: int = -1
    again_at: float = 0.0
    pause_s: float = AGAIN_S
    error: StateflowError | None = None
    tried: bool = False

    @property
    def answers(self) -> bool:
        """True if its owner answered the last attempt, with a refusal."""
        return self.error is not None and not isinstance(self.error, Unavailable)


class Ways:
    """All partitions of an operator.

    Args:
        address_of: partition → address of its owner, as known now.
    """

    def __init__(self, count: int, address_of: Callable[[int], str]) -> None:
        self._ways, self._address_of = [Way() for _ in range(count)], address_of

    def __getitem__(self, partition: int) -> Way:
        return self._ways[partition]

    def __iter__(self) -> Iterator[Way]:
        return iter(self._ways)

    @property
    def at_rest(self) -> bool:
        """True while nothing waits and no thread sends, so that new rows are sent at once."""
        return not any(way.waiting or way.state is State.BUSY for way in self._ways)

    def begin(self, partition: int, waiting: int) -> None:
        """Sets the number of batches that are stored for a partition already."""
        self[partition].waiting, self[partition].state = waiting, State.AWAY

    def come(self, partitions: Iterable[int]) -> list[int]:
        """Adds a batch for these partitions. Returns those to which it is sent at once, as nothing waits before it."""
        direct = []
        for partition in partitions:
            way = self[partition]
            way.waiting += 1
            if way.state is State.IDLE:
                way.state = State.BUSY
                direct.append(partition)
        return direct

    def took(self, partition: int, parts: int) -> None:
        """Subtracts batches that the partition took; its owner answers."""
        way = self[partition]
        way.waiting, way.error, way.pause_s = way.waiting - parts, None, AGAIN_S
        for other in self._away_with(partition):
            other.again_at = 0.0

    def failed(self, partition: int, error: StateflowError, now: float) -> None:
        way = self[partition]
        way.error, way.again_at = error, now + way.pause_s
        way.pause_s = min(AGAIN_S_MAX, 2 * way.pause_s)
        if isinstance(error, Unavailable):
            for other in self._away_with(partition):
                other.again_at = way.again_at

    def apart(self, partition: int, number: int) -> None:
        """Makes batches up to ``number``, which went together, be tried one by one from now on."""
        self[partition].alone_to, self[partition].error = number, None

    def release(self, partition: int) -> None:
        """Ends sending to a partition."""
        way = self[partition]
        way.state, way.tried = (State.AWAY if way.waiting else State.IDLE), False

    def due(self, now: float) -> list[int]:
        """Returns the partitions to be tried now, which are busy from now on."""
        owners, due = {self._address_of(p) for p, way in enumerate(self._ways) if way.tried and not way.answers}, []
        for partition, way in enumerate(self._ways):
            if way.state is not State.AWAY or way.again_at > now:
                continue
            if not way.answers:
                address = self._address_of(partition)
                if address in owners:
                    continue
                owners.add(address)
            way.state, way.tried = State.BUSY, True
            due.append(partition)
        return due

    def pause_s(self, now: float) -> float | None:
        """Returns the seconds until a partition may be due; None: none is, until something changes."""
        at = [way.again_at for way in self._ways if way.state is State.AWAY]
        return max(0.01, min(at) - now) if at else None

    def at_once(self) -> None:
        """Makes all partitions due, whatever pause is left."""
        for way in self._ways:
            way.again_at = 0.0

    def _away_with(self, partition: int) -> list[Way]:
        """Returns the waiting partitions whose owner is this one's, and is not known to answer."""
        address = self._address_of(partition)
        return [
            way
            for other, way in enumerate(self._ways)
            if way.state is State.AWAY and not way.answers and self._address_of(other) == address
        ]
