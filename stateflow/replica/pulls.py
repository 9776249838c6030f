"""The transfers to this replica, one for each move, however many callers ask for it and however often."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc.aio

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import Clock
from stateflow.errors import MoveAborted
from stateflow.replica.peers import SourceReplica
from stateflow.replica.puller import Pull
from stateflow.replica.threads import Threads
from stateflow.rpc.wire import unexpected
from stateflow.runtime.control import Phase, Preparation, Progress
from stateflow.runtime.lifecycle import State
from stateflow.runtime.replica import ReplicaNode
from stateflow.types import PartitionId

log = logging.getLogger(__name__)


class RunningPull:
    """A transfer and its listeners.

    A transfer without listeners for ``alone_s`` is given up: either its controller has ended the move and the message
    was lost, or the controller comes back and asks again. ``alone_s`` None: never given up, as the transfer is a
    standby's.
    """

    def __init__(self, move_id: str, pull: Pull, loop: asyncio.AbstractEventLoop, alone_s: float | None = None) -> None:
        self.move_id = move_id
        self.pull, self._loop, self._alone_s = pull, loop, alone_s
        self._listeners: list[tuple[str, asyncio.Queue[Progress | None]]] = []  # each with the move it listens for
        self._said: Progress | None = None  # the last report
        self.task = loop.create_task(self._run(pull))

    async def _run(self, pull: Pull) -> None:
        try:
            async for report in pull.run():
                self._say(report)
        except asyncio.CancelledError:
            # a task keeps the error that ends it, with its frames, which refer to the task: the transfer and its last
            # message would stay until the next full garbage collection
            return
        except Exception as error:
            log.exception("a transfer failed")
            self._say(Progress(Phase.FAILED, fault=unexpected(error)))
        finally:
            self._say(None)

    def _say(self, report: Progress | None) -> None:
        self._said = report or self._said
        for _, listener in self._listeners:
            listener.put_nowait(report)

    def dismiss(self, move_id: str) -> None:
        """Ends the listeners of a cancelled move that had joined this transfer. The move never owns, even if the
        transfer does."""
        for listens_for, listener in self._listeners:
            if listens_for == move_id != self.move_id:
                listener.put_nowait(_was_cancelled(move_id))
                listener.put_nowait(None)

    def told(self, move_id: str) -> Progress | None:
        """Returns the last report if it says that the target owns. Only the transfer knows the digest in it."""
        owned = self.move_id == move_id and self._said is not None and self._said.phase is Phase.OWNED
        return self._said if owned else None

    async def reports(self, move_id: str) -> AsyncIterator[Progress]:
        queue: asyncio.Queue[Progress | None] = asyncio.Queue()
        if self._said is not None:
            queue.put_nowait(self._said)
        self._listeners.append((move_id, queue))
        try:
            while (report := await queue.get()) is not None:
                yield report
        finally:
            self._listeners.remove((move_id, queue))
            if not self._listeners and self._alone_s is not None and not self.task.done():
                self._loop.call_later(self._alone_s, self._give_up_if_alone)

    def _give_up_if_alone(self) -> None:
        if not self._listeners and not self.task.done():
            self._giving_up = self._loop.create_task(self._give_up())

    async def _give_up(self) -> None:
        self.task.cancel()
        await self.pull.abandon()  # does nothing if the target owns by now
        log.warning("move %s abandoned: no controller waits for it", self.move_id)


def _was_cancelled(move_id: str) -> Progress:
    return Progress(
        Phase.FAILED, fault=MoveAborted("the move was cancelled here", remedy="start a new one", move=move_id)
    )


class Pulls:
    """The transfers to one replica.

    Args:
        checkpoints: a second source of base files; None: only the source replica.
        connect: opens a channel to a replica's address.
    """

    def __init__(
        self,
        node: ReplicaNode,
        checkpoints: CheckpointStore | None,
        clock: Clock,
        connect: Callable[[str], grpc.aio.Channel],
        threads: Threads,
    ) -> None:
        self._node, self._checkpoints, self._clock = node, checkpoints, clock
        self._connect, self._threads = connect, threads
        self._peers: dict[str, grpc.aio.Channel] = {}
        self._running: dict[PartitionId, RunningPull] = {}
        self._turns = asyncio.Semaphore()  # of moves on demand that no batch waits for
        self._loop = asyncio.get_running_loop()

    async def run(self, move: Preparation, standby_move: str) -> AsyncIterator[Progress]:
        """Begins a transfer, or joins the one under way, and yields its reports.

        The transfer outlives its callers: a controller that goes away must not stop a sealed move, and one that comes
        back joins the transfer. A standby's copy that follows for ``standby_move`` is the move's own: it owns at the
        seal, and confirms its progress until then.
        """
        partition = move.partition
        lifecycle = self._node.lifecycle(partition)
        if lifecycle.state is State.OWNED and lifecycle.move_id == move.move_id:  # an earlier call completed the move
            running = self._running.get(partition)
            told = running.told(move.move_id) if running is not None else None
            yield told if told is not None else Progress(Phase.OWNED, epoch=lifecycle.epoch)
            return
        if (lost := await self._threads.in_files(self._node.receiver.lost, partition, move.move_id)) is not None:
            yield Progress(Phase.OWNED, fault=lost)
            return
        if move.move_id in lifecycle.cancelled:  # in an earlier term; no seal is addressed to it any more
            yield _was_cancelled(move.move_id)
            return
        running = self._running.get(partition)
        joined = running is not None and running.move_id in (move.move_id, standby_move)
        if running is None or not joined or running.task.done():
            running = self._running[partition] = self._begin(move)
        async for progress in running.reports(move.move_id):
            yield progress

    def _begin(self, move: Preparation) -> RunningPull:
        pull = Pull(
            self._node,
            move,
            SourceReplica(self._peer(move.source.address), move.source.address, self._node.settings.transfer_timeout_s),
            self._threads.files,
            self._threads.quick,
            self._clock,
            self._checkpoints,
            self._turns,
        )
        alone_s = None if move.standby else self._node.settings.resume_timeout_s
        return RunningPull(move.move_id, pull, self._loop, alone_s)

    def _peer(self, address: str) -> grpc.aio.Channel:
        if address not in self._peers:
            self._peers[address] = self._connect(address)
        return self._peers[address]

    def ask(self, partition: PartitionId) -> None:
        """Gives a copy its turn, as a batch came ahead of the partition."""
        if (running := self._running.get(partition)) is not None:
            running.pull.asked.set()

    def dismiss(self, partition: PartitionId, move_id: str) -> None:
        """Ends the reports of a cancelled move that may have joined a standby's transfer. The transfer goes on."""
        if (running := self._running.get(partition)) is not None:
            running.dismiss(move_id)

    def stop(self, partition: PartitionId) -> None:
        """Stops the transfer of a copy that follows no source any more."""
        running = self._running.pop(partition, None)
        if running is not None:
            running.task.cancel()

    def incoming(self) -> list[tuple[PartitionId, str]]:
        """Returns (partition, move) of copies to this replica whose move has not ended here.

        Copies of failed transfers count: they are kept until the controller decides about them.
        """
        return [(found.partition, found.move_id) for found, _ in self._node.inventory() if found.state is State.WARMING]

    async def end(self, partition: PartitionId, move_id: str) -> None:
        """Gives up the copy of a move that is over, and whose cancellation was lost."""
        lifecycle = self._node.lifecycle(partition)
        if lifecycle.state is State.WARMING and lifecycle.move_id == move_id:
            log.warning("move %s of %s is over, its copy is abandoned", move_id, partition)
            await self._threads.in_quick(self._node.cancel, partition, move_id)

    async def close(self) -> None:
        for running in self._running.values():
            running.task.cancel()
        for channel in self._peers.values():
            await channel.close()
