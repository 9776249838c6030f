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
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import Clock
from stateflow.errors import MoveUnknown, StateflowError, StateMissing, TransferCorrupt, Unavailable
from stateflow.replica.bases import BaseSource, Nearest, Peer, Store
from stateflow.replica.peers import SourceReplica
from stateflow.runtime.control import Phase, Preparation, Progress
from stateflow.runtime.following import Confirming, Persistence, Rate
from stateflow.runtime.rate_limit import RateLimit
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.transfer import Kept, Reading, SnapshotInfo
from stateflow.storage.faults import meaning

T = TypeVar("T")
REPORT_INTERVAL_S = 0.1
#: a copy that follows is forced to disk this often, so that the pause has not to wait for all of it
SYNC_INTERVAL_S = 0.25
#: between reports of a copy that has caught up
CAUGHT_UP_INTERVAL_S = 0.02
RETRY_INTERVAL_S = 0.1
#: a standby behind its source's end looks so often whether it is over
OUTLAST_INTERVAL_S = 1.0
PING_INTERVAL_S = 0.25
PINGS_KEPT = 9
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
        move: Preparation,
        source: SourceReplica,
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
        self._source = source
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
        persistence = Persistence(self._move.standby, self._node.settings.resume_timeout_s)
        while True:
            try:
                async for report in self._attempt():
                    yield report
                return
            except _Restart as why:
                self._base, self._opened, self._goes_back = None, False, False
                cause = why.__cause__
                assert isinstance(cause, StateflowError)
                if not persistence.begins_anew():
                    yield await self._failed(cause)
                    return
                log.info("move %s begins anew: %s", self._move.move_id, cause)
            except Unavailable as error:
                if not persistence.goes_on(self._clock.monotonic() - self._heard_at):
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
            await self._source.connected()
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
        started = self._clock.monotonic()
        await self._source.ping(self._move.partition)
        self._pings.append(self._clock.monotonic() - started)
        rtt_ms = statistics.median(self._pings) * 1e3
        self._progress = replace(self._progress, rtt_ms=rtt_ms, stall_ms=max(self._pings) * 1e3 - rtt_ms)

    async def _keep_pinging(self) -> None:
        """Round trips as a request sees them, on processes that are at work."""
        with contextlib.suppress(StateflowError):  # the stream beside it tells
            while True:
                await asyncio.sleep(PING_INTERVAL_S)
                await self._ping()

    async def _snapshot(self, kept: Kept | None) -> SnapshotInfo:
        move = self._move
        for _ in range(3):
            await self._ping()
        return await self._source.snapshot(move.partition, move.move_id, standby=move.standby, kept=kept)

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
        peer = Peer(self._source, base.snapshot_id, self._rate_limit, self._clock, self._timeout, self._arrived)
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
        confirming, rate, synced_at = Confirming(move.standby), Rate(self._clock.monotonic()), -math.inf
        reached = await self._in_quick(receiver.apply_changes, move.partition, move.move_id, [])
        bytes_max = self._node.settings.change_log_bytes_max
        async with contextlib.aclosing(self._source.follow(base.snapshot_id, reached, bytes_max)) as readings:
            while True:
                reading = await self._next(readings)
                size = sum(map(len, reading.change_sets))
                reached, beside = await self._in_quick(self._take, reading)
                self._progress = replace(
                    self._progress,
                    bytes_delta=self._progress.bytes_delta + size,
                    lag_bytes=reading.lag_bytes,
                    change_rate=rate.add(size, self._clock.monotonic()),
                    sequence=reached,
                    waited_s=self._clock.monotonic() - self._caught_up_at,
                )
                if (seal := reading.seal) is not None:
                    if beside is None:
                        await self._outlast()
                    self._progress = replace(self._progress, phase=Phase.OWNED, epoch=seal.epoch, digest=seal.digest)
                    yield self._progress
                    await self._in_thread(receiver.tidy, move.partition, beside or [])
                    return
                caught_up = reached == reading.head_sequence and not reading.lag_bytes
                if confirming.is_due(size, reached, caught_up):
                    await self._confirm(base.snapshot_id, reached)
                if self._due(CAUGHT_UP_INTERVAL_S if caught_up else REPORT_INTERVAL_S):
                    if not move.standby and self._said_at - synced_at >= SYNC_INTERVAL_S:
                        sync_ms = await self._in_quick(receiver.sync, move.partition, move.move_id)
                        self._progress = replace(self._progress, sync_ms=sync_ms)
                        synced_at = self._said_at
                    self._progress = replace(self._progress, rounds=self._progress.rounds + 1)
                    yield self._progress

    async def _outlast(self) -> NoReturn:
        """A standby's copy has come to its source's end, and is there for a take-over until somebody else's ownership
        is recorded. Raises MoveUnknown then."""
        while True:
            await self._in_quick(self._node.receiver.apply_changes, self._move.partition, self._move.move_id, [])
            await asyncio.sleep(OUTLAST_INTERVAL_S)

    def _take(self, reading: Reading) -> tuple[int, list[Path] | None]:
        """Apply; prove, while a mismatch can still abort the move; own at the seal. (The sequence reached, what is left
        beside the new copy; None for that: the seal is not for this copy.)"""
        receiver, partition, move_id = self._node.receiver, self._move.partition, self._move.move_id
        try:
            reached = receiver.apply_changes(partition, move_id, reading.change_sets, sync=self._move.standby)
        except TransferCorrupt as error:
            raise _Restart from error
        if reading.seal is not None:
            return reached, receiver.own(partition, move_id, reading.seal)
        if reading.chain:
            receiver.check_chain(partition, move_id, reading.head_sequence, reading.chain)
        return reached, []

    async def _confirm(self, snapshot_id: str, sequence: int) -> None:
        try:
            await self._source.confirm(snapshot_id, sequence)
        except MoveUnknown as error:
            raise _Restart from error

    async def _next(self, readings: AsyncIterator[Reading]) -> Reading:
        """Raises _Restart when the source does not know the snapshot any more, Unavailable when it does not answer."""
        try:
            reading = await asyncio.wait_for(anext(readings), self._timeout)
        except TimeoutError as error:
            what = f"the change log was silent for {self._timeout:g} s"
            raise Unavailable(what, remedy="see whether the source runs") from error
        except MoveUnknown as error:
            raise _Restart from error
        self._heard()
        return reading

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
