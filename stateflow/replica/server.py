"""A replica's gRPC shell: one event loop for control, one thread for batches, a few for files."""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from random import Random  # noqa: TID251 - the type; which one is handed in
from typing import Any

import grpc
import grpc.aio

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import StateflowError
from stateflow.replica.applying import Applier
from stateflow.replica.checkpoints import CheckpointShell
from stateflow.replica.commands import command_of, commanded
from stateflow.replica.membership import say_opening, stay_registered
from stateflow.replica.moving import MoveHandlers, views_of
from stateflow.replica.troubles import Troubles
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.wire import (
    OPTIONS,
    RPCS_MAX,
    abort,
    bind,
    connect,
    pieces,
    replica_of,
    session_of,
    source_to_pb,
    spec_of,
    streaming,
    unary,
    unexpected,
)
from stateflow.runtime.allocator import keep_buffers
from stateflow.runtime.garbage import Garbage
from stateflow.runtime.lifecycle import State
from stateflow.runtime.replica import ReplicaNode
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: how long a thread may keep the interpreter from the event loop; bounds what a busy batch adds to a pause
SWITCH_INTERVAL_S = 0.0005
SOURCES_PER_REPLY = 1000


class ReplicaServer(MoveHandlers):
    """Args:
    checkpoints: where periodic and on-demand checkpoints go; None switches them off.
    garbage: this process's, when nobody else looks after it.
    """

    def __init__(
        self,
        node: ReplicaNode,
        checkpoints: CheckpointStore | None,
        clock: Clock = SYSTEM_CLOCK,
        connect: Callable[[str], grpc.aio.Channel] = connect,
        random: Random | None = None,
        garbage: Garbage | None = None,
    ) -> None:
        super().__init__(node, checkpoints, clock, connect)
        self.checkpointing = CheckpointShell(node, checkpoints, clock, random or Random(0))
        self._applier = Applier(node, clock, self._next_change, self._ask, garbage)
        self._freeing: asyncio.Task[None] | None = None

    async def Apply(self, requests: AsyncIterator[rpb.ApplyRequest], context: grpc.aio.ServicerContext) -> None:
        try:
            await self._applier.run(requests, context)
        except StateflowError as error:  # of the call as a whole; what is wrong with a partition is its result
            await abort(context, error)

    async def watch_batches(self) -> None:
        await self._applier.watch()

    async def ApplyOne(self, request: rpb.ApplyRequest, context: grpc.aio.ServicerContext) -> None:
        await self.Apply(_alone(request), context)

    # -- control ------------------------------------------------------------------------------------------

    @unary
    @commanded
    async def Create(self, request: rpb.CreateRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        spec = spec_of(request.spec)
        if request.asked:
            await self.in_files(self.node.check, spec, request.total)
        else:
            await self.in_files(self.node.create, spec, list(request.partitions), request.epoch, request.total)
        return pb.Empty()

    @unary
    @commanded
    async def Drop(self, request: rpb.DropRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        await self.in_files(self.node.drop, request.operator, request.epoch)
        return pb.Empty()

    # -- checkpoints and reading --------------------------------------------------------------------------

    @unary
    @commanded
    async def Checkpoint(
        self, request: rpb.CheckpointRequest, context: grpc.aio.ServicerContext
    ) -> rpb.CheckpointReply:
        return await self.checkpointing.on_demand(request)

    @unary
    @commanded
    async def Restore(self, request: rpb.RestoreRequest, context: grpc.aio.ServicerContext) -> rpb.RestoreReply:
        return await self.checkpointing.restore(request)

    @unary
    @commanded
    async def Surrender(self, request: rpb.FenceRequest, context: grpc.aio.ServicerContext) -> rpb.FenceReply:
        partition = PartitionId(request.operator, request.partition)
        event = self._next_change(partition)
        sealed = await self.in_files(self._surrender, partition, request)
        while not sealed:  # the batch in hand is being finished
            await event.wait()
            event = self._next_change(partition)
            sealed = self.node.lifecycle(partition).state is not State.FENCING
        return rpb.FenceReply(sealed=True)

    def _surrender(self, partition: PartitionId, request: rpb.FenceRequest) -> bool:
        target, command = replica_of(request.target), command_of(request)
        return self.node.sender.surrender(partition, request.move_id, request.epoch, target, command=command)

    @streaming
    async def Scan(self, request: rpb.ScanRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[rpb.ScanPage]:
        for number in request.partitions:
            scan = self.node.scan_pages(PartitionId(request.operator, number), request.state, request.keys)
            while pages := await self.in_files(next, scan, None):
                for page in pages:
                    for piece, last in pieces(page, self.node.settings.chunk_bytes):
                        yield rpb.ScanPage(records=piece, continues=not last)

    @unary
    async def Stats(self, request: rpb.StatsRequest, context: grpc.aio.ServicerContext) -> rpb.StatsReply:
        samples = self._applier.samples(request.after)
        views = views_of(self.node, sizes=request.sizes)
        return rpb.StatsReply(
            samples=samples, partitions=views, rows=self._applier.rows, checkpoints=self.checkpointing.taken
        )

    @unary
    async def Positions(self, request: rpb.PositionsRequest, context: grpc.aio.ServicerContext) -> rpb.PositionsReply:
        return await self._positions(request)

    async def _positions(self, request: rpb.PositionsRequest) -> rpb.PositionsReply:
        reply = rpb.PositionsReply()
        if request.HasField("before"):  # asked by every task of a micro-batch
            found = self.node.whole_before(request.operator, request.partitions, request.source, request.before)
            if found is not None:
                reply.whole = True
                if found.event_us is not None:
                    reply.newest_event_us = found.event_us
                return reply
        for number in request.partitions:
            partition = PartitionId(request.operator, number)
            position = await self.in_files(self.node.position, partition, request.source)
            if position is None:
                continue
            reply.positions[number] = position.batch
            if position.event_us is not None:
                reply.event_us[number] = position.event_us
            if position.event_before_us is not None:
                reply.event_before_us[number] = position.event_before_us
            if position.known:
                reply.known[number] = position.known
            if position.client:
                reply.clients[number] = position.client
        return reply

    @unary
    async def OpenSource(self, request: rpb.OpenSourceRequest, context: grpc.aio.ServicerContext) -> rpb.PositionsReply:
        session = session_of(request.session)
        for number in request.asked.partitions:
            partition = PartitionId(request.asked.operator, number)
            await self._applier.in_turn(self.node.open_source, partition, request.asked.source, session)
        return await self._positions(request.asked)

    @streaming
    async def Sources(
        self, request: rpb.SourcesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.SourcesReply]:
        for number in request.partitions:
            found = await self.in_files(self.node.sources, PartitionId(request.operator, number))
            for at in range(0, len(found), SOURCES_PER_REPLY):
                yield rpb.SourcesReply(sources=[source_to_pb(number, v) for v in found[at : at + SOURCES_PER_REPLY]])

    @unary
    async def RetireSource(
        self, request: rpb.PositionsRequest, context: grpc.aio.ServicerContext
    ) -> rpb.RetireSourceReply:
        reply = rpb.RetireSourceReply()
        for number in request.partitions:
            partition = PartitionId(request.operator, number)
            reply.retired += await self._applier.in_turn(self.node.retire_source, partition, request.source)
        return reply

    # -- plumbing -----------------------------------------------------------------------------------------

    def _wake(self, partition: PartitionId) -> None:
        super()._wake(partition)
        if self.node.cache.has_left and (self._freeing is None or self._freeing.done()):
            self._freeing = self._loop.create_task(self._applier.free_caches())

    async def close(self) -> None:
        await self._applier.close()
        await self.stop_moving()
        self.checkpointing.close()
        self.node.close()


async def _alone(request: rpb.ApplyRequest) -> AsyncIterator[rpb.ApplyRequest]:
    yield request


async def serve(
    node: ReplicaNode,
    listen: str,
    controller: str,
    *,
    advertise: str | None = None,
    random: Random,
    checkpoints: CheckpointStore | None = None,
    clock: Clock = SYSTEM_CLOCK,
    ready: asyncio.Future[str] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run a replica until ``stop``, or until one of its duties ends by itself. Then it stops, and raises that error:
    without its lease, or with nobody who looks after stuck batches, it would only seem to be there.

    Raises PortInUse, InvalidArgument.

    Args:
        random: spreads the periodic checkpoints of replicas that were started together.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_buffers()
    stop = stop or asyncio.Event()
    server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=RPCS_MAX)
    shell = ReplicaServer(node, checkpoints, clock, random=random, garbage=Garbage(lambda: node.cache.objects))
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(shell, server)
    try:
        address = bind(server, listen)
        info = ReplicaInfo(node.info.name, node.info.site, advertise or address, node.info.weight)
        if not await recover(shell, info, controller, stop):
            return
        await server.start()
        if ready is not None:
            ready.set_result(address)
        tasks = [
            asyncio.create_task(duty, name=getattr(duty, "__qualname__", None))
            for duty in duties(shell, info, controller, uuid.uuid4().hex)
        ]
        ended = await _first_to_end(tasks, stop)
        for task in tasks:
            task.cancel()
        await server.stop(grace=2)
    finally:
        await shell.close()
    if ended is not None:
        raise ended


async def _first_to_end(duties: list[asyncio.Task[None]], stop: asyncio.Event) -> StateflowError | None:
    """Wait for ``stop``. What a duty ended with that did not wait for it, which sets ``stop``, too."""
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([stopping, *duties], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    if stop.is_set():
        return None
    duty = next(iter(done))
    why = None if duty.cancelled() else duty.exception()
    log.critical("this replica ends: %s ended by itself", duty.get_name(), exc_info=why)
    stop.set()
    if why is not None:
        return unexpected(why)
    return StateflowError(f"{duty.get_name()} ended by itself", remedy="this is a fault of stateflow; see the log")


async def recover(shell: ReplicaServer, info: ReplicaInfo, controller: str, stop: asyncio.Event) -> bool:
    """Find what is here, saying meanwhile that this replica is coming. False: it was stopped. Raises what
    :meth:`ReplicaNode.recover` raises."""
    finding = asyncio.ensure_future(shell.in_files(shell.node.recover))
    saying = asyncio.create_task(say_opening(shell, info, controller))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([finding, stopping], return_when=asyncio.FIRST_COMPLETED)
        shell.node.give_up_recovery()
        await finding
        return not stop.is_set()
    finally:
        saying.cancel()
        stopping.cancel()


def duties(
    shell: ReplicaServer, info: ReplicaInfo, controller: str, incarnation: str
) -> list[Coroutine[Any, Any, None]]:
    """What a replica does without being asked, for as long as it runs."""
    found: list[Coroutine[Any, Any, None]] = [
        shell.watch_batches(),
        stay_registered(shell, info, controller, incarnation),
        _drop_unread(shell),
    ]
    if shell.checkpoints is not None and shell.node.settings.checkpoint_interval_s:
        found += [shell.checkpointing.periodically(), shell.checkpointing.tidily()]
    return found


async def _drop_unread(shell: ReplicaServer) -> None:
    troubles = Troubles(log, "what nobody reads is not dropped")
    while True:
        await asyncio.sleep(shell.node.settings.transfer_timeout_s / 4)
        with troubles.survived():
            await shell.in_files(shell.node.sender.drop_unread)
