"""Performs the source's side of a copy: sends a snapshot's files and the changes after it, and fences partitions.

:class:`Followers` finds out who may copy a partition, and :class:`SnapshotServer` sends files and changes to the copies
of moves and standbys. :class:`Fencer` ends a move at its source: it cancels the move, or seals the partition after its
last batch here. The seal waits for a quiet disk (unless the fence is cold), for a quiet moment, and for the running
batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterable
from typing import Any

import xxhash

from stateflow.clock import Clock
from stateflow.errors import MoveUnknown, Unavailable
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.partition.change_feed import ChangeLog, Reading
from stateflow.partition.control import Cancellation, Cancelled, Fence, NamedFollower
from stateflow.partition.environment import DutyCycle
from stateflow.partition.lifecycle import State
from stateflow.partition.local_partition import QuietDisk, QuietMoment
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.executor import Changed, Threads
from stateflow.security.roles import Identity, check_follower
from stateflow.types import PartitionId

log = logging.getLogger(__name__)

FOLLOW_IDLE_S = 1.0
#: bytes of a base file in one message; larger messages take longer to pack, which delays batches that arrive then
PIECE_BYTES = 1 << 18
#: fraction of this process's time for sending base files while batches arrive
SENDING_SHARE = 0.4
#: time limit for the controller's answer to the question who may have a copy, in seconds
ASK_TIMEOUT_S = 10.0
#: shortest time between two heartbeats that ask, in seconds; callers must not make a replica flood its controller
ASK_INTERVAL_S = 0.05
#: most copies that one heartbeat asks about
ASKED_MAX = 1000

# -- Who may follow --------------------------------------------------------------------------------------------------

#: a copy that asks for a partition: the partition, and its move
Asking = tuple[PartitionId, str]


class Followers:
    """Finds out which replica may follow a partition for a move, if callers are told apart by their certificates.

    The target of a move begins the copy, and any node could claim to be the target. The controller knows whom it told
    to copy. The replica's next heartbeat contains the question, so the answer comes from the controller that the
    replica obeys. No question is needed once a fence has named the move's target, so copies of a sealed partition wait
    for no answer.
    """

    def __init__(self, node: ReplicaNode, clock: Clock) -> None:
        self._node, self._clock = node, clock
        self._waiting: dict[asyncio.Future[NamedFollower | None], Asking] = {}
        self._is_new = False  # a question came since the last heartbeat began
        self._asked_at = -math.inf
        self._pause: asyncio.Future[None] | None = None

    async def check(self, who: Identity, partition: PartitionId, move_id: str, standby: bool) -> str:
        """Checks that a caller may copy a partition for a move. Returns the name of the follower.

        Args:
            standby: the caller wants to be a standby.

        Raises NotAllowed, and Unavailable if no controller answers in time.
        """
        fenced_for = self._node.sender.fenced_for(partition, move_id)
        named = NamedFollower(partition, move_id, fenced_for) if fenced_for else await self._named(partition, move_id)
        if named is None:
            log.warning(
                "move %s: replica %s may copy without a check, because the controller's release cannot name who may",
                move_id,
                who.name,
            )
            return who.name
        check_follower(who, "Snapshot", named.replica, standby=named.standby, as_standby=standby)
        return named.replica

    async def _named(self, partition: PartitionId, move_id: str) -> NamedFollower | None:
        """Returns the controller's answer; None: the controller is of a release that does not know the question. Raises
        Unavailable."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[NamedFollower | None] = loop.create_future()
        self._waiting[answer], self._is_new = (partition, move_id), True
        if self._pause is not None:
            loop.call_later(self._due_in_s(), _end, self._pause)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            raise Unavailable(
                f"no controller has said within {ASK_TIMEOUT_S:g} s who may follow the partition",
                remedy="check that a controller leads; the copy is retried",
                partition=partition,
                move=move_id,
            ) from error
        finally:
            del self._waiting[answer]

    def _due_in_s(self) -> float:
        return max(0.0, self._asked_at + ASK_INTERVAL_S - self._clock.monotonic())

    def questions(self) -> list[Asking]:
        """Returns the copies to ask about with the heartbeat that begins now: at most ``ASKED_MAX``, oldest first."""
        self._is_new, self._asked_at = False, self._clock.monotonic()
        return list(dict.fromkeys(self._waiting.values()))[:ASKED_MAX]

    def answered(self, asked: Iterable[Asking], named: Iterable[NamedFollower]) -> None:
        """Passes on the answer to a heartbeat that asked about the copies ``asked``.

        If a copy has no entry in ``named``, the controller is of a release that does not know the question.
        """
        known = {(each.partition, each.move_id): each for each in named}
        asked = set(asked)
        for answer, copy in self._waiting.items():
            if copy in asked and not answer.done():
                answer.set_result(known.get(copy))

    async def pause(self, seconds: float) -> None:
        """Waits ``seconds`` before the next heartbeat, or less if a question arrives that is due earlier."""
        loop = asyncio.get_running_loop()
        self._pause = loop.create_future()
        timer = loop.call_later(min(seconds, self._due_in_s()) if self._is_new else seconds, _end, self._pause)
        try:
            await self._pause
        finally:
            timer.cancel()
            self._pause = None


def _end(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


# -- Files and changes -----------------------------------------------------------------------------------------------


class SnapshotServer:
    def __init__(self, node: ReplicaNode, clock: Clock, threads: Threads) -> None:
        self._node, self._clock, self._threads = node, clock, threads
        self._share = DutyCycle(SENDING_SHARE)
        self._loop = asyncio.get_running_loop()

    async def file(self, snapshot_id: str, name: str, offset: int) -> AsyncIterator[tuple[bytes, int]]:
        """Yields (piece, checksum) of a base file, from ``offset`` on. Raises MoveUnknown if the snapshot is gone."""
        with self._node.sender.reading(snapshot_id):
            size = min(PIECE_BYTES, self._node.settings.chunk_bytes)
            with self._node.sender.open_file(snapshot_id, name) as file:
                file.seek(offset)
                while True:
                    began = self._clock.monotonic()
                    data, checksum = await self._threads.in_files(_chunk, file, size)
                    if not data:
                        return
                    yield data, checksum
                    now = self._clock.monotonic()
                    wait = self._share.wait_s(now, now - began, self._node.served_at)
                    if wait:
                        await asyncio.sleep(wait)

    async def changes(self, snapshot_id: str, after: int) -> AsyncIterator[Reading]:
        """Yields the changes after change set ``after``, up to the seal.

        While there are no changes, yields an empty reading every ``FOLLOW_IDLE_S``, so that silence means a broken
        stream. Raises MoveUnknown if the snapshot is gone, or the change log is closed or has overflowed.
        """
        with self._node.sender.reading(snapshot_id) as changes:
            changes.confirm(after)
            more = asyncio.Event()

            def wake() -> None:
                self._loop.call_soon_threadsafe(more.set)

            changes.wake = wake
            said = False
            while True:
                more.clear()
                _check_log(changes)
                reading = changes.read(after, self._node.settings.chunk_bytes)
                after += len(reading.change_sets)
                if reading.change_sets or reading.seal or not said:
                    yield reading
                    said = True
                if reading.seal is not None:
                    return
                if not reading.lag_bytes:
                    try:
                        await asyncio.wait_for(more.wait(), FOLLOW_IDLE_S)
                    except TimeoutError:
                        said = False


def _chunk(file: Any, size: int) -> tuple[bytes, int]:
    data = file.read(size)
    return data, xxhash.xxh64_intdigest(data)


def _check_log(changes: ChangeLog) -> None:
    if changes.closed:
        raise MoveUnknown(
            "the move was cancelled or restarted", remedy="start a new move if it is still wanted", move=changes.move_id
        )
    if changes.overflowed:
        LIMIT_HITS.note("change_log_bytes")
        raise MoveUnknown(
            "changes arrived faster than the target fetched them",
            remedy="raise STATEFLOW_REPLICA_CHANGE_LOG_BYTES_MAX",
            move=changes.move_id,
        )


# -- Fence and cancellation ------------------------------------------------------------------------------------------


class Fencer:
    def __init__(self, node: ReplicaNode, clock: Clock, threads: Threads, changed: Changed) -> None:
        self._node, self._clock, self._threads, self._changed = node, clock, threads, changed

    async def fence(self, fence: Fence) -> float:
        """Seals the partition, and returns how long it waited for a quiet disk, a quiet moment and the running batch,
        in ms.

        Rows were processed during that time. Raises BudgetUnreachable if the disk does not become quiet enough in time,
        MoveUnknown if the target does not follow or the fence was cancelled, and the errors with which the seal is
        refused.
        """
        partition = fence.partition
        started = self._clock.monotonic()
        if not fence.cold:
            await self._quiet_disk(fence)
        await self._quiet_moment(fence)
        event = self._changed.next(partition)
        sealed = await self._threads.in_quick(self._fence, fence)
        while not sealed:  # the running batch is being finished
            await event.wait()
            event = self._changed.next(partition)
            lifecycle = self._node.lifecycle(partition)
            sealed = lifecycle.state is State.SEALED
            if not sealed and lifecycle.state is not State.FENCING:
                raise MoveUnknown(
                    "the fence was cancelled", remedy="start a new move if it is still wanted", move=fence.move_id
                )
        # measured up to the begin of the seal, because this task may wake long after the target began to serve
        return max(0.0, self._node.sealed_at(partition) - started) * 1e3

    def _fence(self, fence: Fence) -> bool:
        sender, serves = self._node.sender, self._node.lifecycle(fence.partition).state is State.OWNED
        followed = sender.is_followed(fence.partition, fence.move_id, fence.standby_move)
        if serves and not fence.cold and not followed:
            raise MoveUnknown(
                "the target does not follow this partition", remedy="start the move again", move=fence.move_id
            )
        return sender.fence(
            fence.partition,
            fence.move_id,
            fence.epoch,
            fence.target,
            cold=fence.cold,
            standby_move=fence.standby_move,
            command=fence.command,
        )

    async def _quiet_disk(self, fence: Fence) -> None:
        """Waits until the disk is quiet enough for the pause. Raises BudgetUnreachable if that takes too long."""
        quiet = QuietDisk(fence.partition, self._clock.monotonic(), fence.pause_ms, fence.max_pause_ms)
        while self._node.lifecycle(fence.partition).state is State.OWNED:
            sync_ms = await self._threads.in_quick(self._node.sender.sync, fence.partition)
            if quiet.has_come(sync_ms, self._clock.monotonic()):
                return

    async def _quiet_moment(self, fence: Fence) -> None:
        partition = fence.partition
        wait_s = self._node.quiet_in(partition, fence.pause_ms / 1e3)
        moment = QuietMoment(self._node.sequence(partition), self._clock.monotonic() + wait_s)
        while left := moment.wait_s(self._clock.monotonic(), self._node.sequence(partition)):  # noqa: ASYNC110 - a thread's
            await asyncio.sleep(left)

    async def surrender(self, fence: Fence) -> None:
        """Seals the partition for another replica, which gets the state from elsewhere. Returns when it is sealed."""
        event = self._changed.next(fence.partition)
        sealed = await self._threads.in_files(self._surrender, fence)
        while not sealed:  # the running batch is being finished
            await event.wait()
            event = self._changed.next(fence.partition)
            sealed = self._node.lifecycle(fence.partition).state is not State.FENCING

    def _surrender(self, fence: Fence) -> bool:
        return self._node.sender.surrender(
            fence.partition, fence.move_id, fence.epoch, fence.target, command=fence.command
        )

    async def cancel(self, wanted: Cancellation) -> Cancelled:
        """Cancels a move on this replica, which is the move's source or target. Raises StateMissing if the partition's
        data was lost here."""
        lifecycle = self._node.lifecycle(wanted.partition)
        as_target = not wanted.owned_at
        if as_target and lifecycle.state is not State.WARMING and lifecycle.move_id == wanted.move_id:
            return Cancelled(owned=lifecycle.state is State.OWNED, epoch=lifecycle.epoch)
        cancelled = await self._threads.in_quick(self._node.cancel, wanted.partition, wanted.move_id, wanted.owned_at)
        if as_target and lifecycle.state is State.OWNED and lifecycle.move_id == wanted.move_id:
            return Cancelled(owned=True, epoch=lifecycle.epoch)  # the target owned it while the cancellation waited
        return Cancelled(sealed=not cancelled)
