"""Running batches, and the groups of processed batches that one commit makes durable.

A thread runs the batch of one partition at a time. It parks a processed batch in its :class:`Group`, and later commits
all batches of the group together. Other threads may take a running batch, or a group, away from a thread whose operator
does not return. A batch that was taken away never commits.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stateflow.durable import MALFORMED
from stateflow.errors import OperatorCrashed
from stateflow.operator.watchdog import RunningBatch
from stateflow.partition.environment import Environment, RunningNote
from stateflow.partition.local_partition import LocalPartition
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Opening, PartitionProcessor, Ran
from stateflow.partition.registry import PartitionRegistry
from stateflow.partition.transfer_out import Sender

log = logging.getLogger(__name__)
#: files of a data directory: note of the running batch, and counts of batches in which the process ended
RUNNING, CRASHES = "RUNNING", "CRASHES"
#: a batch in which the process has ended so many times in a row is refused for so many seconds after the last time
ENDS_MAX, REFUSED_S = 3, 300
#: counts are kept of so many batches, and for so many seconds after the last end: a batch that was run elsewhere since
#: does not come again, and each count costs every batch a comparison
CRASHES_KEPT, CRASHES_KEPT_S = 100, 86_400
#: a group is committed when it has been open for this many seconds, or has this many rows of input and output
GROUP_S, GROUP_ROWS = 0.005, 2048


# -- Group commit ----------------------------------------------------------------------------------------------------


class Member(NamedTuple):
    """A processed batch of one partition, to be committed with its group. ``number``: index of the part in the batch
    that the client sent."""

    number: int
    local: LocalPartition
    run: RunningBatch
    processor: PartitionProcessor
    ran: Ran


class Opened(NamedTuple):
    """A partition in which a source is being opened, together with other partitions. ``opening``: the commit to be
    written; None: no commit is needed."""

    local: LocalPartition
    run: RunningBatch
    processor: PartitionProcessor
    opening: Opening | None


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
        """Protects the members from :meth:`take` until :meth:`end_commit`. Returns False if they were already taken
        away."""
        with self._lock:
            self._committing = self.members is members
            return self._committing

    def end_commit(self) -> None:
        with self._lock:
            self._committing = False
            self._clear()

    def take(self, *, ends: bool = False, before: float = math.inf) -> list[Member]:
        """Takes the members away from the group's thread, which will not commit them. Returns no members if they are
        just being committed, or were already taken away.

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


# -- Batches in which the process ends -------------------------------------------------------------------------------


class Crashes:
    """Counts how often this replica's process has ended while it ran a batch, and refuses a batch that ends it
    repeatedly, so that other batches are run.

    A crash in C code, ``os._exit`` or a kill for lack of memory ends the whole process. Senders then send the batch
    again, to the restarted process. The third time in a row that it has ended in the same batch of the same partition,
    the batch is refused for ``REFUSED_S`` seconds, and then tried once more. A new version of the operator is tried at
    once. Any end of the process counts, as its cause cannot be known. Each replica counts for itself, so a batch that
    follows its partition by failover may end each of them three times.

    A note of the running batch outlives the process (:class:`~stateflow.partition.environment.RunningNote`). It is of
    the thread that began last: one that was left behind no longer notes anything. The file ``CRASHES`` keeps the
    counts, each for ``CRASHES_KEPT_S`` seconds after the last end. Without them a batch is run as if it had never been
    tried.
    """

    def __init__(self, root: Path, environment: Environment, now_us: Callable[[], int]) -> None:
        self._root, self._environment, self._now_us = root, environment, now_us
        self._note: RunningNote | None = None
        self._thread = 0  # that began last
        self._ends: dict[str, tuple[int, int]] = {}  # batch and partition → (number of ends in a row, time of the last)

    def find(self) -> None:
        """Reads the counts, and adds the batch in which the last process ended."""
        file = self._root / CRASHES
        try:
            if file.exists():
                found = json.loads(file.read_text())
                self._ends = {str(key): (int(ends), int(at_us)) for key, (ends, at_us) in found.items()}
        except MALFORMED as error:
            log.warning("counts of crashes cannot be read and begin anew: %s", error)
        except OSError as error:
            log.warning("counts of crashes cannot be read: %s", error)
        try:
            self._note = self._environment.running_note(self._root / RUNNING)
        except OSError as error:
            log.warning("running batches are not noted, so a batch that ends the process is not noticed: %s", error)
            return
        if self._note.found is not None and self._note.found[1] >= 0:
            text, partition = self._note.found
            key = _key(text, partition)
            ends = self._ends.get(key, (0, 0))[0] + 1
            self._ends[key] = ends, self._now_us()
            log.error("the last process ended while it ran %s (%d times in a row)", _said(text, partition), ends)
            self._keep()

    @contextmanager
    def noted(self, operator: str, version: int, batch: Batch) -> Iterator[None]:
        """Notes that this process runs a batch."""
        if self._ends:
            self._forget_old()
        if self._note is None:
            yield
            return
        self._thread = threading.get_ident()
        self._note.begin(_text(operator, version, batch))
        try:
            yield
        finally:
            if self._thread == threading.get_ident():
                self._note.end()

    def at(self, partition: int) -> None:
        """Notes the partition of the batch that is being run."""
        if self._note is not None and self._thread == threading.get_ident():
            self._note.at(partition)

    @property
    def any(self) -> bool:
        """True if the process has ended in a batch that was not run to its end since."""
        return bool(self._ends)

    def check(self, operator: str, version: int, batch: Batch, partition: int) -> None:
        """Checks that a batch is not refused. Raises OperatorCrashed if it is."""
        ends, at_us = self._ends.get(_key(_text(operator, version, batch), partition), (0, 0))
        left_s = REFUSED_S - (self._now_us() - at_us) / 1e6
        if ends >= ENDS_MAX and 0 < left_s <= REFUSED_S:
            raise OperatorCrashed(
                f"the process has ended {ends} times in a row while it ran this batch",
                remedy="look in the logs of replica and system for a crash in C code, os._exit or a lack of memory, "
                f"and deploy a corrected operator; this one is tried again in {left_s:.0f} s",
                operator=operator,
                partition=partition,
                source=batch.source,
                batch=batch.number,
            )

    def survived(self, operator: str, version: int, batch: Batch, partition: int) -> None:
        """Notes that a batch was run to its end in a partition, whether it was applied or failed."""
        if self._ends.pop(_key(_text(operator, version, batch), partition), None) is not None:
            self._keep()

    def _forget_old(self) -> None:
        before_us = self._now_us() - CRASHES_KEPT_S * 1_000_000
        kept = {key: each for key, each in self._ends.items() if each[1] > before_us}
        if len(kept) < len(self._ends):
            self._ends = kept
            self._keep()

    def _keep(self) -> None:
        newest = sorted(self._ends.items(), key=lambda each: each[1][1])[-CRASHES_KEPT:]
        self._ends = dict(newest)
        try:
            self._environment.write_durably(self._root / CRASHES, json.dumps(self._ends))
        except OSError as error:
            log.warning("counts of crashes not kept: %s", error)

    def close(self) -> None:
        """Removes the note of a batch whose thread was left behind."""
        if self._note is not None:
            self._note.end()


def _text(operator: str, version: int, batch: Batch) -> str:
    return json.dumps([operator, version, batch.source, batch.number])


def _said(text: str, partition: int) -> str:
    try:
        operator, _, source, number = json.loads(text)
    except MALFORMED:
        return text
    return f"batch {number} of source {source} in partition {partition} of operator {operator}"


def _key(text: str, partition: int) -> str:
    return f"{text} {partition}"


# -- Running batches -------------------------------------------------------------------------------------------------


class RunningBatches:
    """Running batches of one replica. Thread-safe.

    Each thread runs the batch of one partition, and holds a group of processed batches of other partitions that are
    committed together with it. If the operator does not return, the batch and the group are taken away from the thread.
    """

    def __init__(self, registry: PartitionRegistry, sender: Sender) -> None:
        self._registry, self._sender, self._clock = registry, sender, registry.clock
        self._with: dict[int, RunningBatch] = {}  # by thread
        self._groups: dict[int, Group] = {}  # by thread
        self.crashes = Crashes(registry.root, registry.environment, registry.clock.now_us)

    # -- in the thread itself -----------------------------------------------------------------------------

    @contextmanager
    def group(self) -> Iterator[Group]:
        """Opens a group for this thread. Members that are not committed at the end are dropped."""
        thread, group = threading.get_ident(), Group()
        self._groups[thread] = group
        try:
            yield group
        finally:
            del self._groups[thread]
            self._drop(group.take(ends=True))

    def take(self, local: LocalPartition, began: float) -> RunningBatch:
        """Begins a running batch on this thread at ``began``, in monotonic seconds. Callers have called the lifecycle's
        ``begin``."""
        run = RunningBatch(local.id, began)
        self._with[run.thread] = run
        return run

    def park(self, run: RunningBatch) -> None:
        """Sets a processed batch aside until its group is committed."""
        del self._with[run.thread]

    def resume(self, run: RunningBatch, now: float) -> None:
        run.began = now
        self._with[run.thread] = run

    def end(self, local: LocalPartition, run: RunningBatch) -> None:
        """Ends a batch that is committed or rolled back, or that was taken away and has now returned from the operator.
        Seals the partition if a seal waited for the batch, and raises the errors of sealing."""
        self._with.pop(run.thread, None)
        if run.end():
            with self._registry.reopening(local), local.mutex:
                if run.interrupted and local.processor is not None:
                    local.processor.discard()
                    local.processor = None
                sealing = local.lifecycle.finish()
                if local.processor is not None and local.processor.is_unsure:
                    # the database is read again, and followers start over: they may have missed the last commit
                    self._registry.close_store(local)
                if sealing:
                    self._sender.seal(local)
            return
        with local.mutex:
            if run.processor is not None:
                run.processor.discard()
            if local.stuck is run:
                local.stuck = None
        log.warning("%s is served again: the operator has returned from its batch", local.id)
        self._registry.on_change(local.id)

    # -- in other threads ---------------------------------------------------------------------------------

    def active(self) -> list[RunningBatch]:
        """Returns the running batches, except those whose thread was left behind."""
        return [run for run in list(self._with.values()) if not run.left]

    @property
    def is_stuck(self) -> bool:
        """Tells whether a thread that was left behind still works on its batch."""
        return any(run.left for run in list(self._with.values()))

    def overdue(self, limit_s: float) -> RunningBatch | None:
        """Returns a batch that has been running for longer than ``limit_s``, or None."""
        before = self._clock.monotonic() - limit_s
        return next((run for run in self.active() if run.began < before), None)

    def take_away(self, run: RunningBatch) -> bool:
        """Takes a batch that cannot be interrupted away from its thread, with the thread's group.

        The batch will never commit, and this replica does not serve the partition before the thread returns from the
        operator. Until then the partition may move away, be checkpointed and be taken over, in its state before the
        batch. Returns False if the batch has ended, or is just being committed.
        """
        local, group = self._registry.local(run.partition), self._groups.get(run.thread)
        members: list[Member] = []
        try:
            with self._registry.reopening(local), local.mutex:
                if not run.take_away():
                    return False
                members = [] if group is None else group.take(ends=True)
                local.stuck, run.processor, local.processor = run, local.processor, None
                local.work.take_away()
                if local.lifecycle.finish():
                    self._sender.seal(local)
        finally:
            self._leave(members)
        self._registry.on_change(local.id)
        return True

    def leave_behind(self) -> None:
        """Takes all groups away from their threads, because a thread does not return although it has no running
        batch."""
        self._leave([member for group in list(self._groups.values()) for member in group.take(ends=True)])

    def keeps_waiting(self, limit_s: float) -> bool:
        """Tells whether processed batches have waited for ``limit_s`` to be committed together with a slow batch."""
        before = self._clock.monotonic() - limit_s
        return any(group.has_waited(before) for group in list(self._groups.values()))

    def spare(self, limit_s: float) -> None:
        """Drops processed batches that have waited for ``limit_s``, because a move may need their partitions. Clients
        send them again after the slow batch."""
        before = self._clock.monotonic() - limit_s
        self._leave([member for group in list(self._groups.values()) for member in group.take(before=before)])

    def _leave(self, members: list[Member]) -> None:
        if members:
            self._registry.environment.aside(partial(self._drop, members))  # dropping a batch may wait for the disk

    def _drop(self, members: list[Member]) -> None:
        """Drops processed batches as if they had never arrived, and takes the lock ``work`` of their partitions away
        from the thread that held it."""
        for member in members:
            local = member.local
            try:
                with self._registry.reopening(local), local.mutex:
                    member.processor.discard()
                    if local.processor is member.processor:
                        local.processor = None
                    local.work.take_away()
                    if local.lifecycle.finish():
                        self._sender.seal(local)
            except Exception:  # for example in the seal that waited for the batch; the controller requests it again
                log.exception("%s: failed to drop a processed batch", local.id)
            self._registry.on_change(local.id)
