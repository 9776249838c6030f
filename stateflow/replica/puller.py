"""The target's side of a move: pull the base, follow the change log, own at the seal.

Everything it decides stands in the seal and in :mod:`stateflow.runtime.lifecycle`; this is the I/O.

A connection that breaks is made again: files that arrived stay, a partial one goes on where it broke, a copy that
follows goes on behind its last change set. Only when the source has let go of the snapshot the copy begins anew, and
even then it fetches only files, and parts of files, it does not have. A standby tries for ever, a move for
``resume_timeout_s`` after the last byte that came. How long a file takes is no matter, how long nothing comes is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import statistics
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc.aio

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import Clock
from stateflow.errors import MoveUnknown, StateflowError, StateMissing, TransferCorrupt, Unavailable
from stateflow.replica.bases import BaseSource, Nearest, Peer, Store
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.wire import answered, connected, remote_error, seal_of, snapshot_of, unexpected
from stateflow.runtime.control import IncomingMove, Phase, Progress
from stateflow.runtime.rate_limit import RateLimit
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.transfer import Kept, SnapshotInfo
from stateflow.storage.faults import meaning

T = TypeVar("T")
REPORT_INTERVAL_S = 0.1
#: a copy that follows is forced to disk this often, so that the pause has not to wait for all of it
SETTLE_INTERVAL_S = 0.25
#: between reports of a copy that has caught up
CAUGHT_UP_INTERVAL_S = 0.02
RETRY_INTERVAL_S = 0.1
#: a standby behind its source's end looks so often whether it is over
OUTLAST_INTERVAL_S = 1.0
RESTARTS_MAX = 3
PING_INTERVAL_S = 0.25
PINGS_KEPT = 9
#: so much is applied at most before the source hears of it, and forgets it
CONFIRM_BYTES = 1 << 20
log = logging.getLogger(__name__)


class _Restart(Exception):
    """The snapshot is gone at the source, or what came of it was damaged: begin with a new one."""


class Pull:
    """One move's transfer. Iterate :meth:`run`; the last report is OWNED or FAILED.

    Args:
        executor: for long work, on files; ``quick``: for what the pause waits for.
        checkpoints: base files may come from there, too.
        turns: one at a time for the copies that nobody asks for, of moves on demand.
    """

    def __init__(
        self,
        node: ReplicaNode,
        move: IncomingMove,
        channel: grpc.aio.Channel,
        executor: Executor,
        quick: Executor,
        clock: Clock,
        checkpoints: CheckpointStore | None = None,
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        self.asked = asyncio.Event()  # a batch waits for the partition
        self._turns = turns or asyncio.Semaphore()
        self._node = node
        self._move = move
        self._channel = channel
        self._stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        self._executor, self._quick = executor, quick
        self._clock = clock
        self._checkpoints = checkpoints
        self._timeout = node.settings.transfer_timeout_s
        self._rate_limit = RateLimit(move.bandwidth_max)
        self._progress = Progress()
        self._said_at = 0.0
        self._heard_at = clock.monotonic()
        self._base: SnapshotInfo | None = None
        self._goes_back = True  # until that has failed: what an earlier stay left here is offered as the base
        self._opened = False
        self._waited_for = ""  # why it does, as it was said last
        self._here: dict[tuple[str, str], int] = {}  # file → how much of it was here before this move
        self._caught_up_at = 0.0
        self._pings: deque[float] = deque(maxlen=PINGS_KEPT)

    async def run(self) -> AsyncIterator[Progress]:
        restarts = 0
        while True:
            try:
                async for report in self._attempt():
                    yield report
                return
            except _Restart as why:
                self._base, self._opened, self._goes_back = None, False, False
                restarts += 1
                cause = why.__cause__
                assert isinstance(cause, StateflowError)
                if restarts > RESTARTS_MAX and not self._move.standby:
                    yield await self._failed(cause)
                    return
                log.info("move %s begins anew: %s", self._move.move_id, cause)
            except Unavailable as error:
                silent_s = self._clock.monotonic() - self._heard_at
                if silent_s > self._node.settings.resume_timeout_s and not self._move.standby:
                    yield await self._failed(error)
                    return
                if self._waited_for != error.what:
                    self._waited_for = error.what
                    log.warning("move %s: %s waits: %s", self._move.move_id, self._move.partition, error)
                await asyncio.sleep(RETRY_INTERVAL_S)
            except StateflowError as error:
                yield await self._failed(error)
                return
            except Exception as error:
                if (meant := meaning(error) or self._given_up()) is None:
                    raise
                yield await self._failed(meant)
                return

    async def _attempt(self) -> AsyncIterator[Progress]:
        """Goes on where the last one broke. Raises Unavailable when the connection breaks, _Restart."""
        move = self._move
        if self._base is None:
            kept = await self._in_thread(
                self._node.receiver.prepare,
                move.spec,
                move.partition,
                move.move_id,
                move.source_epoch,
                move.newest_epoch,
            )
        async with self._turn() if move.on_demand else contextlib.nullcontext():
            await connected(self._channel, move.source.address)
            if self._base is None:
                self._base = await self._snapshot(kept if self._goes_back else None)
            self._heard()
            if not self._opened:
                async for report in self._warm(self._base):
                    yield report
                await self._open(self._base)
                self._opened, self._caught_up_at = True, self._clock.monotonic()
        # a standby is not cut over: nobody predicts its pause
        pinging = None if move.standby else asyncio.ensure_future(self._keep_pinging())
        try:
            async for report in self._catch_up(self._base):
                yield report
        finally:
            if pinging is not None:
                pinging.cancel()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """From when a batch asks for the partition, or the ones that came before it are copied."""
        asked = asyncio.ensure_future(self.asked.wait())
        turn = asyncio.ensure_future(self._turns.acquire())
        try:
            await asyncio.wait((asked, turn), return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                turn.cancel()
            yield
        finally:
            asked.cancel()
            if not turn.cancel() and not turn.cancelled():
                self._turns.release()

    async def _failed(self, error: StateflowError) -> Progress:
        """When no attempt follows, and nobody says so, the partition must be free for another move."""
        await self.abandon()
        self._progress = replace(self._progress, phase=Phase.FAILED, fault=error)
        return self._progress

    def _given_up(self) -> MoveUnknown | None:
        """It was cancelled while a thread was at work on its files, which are gone."""
        if self._node.receiver.is_under_way(self._move.partition, self._move.move_id):
            return None
        return MoveUnknown("the move was cancelled here", remedy="start a new one", move=self._move.move_id)

    async def abandon(self) -> None:
        await self._in_thread(self._node.receiver.abandon, self._move.partition, self._move.move_id)

    def _heard(self) -> None:
        self._heard_at = self._clock.monotonic()

    async def _ping(self) -> None:
        where = rpb.InspectRequest(operator=self._move.partition.operator, partition=self._move.partition.partition)
        started = self._clock.monotonic()
        await self._stub.Inspect(where, timeout=self._timeout)
        self._pings.append(self._clock.monotonic() - started)
        rtt_ms = statistics.median(self._pings) * 1e3
        self._progress = replace(self._progress, rtt_ms=rtt_ms, stall_ms=max(self._pings) * 1e3 - rtt_ms)

    async def _keep_pinging(self) -> None:
        """Round trips as a request sees them, on processes that are at work."""
        with contextlib.suppress(grpc.aio.AioRpcError):  # the stream beside it tells
            while True:
                await asyncio.sleep(PING_INTERVAL_S)
                await self._ping()

    async def _snapshot(self, kept: Kept | None) -> SnapshotInfo:
        move = self._move
        request = rpb.SnapshotRequest(
            move_id=move.move_id,
            operator=move.partition.operator,
            partition=move.partition.partition,
            standby=move.standby,
        )
        if kept is not None:
            request.kept.CopyFrom(rpb.Kept(**asdict(kept)))
        try:
            for _ in range(3):
                await self._ping()
            return snapshot_of(answered(await self._stub.Snapshot(request, timeout=self._timeout), move.source.address))
        except grpc.aio.AioRpcError as error:
            raise remote_error(error, move.source.address) from error

    # -- warm ---------------------------------------------------------------------------------------------

    async def _warm(self, base: SnapshotInfo) -> AsyncIterator[Progress]:
        move, receiver = self._move, self._node.receiver
        base_bytes = sum(file.size for file in base.files)
        self._progress = replace(self._progress, phase=Phase.WARMING, bytes_reused=0, base_bytes=base_bytes)
        if not base.kept:
            await self._in_thread(receiver.forget_received, move.partition, {file.digest for file in base.files})
        have = await self._in_thread(receiver.warm_base, move.partition)
        begun = await self._in_thread(receiver.begun, move.partition)
        directory = receiver.incoming_directory(move.partition, move.move_id)
        missing = sum(file.size - begun.get(file.digest, 0) for file in base.files if file.digest not in have)
        await self._in_thread(receiver.check_room, move.partition, missing)
        peer = Peer(
            self._stub,
            base.snapshot_id,
            move.source.address,
            self._rate_limit,
            self._clock,
            self._timeout,
            self._arrived,
        )
        sources: list[BaseSource] = [peer]
        if self._checkpoints is not None:
            sources.insert(0, Store(self._checkpoints, move.partition, self._executor, self._rate_limit, self._clock))
        nearest = Nearest(sources, self._clock)
        for file in base.files:
            path = directory / file.name
            near = have.get(file.digest)
            was_here = file.size if near is not None else begun.get(file.digest, 0)
            self._reused(self._here.setdefault((file.name, file.digest), was_here))
            if near is not None:
                if not path.exists():
                    path.hardlink_to(near)
                continue
            arriving = receiver.arriving(move.partition, move.move_id, file)
            fetching = asyncio.ensure_future(nearest.fetch(file, arriving))
            try:
                while not fetching.done():
                    await asyncio.wait((fetching,), timeout=REPORT_INTERVAL_S)
                    if self._due(REPORT_INTERVAL_S):
                        yield self._progress
                source = fetching.result()
                await self._in_thread(receiver.keep_received, move.partition, move.move_id, file)
            except (MoveUnknown, TransferCorrupt) as error:
                raise _Restart from error
            finally:
                fetching.cancel()
            self._heard()
            if source == Store.name:
                stored = self._progress.bytes_stored + file.size
                self._progress = replace(
                    self._progress, bytes_warm=self._progress.bytes_warm + file.size, bytes_stored=stored
                )
        self._progress = replace(self._progress, bandwidth=nearest.bandwidth or self._progress.bandwidth)
        yield self._progress

    def _arrived(self, size: int) -> None:
        self._progress = replace(self._progress, bytes_warm=self._progress.bytes_warm + size)
        self._heard()

    def _reused(self, size: int) -> None:
        self._progress = replace(self._progress, bytes_reused=self._progress.bytes_reused + size)

    async def _open(self, base: SnapshotInfo) -> None:
        move, receiver = self._move, self._node.receiver
        if not base.kept:
            await self._in_thread(receiver.open_incoming, move.partition, move.move_id, base)
            return
        try:
            size = await self._in_thread(receiver.open_kept, move.partition, move.move_id, base)
        except (MoveUnknown, StateMissing, TransferCorrupt) as error:
            raise _Restart from error
        self._reused(size)
        self._progress = replace(self._progress, base_bytes=self._progress.base_bytes + size)

    # -- catch up and own ---------------------------------------------------------------------------------

    async def _catch_up(self, base: SnapshotInfo) -> AsyncIterator[Progress]:
        move = self._move
        self._progress = replace(self._progress, phase=Phase.CATCHING_UP)
        receiver = self._node.receiver
        partial: list[bytes] = []  # of a change set that goes on in the next frame
        unconfirmed, confirmed, settled_at = 0, -1, -math.inf
        rate = _Rate(self._clock)
        reached = await self._in_quick(receiver.apply_changes, move.partition, move.move_id, [])
        call = self._stub.Follow(rpb.FollowRequest(snapshot_id=base.snapshot_id, after_sequence=reached))
        try:
            while True:
                frame = await self._next_frame(call)
                change_sets = list(frame.change_sets)
                if change_sets and (len(change_sets) > 1 or not frame.continues):
                    change_sets[0] = b"".join([*partial, change_sets[0]])
                    partial.clear()
                if frame.continues and change_sets:
                    partial.append(change_sets.pop())
                    self._check_size(sum(map(len, partial)))
                size = sum(map(len, change_sets))
                reached, beside = await self._in_quick(self._take, frame, change_sets)
                unconfirmed += size
                self._progress = replace(
                    self._progress,
                    bytes_delta=self._progress.bytes_delta + size,
                    lag_bytes=frame.lag_bytes + sum(map(len, partial)),
                    change_rate=rate.add(size),
                    sequence=reached,
                    waited_s=self._clock.monotonic() - self._caught_up_at,
                )
                if frame.HasField("seal") and beside is None:
                    await self._outlast()
                if frame.HasField("seal"):
                    self._progress = replace(
                        self._progress, phase=Phase.OWNED, epoch=frame.seal.epoch, digest=frame.seal.digest
                    )
                    yield self._progress
                    await self._in_thread(receiver.tidy, move.partition, beside or [])
                    return
                caught_up = reached == frame.head_sequence and not frame.lag_bytes
                if reached > confirmed and ((move.standby and caught_up) or unconfirmed > CONFIRM_BYTES):
                    await self._confirm(base.snapshot_id, reached)
                    unconfirmed, confirmed = 0, reached
                if self._due(CAUGHT_UP_INTERVAL_S if caught_up else REPORT_INTERVAL_S):
                    if not move.standby and self._said_at - settled_at >= SETTLE_INTERVAL_S:
                        sync_ms = await self._in_quick(receiver.settle, move.partition, move.move_id)
                        self._progress = replace(self._progress, sync_ms=sync_ms)
                        settled_at = self._said_at
                    self._progress = replace(self._progress, rounds=self._progress.rounds + 1)
                    yield self._progress
        finally:
            call.cancel()

    async def _outlast(self) -> NoReturn:
        """A standby's copy has come to its source's end, and is there for a take-over until somebody else's ownership
        is recorded. Raises MoveUnknown then."""
        while True:
            await self._in_quick(self._node.receiver.apply_changes, self._move.partition, self._move.move_id, [])
            await asyncio.sleep(OUTLAST_INTERVAL_S)

    def _take(self, frame: rpb.ChangeFrame, change_sets: list[bytes]) -> tuple[int, list[Path] | None]:
        """Apply; prove, while a mismatch can still abort the move; own at the seal. (The sequence reached, what is left
        beside the new copy; None for that: the seal is not for this copy.)"""
        receiver, partition, move_id = self._node.receiver, self._move.partition, self._move.move_id
        try:
            reached = receiver.apply_changes(partition, move_id, change_sets, sync=self._move.standby)
        except TransferCorrupt as error:
            raise _Restart from error
        if frame.HasField("seal"):
            return reached, receiver.own(partition, move_id, seal_of(frame.seal))
        if frame.chain:
            receiver.check_chain(partition, move_id, frame.head_sequence, frame.chain)
        return reached, []

    def _check_size(self, bytes_: int) -> None:
        """Raises TransferCorrupt for a change set that no source would have kept for its follower."""
        if bytes_ > self._node.settings.change_log_bytes_max:
            raise TransferCorrupt(
                f"a change set does not end within {bytes_} bytes",
                remedy="see the source; or raise STATEFLOW_REPLICA_CHANGE_LOG_BYTES_MAX here",
                move=self._move.move_id,
            )

    async def _confirm(self, snapshot_id: str, sequence: int) -> None:
        request = rpb.ConfirmRequest(snapshot_id=snapshot_id, sequence=sequence)
        try:
            await self._stub.Confirm(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as error:
            self._lost(error)

    async def _next_frame(self, call: Any) -> rpb.ChangeFrame:
        try:
            frame: rpb.ChangeFrame = await asyncio.wait_for(call.read(), self._timeout)
        except TimeoutError as error:
            what = f"the change log was silent for {self._timeout:g} s"
            raise Unavailable(what, remedy="see whether the source runs") from error
        except grpc.aio.AioRpcError as error:
            self._lost(error)
        if frame is grpc.aio.EOF:
            await call.code()
            raise Unavailable("the change log ended without a seal", remedy="it is asked for again")
        self._heard()
        return answered(frame, self._move.source.address)

    def _lost(self, error: grpc.aio.AioRpcError) -> NoReturn:
        """Raises _Restart when the source does not know the snapshot any more, Unavailable when it does not answer."""
        meant = remote_error(error, self._move.source.address)
        if isinstance(meant, MoveUnknown):
            raise _Restart from meant
        raise meant

    def _due(self, interval_s: float) -> bool:
        now = self._clock.monotonic()
        if now - self._said_at < interval_s:
            return False
        self._said_at = now
        return True

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    async def _in_quick(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._quick, work, *arguments)


class RunningPull:
    """A transfer and whoever listens to it.

    One that nobody listens to for ``alone_s`` is given up: its controller has ended the move and its word was lost, or
    it comes back and asks again. None: never, since it is a standby.
    """

    def __init__(self, move_id: str, pull: Pull, loop: asyncio.AbstractEventLoop, alone_s: float | None = None) -> None:
        self.move_id = move_id
        self.pull, self._loop, self._alone_s = pull, loop, alone_s
        self._listeners: list[asyncio.Queue[Progress | None]] = []
        self._said: Progress | None = None
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
        self._said = report
        for listener in self._listeners:
            listener.put_nowait(report)

    async def reports(self) -> AsyncIterator[Progress]:
        queue: asyncio.Queue[Progress | None] = asyncio.Queue()
        if self._said is not None:
            queue.put_nowait(self._said)
        self._listeners.append(queue)
        try:
            while (report := await queue.get()) is not None:
                yield report
        finally:
            self._listeners.remove(queue)
            if not self._listeners and self._alone_s is not None and not self.task.done():
                self._loop.call_later(self._alone_s, self._give_up_if_alone)

    def _give_up_if_alone(self) -> None:
        if not self._listeners and not self.task.done():
            self._giving_up = self._loop.create_task(self._give_up())

    async def _give_up(self) -> None:
        self.task.cancel()
        await self.pull.abandon()  # nothing, where it owns by now
        log.warning("move %s is given up: nobody asks for it any more", self.move_id)


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
