"""Moves at their source, which takes snapshots, keeps change logs for targets, and fences and seals partitions."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from stateflow.changes import ChangeSet, net
from stateflow.errors import Busy, MoveUnknown, StateDamaged
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.partition.change_feed import (
    CHANGES,
    ChangeLog,
    Kept,
    Seal,
    SnapshotInfo,
    base_digest,
    cutover_digest,
    kept_digest,
)
from stateflow.partition.control import NOBODY, Command, FencingGuard
from stateflow.partition.layout import read_sequence
from stateflow.partition.lifecycle import SERVED, FenceAnswer, State
from stateflow.partition.local_partition import LocalPartition
from stateflow.partition.registry import PartitionRegistry
from stateflow.security.roles import Identity, check_follower
from stateflow.types import PartitionId, ReplicaInfo


class Sender:
    """The source's side of moves. Called from several threads."""

    def __init__(self, registry: PartitionRegistry, authority: FencingGuard) -> None:
        self._registry, self._authority = registry, authority

    def snapshot(
        self,
        partition: PartitionId,
        move_id: str,
        standby: bool = False,
        kept: Kept | None = None,
        follower: str = "",
    ) -> SnapshotInfo:
        """Takes a snapshot as the base for a move's target, and starts a change log at that point.

        A sealed partition can be the base only for the move that it was sealed for. Raises MoveUnknown for another
        move, and for a move that was cancelled or restarted.

        Args:
            kept: the sealed copy that the target has; None: it has none. This copy becomes the base if every change
                since then is known here.
            follower: name of the replica that asks, which alone may read the log and confirm it; empty: not known.

        Raises Busy if the partition has ``followers_max`` other followers.
        """
        local = self._registry.look(partition)
        goes_back = kept is not None and local.since is not None and local.since.kept == kept
        with self._registry.reopening(local, only_unsure=True):
            if local.lifecycle.state is State.OWNED and local.store is not None and not goes_back:
                local.store.flush()  # outside the lock, so that little is left to flush inside it
        with self._registry.reopening(local, only_unsure=True), local.work, local.mutex:
            lifecycle = local.lifecycle
            sealed = lifecycle.state is State.SEALED and lifecycle.move_id == move_id
            owned = lifecycle.state is State.OWNED and move_id not in lifecycle.cancelled
            if not (owned or sealed):
                raise MoveUnknown(
                    f"the partition is {lifecycle.state} here and cannot be a source of this move",
                    remedy="plan the move again",
                    partition=partition,
                    move=move_id,
                )
            if owned:  # the one target of a sealed partition is always let in, or the partition would stay unserved
                self._check_room(local, move_id)
            store = self._registry.store(local)
            if owned:
                self._registry.settle(local)
            local.snapshots += 1
            snapshot_id = f"{partition.operator}-{partition.partition}-{move_id}-{local.snapshots}"
            sequence, epoch = read_sequence(store), lifecycle.epoch
            limit = self._registry.settings.change_log_bytes_max
            since = local.since
            directory = self._registry.snapshots / snapshot_id
            if since is not None and since.kept == kept and not since.changes.overflowed:
                known, written = since.digest, since.changes.entries()
            else:
                known = ""
                store.snapshot(directory)
            changes = ChangeLog(move_id, snapshot_id, sequence, limit, standby=standby, follower=follower)
            changes.read_at = self._registry.clock.monotonic()
            self._registry.drop_log(local, move_id)
            self._registry.add_log(local, changes)
        # the rest is done while the stream goes on
        try:
            if known:
                directory.mkdir()
                (directory / CHANGES).write_bytes(_net(partition, epoch, sequence, written).encode())
            files = self._registry.digests.files(directory)
        except Exception as error:
            if not (changes.closed and isinstance(error, FileNotFoundError)):
                self._drop(local, changes)  # no target will ever read it
                self._registry.remove_snapshot(directory)  # files written after the log was closed
                raise
        if changes.closed:  # its files were removed, except those written after the log was closed
            self._registry.remove_snapshot(directory)
            raise MoveUnknown("the move was cancelled or restarted", remedy="start the move again", move=move_id)
        digest = kept_digest(known, files, sequence) if known else base_digest(files, sequence)
        changes.base = SnapshotInfo(snapshot_id, sequence, epoch, digest, files, known)
        with local.mutex:
            if local.lifecycle.state is State.SEALED and local.kept is not None:  # perhaps sealed since the snapshot
                self._end(local, changes, local.kept)
        return changes.base

    def _check_room(self, local: LocalPartition, move_id: str) -> None:
        """Checks that a partition may have one more follower, which costs the files of a snapshot, and a log in memory.

        Raises Busy.
        """
        others, limit = len(local.logs.keys() - {move_id}), self._registry.settings.followers_max
        if others >= limit:
            LIMIT_HITS.note("followers")
            raise Busy(
                f"{others} copies follow this partition already",
                remedy="wait until one of them ends, or raise STATEFLOW_REPLICA_FOLLOWERS_MAX; the copy is retried",
                partition=local.id,
                move=move_id,
            )

    def fenced_for(self, partition: PartitionId, move_id: str) -> str:
        """Returns the name of the replica for which the move has fenced the partition; empty: the move has not fenced
        it here."""
        lifecycle = self._registry.look(partition).lifecycle
        fenced = lifecycle.state in (State.FENCING, State.SEALED) and lifecycle.move_id == move_id
        return lifecycle.successor.name if fenced and lifecycle.successor is not None else ""

    def check_follower(self, who: Identity, call: str, snapshot_id: str) -> None:
        """Checks that a caller's certificate speaks for the follower that took a snapshot. Raises MoveUnknown,
        NotAllowed."""
        check_follower(who, call, self.change_log(snapshot_id).follower)

    def followers(self) -> Counter[str]:
        """Returns the number of copies that follow partitions on this replica, by operator."""
        return Counter(local.id.operator for local in self._registry.local_partitions() for _ in list(local.logs))

    def limits_used(self) -> tuple[float, float]:
        """Returns which part of their limits are in use: the followers of the partition that has most, and the bytes of
        the fullest change log."""
        settings, most, fullest = self._registry.settings, 0, 0
        for local in self._registry.local_partitions():
            logs = list(local.logs.values())
            most = max(most, len(logs))
            fullest = max(fullest, *(changes.bytes for changes in logs if not changes.overflowed), 0)
        return most / settings.followers_max, fullest / settings.change_log_bytes_max

    def open_file(self, snapshot_id: str, name: str) -> BinaryIO:
        """Opens a base file for reading. Raises MoveUnknown if the file is gone, as after a cancelled move."""
        path = self._registry.snapshots / snapshot_id / name
        try:
            if path.parent.parent == self._registry.snapshots:
                return path.open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            pass
        raise MoveUnknown("there is no such base file", remedy="the transfer restarts", path=path)

    def change_log(self, snapshot_id: str) -> ChangeLog:
        return self._followed(snapshot_id)[1]

    def _followed(self, snapshot_id: str) -> tuple[LocalPartition, ChangeLog]:
        """Returns the partition of which a snapshot was taken, and its change log. Raises MoveUnknown."""
        followed = self._registry.followed(snapshot_id)
        if followed is None:
            raise MoveUnknown("there is no such snapshot", remedy="the transfer restarts", snapshot=snapshot_id)
        return followed

    @contextmanager
    def reading(self, snapshot_id: str) -> Iterator[ChangeLog]:
        """Yields the change log of a snapshot, and keeps it while the caller reads from it. Raises MoveUnknown."""
        changes = self.change_log(snapshot_id)
        changes.readers += 1
        try:
            yield changes
        finally:
            changes.readers -= 1
            changes.read_at = self._registry.clock.monotonic()

    def drop_unread(self) -> None:
        """Removes snapshots and logs from which no target has read for ``transfer_timeout_s``: the message that their
        move is over may be lost. A target that returns after that begins with a new snapshot.

        Also removes snapshots that could not be removed before, as without file handles.
        """
        before = self._registry.clock.monotonic() - self._registry.settings.transfer_timeout_s
        for local in self._registry.local_partitions():
            for changes in list(local.logs.values()):
                if not changes.readers and changes.base is not None and changes.read_at < before:
                    self._drop(local, changes)
        for directory in list(self._registry.removed):
            self._registry.environment.remove_tree(directory)
            if not directory.exists():
                self._registry.removed.discard(directory)

    def _drop(self, local: LocalPartition, changes: ChangeLog) -> None:
        """Removes a log and its snapshot, unless the log was dropped already."""
        with local.mutex:
            if local.logs.get(changes.move_id) is changes:
                self._registry.drop_log(local, changes.move_id)

    def is_followed(self, partition: PartitionId, *moves: str) -> bool:
        """Tells whether the target of one of ``moves`` is reading the change log now."""
        logs = self._registry.look(partition).logs
        return any(move_id in logs and logs[move_id].readers > 0 for move_id in moves)

    def confirm(self, snapshot_id: str, sequence: int) -> None:
        local, changes = self._followed(snapshot_id)
        changes.confirm(sequence)
        self._registry.on_change(local.id)

    def confirmed(self, partition: PartitionId, sequence: int) -> bool:
        """Tells whether a standby of this partition has confirmed everything up to ``sequence``."""
        logs = list(self._registry.look(partition).logs.values())
        return any(changes.standby and changes.confirmed >= sequence for changes in logs)

    def sync(self, partition: PartitionId) -> float:
        """Forces the partition's store to disk while it is served, so that only the seal is left to write later.
        Returns the duration in milliseconds."""
        store = self._registry.look(partition).store
        return 0.0 if store is None else self._registry.sync(store)

    def fence(
        self,
        partition: PartitionId,
        move_id: str,
        epoch: int,
        target: ReplicaInfo,
        *,
        cold: bool = False,
        standby_move: str = "",
        command: Command = NOBODY,
    ) -> bool:
        """Stops serving for the move, after the running batch. Returns True if the partition is sealed, False if it
        will be sealed at the end of that batch.

        Args:
            cold: the target copies after the seal; False: the target must already follow, through ``move_id`` or
                ``standby_move``.
            standby_move: move of the standby that the target is; empty: the target is no standby.

        Raises the error that prevents the seal; the partition is then served as before.
        """
        local = self._registry.local(partition)
        with self._registry.reopening(local), local.mutex:
            self._authority.check(command)
            logs = [local.logs[each] for each in (move_id, standby_move) if each in local.logs]
            follows = any(changes.base is not None and not changes.overflowed for changes in logs)
            if local.lifecycle.state is State.OWNED and not (follows or cold):
                raise MoveUnknown(
                    "the target does not follow this partition", remedy="start the move again", move=move_id
                )
            answer = local.lifecycle.fence(move_id, epoch, target)
            if answer is FenceAnswer.SEAL_NOW:
                self.seal(local)
            return answer is not FenceAnswer.SEAL_AFTER_BATCH

    def surrender(
        self,
        partition: PartitionId,
        restore_id: str,
        epoch: int,
        target: ReplicaInfo,
        *,
        command: Command = NOBODY,
    ) -> bool:
        """Stops serving, because the partition is restored elsewhere.

        Returns True if the partition is sealed or not owned here, False if it will be sealed at the end of the running
        batch. Raises InvalidTransition while a move is being fenced, StaleEpoch if the partition is owned at ``epoch``
        or a newer one.
        """
        local = self._registry.local(partition)
        with self._registry.reopening(local), local.mutex:
            self._authority.check(command)
            lifecycle = local.lifecycle
            if lifecycle.state not in SERVED:
                return True
            answer = lifecycle.fence(restore_id, epoch, target)
            if answer is FenceAnswer.SEAL_NOW:
                self.seal(local)
            return answer is not FenceAnswer.SEAL_AFTER_BATCH

    def seal(self, local: LocalPartition) -> None:
        """Writes the seal durably, then sends it to the followers. Callers hold ``mutex``, with no batch running."""
        lifecycle = local.lifecycle
        local.sealed_at = self._registry.clock.monotonic()
        store = self._registry.store(local)
        self._registry.settle(local)
        local.seal_unsure = True
        self._registry.copies.record(lifecycle, store, lambda here: here.sealed())
        lifecycle.sealed()
        local.seal_unsure = False
        sequence = local.processor.sequence if local.processor else read_sequence(store)
        local.kept = Kept(lifecycle.move_id, lifecycle.epoch, sequence)
        for changes in local.logs.values():
            if changes.base is not None:  # otherwise snapshot() ends the log once its base is known
                self._end(local, changes, local.kept)
        if local.processor is not None:
            local.processor.let_go(self._registry.environment.aside)
            local.processor = None
        self._registry.commits.left(local.id)
        self._registry.on_change(local.id)

    def _end(self, local: LocalPartition, changes: ChangeLog, kept: Kept) -> None:
        assert changes.base is not None
        digest = cutover_digest(changes.base.digest, changes.changes)
        now_us = self._registry.clock.now_us()
        changes.end(Seal(kept.move_id, kept.epoch, kept.sequence, digest, now_us, local.lifecycle.successor))

    def cancel(self, partition: PartitionId, move_id: str, owned_at: int = 0) -> bool:
        """Forbids the move to seal. Returns False if it has sealed already and must be completed.

        Does not wait for a running batch. Raises StateMissing if the partition's data was lost here, and errors of the
        disk; the partition then stays as it was.
        """
        local = self._registry.local(partition)
        try:
            with self._registry.reopening(local), local.mutex:
                lifecycle = local.lifecycle
                if local.seal_unsure and lifecycle.state is State.FENCING and lifecycle.move_id == move_id:
                    # otherwise the next start could find the partition sealed, without what it commits from now on
                    store = self._registry.store(local)
                    self._registry.copies.record(lifecycle, store, lambda here: here.cancel(move_id, owned_at))
                    local.seal_unsure = False
                possible = lifecycle.cancel(move_id, owned_at)
                if possible:
                    self._registry.drop_log(local, move_id)
        except StateDamaged as error:  # otherwise the partition would stay fenced for ever
            self._registry.lose(local, error)
            raise
        self._registry.on_change(partition)
        return possible

    def release(self, partition: PartitionId, move_id: str) -> None:
        """Ends a move whose target owns the partition. The change log is dropped; the partition's files stay as a warm
        base, in case it moves back."""
        local = self._registry.local(partition)
        if local.lifecycle.state is State.SEALED and local.lifecycle.move_id == move_id and local.store is not None:
            with contextlib.suppress(Exception):  # it is sealed durably, and only opens more slowly without
                local.store.flush()  # otherwise the next open reads its write-ahead log, and blocks every thread
        with local.work, local.mutex:
            self._registry.drop_log(local, move_id)
            if local.lifecycle.state is State.SEALED and local.lifecycle.move_id == move_id:
                local.since = None
                if local.store is not None:
                    local.store.close()
                    local.store = None
        if self._registry.skipped_batches.has_void:
            self._registry.skipped_batches.tidy()  # only now, after the pause of the move


def _net(partition: PartitionId, epoch: int, sequence: int, written: list[bytes]) -> ChangeSet:
    mutations = net(ChangeSet.decode(each).mutations for each in written)
    return ChangeSet(partition.operator, partition.partition, epoch, sequence, "", -1, mutations)
