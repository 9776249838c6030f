"""gRPC handlers of a replica. Each handler translates a request and passes the work to the object that does it.

Handlers of commands are decorated with :func:`commanded`, and handlers for steps of moves with :func:`followed`. Two of
the objects are in this module: :class:`TakeoverHandler` takes over a partition from an owner that is gone, and
:class:`Sources` reads and changes what partitions know of their sources.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import suppress
from random import Random  # noqa: TID251 - the type; which one is handed in
from typing import Any

import grpc.aio

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import InvalidArgument, NotOwner, StateflowError
from stateflow.metrics.limits import LIMIT_HITS, Limit
from stateflow.partition.change_feed import Kept, Reading
from stateflow.partition.control import (
    Cancellation,
    Command,
    DiskView,
    Fence,
    Fenced,
    Preparation,
    Restore,
    TakenOver,
    TakeOver,
)
from stateflow.partition.layout import Position, Session
from stateflow.partition.local_partition import left
from stateflow.partition.positions import SourceView
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.applying import Applier, Confirmations
from stateflow.replica.checkpoints import CheckpointShell, TrialShell, VerifyShell
from stateflow.replica.executor import BatchThread, Changed, Garbage, Threads, free_caches
from stateflow.replica.membership import Member
from stateflow.replica.peers import Bundles, RoundTrips
from stateflow.replica.streams import CallStream
from stateflow.replica.transfer_in import IncomingTransfers
from stateflow.replica.transfer_out import Fencer, Followers, SnapshotServer
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.faults import abort
from stateflow.rpc.serving import caller, caller_name
from stateflow.rpc.wire import (
    connect,
    message_of,
    pieces,
    positions_to_pb,
    streaming,
    unary,
    value_of,
)
from stateflow.tracing import Made, Tracing, begin_about, traceparent_in
from stateflow.types import How, OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
SOURCES_PER_REPLY = 1000
#: number of partitions in which a source is opened at once; meanwhile, no batch and no seal of these partitions runs
OPENED_AT_ONCE = 128
#: number of partitions whose positions one thread reads at once
READ_AT_ONCE = 64
#: limits whose hits a replica counts, besides those of its calls
REPLICA_LIMITS: tuple[Limit, ...] = (
    "batch_seconds",
    "change_log_bytes",
    "commit_log_bytes",
    "followers",
    "sources",
    "stream_batches",
    "waiting_bytes",
)

# -- Commands, and spans of moves ------------------------------------------------------------------------------------


def commanded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a handler, unary or streaming, that only the controller which this replica obeys may call.

    The fencing token of the request is checked before the handler begins. Apply this decorator inside ``unary`` or
    ``streaming``, which report a refusal to the caller.
    """
    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def stream(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
            self.node.authority.check(value_of(Command, request.command))
            async for message in method(self, request, context):
                yield message

        return stream

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self.node.authority.check(value_of(Command, request.command))
        return await method(self, request, context)

    return handler


def followed(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a handler, unary or streaming, for a step of a move on this replica.

    Lines that the handler logs name the move. If the move is traced, the handler gets a span that is a child of the
    caller's. Apply this decorator inside ``unary`` or ``streaming``.

    Args:
        name: name of the span.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(method):

            @functools.wraps(method)
            async def stream(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
                made = _begun(name, self.tracing, request, context)
                try:
                    async for message in method(self, request, context):
                        yield message
                except BaseException as error:
                    if made is not None and not isinstance(error, GeneratorExit):
                        made.failed(error)
                    raise
                finally:
                    if made is not None:
                        made.end()

            return stream

        @functools.wraps(method)
        async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
            made = _begun(name, self.tracing, request, context)
            if made is None:
                return await method(self, request, context)
            try:
                with made.current():
                    return await method(self, request, context)
            except BaseException as error:
                made.failed(error)
                raise
            finally:
                made.end()

        return handler

    return decorate


def _begun(name: str, tracing: Tracing | None, request: Any, context: grpc.aio.ServicerContext) -> Made | None:
    ids: dict[str, Any] = _attributes_of(request)
    begin_about(lambda: ids)
    traceparent = "" if tracing is None else traceparent_in(context.invocation_metadata())
    if tracing is None or not traceparent:
        return None
    return tracing.begin(name, parent=traceparent, kind="server", **ids)


def _attributes_of(request: Any) -> dict[str, Any]:
    operator = request.operator if hasattr(request, "operator") else request.spec.name
    return {"move": request.move_id, "operator": operator, "partition": request.partition}


# -- Takeover --------------------------------------------------------------------------------------------------------


class TakeoverHandler:
    def __init__(
        self, node: ReplicaNode, checkpoints: CheckpointStore | None, threads: Threads, transfers: IncomingTransfers
    ) -> None:
        self._node, self._checkpoints, self._threads, self._transfers = node, checkpoints, threads, transfers

    async def take_over(self, wanted: TakeOver) -> TakenOver:
        """Takes over the partition with the state of a standby's copy, of local files or of a checkpoint.

        Raises InvalidArgument if a checkpoint is needed but there is no store, and the errors of the chosen way.
        """
        successor, partition = self._node.successor, wanted.partition
        move_id, epoch, command = wanted.move_id, wanted.epoch, wanted.command
        match wanted.how:
            case How.STANDBY:
                taken = await self._threads.in_quick(
                    successor.from_standby, partition, move_id, epoch, wanted.standby_move, command
                )
                self._transfers.stop(partition)
                return taken
            case How.LOCAL:
                return await self._threads.in_quick(successor.from_local, partition, move_id, epoch, command)
            case How.CHECKPOINT:
                return await self._threads.in_files(
                    successor.from_checkpoint,
                    wanted.spec,
                    partition,
                    move_id,
                    epoch,
                    self._store(),
                    command,
                    wanted.oldest_epoch,
                )

    def _store(self) -> CheckpointStore:
        if self._checkpoints is None:
            raise InvalidArgument(
                "this replica has no checkpoint store",
                remedy="start it with --checkpoints URL, or restart the partition's former owner",
                replica=self._node.info.name,
            )
        return self._checkpoints


# -- Sources of partitions -------------------------------------------------------------------------------------------


class Sources:
    """Opens and retires sources, and reads their positions and kept outputs. Methods raise NotOwner or LeaseLost for
    partitions that this replica may not serve."""

    def __init__(
        self, node: ReplicaNode, threads: Threads, batch_thread: BatchThread, confirmations: Confirmations
    ) -> None:
        self._node, self._threads, self._batch_thread, self._confirmations = node, threads, batch_thread, confirmations

    async def positions(
        self, operator: str, source: str, partitions: Collection[int], before: int | None = None
    ) -> Position | dict[int, Position]:
        """Returns a source's position in each partition. Partitions without a batch of the source are left out.

        If all partitions contain the batch before ``before``, returns a single position instead, from memory. Tasks of
        micro-batches pass ``before``.
        """
        if before is not None:
            whole = self._node.reader.whole_before(operator, partitions, source, before)
            if whole is not None:
                return whole
        found: dict[int, Position] = {}
        numbers = list(partitions)
        for first in range(0, len(numbers), READ_AT_ONCE):  # to wake a thread costs more than to read one position
            some = numbers[first : first + READ_AT_ONCE]
            found |= await self._threads.in_files(self._read, operator, source, some)
        return found

    def _read(self, operator: str, source: str, numbers: Collection[int]) -> dict[int, Position]:
        positions = ((number, self._node.reader.position(PartitionId(operator, number), source)) for number in numbers)
        return {number: position for number, position in positions if position is not None}

    async def open(
        self, operator: str, source: str, partitions: Collection[int], session: Session, settled: int | None = None
    ) -> Position | dict[int, Position]:
        """Opens a session of a source, and returns the source's positions. From then on older clients are refused.

        The client treats the batches that partitions contain now as acknowledged. So if acknowledgements wait for a
        standby, this call waits for it, too.

        Args:
            settled: see :meth:`~stateflow.partition.sources.Sources.open`.

        Raises SourceTaken if a newer session is open, StandbyMissing if no standby confirms the batches in time, or
        SourceRetired.
        """
        batches, at_once = self._node.batches, OPENED_AT_ONCE if self._node.batches.commits_together else 1
        wanted = [PartitionId(operator, number) for number in partitions]
        at: dict[PartitionId, int] = {}
        refused: list[NotOwner] = []
        for first in range(0, len(wanted), at_once):
            some = wanted[first : first + at_once]
            for partition in some:
                if at_once > 1 and not batches.is_ready(partition):
                    with suppress(NotOwner):  # it is among the outcomes below
                        await self._batch_thread.between_batches(batches.make_ready, partition)
            opened = await self._batch_thread.between_batches(batches.open_source, some, source, session, settled)
            for partition, outcome in opened.items():
                if isinstance(outcome, NotOwner):
                    refused.append(outcome)
                else:
                    at[partition] = outcome
        if refused:  # raised last: the client asks for all again, but partitions opened by now need no further write
            raise refused[0]
        if self._confirmations.is_needed:
            deadline = self._confirmations.deadline()
            for partition, sequence in at.items():
                missing = await self._confirmations.of(partition, sequence, deadline)
                if missing is not None:
                    raise left(partition) if isinstance(missing, ReplicaInfo) else missing
        return await self.positions(operator, source, partitions)

    async def outputs(
        self, operator: str, source: str, partitions: Collection[int], after: int
    ) -> AsyncIterator[tuple[int, int, bytes]]:
        """Yields (partition, batch, kept output) of batches after ``after``."""
        for number in partitions:
            partition = PartitionId(operator, number)
            for batch, output in await self._threads.in_files(self._node.reader.outputs, partition, source, after):
                yield number, batch, output

    async def views(self, operator: str, partitions: Collection[int]) -> AsyncIterator[tuple[int, list[SourceView]]]:
        """Yields (partition, sources that have sent batches to the partition)."""
        for number in partitions:
            yield number, await self._threads.in_files(self._node.reader.sources, PartitionId(operator, number))

    async def retire(self, operator: str, source: str, partitions: Collection[int]) -> int:
        """Retires a source. Returns the number of partitions that knew the source and had not retired it before."""
        retired = 0
        for number in partitions:
            retired += await self._batch_thread.between_batches(
                self._node.batches.retire_source, PartitionId(operator, number), source
            )
        return retired

    async def drop_output(
        self, operator: str, source: str, batch: int, partitions: Collection[int], apply: bool
    ) -> dict[int, int]:
        """Returns the size of a batch's stored output in each partition, and drops the output if ``apply`` is True.

        Partitions without a stored output are left out.
        """
        found: dict[int, int] = {}
        for number in partitions:
            partition = PartitionId(operator, number)
            size = await self._batch_thread.between_batches(
                self._node.batches.drop_output, partition, source, batch, apply
            )
            if size:
                found[number] = size
        return found


# -- Messages of change sets -----------------------------------------------------------------------------------------


def frames_of(reading: Reading, bytes_max: int) -> Iterator[rpb.ChangeFrame]:
    """Packs a reading of a change log into as few messages as ``bytes_max`` allows.

    The target applies one message at a time. So change sets that gathered while the base was copied are applied
    together, which shortens the pause of the partition. If a change set continues in the next frame, it is the last one
    in its frame. Only the last frame states how far the source has come.
    """
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
        frame.seal.CopyFrom(message_of(rpb.Seal, reading.seal))
    yield frame


# -- Handlers --------------------------------------------------------------------------------------------------------


class ReplicaService(replica_pb2_grpc.ReplicaServiceServicer):
    """The gRPC service of one replica.

    Args:
        checkpoints: store for periodic and on-demand checkpoints; None if no checkpoints are taken.
        random: varies the intervals of heartbeats and checkpoints; None: one with a fixed seed, for tests.
        garbage: collects this process's garbage between batches; None if other code does.
        tracing: receiver of the replica's spans; None turns tracing off.
    """

    def __init__(
        self,
        node: ReplicaNode,
        checkpoints: CheckpointStore | None,
        clock: Clock = SYSTEM_CLOCK,
        connect: Callable[[str], grpc.aio.Channel] = connect,
        random: Random | None = None,
        garbage: Garbage | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.node, self.tracing = node, tracing
        self.threads = Threads()
        self.bundles = Bundles(node.bundles, self.threads)
        self._random = random or Random(0)
        self.checkpointing = CheckpointShell(node, checkpoints, clock, self._random)
        self._verifying = VerifyShell(node, self.threads)
        self._trials = TrialShell(node, clock, self.threads)
        self._clock, self._connect = clock, connect
        changed = Changed(node, self._free_caches)
        self._followers = Followers(node, clock)
        self._snapshots = SnapshotServer(node, clock, self.threads)
        self._fencer = Fencer(node, clock, self.threads, changed)
        self._transfers = IncomingTransfers(node, checkpoints, clock, connect, self.threads)
        self._takeovers = TakeoverHandler(node, checkpoints, self.threads, self._transfers)
        self.applier = Applier(node, clock, changed.next, self._transfers.ask, garbage, tracing)
        self._round_trips = RoundTrips(connect, clock)
        self._sources = Sources(node, self.threads, self.applier.batch_thread, self.applier.confirmations)
        self.streams: set[CallStream] = set()  #: open streams of batches
        self._freeing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        LIMIT_HITS.watch(*REPLICA_LIMITS)

    def member(self, info: ReplicaInfo) -> Member:
        """Returns the parts of this replica that its membership of the cluster needs."""
        shared = self.threads, self._transfers, self._followers, self.bundles
        return Member(self.node, info, self._clock, self._connect, *shared, self._random)

    # -- batches ------------------------------------------------------------------------------------------

    async def Apply(self, requests: AsyncIterator[rpb.ApplyRequest], context: grpc.aio.ServicerContext) -> None:
        whose, settings = caller_name(context), self.node.settings
        stream = CallStream(
            self.applier,
            context.write,
            settings.chunk_bytes,
            whose,
            self.streams.__len__,
            settings.stream_bytes_max,
        )
        self.streams.add(stream)
        try:
            await stream.run(requests)
        except StateflowError as error:  # the call's error is its answer
            await abort(context, error)
        finally:
            self.streams.discard(stream)

    # -- control ------------------------------------------------------------------------------------------

    @unary
    @commanded
    async def Create(self, request: rpb.CreateRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        spec = value_of(OperatorSpec, request.spec)
        await self.bundles.ensure(spec)
        if request.asked:
            await self.threads.in_files(self.node.check, spec, request.total)
        elif not request.partitions:
            if (refused := await self.threads.in_files(self.node.follow, spec)) is not None:
                raise refused
        else:
            wanted = list(request.partitions), request.epoch, request.total, value_of(Command, request.command)
            await self.threads.in_files(self.node.create, spec, *wanted)
        return pb.Empty()

    @streaming
    @commanded
    async def Try(self, request: rpb.TryRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[rpb.TryPage]:
        spec = value_of(OperatorSpec, request.spec)
        await self.bundles.ensure(spec)
        async for number in self._trials.run(spec, request.partitions):
            yield rpb.TryPage(partition=number)

    @unary
    @commanded
    async def Drop(self, request: rpb.DropRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        await self.threads.in_files(self.node.drop, request.operator, request.epoch)
        return pb.Empty()

    # -- checkpoints and reading --------------------------------------------------------------------------

    @unary
    @commanded
    async def Checkpoint(
        self, request: rpb.CheckpointRequest, context: grpc.aio.ServicerContext
    ) -> rpb.CheckpointReply:
        wanted = request.operator, set(request.partitions), request.savepoint
        return message_of(rpb.CheckpointReply, await self.checkpointing.on_demand(*wanted))

    @unary
    @commanded
    async def Restore(self, request: rpb.RestoreRequest, context: grpc.aio.ServicerContext) -> rpb.RestoreReply:
        restore, command = value_of(Restore, request), value_of(Command, request.command)
        shell = self.checkpointing
        restored = await (shell.own(restore, command) if request.own else shell.prepare(restore))
        return message_of(rpb.RestoreReply, restored)

    @streaming
    @commanded
    async def Verify(
        self, request: rpb.VerifyRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.VerifyPage]:
        standby_of = request.standby_of if request.HasField("standby_of") else None
        async for page in self._verifying.verify(PartitionId(request.operator, request.partition), standby_of):
            yield message_of(rpb.VerifyPage, page)

    @streaming
    async def Scan(self, request: rpb.ScanRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[rpb.ScanPage]:
        for number in request.partitions:
            scan = self.node.reader.scan_pages(PartitionId(request.operator, number), request.state, request.keys)
            while pages := await self.threads.in_files(next, scan, None):
                for page in pages:
                    for piece, last in pieces(page, self.node.settings.chunk_bytes):
                        yield rpb.ScanPage(records=piece, continues=not last)

    @unary
    async def Stats(self, request: rpb.StatsRequest, context: grpc.aio.ServicerContext) -> rpb.StatsReply:
        samples, views, disk = self.applier.samples, self.node.views(), DiskView()
        if request.sizes:
            views, disk = await self.threads.in_sizes(self.node.sized, views)
        return message_of(
            rpb.StatsReply,
            disk,
            samples=samples.after(request.after, request.newest),
            partitions=views,
            rows=samples.rows,
            checkpoints=self.checkpointing.taken,
        )

    @unary
    @commanded
    async def RoundTrips(
        self, request: rpb.RoundTripsRequest, context: grpc.aio.ServicerContext
    ) -> rpb.RoundTripsReply:
        return rpb.RoundTripsReply(milliseconds=await self._round_trips.measure(request.addresses))

    @unary
    async def Positions(self, request: rpb.PositionsRequest, context: grpc.aio.ServicerContext) -> rpb.PositionsReply:
        before = request.before if request.HasField("before") else None
        found = await self._sources.positions(request.operator, request.source, request.partitions, before)
        return positions_to_pb(found)

    @unary
    async def OpenSource(self, request: rpb.OpenSourceRequest, context: grpc.aio.ServicerContext) -> rpb.PositionsReply:
        asked = request.asked
        settled = request.settled if request.HasField("settled") else None
        session = value_of(Session, request.session)
        found = await self._sources.open(asked.operator, asked.source, asked.partitions, session, settled)
        return positions_to_pb(found)

    @streaming
    async def Outputs(
        self, request: rpb.OutputsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.OutputsReply]:
        kept = self._sources.outputs(request.operator, request.source, request.partitions, request.after)
        async for partition, batch, output in kept:
            for piece, last in pieces(output, self.node.settings.chunk_bytes):
                yield rpb.OutputsReply(partition=partition, batch=batch, output=piece, more=not last)

    @streaming
    async def Sources(
        self, request: rpb.SourcesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.SourcesReply]:
        async for number, found in self._sources.views(request.operator, request.partitions):
            for at in range(0, len(found), SOURCES_PER_REPLY):
                page = found[at : at + SOURCES_PER_REPLY]
                yield rpb.SourcesReply(sources=[message_of(rpb.SourceView, each, partition=number) for each in page])

    @unary
    async def RetireSource(
        self, request: rpb.PositionsRequest, context: grpc.aio.ServicerContext
    ) -> rpb.RetireSourceReply:
        log.info(
            "%s retires the source %r of %s, partitions: %d",
            caller_name(context),
            request.source,
            request.operator,
            len(request.partitions),
        )
        retired = await self._sources.retire(request.operator, request.source, request.partitions)
        return rpb.RetireSourceReply(retired=retired)

    @unary
    async def DropOutput(
        self, request: rpb.DropOutputRequest, context: grpc.aio.ServicerContext
    ) -> rpb.DropOutputReply:
        if request.apply:
            log.info(
                "%s drops the kept output of batch %d of the source %r of %s, partitions: %d",
                caller_name(context),
                request.batch,
                request.source,
                request.operator,
                len(request.partitions),
            )
        named = request.operator, request.source, request.batch
        return rpb.DropOutputReply(sizes=await self._sources.drop_output(*named, request.partitions, request.apply))

    # -- moves, at the target -----------------------------------------------------------------------------

    @streaming
    @commanded
    @followed("stateflow.prepare")
    async def Prepare(
        self, request: rpb.PrepareRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.MoveProgress]:
        async for progress in self._transfers.run(value_of(Preparation, request), request.standby_move):
            yield message_of(rpb.MoveProgress, progress)

    @unary
    @commanded
    @followed("stateflow.take_over")
    async def TakeOver(self, request: rpb.TakeOverRequest, context: grpc.aio.ServicerContext) -> rpb.TakeOverReply:
        return message_of(rpb.TakeOverReply, await self._takeovers.take_over(value_of(TakeOver, request)))

    # -- moves, at the source -----------------------------------------------------------------------------

    @unary
    @commanded
    @followed("stateflow.fence")
    async def Fence(self, request: rpb.FenceRequest, context: grpc.aio.ServicerContext) -> rpb.FenceReply:
        try:
            fenced = Fenced(await self._fencer.fence(value_of(Fence, request)))
        except StateflowError as error:
            fenced = Fenced(refused=error)
        return message_of(rpb.FenceReply, fenced)

    @unary
    @commanded
    async def Surrender(self, request: rpb.FenceRequest, context: grpc.aio.ServicerContext) -> rpb.FenceReply:
        await self._fencer.surrender(value_of(Fence, request))
        return rpb.FenceReply(sealed=True)

    @unary
    @commanded
    @followed("stateflow.cancel")
    async def Cancel(self, request: rpb.CancelRequest, context: grpc.aio.ServicerContext) -> rpb.FenceReply:
        cancellation = value_of(Cancellation, request)
        cancelled = await self._fencer.cancel(cancellation)
        self._transfers.dismiss(cancellation.partition, cancellation.move_id)
        return message_of(rpb.FenceReply, cancelled)

    @unary
    @commanded
    async def Release(self, request: rpb.ReleaseRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        partition = PartitionId(request.operator, request.partition)
        await self.threads.in_quick(self.node.sender.release, partition, request.move_id)
        return pb.Empty()

    @unary
    @commanded
    async def Hold(self, request: rpb.HoldRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        self.node.batches.hold(request.operator, request.seconds)
        return pb.Empty()

    @unary
    async def Inspect(self, request: rpb.InspectRequest, context: grpc.aio.ServicerContext) -> rpb.PartitionView:
        view = self.node.view(PartitionId(request.operator, request.partition))
        return message_of(rpb.PartitionView, view)

    @unary
    async def Snapshot(self, request: rpb.SnapshotRequest, context: grpc.aio.ServicerContext) -> rpb.SnapshotReply:
        partition = PartitionId(request.operator, request.partition)
        kept, follower = value_of(Kept, request.kept), ""  # unset: no move, so it matches no copy
        if (who := caller()) is not None:
            follower = await self._followers.check(who, partition, request.move_id, request.standby)
        snapshot = await self.threads.in_files(
            self.node.sender.snapshot, partition, request.move_id, request.standby, kept, follower
        )
        return message_of(rpb.SnapshotReply, snapshot)

    @streaming
    async def Fetch(self, request: rpb.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[rpb.FileChunk]:
        self._check_follower("Fetch", request.snapshot_id)
        async for data, checksum in self._snapshots.file(request.snapshot_id, request.name, request.offset):
            yield rpb.FileChunk(data=data, checksum=checksum)

    @streaming
    async def Follow(
        self, request: rpb.FollowRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.ChangeFrame]:
        self._check_follower("Follow", request.snapshot_id)
        async for reading in self._snapshots.changes(request.snapshot_id, request.after_sequence):
            for frame in frames_of(reading, self.node.settings.chunk_bytes):
                yield frame

    @unary
    async def Confirm(self, request: rpb.ConfirmRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        self._check_follower("Confirm", request.snapshot_id)
        self.node.sender.confirm(request.snapshot_id, request.sequence)
        return pb.Empty()

    def _check_follower(self, call: str, snapshot_id: str) -> None:
        """Checks that the caller speaks for the follower that took a snapshot. Without TLS, callers cannot be told
        apart, and all may call. Raises MoveUnknown, NotAllowed."""
        if (who := caller()) is not None:
            self.node.sender.check_follower(who, call, snapshot_id)

    # -- plumbing -----------------------------------------------------------------------------------------

    def _free_caches(self) -> None:
        if self.node.cache.has_left and (self._freeing is None or self._freeing.done()):
            self._freeing = self._loop.create_task(free_caches(self.node.cache, self.applier.batch_thread))

    def end_streams(self) -> None:
        """Stops reading batches. Batches that were received completely are still answered."""
        for stream in self.streams:
            stream.end()

    async def close(self) -> None:
        await self.applier.close()
        await self._transfers.close()
        self.threads.close()
        self.checkpointing.close()
        self._verifying.close()
        self.node.close()
