"""Partitions whose batches are committed together: what each costs is shared, and none waits long for the others.

The ``work`` of each is held from before its batch until behind the commit. Who has to wait for another partition's
commits its group first, so that nobody waits for somebody who waits. When the thread does not come back, the group is
taken from it: what is not committed is as before its batches, and served again at once, but for the partition that the
thread is with.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from stateflow.runtime.host import PartitionHost, Ran
from stateflow.runtime.slot import Slot
from stateflow.runtime.watchdog import InHand

#: a group is committed when it has been open for so long, or has come to so many rows
GROUP_S, GROUP_ROWS = 0.005, 2048
#: a partition whose batches take longer is not run while others wait for their commit, and perhaps for their fence
SLOW_S = 0.02


class Member(NamedTuple):
    """``number``: of the part."""

    number: int
    slot: Slot
    hand: InHand
    host: PartitionHost
    ran: Ran


class Group:
    """Of one thread; :meth:`take` is anybody's."""

    __slots__ = ("_began", "_committing", "_lock", "_rows", "_slots", "_taken", "members")

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._slots: set[int] = set()
        self._began, self._rows = 0.0, 0
        self._lock = threading.Lock()
        self._committing = self._taken = False

    def add(self, member: Member) -> bool:
        """False: the group was taken, and this is none of it."""
        with self._lock:
            if self._taken:
                return False
            if not self.members:
                self._began, self._rows = member.hand.began, 0
            self.members.append(member)
            self._slots.add(id(member.slot))
            self._rows += member.ran.rows + len(member.ran.outputs.rows)
            return True

    def is_full(self, now: float) -> bool:
        return bool(self.members) and (self._rows >= GROUP_ROWS or now - self._began >= GROUP_S)

    def has(self, slot: Slot) -> bool:
        return id(slot) in self._slots

    def begin_commit(self) -> bool:
        """False: it was taken."""
        with self._lock:
            self._committing = not self._taken
            return self._committing

    def end_commit(self) -> None:
        self.members, self._slots, self._committing = [], set(), False

    def take(self) -> list[Member]:
        """They are the caller's from now on, and nothing of them will be committed; none where they are just being
        committed, or were taken before."""
        with self._lock:
            if self._committing or self._taken:
                return []
            self._taken = True
            return self.members
