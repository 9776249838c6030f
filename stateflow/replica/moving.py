"""What a replica answers about moves: as the source of one, as its target, and as the successor of a dead owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import grpc.aio
import xxhash

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import Clock
from stateflow.errors import BudgetUnreachable, InvalidArgument, MoveUnknown, StateflowError
from stateflow.replica.commands import command_of, commanded
from stateflow.replica.messages import progress_to_pb
from stateflow.replica.progress import Phase, Progress
from stateflow.replica.puller import Incoming, Pull, RunningPull
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.wire import fault_of, pieces, replica_of, seal_to_pb, snapshot_to_pb, spec_of, streaming, unary
from stateflow.runtime.lifecycle import Lifecycle, State
from stateflow.runtime.pace import Share
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.rhythm import WAIT_S_MAX, disk_is_quiet
from stateflow.runtime.takeover import TakenOver
from stateflow.runtime.transfer import ChangeLog, Kept, Reading
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
FOLLOW_IDLE_S = 1.0
#: of a base file at a time: packing a larger one holds up the batches that come meanwhile
PIECE_BYTES = 1 << 18
#: of this process's time, that sending base files may have while there are batches
SENDING_SHARE = 0.4
T = TypeVar("T")


class MoveHandlers(replica_pb2_grpc.ReplicaServiceServicer):
    """Base of a replica's server. ``in_files`` is for long work on files, ``_in_quick`` for what a pause waits for."""

    def __init__(
        self,
        node: ReplicaNode,
        checkpoints: CheckpointStore | None,
        clock: Clock,
        connect: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self.node = node
        self.connect = connect
        self.checkpoints = checkpoints
        self.clock = clock
        self._files = ThreadPoolExecutor(4, thread_name_prefix="files")
        self._quick = ThreadPoolExecutor(4, thread_name_prefix="moves")
        self._peers: dict[str, grpc.aio.Channel] = {}
        self._pulls: dict[PartitionId, RunningPull] = {}
        self._turns = asyncio.Semaphore()  # of moves on demand that nobody asks for
        self._changed: WeakValueDictionary[PartitionId, asyncio.Event] = WeakValueDictionary()  # while one waits
        self._loop = asyncio.get_running_loop()
        self._share = Share(SENDING_SHARE)
        node.on_change(self._wake_from_thread)

    def _next_change(self, partition: PartitionId) -> asyncio.Event:
        return self._changed.setdefault(partition, asyncio.Event())

    def _wake_from_thread(self, partition: PartitionId) -> None:
        self._loop.call_soon_threadsafe(self._wake, partition)

    def _wake(self, partition: PartitionId) -> None:
        event = self._changed.pop(partition, None)
        if event is not None:
            event.set()

    # -- as the target ------------------------------------------------------------------------------------

    @streaming
    @commanded
    async def Prepare(
        self, request: rpb.PrepareRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.MoveProgress]:
        spec = spec_of(request.spec)
        partition = PartitionId(spec.name, request.partition)
        lifecycle = self.node.lifecycle(partition)
        if lifecycle.state is State.OWNED and lifecycle.move_id == request.move_id:
            yield progress_to_pb(Progress(Phase.OWNED, epoch=lifecycle.epoch))  # it ended before
            return
        if (lost := await self.in_files(self.node.receiver.lost, partition, request.move_id)) is not None:
            yield progress_to_pb(Progress(Phase.OWNED, fault=lost))
            return
        # The transfer outlives this call: a controller that goes away must not stop a move that is sealed, and
        # one that comes back joins the transfer that is under way.
        # A standby's copy that follows is the move's: it owns at the seal, and confirms what it has until then.
        running = self._pulls.get(partition)
        joined = running is not None and running.move_id in (request.move_id, request.standby_move)
        if running is None or not joined or running.task.done():
            source = replica_of(request.source)
            move = Incoming(
                request.move_id,
                spec,
                partition,
                source,
                request.source_epoch,
                request.bandwidth_max,
                request.standby,
                request.on_demand,
                request.newest_epoch,
            )
            pull = Pull(
                self.node,
                move,
                self._peer(source.address),
                self._files,
                self._quick,
                self.clock,
                self.checkpoints,
                self._turns,
            )
            alone_s = None if request.standby else self.node.settings.resume_timeout_s
            running = self._pulls[partition] = RunningPull(request.move_id, pull, self._loop, alone_s)
        async for progress in running.reports():
            yield progress_to_pb(progress)

    def _ask(self, partition: PartitionId) -> None:
        """A batch came ahead of the partition."""
        if (running := self._pulls.get(partition)) is not None:
            running.pull.asked.set()

    # -- as the source ------------------------------------------------------------------------------------

    @unary
    @commanded
    async def Fence(self, request: rpb.FenceRequest, context: grpc.aio.ServicerContext) -> rpb.FenceReply:
        partition = PartitionId(request.operator, request.partition)
        started = self.clock.monotonic()
        in_hand_ms = 0.0
        try:
            if not request.cold:
                await self._quiet_disk(partition, request)
            await self._quiet_moment(partition, request.pause_ms / 1e3)
            in_hand_ms = (self.clock.monotonic() - started) * 1e3
            event = self._next_change(partition)
            sealed = await self._in_quick(self._fence, partition, request)
            while not sealed:  # the batch in hand is being finished
                await event.wait()
                event = self._next_change(partition)
                lifecycle = self.node.lifecycle(partition)
                sealed = lifecycle.state is State.SEALED
                in_hand_ms = (self.clock.monotonic() - started) * 1e3
                if not sealed and lifecycle.state is not State.FENCING:
                    raise MoveUnknown("the fence was cancelled", remedy="none", move=request.move_id)
        except StateflowError as error:
            return rpb.FenceReply(sealed=False, fault=fault_of(error))
        return rpb.FenceReply(sealed=True, in_hand_ms=in_hand_ms)

    def _fence(self, partition: PartitionId, request: rpb.FenceRequest) -> bool:
        sender, serves = self.node.sender, self.node.lifecycle(partition).state is State.OWNED
        followed = sender.is_followed(partition, request.move_id, request.standby_move)
        if serves and not request.cold and not followed:
            raise MoveUnknown(
                "the target does not follow this partition now", remedy="start the move again", move=request.move_id
            )
        target = replica_of(request.target)
        return sender.fence(
            partition,
            request.move_id,
            request.epoch,
            target,
            cold=request.cold,
            standby_move=request.standby_move,
            command=command_of(request),
        )

    async def _quiet_disk(self, partition: PartitionId, request: rpb.FenceRequest) -> None:
        """Return once a durable write is as fast as the pause expects, or after a while. Raises BudgetUnreachable when
        one is still slower than the whole budget then."""
        deadline = self.clock.monotonic() + WAIT_S_MAX
        while self.node.lifecycle(partition).state is State.OWNED:
            sync_ms = await self._in_quick(self.node.sender.settle, partition)
            if disk_is_quiet(sync_ms, request.pause_ms):
                return
            if self.clock.monotonic() > deadline:
                if 0 < request.max_pause_ms < sync_ms:
                    raise BudgetUnreachable(
                        f"a durable write takes the source {sync_ms:.0f} ms, a pause of {request.max_pause_ms:g} ms "
                        "is allowed",
                        remedy="raise max_pause_ms, or move when its disk is not as busy",
                        partition=partition,
                    )
                return

    async def _quiet_moment(self, partition: PartitionId, pause_s: float) -> None:
        """Return right behind the commit of the next batch, where waiting for it is worth it."""
        left = self.node.quiet_in(partition, pause_s)
        deadline = self.clock.monotonic() + left
        sequence = self.node.sequence(partition)
        while left > 0 and self.node.sequence(partition) == sequence:
            await asyncio.sleep(min(left, 0.002))
            left = deadline - self.clock.monotonic()

    @unary
    @commanded
    async def Cancel(self, request: rpb.CancelRequest, context: grpc.aio.ServicerContext) -> rpb.FenceReply:
        partition = PartitionId(request.operator, request.partition)
        lifecycle = self.node.lifecycle(partition)
        if not request.owned_at and lifecycle.state is not State.WARMING and lifecycle.move_id == request.move_id:
            return rpb.FenceReply(owned=lifecycle.state is State.OWNED, owned_epoch=lifecycle.epoch)
        cancelled = await self._in_quick(self.node.cancel, partition, request.move_id, request.owned_at)
        if not request.owned_at and lifecycle.state is State.OWNED and lifecycle.move_id == request.move_id:
            return rpb.FenceReply(owned=True, owned_epoch=lifecycle.epoch)  # it owned while the cancellation waited
        return rpb.FenceReply(sealed=not cancelled)

    @unary
    @commanded
    async def Release(self, request: rpb.ReleaseRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        partition = PartitionId(request.operator, request.partition)
        await self._in_quick(self.node.sender.release, partition, request.move_id)
        return pb.Empty()

    @unary
    @commanded
    async def Hold(self, request: rpb.HoldRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        self.node.hold(request.operator, request.seconds)
        return pb.Empty()

    @unary
    async def Inspect(self, request: rpb.InspectRequest, context: grpc.aio.ServicerContext) -> rpb.PartitionView:
        return view_of(self.node, self.node.lifecycle(PartitionId(request.operator, request.partition)), 0)

    @unary
    async def Snapshot(self, request: rpb.SnapshotRequest, context: grpc.aio.ServicerContext) -> rpb.SnapshotReply:
        partition = PartitionId(request.operator, request.partition)
        has = request.kept  # unset: without a move, as no copy is
        kept = Kept(has.move_id, has.epoch, has.sequence)
        snapshot = await self.in_files(self.node.sender.snapshot, partition, request.move_id, request.standby, kept)
        return snapshot_to_pb(snapshot)

    @streaming
    async def Fetch(self, request: rpb.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[rpb.FileChunk]:
        with self.node.sender.reading(request.snapshot_id):
            path = self.node.sender.snapshot_file(request.snapshot_id, request.name)
            size = min(PIECE_BYTES, self.node.settings.chunk_bytes)
            with path.open("rb") as file:
                file.seek(request.offset)
                while True:
                    began = self.clock.monotonic()
                    data, checksum = await self.in_files(_chunk, file, size)
                    if not data:
                        return
                    yield rpb.FileChunk(data=data, checksum=checksum)
                    now = self.clock.monotonic()
                    wait = self._share.wait_s(now, now - began, self.node.served_at)
                    if wait:
                        await asyncio.sleep(wait)

    @streaming
    async def Follow(
        self, request: rpb.FollowRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.ChangeFrame]:
        with self.node.sender.reading(request.snapshot_id) as changes:
            more = asyncio.Event()

            def wake() -> None:
                self._loop.call_soon_threadsafe(more.set)

            changes.wake = wake
            after, said = request.after_sequence, False
            changes.confirm(after)
            while True:
                more.clear()
                _check_log(changes)
                reading = changes.read(after, self.node.settings.chunk_bytes)
                after += len(reading.change_sets)
                if reading.change_sets or reading.seal or not said:
                    for frame in frames_of(reading, self.node.settings.chunk_bytes):
                        yield frame
                    said = True
                if reading.seal is not None:
                    return
                if not reading.lag_bytes:
                    try:
                        await asyncio.wait_for(more.wait(), FOLLOW_IDLE_S)
                    except TimeoutError:
                        said = False  # so that a silent stream is a broken one

    @unary
    async def Confirm(self, request: rpb.ConfirmRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        self.node.sender.confirm(request.snapshot_id, request.sequence)
        return pb.Empty()

    # -- as the successor ---------------------------------------------------------------------------------

    @unary
    @commanded
    async def TakeOver(self, request: rpb.TakeOverRequest, context: grpc.aio.ServicerContext) -> rpb.TakeOverReply:
        spec = spec_of(request.spec)
        partition = PartitionId(spec.name, request.partition)
        successor = self.node.successor
        match request.how:
            case rpb.TakeOverRequest.STANDBY:
                taken = await self._in_quick(
                    successor.from_standby,
                    partition,
                    request.move_id,
                    request.epoch,
                    request.standby_move,
                    command_of(request),
                )
                running = self._pulls.pop(partition, None)
                if running is not None:
                    running.task.cancel()
            case rpb.TakeOverRequest.LOCAL:
                taken = await self._in_quick(
                    successor.from_local, partition, request.move_id, request.epoch, command_of(request)
                )
            case _:
                if self.checkpoints is None:
                    raise InvalidArgument(
                        "this replica has no checkpoint store",
                        remedy="start it with --checkpoints URL, or start the owner again",
                        replica=self.node.info.name,
                    )
                taken = await self.in_files(
                    successor.from_checkpoint,
                    spec,
                    partition,
                    request.move_id,
                    request.epoch,
                    self.checkpoints,
                    command_of(request),
                    request.oldest_epoch,
                )
        return _taken_to_pb(taken)

    # -- plumbing -----------------------------------------------------------------------------------------

    def _peer(self, address: str) -> grpc.aio.Channel:
        if address not in self._peers:
            self._peers[address] = self.connect(address)
        return self._peers[address]

    async def in_files(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self._files, work, *arguments)

    async def _in_quick(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self._quick, work, *arguments)

    def incoming(self) -> list[dict[str, Any]]:
        """Copies to this replica whose move has not ended here: operator, partition, move_id. Also of a transfer that
        failed: what it left is kept until the controller says what becomes of it."""
        return [
            {"operator": found.partition.operator, "partition": found.partition.partition, "move_id": found.move_id}
            for found, _ in self.node.inventory()
            if found.state is State.WARMING
        ]

    async def end(self, partition: PartitionId, move_id: str) -> None:
        """Its move is over, and its cancellation was lost."""
        lifecycle = self.node.lifecycle(partition)
        if lifecycle.state is State.WARMING and lifecycle.move_id == move_id:
            log.warning("move %s of %s is over: its copy is given up", move_id, partition)
            await self._in_quick(self.node.cancel, partition, move_id)

    async def stop_moving(self) -> None:
        for running in self._pulls.values():
            running.task.cancel()
        for channel in self._peers.values():
            await channel.close()
        for pool in (self._files, self._quick):  # a thread may wait for a partition that never comes back
            pool.shutdown(wait=False, cancel_futures=True)


def _chunk(file: Any, size: int) -> tuple[bytes, int]:
    data = file.read(size)
    return data, xxhash.xxh64_intdigest(data)


def frames_of(reading: Reading, bytes_max: int) -> Iterator[rpb.ChangeFrame]:
    """As few messages as the limit allows: what gathered while the base crossed is applied at once, and not one change
    set after another while the partition stands still. One that goes on in the next frame ends a frame. The last frame
    says how far it is."""
    frame, size = rpb.ChangeFrame(), 0
    for change_set in reading.change_sets:
        for piece, last in pieces(change_set, bytes_max):
            if size and size + len(piece) > bytes_max:
                yield frame
                frame, size = rpb.ChangeFrame(), 0
            frame.change_sets.append(piece)
            size += len(piece)
            if not last:
                frame.continues = True
                yield frame
                frame, size = rpb.ChangeFrame(), 0
    frame.head_sequence, frame.lag_bytes, frame.chain = reading.head_sequence, reading.lag_bytes, reading.chain
    if reading.seal is not None:
        frame.seal.CopyFrom(seal_to_pb(reading.seal))
    yield frame


def _check_log(changes: ChangeLog) -> None:
    if changes.closed:
        raise MoveUnknown("the move was cancelled or began anew", remedy="start it again", move=changes.move_id)
    if changes.overflowed:
        raise MoveUnknown(
            "changes came faster than they were fetched",
            remedy="raise the change log's limit",
            move=changes.move_id,
        )


def _taken_to_pb(taken: TakenOver) -> rpb.TakeOverReply:
    reply = rpb.TakeOverReply(epoch=taken.epoch, sequence=taken.sequence, positions=taken.positions)
    if taken.checkpoint is not None:
        reply.checkpoint_epoch, reply.checkpoint_sequence = taken.checkpoint.order
        reply.checkpoint_us = taken.checkpoint.created_us
    return reply


def view_of(node: ReplicaNode, lifecycle: Lifecycle, sequence: int, *, size: bool = False) -> rpb.PartitionView:
    return rpb.PartitionView(
        operator=lifecycle.partition.operator,
        partition=lifecycle.partition.partition,
        state=lifecycle.state,
        epoch=lifecycle.epoch,
        sequence=sequence,
        move_id=lifecycle.move_id,
        batch_rate=node.batch_rate(lifecycle.partition),
        bytes=node.bytes_on_disk(lifecycle.partition) if size else 0,
    )


def views_of(node: ReplicaNode, *, sizes: bool = False) -> list[rpb.PartitionView]:
    return [view_of(node, lifecycle, sequence, size=sizes) for lifecycle, sequence in node.inventory()]
