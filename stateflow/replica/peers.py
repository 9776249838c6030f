"""Clients of the processes that a replica calls, and thread pools for work that would block its event loop.

A replica calls the replica from which a partition comes, and the controller. Arguments and results are values of
stateflow's own types. Only this module of the package makes calls, so only it knows the stubs of other processes.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio

from stateflow.clock import Clock
from stateflow.code.bundles import PACKED_MAX, BundleStore
from stateflow.errors import BundleDamaged, StateflowError, TransferCorrupt, Unavailable
from stateflow.fleet import Directory
from stateflow.partition.change_feed import Kept, Reading, Seal, SnapshotInfo
from stateflow.partition.control import Command, PartitionView, Superseded
from stateflow.release import VERSION
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc, replica_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import answered, batched, connected, message_of, remote_error, value_of
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
T = TypeVar("T")
#: pings to each address, of which the median counts: the first may meet a program that has just started
PINGS = 5
#: a replica that is asked about more addresses measures only this many
ADDRESSES_MAX = 64
#: time limit of all pings to one address, connecting included
WITHIN_S = 2.0
#: a partition of no operator: inspecting it is answered at once, and costs nothing
_NOTHING = PartitionId("ping", 0)

#: time limit of a heartbeat; a registration or claim has twice as long
CALL_TIMEOUT_S = 5.0
PART_TIMEOUT_S = 120.0


@contextmanager
def _named(address: str) -> Iterator[None]:
    """Translates the error of a failed call into the StateflowError that it means."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise remote_error(error, address) from error


# -- Source of a partition -------------------------------------------------------------------------------------------


class SourceReplica:
    """The replica from which a partition comes. Methods raise that replica's errors, or Unavailable.

    Args:
        timeout_s: time limit of calls with one answer. A stream may be silent for as long as its reader waits.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
        self.address = address
        self._channel, self._timeout_s = channel, timeout_s
        self._stub = replica_pb2_grpc.ReplicaServiceStub(channel)

    async def connected(self) -> None:
        await connected(self._channel, self.address)

    async def ping(self, partition: PartitionId) -> None:
        """Makes one round trip of an ordinary request."""
        where = rpb.InspectRequest(operator=partition.operator, partition=partition.partition)
        with _named(self.address):
            await self._stub.Inspect(where, timeout=self._timeout_s)

    async def snapshot(
        self, partition: PartitionId, move_id: str, *, standby: bool = False, kept: Kept | None = None
    ) -> SnapshotInfo:
        """Asks for a snapshot of the partition. Raises InvalidArgument for a base that has a file twice."""
        where = {"operator": partition.operator, "partition": partition.partition}
        request = message_of(rpb.SnapshotRequest, move_id=move_id, **where, standby=standby, kept=kept)
        with _named(self.address):
            reply = await self._stub.Snapshot(request, timeout=self._timeout_s)
        return value_of(SnapshotInfo, answered(reply, self.address))

    async def fetch(self, snapshot_id: str, name: str, offset: int) -> AsyncGenerator[tuple[bytes, int]]:
        """Yields (piece, checksum) of a base file, from ``offset`` on."""
        call = self._stub.Fetch(rpb.FetchRequest(snapshot_id=snapshot_id, name=name, offset=offset))
        try:
            with _named(self.address):
                while (chunk := await call.read()) is not grpc.aio.EOF:
                    yield chunk.data, chunk.checksum
        finally:
            call.cancel()

    async def follow(self, snapshot_id: str, after: int, bytes_max: int) -> AsyncGenerator[Reading]:
        """Yields the changes after change set ``after``, up to the seal.

        A change set that arrives in pieces is yielded when it is complete; until then it counts as lag. Raises
        TransferCorrupt for a change set of more than ``bytes_max``, and Unavailable if the stream ends without a
        seal.
        """
        begun: list[bytes] = []
        call = self._stub.Follow(rpb.FollowRequest(snapshot_id=snapshot_id, after_sequence=after))
        try:
            with _named(self.address):
                while (frame := await call.read()) is not grpc.aio.EOF:
                    answered(frame, self.address)
                    change_sets = _joined(begun, list(frame.change_sets), frame.continues)
                    size = sum(map(len, begun))
                    if size > bytes_max:
                        raise TransferCorrupt(
                            f"a change set is incomplete after {size} bytes",
                            remedy="check the source, or raise STATEFLOW_REPLICA_CHANGE_LOG_BYTES_MAX here",
                            snapshot=snapshot_id,
                        )
                    seal = value_of(Seal, frame.seal) if frame.HasField("seal") else None
                    yield Reading(change_sets, frame.head_sequence, frame.lag_bytes + size, seal, frame.chain)
                    if seal is not None:
                        return
                await call.code()
            raise Unavailable("the change log ended without a seal", remedy="the target retries")
        finally:
            call.cancel()

    async def confirm(self, snapshot_id: str, sequence: int) -> None:
        request = rpb.ConfirmRequest(snapshot_id=snapshot_id, sequence=sequence)
        with _named(self.address):
            await self._stub.Confirm(request, timeout=self._timeout_s)


def _joined(begun: list[bytes], change_sets: list[bytes], continues: bool) -> list[bytes]:
    """Returns the change sets that are complete now; ``begun`` holds the pieces of an incomplete one."""
    if change_sets and (len(change_sets) > 1 or not continues):
        change_sets[0] = b"".join([*begun, change_sets[0]])
        begun.clear()
    if continues and change_sets:
        begun.append(change_sets.pop())
    return change_sets


# -- Controller ------------------------------------------------------------------------------------------------------


class Unanswered(Exception):
    """A controller did not answer, or refused. ``meant``: the reason; it is not an error of this replica itself."""

    def __init__(self, meant: StateflowError) -> None:
        super().__init__(str(meant))
        self.meant = meant


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The regular message of a replica to its controller.

    ``incarnation``: empty while the replica is not registered. ``incoming``: (partition, move) of copies under way to
    it. ``term``: the greatest term that it has heard of. ``opening``: the replica is starting, and registers when it
    knows which partitions it has. ``alone``: (order, operators) that it may serve without a controller.
    """

    replica: ReplicaInfo
    directory: Directory
    incarnation: str = ""
    incoming: Sequence[tuple[PartitionId, str]] = ()
    term: int = 0
    opening: bool = False
    alone: tuple[int, frozenset[str]] = (0, frozenset())


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The answer to a heartbeat.

    ``lease_s``: duration of the lease, from when the heartbeat was sent. ``ended``: the named copies whose moves are
    over. ``ticket``: valid for one registration. ``claimed``: the controller already has this replica's report on
    partitions that its ledger does not know. ``adopted``: the ledger that this controller's ledger has taken over.
    ``alone``: (order, operators) that may be served while no controller answers.
    """

    known: bool
    lease_s: float
    ledger: str
    term: int
    ticket: str = ""
    ended: tuple[tuple[PartitionId, str], ...] = ()
    claimed: bool = False
    adopted: str = ""
    alone: tuple[int, frozenset[str]] = (0, frozenset())


@dataclass(frozen=True, slots=True)
class Registered:
    """Duties of the replica before its first heartbeat. ``dropped``: (operator, epoch) of undeployed operators."""

    operators: tuple[OperatorSpec, ...]
    superseded: tuple[Superseded, ...]
    dropped: tuple[tuple[str, int], ...]


class Controller:
    """A controller, called by its replicas. Methods raise Unanswered, and Unavailable for an impossible answer."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = controller_pb2_grpc.ControllerServiceStub(channel)
        self._address = address

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        request = message_of(
            cpb.HeartbeatRequest,
            beat,
            name=beat.replica.name,
            incoming=[
                cpb.Incoming(operator=partition.operator, partition=partition.partition, move_id=move_id)
                for partition, move_id in beat.incoming
            ],
            alone=sorted(beat.alone[1]),
            alone_order=beat.alone[0],
            version=VERSION,
        )
        reply: cpb.HeartbeatReply = await self._call(self._stub.Heartbeat, request, CALL_TIMEOUT_S)
        ended = tuple((PartitionId(each.operator, each.partition), each.move_id) for each in reply.ended)
        return value_of(HeartbeatReply, reply, ended=ended, alone=(reply.alone_order, frozenset(reply.alone)))

    async def register(
        self,
        replica: ReplicaInfo,
        directory: Directory,
        incarnation: str,
        command: Command,
        partitions: Iterable[PartitionView],
    ) -> Registered | None:
        """Registers with a ticket, which is the session of ``command``.

        Returns None if the ticket was void by then, or a controller of another ledger or term answers.
        """
        *pieces, last = batched(_views(partitions))
        for piece in [*pieces, last]:
            request = message_of(
                cpb.RegisterRequest,
                replica=replica,
                incarnation=incarnation,
                partitions=piece,
                ticket=command.session,
                directory=directory,
                more=piece is not last,
            )
            reply: cpb.RegisterReply = await self._call(self._stub.Register, request, 2 * CALL_TIMEOUT_S)
            if reply.late or (reply.ledger, reply.term) != (command.ledger, command.term):
                return None
        return value_of(Registered, reply, dropped=tuple((each.operator, each.epoch) for each in reply.dropped))

    async def claim(
        self,
        replica: ReplicaInfo,
        directory: Directory,
        operators: Iterable[OperatorSpec],
        partitions: Iterable[PartitionView],
    ) -> None:
        """Reports all partitions here that the controller's ledger does not know. Replaces earlier claims."""
        pieces = list(batched(_views(partitions)))
        for number, piece in enumerate(pieces):
            request = message_of(
                cpb.ClaimRequest,
                replica=replica,
                directory=directory,
                operators=() if number else operators,
                partitions=piece,
                first=not number,
                last=number == len(pieces) - 1,
            )
            await self._call(self._stub.Claim, request, 2 * CALL_TIMEOUT_S)

    async def bundle_part(self, digest: str, number: int) -> tuple[bytes, int]:
        """Returns (part of a bundle, number of parts). A part has about 1 MB, so the call's timeout allows for a slow
        link."""
        request = cpb.BundlePartRequest(bundle=digest, number=number)
        reply: cpb.BundlePart = await self._call(self._stub.GetBundlePart, request, PART_TIMEOUT_S)
        return reply.data, reply.count

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            reply = await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise Unanswered(remote_error(error, self._address)) from error
        return answered(reply, self._address)


def _views(partitions: Iterable[PartitionView]) -> Iterator[rpb.PartitionView]:
    return (message_of(rpb.PartitionView, each) for each in partitions)


# -- Round trips -----------------------------------------------------------------------------------------------------


class RoundTrips:
    """Measures round trips from here to other replicas, at the controller's request."""

    def __init__(self, connect: Callable[[str], grpc.aio.Channel], clock: Clock) -> None:
        self._connect, self._clock = connect, clock

    async def measure(self, addresses: Sequence[str]) -> list[float]:
        """Returns the round trip to each address, in milliseconds; -1: no answer in time."""
        found = await asyncio.gather(*map(self._to, addresses[:ADDRESSES_MAX]))
        return [*found, *(-1.0 for _ in addresses[ADDRESSES_MAX:])]

    async def _to(self, address: str) -> float:
        try:
            async with asyncio.timeout(WITHIN_S):
                return await self._pinged(address)
        except (StateflowError, TimeoutError):
            return -1.0

    async def _pinged(self, address: str) -> float:
        took: list[float] = []
        async with self._connect(address) as channel:
            other = SourceReplica(channel, address, WITHIN_S)
            await other.connected()
            for _ in range(PINGS):
                began = self._clock.monotonic()
                await other.ping(_NOTHING)
                took.append((self._clock.monotonic() - began) * 1e3)
        return statistics.median(took)


# -- Thread pools ----------------------------------------------------------------------------------------------------


class Threads:
    """The thread pools of a replica.

    ``files``: long work on files. ``quick``: work for which a move's pause waits. ``sizes``: measurements of disk
    usage; callers treat a replica that does not answer as one without room.
    """

    def __init__(self) -> None:
        self.files = ThreadPoolExecutor(4, thread_name_prefix="files")
        self.quick = ThreadPoolExecutor(4, thread_name_prefix="moves")
        self.sizes = ThreadPoolExecutor(1, thread_name_prefix="sizes")
        self._loop = asyncio.get_running_loop()

    async def in_files(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self.files, work, *arguments)

    async def in_quick(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self.quick, work, *arguments)

    async def in_sizes(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self.sizes, work, *arguments)

    def close(self) -> None:
        for pool in (self.files, self.quick, self.sizes):  # a thread may wait for a partition that never returns
            pool.shutdown(wait=False, cancel_futures=True)


# -- Code bundles ----------------------------------------------------------------------------------------------------


class Bundles:
    """Fetches code bundles of operators into the store, before the code is loaded here.

    ``controller``: the last known leader, which is asked; None: none yet.
    """

    def __init__(self, store: BundleStore, threads: Threads) -> None:
        self._store, self._threads = store, threads
        self.controller: Controller | None = None
        self._fetching: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, spec: OperatorSpec) -> None:
        """Waits until the operator's bundle is here.

        A fetch goes on even if its caller stops waiting. Raises Unavailable, and BundleDamaged for a bundle other than
        the deployed one.
        """
        digest = spec.bundle
        if not digest or await self._threads.in_files(self._store.has, digest):
            return
        if digest not in self._fetching:
            task = self._fetching[digest] = asyncio.ensure_future(self._fetch(digest))
            task.add_done_callback(lambda _: self._fetching.pop(digest, None))
        await asyncio.shield(self._fetching[digest])

    async def _fetch(self, digest: str) -> None:
        controller = self.controller
        if controller is None:
            raise Unavailable("no leading controller to fetch the bundle from yet", remedy="try again", bundle=digest)
        packed, count = bytearray(), 1
        number = 0
        while number < count:
            try:
                part, count = await controller.bundle_part(digest, number)
            except Unanswered as error:
                raise error.meant from error
            packed += part
            number += 1
            if len(packed) > PACKED_MAX:
                raise BundleDamaged("the bundle exceeds the size limit", remedy="deploy it again", bundle=digest)
        await self._threads.in_files(self._store.keep, digest, bytes(packed))
        log.info("bundle %s fetched: %d KB", digest[:12], len(packed) >> 10)
