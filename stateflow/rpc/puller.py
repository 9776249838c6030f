"""The target's side of a move: pull the base, follow the change log, own at the seal.

Everything it decides stands in the seal and in :mod:`stateflow.runtime.lifecycle`; this is the I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import xxhash

from stateflow.clock import Clock
from stateflow.errors import StateflowError, TransferCorrupt
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.wire import connected, fault_of, remote_error, seal_of, snapshot_of, unexpected
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.transfer import BaseFile, SnapshotInfo
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

T = TypeVar("T")
FETCH_ATTEMPTS = 3
REPORT_INTERVAL_S = 0.1
Phase = rpb.MoveProgress.Phase


@dataclass(frozen=True, slots=True)
class Incoming:
    move_id: str
    spec: OperatorSpec
    partition: PartitionId
    source: ReplicaInfo
    source_epoch: int


class Pull:
    """One attempt at one move. Iterate :meth:`run`; the last report is OWNED or FAILED."""

    def __init__(
        self,
        node: ReplicaNode,
        move: Incoming,
        channel: grpc.aio.Channel,
        executor: Executor,
        clock: Clock,
    ) -> None:
        self._node = node
        self._move = move
        self._channel = channel
        self._stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        self._executor = executor
        self._clock = clock
        self._timeout = node.settings.transfer_timeout_s
        self._report = rpb.MoveProgress()
        self._said_at = 0.0

    async def run(self) -> AsyncIterator[rpb.MoveProgress]:
        move = self._move
        try:
            await self._in_thread(
                self._node.receiver.prepare, move.spec, move.partition, move.move_id, move.source_epoch
            )
            await connected(self._channel, move.source.address)
            base = await self._measured_snapshot()
            async for report in self._warm(base):
                yield report
            await self._in_thread(self._node.receiver.open_incoming, move.partition, move.move_id, base)
            async for report in self._catch_up(base):
                yield report
        except grpc.aio.AioRpcError as error:
            yield await self._failed(remote_error(error, move.source.address))
        except StateflowError as error:
            yield await self._failed(error)
        except OSError as error:
            yield await self._failed(unexpected(error))

    async def _failed(self, error: StateflowError) -> rpb.MoveProgress:
        """The next attempt starts from nothing, so that nothing is kept of this one: when no attempt follows, and
        nobody says so, the partition must be free for another move."""
        await self._in_thread(self._node.receiver.abandon, self._move.partition, self._move.move_id)
        self._report.phase = Phase.FAILED
        self._report.fault.CopyFrom(fault_of(error))
        return self._copy()

    async def _measured_snapshot(self) -> SnapshotInfo:
        where = rpb.InspectRequest(operator=self._move.partition.operator, partition=self._move.partition.partition)
        round_trips = []
        for _ in range(3):
            started = self._clock.monotonic()
            await self._stub.Inspect(where, timeout=self._timeout)
            round_trips.append(self._clock.monotonic() - started)
        self._report.rtt_ms = min(round_trips) * 1e3
        request = rpb.SnapshotRequest(move_id=self._move.move_id, operator=where.operator, partition=where.partition)
        return snapshot_of(await self._stub.Snapshot(request, timeout=self._timeout))

    # -- warm ---------------------------------------------------------------------------------------------

    async def _warm(self, base: SnapshotInfo) -> AsyncIterator[rpb.MoveProgress]:
        move, report = self._move, self._report
        report.phase = Phase.WARMING
        have = await self._in_thread(self._node.receiver.warm_base, move.partition)
        directory = self._node.receiver.incoming_directory(move.partition, move.move_id)
        started = self._clock.monotonic()
        for file in base.files:
            near = have.get(file.digest)
            if near is not None:
                (directory / file.name).hardlink_to(near)
                report.bytes_reused += file.size
                continue
            await self._fetch(base.snapshot_id, file, directory / file.name)
            report.bytes_warm += file.size
            if self._due():
                yield self._copy()
        elapsed = self._clock.monotonic() - started
        if report.bytes_warm and elapsed > 0:
            report.bandwidth = report.bytes_warm / elapsed
        yield self._copy()

    async def _fetch(self, snapshot_id: str, file: BaseFile, path: Path) -> None:
        """One base file; a broken stream goes on where it broke."""
        for attempt in range(1, FETCH_ATTEMPTS + 1):
            offset = path.stat().st_size if path.exists() else 0
            request = rpb.FetchRequest(snapshot_id=snapshot_id, name=file.name, offset=offset)
            try:
                with path.open("ab") as out:
                    async for chunk in self._stub.Fetch(request):
                        if xxhash.xxh64_intdigest(chunk.data) != chunk.checksum:
                            raise TransferCorrupt(
                                "a piece of a base file arrived damaged",
                                remedy="it is sent again",
                                file=file.name,
                                offset=out.tell(),
                            )
                        out.write(chunk.data)
                return
            except (grpc.aio.AioRpcError, TransferCorrupt):
                if attempt == FETCH_ATTEMPTS:
                    raise

    # -- catch up and own ---------------------------------------------------------------------------------

    async def _catch_up(self, base: SnapshotInfo) -> AsyncIterator[rpb.MoveProgress]:
        move, report = self._move, self._report
        report.phase = Phase.CATCHING_UP
        partial = b""
        rate = _Rate(self._clock)
        follow = rpb.FollowRequest(snapshot_id=base.snapshot_id, after_sequence=base.sequence)
        call = self._stub.Follow(follow)
        while True:
            frame = await asyncio.wait_for(call.read(), self._timeout)
            if frame is grpc.aio.EOF:
                raise TransferCorrupt("the change log ended without a seal", remedy="the transfer starts again")
            change_sets = list(frame.change_sets)
            if partial and change_sets:
                change_sets[0], partial = partial + change_sets[0], b""
            if frame.continues:
                partial = change_sets.pop()
            size = sum(map(len, change_sets))
            reached = await self._in_thread(
                self._node.receiver.apply_changes, move.partition, move.move_id, change_sets
            )
            report.bytes_delta += size
            report.lag_bytes = frame.lag_bytes + len(partial)
            report.change_rate = rate.add(size)
            if frame.HasField("seal"):
                seal = seal_of(frame.seal)
                await self._in_thread(self._node.receiver.own, move.partition, move.move_id, seal)
                report.phase, report.epoch, report.digest = Phase.OWNED, seal.epoch, seal.digest
                yield self._copy()
                return
            caught_up = reached == frame.head_sequence and not frame.lag_bytes
            if caught_up or self._due():
                report.rounds += 1
                yield self._copy()

    def _due(self) -> bool:
        now = self._clock.monotonic()
        if now - self._said_at < REPORT_INTERVAL_S:
            return False
        self._said_at = now
        return True

    def _copy(self) -> rpb.MoveProgress:
        copy = rpb.MoveProgress()
        copy.CopyFrom(self._report)
        return copy

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)


class _Rate:
    """Bytes a second, averaged over about the last two seconds."""

    HALF_LIFE_S = 1.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock.monotonic()
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, size: int) -> float:
        now = self._clock.monotonic()
        elapsed, self._at = now - self._at, now
        keep = 0.5 ** (elapsed / self.HALF_LIFE_S)
        self._bytes = self._bytes * keep + size
        self._seconds = self._seconds * keep + elapsed
        return self._bytes / self._seconds if self._seconds > 0 else 0.0
