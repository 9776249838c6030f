"""The moves to this replica: one transfer each, whoever asks for it and however often."""

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
    """A transfer and whoever listens to it.

    One that nobody listens to for ``alone_s`` is given up: its controller has ended the move and its word was lost, or
    it comes back and asks again. None: never, since it is a standby.
    """

    def __init__(self, move_id: str, pull: Pull, loop: asyncio.AbstractEventLoop, alone_s: float | None = None) -> None:
        self.move_id = move_id
        self.pull, self._loop, self._alone_s = pull, loop, alone_s
        self._listeners: list[tuple[str, asyncio.Queue[Progress | None]]] = []  # each with the move it is there for
        self._said: Progress | None = None  # the last report
        self.task = loop.create_task(self._run(pull))

    async def _run(self, pull: Pull) -> None:
        try:
            async for report in pull.run():
                self._say(report)
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
        """A move that had joined this transfer was cancelled here: it never owns, whatever becomes of the transfer."""
        for listens_for, listener in self._listeners:
            if listens_for == move_id != self.move_id:
                listener.put_nowait(_was_cancelled(move_id))
                listener.put_nowait(None)

    def told(self, move_id: str) -> Progress | None:
        """What was said last, where it is that the target owns: with the digest, which only the transfer knows."""
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
        await self.pull.abandon()  # nothing, where it owns by now
        log.warning("move %s is given up: nobody asks for it any more", self.move_id)


def _was_cancelled(move_id: str) -> Progress:
    return Progress(
        Phase.FAILED, fault=MoveAborted("this move was cancelled here", remedy="start a new one", move=move_id)
    )


class Pulls:
    """Args:
    checkpoints: base files may come from there, too.
    connect: a channel to a replica's address.
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
        self._turns = asyncio.Semaphore()  # of moves on demand that nobody asks for
        self._loop = asyncio.get_running_loop()

    async def run(self, move: Preparation, standby_move: str) -> AsyncIterator[Progress]:
        """Begin it, or join the one that is under way.

        The transfer outlives whoever iterates: a controller that goes away must not stop a move that is sealed, and
        one that comes back joins the transfer that is under way. A standby's copy that follows for ``standby_move`` is
        the move's: it owns at the seal, and confirms what it has until then.
        """
        partition = move.partition
        lifecycle = self._node.lifecycle(partition)
        if lifecycle.state is State.OWNED and lifecycle.move_id == move.move_id:  # it ended before
            running = self._running.get(partition)
            told = running.told(move.move_id) if running is not None else None
            yield told if told is not None else Progress(Phase.OWNED, epoch=lifecycle.epoch)
            return
        if (lost := await self._threads.in_files(self._node.receiver.lost, partition, move.move_id)) is not None:
            yield Progress(Phase.OWNED, fault=lost)
            return
        if move.move_id in lifecycle.cancelled:  # in an earlier term; no seal is for it here any more
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
        """A batch came ahead of the partition."""
        if (running := self._running.get(partition)) is not None:
            running.pull.asked.set()

    def dismiss(self, partition: PartitionId, move_id: str) -> None:
        """A move was cancelled here that may have joined a standby's transfer, which goes on."""
        if (running := self._running.get(partition)) is not None:
            running.dismiss(move_id)

    def stop(self, partition: PartitionId) -> None:
        """Its copy follows nobody any more."""
        running = self._running.pop(partition, None)
        if running is not None:
            running.task.cancel()

    def incoming(self) -> list[tuple[PartitionId, str]]:
        """(partition, move) of copies to this replica whose move has not ended here. Also of a transfer that failed:
        what it left is kept until the controller says what becomes of it."""
        return [(found.partition, found.move_id) for found, _ in self._node.inventory() if found.state is State.WARMING]

    async def end(self, partition: PartitionId, move_id: str) -> None:
        """Its move is over, and its cancellation was lost."""
        lifecycle = self._node.lifecycle(partition)
        if lifecycle.state is State.WARMING and lifecycle.move_id == move_id:
            log.warning("move %s of %s is over: its copy is given up", move_id, partition)
            await self._threads.in_quick(self._node.cancel, partition, move_id)

    async def close(self) -> None:
        for running in self._running.values():
            running.task.cancel()
        for channel in self._peers.values():
            await channel.close()
