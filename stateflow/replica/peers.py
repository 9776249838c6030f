"""Clients with which a replica calls the source replica of a partition and the controller.

Arguments and results are values of stateflow's own types. Only this module of the package makes calls, so only it knows
the stubs of other processes.

The base files of a move are fetched from the source replica (:class:`Peer`), or from the checkpoint store
(:class:`Store`) if the store is faster. :class:`Nearest` measures the speed: the first large files are fetched from
each source in turn, all later ones from the faster source. Files are addressed by digest and verified when the base is
complete, so any source may send them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import statistics
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc.aio
import xxhash

from stateflow.checkpoint import CheckpointStore, Manifest, ManifestFile
from stateflow.clock import Clock
from stateflow.code.bundles import PACKED_MAX, BundleStore
from stateflow.errors import BundleDamaged, StateflowError, TransferCorrupt, Unavailable
from stateflow.fleet import Directory
from stateflow.partition.change_feed import BaseFile, Kept, Reading, Seal, SnapshotInfo
from stateflow.partition.control import Command, NamedFollower, PartitionView, Superseded
from stateflow.partition.data_directory import STORED
from stateflow.partition.environment import RateLimit
from stateflow.release import VERSION
from stateflow.replica.executor import Threads
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc, replica_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.faults import remote_error
from stateflow.rpc.fields import NUMBER_MAX
from stateflow.rpc.wire import answered, batched, connected, message_of, value_of
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: number of pings to each address; the median is used, because the first may reach a program that has just started
PINGS = 5
#: most addresses that one request measures; the others count as not answering
ADDRESSES_MAX = 64
#: time limit of all pings to one address, including the connection
WITHIN_S = 2.0
#: a partition that does not exist, so that inspecting it is answered at once
_NOTHING = PartitionId("ping", 0)
#: size of the smallest file that is used to measure the speed of a source, in bytes
TELLING_BYTES = 256 << 10
DAMAGED_MAX = 3
#: number of manifests read for one partition, newest first, because files that the newest checkpoint lacks may be in
#: the previous one
MANIFESTS_READ = 2

#: time limit of a heartbeat; for registrations and claims it is doubled
CALL_TIMEOUT_S = 5.0
PART_TIMEOUT_S = 120.0


@contextmanager
def _named(address: str) -> Iterator[None]:
    """Translates the error of a failed call into the StateflowError that it means."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise remote_error(error, address) from error


# -- Source replica of a partition -----------------------------------------------------------------------------------


class SourceReplica:
    """Client of the replica from which a partition is copied. Methods raise that replica's errors, or Unavailable.

    Args:
        timeout_s: time limit of calls with a single answer. For streams, the reader sets the limit.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
        self.address = address
        self._channel, self._timeout_s = channel, timeout_s
        self._stub = replica_pb2_grpc.ReplicaServiceStub(channel)

    async def connected(self) -> None:
        await connected(self._channel, self.address)

    async def ping(self, partition: PartitionId) -> None:
        """Makes one round trip with an ordinary request."""
        where = rpb.InspectRequest(operator=partition.operator, partition=partition.partition)
        with _named(self.address):
            await self._stub.Inspect(where, timeout=self._timeout_s)

    async def snapshot(
        self, partition: PartitionId, move_id: str, *, standby: bool = False, kept: Kept | None = None
    ) -> SnapshotInfo:
        """Asks for a snapshot of the partition. Raises InvalidArgument if the answer names a file twice."""
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
                    answered(chunk, self.address)
                    yield chunk.data, chunk.checksum
        finally:
            call.cancel()

    async def follow(self, snapshot_id: str, after: int, bytes_max: int) -> AsyncGenerator[Reading]:
        """Yields the changes after change set ``after``, up to the seal.

        A change set that arrives in pieces is yielded when it is complete; until then its bytes count as lag. Raises
        TransferCorrupt if a change set is larger than ``bytes_max``, and Unavailable if the stream ends without a seal.
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
                            f"a change set exceeds this replica's limit: {size} bytes have arrived, and more follow",
                            remedy="set STATEFLOW_REPLICA_CHANGE_LOG_BYTES_MAX here as high as on the source replica",
                            snapshot=snapshot_id,
                        )
                    seal = value_of(Seal, frame.seal) if frame.HasField("seal") else None
                    lag_bytes = min(frame.lag_bytes + size, NUMBER_MAX)
                    yield Reading(change_sets, frame.head_sequence, lag_bytes, seal, frame.chain)
                    if seal is not None:
                        return
                await call.code()
            raise Unavailable(
                "the change log ended without a seal", remedy="check that the source replica runs; the target retries"
            )
        finally:
            call.cancel()

    async def confirm(self, snapshot_id: str, sequence: int) -> None:
        request = rpb.ConfirmRequest(snapshot_id=snapshot_id, sequence=sequence)
        with _named(self.address):
            await self._stub.Confirm(request, timeout=self._timeout_s)


def _joined(begun: list[bytes], change_sets: list[bytes], continues: bool) -> list[bytes]:
    """Returns the change sets that are now complete. ``begun`` collects the pieces of an incomplete one."""
    if change_sets and (len(change_sets) > 1 or not continues):
        change_sets[0] = b"".join([*begun, change_sets[0]])
        begun.clear()
    if continues and change_sets:
        begun.append(change_sets.pop())
    return change_sets


# -- Sources of base files -------------------------------------------------------------------------------------------


class BaseSource(Protocol):
    name: str
    waited_s: float  # total time that its rate limit made it wait

    async def fetch(self, file: BaseFile, path: Path) -> bool:
        """Fetches a file to ``path``, which may already contain its beginning. Returns False if the source lacks it.

        Raises Unavailable if the source does not answer, and the source's own errors.
        """
        ...


class Peer:
    """Fetches base files from the move's source replica, over its Fetch stream.

    Bytes are written to the file as they arrive, so that the next attempt resumes after them.

    Args:
        silence_s: number of seconds without a byte after which a fetch fails. There is no limit for a whole file.
        arrived: called with the size of each piece, in bytes.
    """

    name = "peer"

    def __init__(
        self,
        source: SourceReplica,
        snapshot_id: str,
        rate_limit: RateLimit,
        clock: Clock,
        silence_s: float,
        arrived: Callable[[int], None],
    ) -> None:
        self._source, self._snapshot_id = source, snapshot_id
        self._rate_limit, self._clock = rate_limit, clock
        self._silence_s, self._arrived = silence_s, arrived
        self.waited_s = 0.0

    async def fetch(self, file: BaseFile, path: Path) -> bool:
        for attempt in range(1, DAMAGED_MAX + 1):
            try:
                await self._stream(file, path)
                return True
            except TransferCorrupt:
                if attempt == DAMAGED_MAX:
                    raise
        raise AssertionError

    async def _stream(self, file: BaseFile, path: Path) -> None:
        begun = path.stat().st_size if path.exists() else 0
        try:
            async with aclosing(self._source.fetch(self._snapshot_id, file.name, begun)) as pieces:
                with path.open("ab") as out:
                    while (piece := await self._next(pieces)) is not None:
                        data, checksum = piece
                        if not data or xxhash.xxh64_intdigest(data) != checksum:
                            raise _corrupt("a piece of a base file arrived damaged", file, begun)
                        if begun + len(data) > file.size:
                            raise _corrupt(f"a base file is longer than its {file.size} bytes", file, begun)
                        out.write(data)
                        begun += len(data)
                        self._arrived(len(data))
                        wait = self._rate_limit.wait_s(self._clock.monotonic(), len(data))
                        if wait:
                            self.waited_s += wait
                            await asyncio.sleep(wait)
        except TimeoutError as error:
            raise Unavailable(
                f"{self._source.address} has sent no data of a base file for {self._silence_s:g} s",
                remedy="check the source replica and the network; the bytes received are kept for the next attempt",
                file=file.name,
                arrived=f"{begun} of {file.size} bytes",
            ) from error
        if begun != file.size:
            raise _corrupt(f"a base file ended before its {file.size} bytes arrived", file, begun)

    async def _next(self, pieces: AsyncIterator[tuple[bytes, int]]) -> tuple[bytes, int] | None:
        """Returns the next piece, or None after the last one. Raises TimeoutError after ``silence_s``."""
        async with asyncio.timeout(self._silence_s):  # wait_for() would keep an error and its frames in a cycle
            return await anext(pieces, None)


def _corrupt(what: str, file: BaseFile, offset: int) -> TransferCorrupt:
    return TransferCorrupt(what, remedy="the file is fetched again", file=file.name, offset=offset)


class Store:
    """Fetches base files from the checkpoint store, if the partition's newest checkpoints have files with the same
    digest."""

    name = "store"

    def __init__(
        self,
        checkpoints: CheckpointStore,
        partition: PartitionId,
        executor: Executor,
        rate_limit: RateLimit,
        clock: Clock,
    ) -> None:
        self._checkpoints, self._partition, self._executor = checkpoints, partition, executor
        self._rate_limit, self._clock = rate_limit, clock
        self._known: dict[str, tuple[Manifest, ManifestFile]] | None = None
        self.waited_s = 0.0

    async def fetch(self, file: BaseFile, path: Path) -> bool:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._executor, self._fetch, file, path)
        except StateflowError as error:  # whatever it is, the source replica has every file
            if self._known is None and not error.retryable:
                self._known = {}  # the next file would meet the same error
            log.warning(
                "base file %s not usable from the checkpoint store, fetching it from the source replica: %s",
                file.name,
                error,
            )
            return False
        if found and (wait := self._rate_limit.wait_s(self._clock.monotonic(), file.size)):
            self.waited_s += wait
            await asyncio.sleep(wait)
        return found

    def _fetch(self, file: BaseFile, path: Path) -> bool:
        if self._known is None:
            newest = list(itertools.islice(self._checkpoints.newest(self._partition), MANIFESTS_READ))
            self._known = {each.digest: (manifest, each) for manifest in reversed(newest) for each in manifest.files}
        if file.digest not in self._known:
            return False
        manifest, stored = self._known[file.digest]
        scratch = path.with_name(path.name + STORED)
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # a process that was killed may have left it
            scratch.mkdir(parents=True)
            # without a hold on the checkpoint, because the source replica has every file that the store may delete
            self._checkpoints.fetch(manifest, stored, scratch / stored.name)
            (scratch / stored.name).replace(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return True


@dataclass(slots=True)
class _Speed:
    bytes_: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.bytes_ / self.seconds if self.seconds > 0 else 0.0


class Nearest:
    """Chooses the fastest source for each file. The last of ``sources`` must have every file."""

    def __init__(self, sources: Sequence[BaseSource], clock: Clock) -> None:
        self._sources = list(sources)
        self._clock = clock
        self._speeds = {source.name: _Speed() for source in self._sources}
        self.fetched = {source.name: 0 for source in self._sources}

    async def fetch(self, file: BaseFile, path: Path) -> str:
        """Fetches a file from the preferred source that has it, and returns the source's name."""
        for source in self._order(file, path):
            waited, started = source.waited_s, self._clock.monotonic()
            begun = path.stat().st_size if path.exists() else 0
            if await source.fetch(file, path):
                speed = self._speeds[source.name]
                speed.bytes_ += file.size - begun
                speed.seconds += self._clock.monotonic() - started - (source.waited_s - waited)
                self.fetched[source.name] += file.size
                return source.name
        raise TransferCorrupt("no source has the base file", remedy="the transfer restarts", file=file.name)

    def _order(self, file: BaseFile, path: Path) -> list[BaseSource]:
        everything = self._sources[-1]
        if file.size < TELLING_BYTES or path.exists():  # too small to measure, or partly fetched from the peer
            return [everything]
        unknown = [source for source in self._sources if not self._speeds[source.name].bytes_]
        if unknown:
            return [*unknown, *(source for source in self._sources if source not in unknown)]
        return sorted(self._sources, key=lambda source: -self._speeds[source.name].rate)

    @property
    def bandwidth(self) -> float:
        """Bytes per second from the peer, without the waits of its rate limit; 0 if too few bytes have arrived."""
        speed = self._speeds[self._sources[-1].name]
        return speed.rate if speed.bytes_ >= TELLING_BYTES else 0.0


# -- Controller ------------------------------------------------------------------------------------------------------


class Unanswered(Exception):
    """A controller did not answer, or refused.

    ``meant`` is the reason. It is wrapped in this exception to distinguish it from errors of the replica itself.
    """

    def __init__(self, meant: StateflowError) -> None:
        super().__init__(str(meant))
        self.meant = meant


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Regular message of a replica to its controller.

    Attributes:
        incarnation: id of the replica's process; empty while the replica is not registered.
        incoming: (partition, move) of copies that are under way to the replica.
        term: the greatest term that the replica knows.
        opening: True while the replica is starting; it registers when it knows which partitions it has.
        alone: (number of the order, operators that the replica may serve while no controller answers).
        outgoing: (partition, move) of copies that others request from this replica, which asks who may have them.
    """

    replica: ReplicaInfo
    directory: Directory
    incarnation: str = ""
    incoming: Sequence[tuple[PartitionId, str]] = ()
    term: int = 0
    opening: bool = False
    alone: tuple[int, frozenset[str]] = (0, frozenset())
    outgoing: Sequence[tuple[PartitionId, str]] = ()


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """Answer to a heartbeat.

    Attributes:
        known: True if the controller knows the replica's incarnation.
        lease_s: duration of the lease in seconds, counted from when the heartbeat was sent.
        ledger: id of the controller's ledger.
        term: the controller's term.
        ticket: valid for one registration.
        ended: those of the heartbeat's ``incoming`` copies whose move has ended.
        claimed: True if the controller has this replica's report on partitions that its ledger does not know.
        adopted: the ledger that the controller's ledger has taken over; empty if there is none.
        alone: (number of the order, operators that the replica may serve while no controller answers).
        followers: for each of the heartbeat's ``outgoing`` copies, the replica that may have it; a controller of the
            previous release names none.
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
    followers: tuple[NamedFollower, ...] = ()


@dataclass(frozen=True, slots=True)
class Registered:
    """Answer to a registration, with the work that the replica does before its next heartbeat.

    Attributes:
        operators: deployed operators; the replica loads these versions.
        superseded: partitions that have other owners now, which the replica seals.
        dropped: (operator, epoch) of undeployed operators, which the replica drops.
    """

    operators: tuple[OperatorSpec, ...]
    superseded: tuple[Superseded, ...]
    dropped: tuple[tuple[str, int], ...]


class Controller:
    """Client of a controller. Methods raise Unanswered, or Unavailable if the answer contradicts the protocol."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = controller_pb2_grpc.ControllerServiceStub(channel)
        self._address = address

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        request = message_of(
            cpb.HeartbeatRequest,
            beat,
            name=beat.replica.name,
            incoming=_copies(beat.incoming),
            outgoing=_copies(beat.outgoing),
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

        Returns None if the ticket was no longer valid, or a controller of another ledger or term answers.
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
        """Reports all partitions on this replica that the controller's ledger does not know.

        The report replaces earlier ones.
        """
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
        """Returns (part of a bundle, number of parts). A part has about 1 MB, so the time limit of the call is long
        enough for a slow link."""
        request = cpb.BundlePartRequest(bundle=digest, number=number)
        reply: cpb.BundlePart = await self._call(self._stub.GetBundlePart, request, PART_TIMEOUT_S)
        return reply.data, reply.count

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            reply = await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise Unanswered(remote_error(error, self._address)) from error
        return answered(reply, self._address)


def _copies(copies: Iterable[tuple[PartitionId, str]]) -> list[cpb.Incoming]:
    return [
        cpb.Incoming(operator=partition.operator, partition=partition.partition, move_id=move_id)
        for partition, move_id in copies
    ]


def _views(partitions: Iterable[PartitionView]) -> Iterator[rpb.PartitionView]:
    return (message_of(rpb.PartitionView, each) for each in partitions)


# -- Round trips -----------------------------------------------------------------------------------------------------


class RoundTrips:
    """Measures round trips from this replica to other replicas, at the controller's request."""

    def __init__(self, connect: Callable[[str], grpc.aio.Channel], clock: Clock) -> None:
        self._connect, self._clock = connect, clock

    async def measure(self, addresses: Sequence[str]) -> list[float]:
        """Returns the round trip to each address in milliseconds, or -1 for an address that does not answer in time."""
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


# -- Code bundles ----------------------------------------------------------------------------------------------------


class Bundles:
    """Fetches code bundles of operators into the replica's store, before the code is loaded.

    ``controller`` is the last known leader, from which bundles are fetched, or None if no leader is known yet.
    """

    def __init__(self, store: BundleStore, threads: Threads) -> None:
        self._store, self._threads = store, threads
        self.controller: Controller | None = None
        self._fetching: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, spec: OperatorSpec) -> None:
        """Waits until the operator's bundle is in the store.

        A fetch continues even if its caller stops waiting. Raises Unavailable if no controller answers, and
        BundleDamaged if the bundle is not the deployed one.
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
            raise Unavailable(
                "the bundle cannot be fetched: no leading controller is known yet",
                remedy="check that a controller runs, and try again",
                bundle=digest,
            )
        packed, count = bytearray(), 1
        number = 0
        while number < count:
            try:
                part, count = await controller.bundle_part(digest, number)
            except Unanswered as error:
                raise error.meant from error
            packed += part
            number += 1
            if not part or len(packed) > PACKED_MAX:
                what = "the bundle exceeds the size limit" if part else "a part of the bundle is empty"
                raise BundleDamaged(what, remedy="deploy it again", bundle=digest)
        await self._threads.in_files(self._store.keep, digest, bytes(packed))
        log.info("bundle %s fetched: %d KB", digest[:12], len(packed) >> 10)
