"""A replica's gRPC shell: one event loop for control, one thread for batches, a few for files."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import sys
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pyarrow as pa
import xxhash

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import InvalidArgument, Moved, MoveUnknown, NotOwner, StateflowError
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc, replica_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.puller import Incoming, Pull
from stateflow.rpc.wire import (
    OPTIONS,
    bind,
    fault_of,
    pieces,
    remote_error,
    replica_of,
    replica_to_pb,
    seal_to_pb,
    snapshot_to_pb,
    spec_of,
    streaming,
    unary,
    unexpected,
)
from stateflow.runtime.host import Applied, Batch
from stateflow.runtime.layout import Attempt
from stateflow.runtime.lifecycle import Lifecycle, State
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.transfer import ChangeLog
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: how long a thread may keep the interpreter from the event loop; bounds what a busy batch adds to a pause
SWITCH_INTERVAL_S = 0.0005
#: batches make many objects and no cycles; the collector's default thresholds cost a third of the throughput
GC_THRESHOLDS = (100_000, 20, 50)
SAMPLES_KEPT = 100_000
SCAN_ROWS = 10_000
SCAN_BYTES = 3 << 20
FOLLOW_IDLE_S = 1.0


@dataclass(slots=True)
class _Part:
    partition: PartitionId
    epoch: int
    rows: bytes


@dataclass(slots=True)
class _Call:
    """One Apply stream. ``buffers``: pieces of rows that are not complete yet."""

    batch: Batch
    schema: bytes
    buffers: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    rows: int = 0


class ReplicaServer(replica_pb2_grpc.ReplicaServiceServicer):
    """Args: checkpoints: where periodic and on-demand checkpoints go; None switches them off."""

    def __init__(self, node: ReplicaNode, checkpoints: CheckpointStore | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.node = node
        self._checkpoints = checkpoints
        self._clock = clock
        self._batches = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._files = ThreadPoolExecutor(4, thread_name_prefix="files")
        self._peers: dict[str, grpc.aio.Channel] = {}
        self._pulls: dict[PartitionId, _RunningPull] = {}
        self._changed: dict[PartitionId, asyncio.Event] = {}
        self._samples: deque[rpb.RequestSample] = deque(maxlen=SAMPLES_KEPT)
        self._sample_number = 0
        self._rows = 0
        self._checkpoints_taken = 0
        self._checkpointing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        node.on_change(self._wake_from_thread)

    def _wake_from_thread(self, partition: PartitionId) -> None:
        self._loop.call_soon_threadsafe(self._wake, partition)

    def _wake(self, partition: PartitionId) -> None:
        event = self._changed.pop(partition, None)
        if event is not None:
            event.set()

    # -- records ------------------------------------------------------------------------------------------

    async def Apply(self, requests: AsyncIterator[rpb.ApplyRequest], context: grpc.aio.ServicerContext) -> None:
        started = self._clock.monotonic()
        call: _Call | None = None
        operator = ""
        early: list[_Part] = []
        async for request in requests:
            if call is None:
                header = request.header
                operator = header.operator
                watermark_us = header.watermark_us if header.HasField("watermark_us") else None
                a = header.attempt
                attempt = Attempt(a.run, a.use, a.task, a.call)
                batch = Batch(header.source, header.batch, header.sparse, watermark_us, attempt)
                call = _Call(batch, header.input_schema)
            parts = [_Part(PartitionId(operator, p.partition), p.epoch, r) for p, r in _complete(call, request)]
            early += await self._apply_all(call, parts, context)
        held_from = self._clock.monotonic()
        if call is not None and early:
            await self._apply_early(call, early, context)
        self._sample(operator, call, started, held_from if early else None)

    async def _apply_all(self, call: _Call, parts: list[_Part], context: grpc.aio.ServicerContext) -> list[_Part]:
        """Apply and answer; returns the parts whose partition is still on its way here."""
        if not parts:
            return []
        outcomes = await self._loop.run_in_executor(self._batches, self._apply_in_thread, call, parts)
        early: list[_Part] = []
        results: list[rpb.PartitionResult] = []
        for part, outcome in zip(parts, outcomes, strict=True):
            if outcome is None:
                early.append(part)
            else:
                results += self._results(part, outcome)
                if isinstance(outcome, Applied):
                    call.rows += outcome.rows
        for response in _packed(results, self.node.settings.chunk_bytes):
            await context.write(response)
        return early

    def _apply_in_thread(self, call: _Call, parts: list[_Part]) -> list[Applied | ReplicaInfo | StateflowError | None]:
        outcomes: list[Applied | ReplicaInfo | StateflowError | None] = []
        for part in parts:
            try:
                outcomes.append(self.node.apply(part.partition, part.epoch, call.batch, call.schema, part.rows))
            except StateflowError as error:
                outcomes.append(error)
            except Exception as error:
                log.exception("batch %s failed on %s", call.batch, part.partition)
                outcomes.append(unexpected(error))
        return outcomes

    async def _apply_early(self, call: _Call, early: list[_Part], context: grpc.aio.ServicerContext) -> None:
        """Requests that came ahead of their partition: served as soon as it is here, else sent back."""
        deadline = self._clock.monotonic() + self.node.settings.hold_timeout_s
        while early:
            events = [self._changed.setdefault(part.partition, asyncio.Event()) for part in early]
            early = await self._apply_all(call, early, context)
            left = deadline - self._clock.monotonic()
            if early and left <= 0:
                for part in early:
                    late = NotOwner("the partition did not arrive in time", remedy="refresh", partition=part.partition)
                    await context.write(rpb.ApplyResponse(results=self._results(part, late)))
                return
            if early:
                waits = [asyncio.ensure_future(event.wait()) for event in events]
                _, pending = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for wait in pending:
                    wait.cancel()

    def _results(self, part: _Part, outcome: Applied | ReplicaInfo | StateflowError) -> list[rpb.PartitionResult]:
        number = part.partition.partition
        if isinstance(outcome, Applied):
            return [
                rpb.PartitionResult(partition=number, output=piece, last=last, replayed=outcome.replayed)
                for piece, last in pieces(outcome.output, self.node.settings.chunk_bytes)
            ]
        if isinstance(outcome, ReplicaInfo):
            outcome = Moved(
                "the partition went to another replica",
                remedy="send it there",
                owner=outcome.name,
                site=outcome.site,
                address=outcome.address,
                epoch=self.node.lifecycle(part.partition).epoch,
            )
        return [rpb.PartitionResult(partition=number, last=True, fault=fault_of(outcome))]

    def _sample(self, operator: str, call: _Call | None, started: float, held_from: float | None) -> None:
        now = self._clock.monotonic()
        self._sample_number += 1
        rows = call.rows if call else 0
        self._rows += rows
        self._samples.append(
            rpb.RequestSample(
                number=self._sample_number,
                at_us=self._clock.now_us(),
                operator=operator,
                rows=rows,
                total_ms=(now - started) * 1e3,
                held_ms=0.0 if held_from is None else (now - held_from) * 1e3,
            )
        )

    # -- control ------------------------------------------------------------------------------------------

    @unary
    async def Create(self, request: rpb.CreateRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        spec = spec_of(request.spec)
        await self._in_files(self.node.create, spec, list(request.partitions), request.epoch)
        return pb.Empty()

    @streaming
    async def Prepare(
        self, request: rpb.PrepareRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.MoveProgress]:
        spec = spec_of(request.spec)
        partition = PartitionId(spec.name, request.partition)
        lifecycle = self.node.lifecycle(partition)
        if lifecycle.state is State.OWNED and lifecycle.move_id == request.move_id:
            yield rpb.MoveProgress(phase=rpb.MoveProgress.OWNED, epoch=lifecycle.epoch)  # it ended before
            return
        # The transfer outlives this call: a controller that goes away must not stop a move that is sealed, and
        # one that comes back joins the transfer that is under way.
        running = self._pulls.get(partition)
        if running is None or running.move_id != request.move_id or running.task.done():
            source = replica_of(request.source)
            move = Incoming(request.move_id, spec, partition, source, request.source_epoch)
            pull = Pull(self.node, move, self._peer(source.address), self._files, self._clock)
            running = self._pulls[partition] = _RunningPull(request.move_id, pull, self._loop)
        async for report in running.reports():
            yield report

    @unary
    async def Fence(self, request: rpb.FenceRequest, context: grpc.aio.ServicerContext) -> rpb.FenceReply:
        partition = PartitionId(request.operator, request.partition)
        started = self._clock.monotonic()
        target = replica_of(request.target)
        in_hand_ms = 0.0
        try:
            event = self._changed.setdefault(partition, asyncio.Event())
            sealed = await self._in_files(self.node.sender.fence, partition, request.move_id, request.epoch, target)
            while not sealed:  # the batch in hand is being finished
                await event.wait()
                event = self._changed.setdefault(partition, asyncio.Event())
                lifecycle = self.node.lifecycle(partition)
                sealed = lifecycle.state is State.SEALED
                in_hand_ms = (self._clock.monotonic() - started) * 1e3
                if not sealed and lifecycle.state is not State.FENCING:
                    raise MoveUnknown("the fence was cancelled", remedy="none", move=request.move_id)
        except StateflowError as error:
            return rpb.FenceReply(sealed=False, fault=fault_of(error))
        return rpb.FenceReply(sealed=True, in_hand_ms=in_hand_ms)

    @unary
    async def Cancel(self, request: rpb.CancelRequest, context: grpc.aio.ServicerContext) -> rpb.FenceReply:
        partition = PartitionId(request.operator, request.partition)
        cancelled = await self._in_files(self.node.cancel, partition, request.move_id)
        return rpb.FenceReply(sealed=not cancelled)

    @unary
    async def Release(self, request: rpb.ReleaseRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        partition = PartitionId(request.operator, request.partition)
        await self._in_files(self.node.sender.release, partition, request.move_id)
        return pb.Empty()

    @unary
    async def Inspect(self, request: rpb.InspectRequest, context: grpc.aio.ServicerContext) -> rpb.PartitionView:
        return _view(self.node.lifecycle(PartitionId(request.operator, request.partition)), 0)

    # -- state transfer, source side ----------------------------------------------------------------------

    @unary
    async def Snapshot(self, request: rpb.SnapshotRequest, context: grpc.aio.ServicerContext) -> rpb.SnapshotReply:
        partition = PartitionId(request.operator, request.partition)
        return snapshot_to_pb(await self._in_files(self.node.sender.snapshot, partition, request.move_id))

    @streaming
    async def Fetch(self, request: rpb.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[rpb.FileChunk]:
        path = self.node.sender.snapshot_file(request.snapshot_id, request.name)
        with path.open("rb") as file:
            file.seek(request.offset)
            while data := await self._in_files(file.read, self.node.settings.chunk_bytes):
                yield rpb.FileChunk(data=data, checksum=xxhash.xxh64_intdigest(data))

    @streaming
    async def Follow(
        self, request: rpb.FollowRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.ChangeFrame]:
        changes = self.node.sender.change_log(request.snapshot_id)
        more = asyncio.Event()

        def wake() -> None:
            self._loop.call_soon_threadsafe(more.set)

        changes.wake = wake
        after, said = request.after_sequence, False
        while True:
            more.clear()
            _check_log(changes)
            reading = changes.read(after, self.node.settings.chunk_bytes)
            after += len(reading.change_sets)
            if reading.change_sets or reading.seal or not said:
                for frame in _frames(reading.change_sets, self.node.settings.chunk_bytes):
                    yield frame
                closing = rpb.ChangeFrame(head_sequence=reading.head_sequence, lag_bytes=reading.lag_bytes)
                if reading.seal is not None:
                    closing.seal.CopyFrom(seal_to_pb(reading.seal))
                yield closing
                said = True
            if reading.seal is not None:
                return
            if not reading.lag_bytes:
                try:
                    await asyncio.wait_for(more.wait(), FOLLOW_IDLE_S)
                except TimeoutError:
                    said = False  # so that a silent stream is a broken one

    # -- checkpoints and reading --------------------------------------------------------------------------

    @unary
    async def Checkpoint(
        self, request: rpb.CheckpointRequest, context: grpc.aio.ServicerContext
    ) -> rpb.CheckpointReply:
        return await self.checkpoint(request.operator or None)

    async def checkpoint(self, operator: str | None = None) -> rpb.CheckpointReply:
        if self._checkpoints is None:
            raise InvalidArgument(
                "this replica has no checkpoint store",
                remedy="start it with --checkpoints URL",
                replica=self.node.info.name,
            )
        started = self._clock.monotonic()
        reply = rpb.CheckpointReply()
        async with self._checkpointing:  # one at a time: each uses the same directory for its snapshot
            for partition in self.node.owned(operator):
                saved = await self._in_files(self.node.checkpoint, partition, self._checkpoints)
                if saved is not None:
                    reply.partitions += 1
                    reply.bytes_new += saved.bytes_new
                    reply.bytes_total += saved.bytes_total
        reply.duration_s = self._clock.monotonic() - started
        self._checkpoints_taken += 1
        return reply

    @streaming
    async def Scan(self, request: rpb.ScanRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[rpb.ScanPage]:
        for number in request.partitions:
            entries = self.node.scan(PartitionId(request.operator, number), request.state)
            while pages := await self._in_files(_scan_pages, entries, number):
                for page in pages:
                    yield rpb.ScanPage(records=page)

    @unary
    async def Stats(self, request: rpb.StatsRequest, context: grpc.aio.ServicerContext) -> rpb.StatsReply:
        samples = [sample for sample in self._samples if sample.number > request.after]
        views = [_view(lifecycle, sequence) for lifecycle, sequence in self.node.inventory()]
        return rpb.StatsReply(samples=samples, partitions=views, rows=self._rows, checkpoints=self._checkpoints_taken)

    @unary
    async def Positions(self, request: rpb.PositionsRequest, context: grpc.aio.ServicerContext) -> rpb.PositionsReply:
        reply = rpb.PositionsReply()
        for number in request.partitions:
            partition = PartitionId(request.operator, number)
            position = await self._in_files(self.node.position, partition, request.source)
            if position is not None:
                reply.positions[number] = position
        return reply

    # -- plumbing -----------------------------------------------------------------------------------------

    def _peer(self, address: str) -> grpc.aio.Channel:
        if address not in self._peers:
            self._peers[address] = grpc.aio.insecure_channel(address, options=OPTIONS)
        return self._peers[address]

    async def _in_files(self, work, *arguments):  # type: ignore[no-untyped-def]
        return await self._loop.run_in_executor(self._files, work, *arguments)

    async def close(self) -> None:
        for channel in self._peers.values():
            await channel.close()
        self._batches.shutdown()
        self._files.shutdown()
        self.node.close()


class _RunningPull:
    """A transfer and whoever listens to it."""

    def __init__(self, move_id: str, pull: Pull, loop: asyncio.AbstractEventLoop) -> None:
        self.move_id = move_id
        self._listeners: list[asyncio.Queue[rpb.MoveProgress | None]] = []
        self.task = loop.create_task(self._run(pull))

    async def _run(self, pull: Pull) -> None:
        try:
            async for report in pull.run():
                self._say(report)
        except Exception as error:
            log.exception("a transfer failed")
            self._say(rpb.MoveProgress(phase=rpb.MoveProgress.FAILED, fault=fault_of(unexpected(error))))
        finally:
            self._say(None)

    def _say(self, report: rpb.MoveProgress | None) -> None:
        for listener in self._listeners:
            listener.put_nowait(report)

    async def reports(self) -> AsyncIterator[rpb.MoveProgress]:
        queue: asyncio.Queue[rpb.MoveProgress | None] = asyncio.Queue()
        self._listeners.append(queue)
        try:
            while (report := await queue.get()) is not None:
                yield report
        finally:
            self._listeners.remove(queue)


def _complete(call: _Call, request: rpb.ApplyRequest) -> Iterator[tuple[rpb.PartitionRows, bytes]]:
    for part in request.parts:
        if not part.last:
            call.buffers[part.partition].append(part.rows)
        elif part.partition in call.buffers:
            yield part, b"".join([*call.buffers.pop(part.partition), part.rows])
        else:
            yield part, part.rows


def _packed(results: list[rpb.PartitionResult], bytes_max: int) -> Iterator[rpb.ApplyResponse]:
    """Results in as few messages as the limit allows; order kept."""
    response, size = rpb.ApplyResponse(), 0
    for result in results:
        if size and size + len(result.output) > bytes_max:
            yield response
            response, size = rpb.ApplyResponse(), 0
        response.results.append(result)
        size += len(result.output) + 64
    if response.results:
        yield response


def _frames(change_sets: list[bytes], bytes_max: int) -> Iterator[rpb.ChangeFrame]:
    for change_set in change_sets:
        for piece, last in pieces(change_set, bytes_max):
            yield rpb.ChangeFrame(change_sets=[piece], continues=not last)


def _check_log(changes: ChangeLog) -> None:
    if changes.closed:
        raise MoveUnknown("the move was cancelled or began anew", remedy="start it again", move=changes.move_id)
    if changes.overflowed:
        raise MoveUnknown(
            "changes came faster than they were fetched",
            remedy="raise the change log's limit",
            move=changes.move_id,
        )


def _view(lifecycle: Lifecycle, sequence: int) -> rpb.PartitionView:
    return rpb.PartitionView(
        operator=lifecycle.partition.operator,
        partition=lifecycle.partition.partition,
        state=lifecycle.state,
        epoch=lifecycle.epoch,
        sequence=sequence,
        move_id=lifecycle.move_id,
    )


def _scan_pages(entries: Iterator[tuple[object, object, object]], partition: int) -> list[bytes]:
    """Up to SCAN_ROWS entries as Arrow IPC streams that fit messages; none at the end."""
    rows = list(itertools.islice(entries, SCAN_ROWS))
    return list(_fitting(rows, partition)) if rows else []


def _fitting(rows: list[tuple[object, object, object]], partition: int) -> Iterator[bytes]:
    page = _scan_page(rows, partition)
    if len(page) <= SCAN_BYTES or len(rows) == 1:
        yield page
        return
    half = len(rows) // 2
    yield from _fitting(rows[:half], partition)
    yield from _fitting(rows[half:], partition)


def _scan_page(rows: list[tuple[object, object, object]], partition: int) -> bytes:
    keys, entry_keys, values = (list(column) for column in zip(*rows, strict=True))
    table = pa.table(
        {
            "key": [list(key) if isinstance(key, tuple) else key for key in keys],
            "map_key": entry_keys,
            "value": values,
            "partition": pa.array([partition] * len(rows), pa.int32()),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


async def serve(
    node: ReplicaNode,
    listen: str,
    controller: str,
    *,
    advertise: str | None = None,
    checkpoints: CheckpointStore | None = None,
    clock: Clock = SYSTEM_CLOCK,
    ready: asyncio.Future[str] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run a replica until ``stop``. Raises PortInUse."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    server = grpc.aio.server(options=OPTIONS)
    shell = ReplicaServer(node, checkpoints, clock)
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(shell, server)
    try:
        address = bind(server, listen)
        await server.start()
        info = ReplicaInfo(node.info.name, node.info.site, advertise or address, node.info.weight)
        if ready is not None:
            ready.set_result(address)
        tasks = [asyncio.create_task(_stay_registered(shell, info, controller))]
        if checkpoints is not None and node.settings.checkpoint_interval_s:
            tasks.append(asyncio.create_task(_checkpoint_periodically(shell)))
        await (stop or asyncio.Event()).wait()
        for task in tasks:
            task.cancel()
        await server.stop(grace=2)
    finally:
        await shell.close()


async def _stay_registered(shell: ReplicaServer, info: ReplicaInfo, controller: str) -> None:
    """Register, then heartbeat; register again whenever the controller does not know this incarnation."""
    incarnation = uuid.uuid4().hex
    warned = False
    async with grpc.aio.insecure_channel(controller, options=OPTIONS) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        known = False
        while True:
            try:
                if not known:
                    views = [_view(lifecycle, sequence) for lifecycle, sequence in shell.node.inventory()]
                    request = cpb.RegisterRequest(
                        replica=replica_to_pb(info), incarnation=incarnation, partitions=views
                    )
                    reply = await stub.Register(request, timeout=10)
                    for spec in reply.operators:
                        with contextlib.suppress(StateflowError):  # it is named again when it is really needed
                            shell.node.learn(spec_of(spec))
                    log.info("registered as %s at %s", info.name, controller)
                    known = True
                beat = await stub.Heartbeat(cpb.HeartbeatRequest(name=info.name, incarnation=incarnation), timeout=10)
                known, warned = beat.known, False
            except grpc.aio.AioRpcError as error:
                if not warned:
                    log.warning("%s", remote_error(error, controller))
                    warned = True
            await asyncio.sleep(shell.node.settings.heartbeat_interval_s)


async def _checkpoint_periodically(shell: ReplicaServer) -> None:
    while True:
        await asyncio.sleep(shell.node.settings.checkpoint_interval_s)
        try:
            await shell.checkpoint()
        except StateflowError as error:
            log.error("checkpoint failed: %s", error)
        except Exception:
            log.exception("checkpoint failed")
