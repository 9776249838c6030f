"""Fencing at the source of a move: the partition's last batch there, and the cancellation of a move."""

from __future__ import annotations

import asyncio

from stateflow.clock import Clock
from stateflow.errors import MoveUnknown
from stateflow.replica.changed import Changed
from stateflow.replica.threads import Threads
from stateflow.runtime.cadence import QuietDisk, QuietMoment
from stateflow.runtime.control import Cancellation, Cancelled, Fence
from stateflow.runtime.lifecycle import State
from stateflow.runtime.replica import ReplicaNode


class Fencer:
    def __init__(self, node: ReplicaNode, clock: Clock, threads: Threads, changed: Changed) -> None:
        self._node, self._clock, self._threads, self._changed = node, clock, threads, changed

    async def fence(self, fence: Fence) -> float:
        """Seals the partition, and returns how long it waited for a quiet moment and the running batch, in ms.

        Rows were processed during that time. Raises BudgetUnreachable, MoveUnknown, and the errors that refuse the
        seal.
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
                raise MoveUnknown("the fence was cancelled", remedy="nothing to do", move=fence.move_id)
        # until the seal itself began: this task may wake long after the target began to serve
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
        """Waits for a quiet disk before fencing. Raises BudgetUnreachable."""
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
        """Seals the partition for another replica, which has its state from elsewhere. Returns when it is sealed."""
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
        """Cancels a move here, as its source or its target. Raises StateMissing."""
        lifecycle = self._node.lifecycle(wanted.partition)
        as_target = not wanted.owned_at
        if as_target and lifecycle.state is not State.WARMING and lifecycle.move_id == wanted.move_id:
            return Cancelled(owned=lifecycle.state is State.OWNED, epoch=lifecycle.epoch)
        cancelled = await self._threads.in_quick(self._node.cancel, wanted.partition, wanted.move_id, wanted.owned_at)
        if as_target and lifecycle.state is State.OWNED and lifecycle.move_id == wanted.move_id:
            return Cancelled(owned=True, epoch=lifecycle.epoch)  # the target owned it while the cancellation waited
        return Cancelled(sealed=not cancelled)
