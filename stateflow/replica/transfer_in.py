"""Performs the target's side of a move: fetches the base, follows the change log, and owns the partition at the seal.

This module contains the I/O. The decisions are in :mod:`stateflow.partition.lifecycle`, and in the seal that the source
writes.

A transfer (:class:`IncomingTransfer`) is WARMING while it fetches the base, CATCHING_UP while it applies changes, and
ends as OWNED or FAILED. Each move has one transfer, even if several callers ask for it (:class:`IncomingTransfers`).

After a broken connection the transfer connects again. Complete files are kept, a partial file resumes where it broke
off, and a copy that follows resumes after its last change set. Only if the source has released the snapshot does the
copy begin anew, and even then it fetches only the files and parts of files that it lacks. A standby's transfer never
stops trying; that of a move stops ``resume_timeout_s`` after the last byte. There is a limit for silence, but none for
the duration of a file.
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

import grpc.aio

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import Clock
from stateflow.errors import MoveAborted, MoveUnknown, StateflowError, StateMissing, TransferCorrupt, Unavailable
from stateflow.partition.change_feed import Confirming, Kept, Persistence, Rate, Reading, SnapshotInfo
from stateflow.partition.control import Phase, Preparation, Progress
from stateflow.partition.environment import RateLimit
from stateflow.partition.lifecycle import State
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.executor import Threads
from stateflow.replica.peers import BaseSource, Nearest, Peer, SourceReplica, Store
from stateflow.rpc.faults import unexpected
from stateflow.storage.faults import meaning
from stateflow.types import PartitionId

T = TypeVar("T")
REPORT_INTERVAL_S = 0.1
#: interval at which a following copy is forced to disk, so that little is left to write during the pause
SYNC_INTERVAL_S = 0.25
#: interval between reports of a copy that has caught up
CAUGHT_UP_INTERVAL_S = 0.02
RETRY_INTERVAL_S = 0.1
#: interval at which a standby, after the end of its source's change log, checks whether its move is over
OUTLAST_INTERVAL_S = 1.0
PING_INTERVAL_S = 0.25
PINGS_KEPT = 9
log = logging.getLogger(__name__)


# -- One transfer ----------------------------------------------------------------------------------------------------


class _Restart(Exception):
    """The source has released the snapshot, or its data arrived damaged: the copy begins with a new snapshot."""


class IncomingTransfer:
    """Transfer of one move. Iterate over :meth:`run`; the last report is OWNED or FAILED.

    Args:
        executor: executor for long work on files.
        quick: executor for work that lengthens the pause of the partition.
        checkpoints: second source of base files; None if there is only the source replica.
        turns: semaphore that lets on-demand copies for which no batch waits run one at a time.
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
        self.addresses = {source.address}  # of the sources that the present attempt may use
        self._executor, self._quick = executor, quick
        self._clock = clock
        self._checkpoints = checkpoints
        self._timeout = node.settings.transfer_timeout_s
        self._rate_limit = RateLimit(move.bandwidth_max)
        self._progress = Progress()
        self._said_at = 0.0
        self._heard_at = clock.monotonic()
        self._base: SnapshotInfo | None = None
        self._goes_back = True  # offer the state left here by an earlier ownership as the base, until that fails
        self._opened = False
        self._waited_for = ""  # the reason of the last wait that was logged
        self._here: dict[tuple[str, str], int] = {}  # (name, digest) of a file → bytes that were here before this move
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
                log.info("move %s restarts: %s", self._move.move_id, cause)
            except Unavailable as error:
                if not persistence.goes_on(self._clock.monotonic() - self._heard_at):
                    yield await self._failed(error)
                    return
                if self._waited_for != error.what:
                    self._waited_for = error.what
                    log.warning(
                        "move %s: copy of %s interrupted, retrying: %s", self._move.move_id, self._move.partition, error
                    )
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
        """Continues where the last attempt broke off. Raises Unavailable if the connection breaks, or _Restart."""
        move = self._move
        self.addresses = {self._source.address}
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
        # a standby is not cut over: its pause need not be predicted
        pinging = None if move.standby else asyncio.ensure_future(self._keep_pinging())
        try:
            async for report in self._catch_up(self._base):
                yield report
        finally:
            if pinging is not None:
                pinging.cancel()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Waits until a batch asks for the partition, or until earlier copies in the queue are done."""
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

    def copy_from(self, source: SourceReplica) -> None:
        """Makes later attempts connect to this source, which may be the same one at another address."""
        self._source = source
        self.addresses.add(source.address)

    async def _failed(self, error: StateflowError) -> Progress:
        """Abandons the copy, and returns the last report. The partition must be free for another move even if no
        further attempt or message follows."""
        await self.abandon()
        # the traceback would refer to frames of this transfer, and they to the error, in a cycle
        self._progress = replace(self._progress, phase=Phase.FAILED, fault=error.with_traceback(None))
        return self._progress

    def _given_up(self) -> MoveUnknown | None:
        """Returns the error of a move that was cancelled while a thread worked on its files, or None if the move is
        still under way."""
        if self._node.receiver.is_under_way(self._move.partition, self._move.move_id):
            return None
        return MoveUnknown("the move was cancelled here", remedy="start a new move", move=self._move.move_id)

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
        """Measures round trips to the source regularly, as requests between the busy processes experience them."""
        with contextlib.suppress(StateflowError):  # the parallel stream reports the error
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
                del fetching  # its error holds this frame
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
        """Keeps a standby's copy that has received everything from its source, because a takeover may need it.

        Raises MoveUnknown once the copy is given up, for example because another replica owns the partition.
        """
        while True:
            await self._in_quick(self._node.receiver.apply_changes, self._move.partition, self._move.move_id, [])
            await asyncio.sleep(OUTLAST_INTERVAL_S)

    def _take(self, reading: Reading) -> tuple[int, list[Path] | None]:
        """Applies the change sets of a reading. At the seal, owns the partition; before it, verifies the chain, because
        a mismatch can still abort the move.

        Returns (last sequence applied, leftovers on disk). The leftovers are None if the seal is for another copy.
        """
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
        """Returns the next reading.

        Raises _Restart if the source no longer knows the snapshot, and Unavailable if it sends nothing for the transfer
        timeout.
        """
        try:
            async with asyncio.timeout(self._timeout):  # wait_for() would keep an error and its frames in a cycle
                reading = await anext(readings)
        except TimeoutError as error:
            what = f"no data from the change log for {self._timeout:g} s"
            raise Unavailable(what, remedy="check that the source replica runs") from error
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


# -- Transfers and their listeners -----------------------------------------------------------------------------------


class RunningTransfer:
    """A transfer and its listeners.

    A transfer that has no listeners for ``alone_s`` seconds is given up. Either its controller has ended the move and
    the message was lost, or the controller returns later and asks again. With ``alone_s`` None, as for standbys, the
    transfer is never given up.
    """

    def __init__(
        self, move_id: str, transfer: IncomingTransfer, loop: asyncio.AbstractEventLoop, alone_s: float | None = None
    ) -> None:
        self.move_id = move_id
        self.transfer, self._loop, self._alone_s = transfer, loop, alone_s
        self._listeners: list[tuple[str, asyncio.Queue[Progress | None]]] = []  # (move that it listens for, queue)
        self._said: Progress | None = None  # the last report
        self.task = loop.create_task(self._run(transfer))

    async def _run(self, transfer: IncomingTransfer) -> None:
        try:
            async for report in transfer.run():
                self._say(report)
        except asyncio.CancelledError:
            # a task keeps the error that ends it, and the error's frames refer to the task: raised again, it would
            # keep the transfer and its last message in memory until the next full garbage collection
            return
        except Exception as error:
            log.exception("move %s: transfer failed", self.move_id)
            self._say(Progress(Phase.FAILED, fault=unexpected(error)))
        finally:
            self._say(None)

    def _say(self, report: Progress | None) -> None:
        self._said = report or self._said
        for _, listener in self._listeners:
            listener.put_nowait(report)

    def dismiss(self, move_id: str) -> None:
        """Ends the progress reports to a cancelled move, if another move began this transfer and the cancelled one only
        joined it. The transfer goes on for the move that began it."""
        for listens_for, listener in self._listeners:
            if listens_for == move_id != self.move_id:
                listener.put_nowait(_was_cancelled(move_id))
                listener.put_nowait(None)

    def told(self, move_id: str) -> Progress | None:
        """Returns the last report if it says that the move ``move_id`` owns the partition, else None. Only the transfer
        knows the digest in that report."""
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
        await self.transfer.abandon()  # does nothing if the target already owns the partition
        log.warning("move %s abandoned: no controller waits for it", self.move_id)


def _was_cancelled(move_id: str) -> Progress:
    return Progress(
        Phase.FAILED, fault=MoveAborted("the move was cancelled here", remedy="start a new move", move=move_id)
    )


class IncomingTransfers:
    """Transfers to one replica.

    Args:
        checkpoints: second source of base files; None if there is only the source replica.
        connect: opens a channel to a replica's address.
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
        self._peers: dict[str, grpc.aio.Channel] = {}  # by address
        self._closing: set[asyncio.Task[None]] = set()
        self._under_way: set[RunningTransfer] = set()
        self._running: dict[PartitionId, RunningTransfer] = {}
        self._turns = asyncio.Semaphore()  # of on-demand moves for which no batch waits
        self._loop = asyncio.get_running_loop()

    async def run(self, move: Preparation, standby_move: str) -> AsyncIterator[Progress]:
        """Begins a transfer, or joins the transfer that is under way, and yields its reports.

        The transfer outlives its callers, because the loss of a controller must not stop a sealed move; a controller
        that returns joins the transfer. If a standby's copy follows the source as ``standby_move``, the move uses that
        copy. The copy confirms its progress up to the seal, and becomes the partition at the seal.
        """
        partition = move.partition
        lifecycle = self._node.lifecycle(partition)
        if lifecycle.state is State.OWNED and lifecycle.move_id == move.move_id:  # an earlier call completed the move
            running = self._running.get(partition)
            told = running.told(move.move_id) if running is not None else None
            yield told if told is not None else Progress(Phase.OWNED, epoch=lifecycle.epoch)
            return
        if (lost := await self._threads.in_files(self._node.receiver.lost, partition, move.move_id)) is not None:
            yield Progress(Phase.OWNED, fault=lost)
            return
        if move.move_id in lifecycle.cancelled:  # in an earlier term; no seal will be written for it
            yield _was_cancelled(move.move_id)
            return
        running = self._running.get(partition)
        joined = running is not None and running.move_id in (move.move_id, standby_move)
        if running is None or not joined or running.task.done():
            running = self._running[partition] = self._begin(move)
        else:
            running.transfer.copy_from(self._source(move))
        async for progress in running.reports(move.move_id):
            yield progress

    def _begin(self, move: Preparation) -> RunningTransfer:
        transfer = IncomingTransfer(
            self._node,
            move,
            self._source(move),
            self._threads.files,
            self._threads.quick,
            self._clock,
            self._checkpoints,
            self._turns,
        )
        alone_s = None if move.standby else self._node.settings.resume_timeout_s
        running = RunningTransfer(move.move_id, transfer, self._loop, alone_s)
        self._under_way.add(running)
        running.task.add_done_callback(lambda _: self._under_way.discard(running))
        return running

    def _source(self, move: Preparation) -> SourceReplica:
        address = move.source.address
        return SourceReplica(self._peer(address), address, self._node.settings.transfer_timeout_s)

    def _peer(self, address: str) -> grpc.aio.Channel:
        if address not in self._peers:
            self._close_unused()
            self._peers[address] = self._connect(address)
        return self._peers[address]

    def _close_unused(self) -> None:
        """Closes the channels that no transfer uses: their replicas may have other addresses by now, and this replica
        does not know them all."""
        used = {address for running in self._under_way for address in running.transfer.addresses}
        for address in self._peers.keys() - used:
            closing = self._loop.create_task(self._peers.pop(address).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def ask(self, partition: PartitionId) -> None:
        """Lets the partition's copy begin now, because a batch waits for the partition."""
        if (running := self._running.get(partition)) is not None:
            running.transfer.asked.set()

    def dismiss(self, partition: PartitionId, move_id: str) -> None:
        """Ends the progress reports to a cancelled move if it had joined a standby's transfer, which goes on."""
        if (running := self._running.get(partition)) is not None:
            running.dismiss(move_id)

    def stop(self, partition: PartitionId) -> None:
        """Stops the transfer of a copy that no longer follows a source."""
        running = self._running.pop(partition, None)
        if running is not None:
            running.task.cancel()

    def incoming(self) -> list[tuple[PartitionId, str]]:
        """Returns (partition, move) of all copies to this replica with a move that has not ended here.

        Copies of failed transfers count: they are kept until the controller decides about them.
        """
        return [(found.partition, found.move_id) for found, _ in self._node.inventory() if found.state is State.WARMING]

    async def end(self, partition: PartitionId, move_id: str) -> None:
        """Gives up the copy of a move that has ended at the controller, but whose cancellation has not arrived here."""
        lifecycle = self._node.lifecycle(partition)
        if lifecycle.state is State.WARMING and lifecycle.move_id == move_id:
            log.warning(
                "move %s of %s is no longer under way at the controller: giving up the unfinished copy here",
                move_id,
                partition,
            )
            await self._threads.in_quick(self._node.cancel, partition, move_id)

    async def close(self) -> None:
        for running in self._running.values():
            running.task.cancel()
        for channel in self._peers.values():
            await channel.close()
        await asyncio.gather(*self._closing)
