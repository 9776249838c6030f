"""Group commit: the batches of several partitions share one commit, and none waits long for the others.

A thread holds the ``work`` lock of each member from before its batch until after the commit. A thread that has to wait
for another partition's ``work`` commits its group first, so that no thread waits for a waiting thread. If the thread
spends long on one partition, or does not return from its operator, the other members are taken from it: their
uncommitted batches are dropped, and their partitions are served again at once.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

from stateflow.operator.watchdog import RunningBatch
from stateflow.partition.local_partition import LocalPartition
from stateflow.partition.processor import PartitionProcessor, Ran

#: a group is committed when it has been open for this many seconds, or has this many rows of input and output
GROUP_S, GROUP_ROWS = 0.005, 2048
#: if the operator took longer than this for a partition's last batch (µs), the group is committed before its next one,
#: so that other partitions do not wait for it with their commits and fences
SLOW_US = 20_000


class Member(NamedTuple):
    """A processed batch of one partition, to be committed with its group. ``number``: index of the part in the batch
    that the client sent."""

    number: int
    local: LocalPartition
    run: RunningBatch
    processor: PartitionProcessor
    ran: Ran


class Group:
    """Processed batches that one thread will commit together. Other threads may call :meth:`take` and
    :meth:`has_waited`."""

    __slots__ = ("_began", "_committing", "_ids", "_lock", "_rows", "_taken", "members")

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._ids: set[int] = set()
        self._began, self._rows = 0.0, 0
        self._lock = threading.Lock()
        self._committing = self._taken = False

    def add(self, member: Member) -> bool:
        """Adds a member. Returns False if the whole group was taken; the member is not added then."""
        with self._lock:
            if self._taken:
                return False
            if not self.members:
                self._began, self._rows = member.run.began, 0
            self.members.append(member)
            self._ids.add(id(member.local))
            self._rows += member.ran.rows + len(member.ran.outputs.rows)
            return True

    def has_waited(self, before: float) -> bool:
        """Tells whether the group was begun before a time in monotonic seconds."""
        return bool(self.members) and self._began < before

    def is_full(self, now: float) -> bool:
        return bool(self.members) and (self._rows >= GROUP_ROWS or now - self._began >= GROUP_S)

    def has(self, local: LocalPartition) -> bool:
        return id(local) in self._ids

    def begin_commit(self, members: list[Member]) -> bool:
        """Protects the members from :meth:`take` until :meth:`end_commit`. Returns False if they were taken before."""
        with self._lock:
            self._committing = self.members is members
            return self._committing

    def end_commit(self) -> None:
        with self._lock:
            self._committing = False
            self._clear()

    def take(self, *, ends: bool = False, before: float = math.inf) -> list[Member]:
        """Takes the members away from the group's thread, which will not commit them. Returns no members if they are
        just being committed, or were taken before.

        Args:
            ends: the group accepts no further members.
            before: take members only if the group was begun before this time, in monotonic seconds.
        """
        with self._lock:
            if self._committing or self._taken or self._began >= before:
                return []
            self._taken = ends
            return self._clear()

    def _clear(self) -> list[Member]:
        members, self.members, self._ids = self.members, [], set()
        return members
