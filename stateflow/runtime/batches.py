"""Batches in hand: applied to the partitions that are owned here, one at a time on each, and taken away when the
operator does not return."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from stateflow.errors import (
    DiskFull,
    DiskRefused,
    InvalidArgument,
    NotOwner,
    OperatorFailed,
    OperatorStuck,
    StateDamaged,
    TooFewFiles,
)
from stateflow.runtime import layout
from stateflow.runtime.failures import failure
from stateflow.runtime.host import Applied, PartitionHost
from stateflow.runtime.lease import Lease
from stateflow.runtime.lifecycle import State, Verdict
from stateflow.runtime.positions import Batch
from stateflow.runtime.registry import PartitionRegistry
from stateflow.runtime.retirement import Retention
from stateflow.runtime.sending import Sender
from stateflow.runtime.slot import Slot
from stateflow.runtime.watchdog import InHand, Interrupted
from stateflow.state import CachePool
from stateflow.storage.faults import meaning
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: requests of an operator are held for so long at a time: whoever holds them may be gone
HOLD_S_MAX = 10.0
T = TypeVar("T")


class Batches:
    """Of one replica. Called from several threads.

    Args:
        sender: seals behind the batch in hand, where that was asked for meanwhile.
    """

    def __init__(self, registry: PartitionRegistry, lease: Lease, sender: Sender, cache: CachePool) -> None:
        self._registry, self._lease, self._sender, self._cache = registry, lease, sender, cache
        self._settings, self._clock = registry.settings, registry.clock
        self._retention = Retention(
            round(self._settings.source_idle_s * 1e6),
            self._settings.sources_max,
            self._settings.sources_retired_max,
            round(self._settings.watermark_idle_s * 1e6),
        )
        self._in_hand: dict[int, InHand] = {}  # by thread
        self._held: dict[str, float] = {}  # operator → until, monotonic

    def apply(
        self,
        partition: PartitionId,
        epoch: int,
        batch: Batch,
        input_schema: bytes,
        rows: bytes,
        after: int | None = None,
    ) -> Applied | ReplicaInfo | None:
        """Apply a batch to one partition.

        Returns what was applied; or the replica the partition went to; or None: it is on its way here, ask
        again after the next ``on_change``. Raises LeaseLost, and what is wrong with sender, rows or operator.
        ``after``: see :meth:`~stateflow.runtime.host.PartitionHost.apply`.
        """
        slot = self._registry.look(partition)
        self._lease.check(self._clock.monotonic())
        if self._is_held(partition.operator):
            return None
        try:
            return self._apply(slot, epoch, batch, input_schema, rows, after)
        except Exception as error:
            self.judge(slot, error)
            raise

    def _apply(
        self, slot: Slot, epoch: int, batch: Batch, input_schema: bytes, rows: bytes, after: int | None
    ) -> Applied | ReplicaInfo | None:
        with slot.mutex:
            if slot.lost is not None and slot.lifecycle.state is State.ABSENT:
                raise slot.lost
            if slot.lifecycle.state is not State.OWNED:  # perhaps for the minutes that a checkpoint is fetched for it
                verdict = slot.lifecycle.begin(epoch)
                return slot.lifecycle.successor if verdict is Verdict.MOVED else None
        with slot.work:
            with slot.mutex:
                if slot.stuck is not None:
                    raise slot.stuck.refusal()
                verdict = slot.lifecycle.begin(epoch)
            if verdict is not Verdict.SERVE:
                return slot.lifecycle.successor if verdict is Verdict.MOVED else None
            self._registry.served_at = began = self._clock.monotonic()
            slot.cadence.began(began)
            hand = self._take_in_hand(slot, began)
            try:
                applied = self._host(slot).apply(batch, input_schema, rows, self._clock.now_us(), after, hand)
                now = self._clock.monotonic()
                slot.cadence.ended(now)
                self._registry.served_at = now
                # the process may have been stopped meanwhile: what was committed after the lease is not said
                self._lease.check(now)
                return applied
            except Interrupted as error:
                raise _stuck(hand, error) from error
            finally:
                self._end(slot, hand)

    def _take_in_hand(self, slot: Slot, began: float) -> InHand:
        hand = InHand(slot.id, began)
        self._in_hand[hand.thread] = hand
        return hand

    def _end(self, slot: Slot, hand: InHand) -> None:
        del self._in_hand[hand.thread]
        if hand.end():
            with slot.mutex:
                if hand.interrupted and slot.host is not None:
                    slot.host.discard()
                    slot.host = None
                sealing = slot.lifecycle.finish()
                if slot.host is not None and slot.host.is_unsure:
                    # what is on disk is read anew, and followers begin anew: they may not have been told of all of it
                    self._registry.close_store(slot)
                if sealing:
                    self._sender.seal(slot)
            return
        with slot.mutex:  # it was taken away, and comes back at last
            if hand.host is not None:
                hand.host.discard()
            if slot.stuck is hand:
                slot.stuck = None
        log.warning("%s is served again: its operator came back", slot.id)
        self._registry.on_change(slot.id)

    def in_hand(self) -> list[InHand]:
        """Batches that are being worked on."""
        return [hand for hand in list(self._in_hand.values()) if not hand.left]

    @property
    def is_stuck(self) -> bool:
        """Does a thread work on a batch that was given up?"""
        return any(hand.left for hand in list(self._in_hand.values()))

    def refusal(self, partition: PartitionId) -> OperatorStuck | None:
        """Why a partition's batches are refused, since one of them was taken away; None: they are not."""
        stuck = self._registry.look(partition).stuck
        return None if stuck is None else stuck.refusal()

    def overdue(self, limit_s: float) -> InHand | None:
        """A batch that has been in hand for longer than that."""
        before = self._clock.monotonic() - limit_s
        return next((hand for hand in self.in_hand() if hand.began < before), None)

    def take_away(self, hand: InHand) -> bool:
        """Give a batch up that cannot be interrupted: it never commits, and its partition is not served here before its
        thread comes back. It may move away, be checkpointed, and taken over, as it was before the batch. False: it has
        ended, or is just being committed."""
        slot = self._registry.slot(hand.partition)
        with slot.mutex:
            if not hand.take_away():
                return False
            slot.stuck, hand.host, slot.host = hand, slot.host, None
            slot.work.take_away()
            if slot.lifecycle.finish():
                self._sender.seal(slot)
        self._registry.on_change(slot.id)
        return True

    def open_source(self, partition: PartitionId, source: str, session: layout.Session) -> int:
        """See :meth:`~stateflow.runtime.host.PartitionHost.open_source`. Raises NotOwner, LeaseLost, SourceTaken."""
        return self._beside_batches(partition, lambda host: host.open_source(source, session))

    def retire_source(self, partition: PartitionId, source: str) -> bool:
        """See :meth:`~stateflow.runtime.host.PartitionHost.retire`. Raises NotOwner, LeaseLost."""
        return self._beside_batches(partition, lambda host: host.retire(source))

    def _beside_batches(self, partition: PartitionId, work: Callable[[PartitionHost], T]) -> T:
        """What commits to a partition and is no batch."""
        slot = self._registry.look(partition)
        try:
            return self._commit_beside(slot, work)
        except Exception as error:
            self.judge(slot, error)
            raise

    def _commit_beside(self, slot: Slot, work: Callable[[PartitionHost], T]) -> T:
        self._lease.check(self._clock.monotonic())
        if slot.lifecycle.state is not State.OWNED:
            raise not_owned(slot)
        with slot.work:
            with slot.mutex:
                if slot.stuck is not None:
                    raise slot.stuck.refusal()
                serves = slot.lifecycle.state is State.OWNED
                serves = serves and slot.lifecycle.begin(slot.lifecycle.epoch) is Verdict.SERVE
            if not serves:
                raise not_owned(slot)
            hand = self._take_in_hand(slot, self._clock.monotonic())
            try:
                host = self._host(slot)  # the operator may have to open
                hand.begin_commit()
                done = work(host)
                self._lease.check(self._clock.monotonic())
                return done
            except Interrupted as error:
                raise _stuck(hand, error) from error
            finally:
                self._end(slot, hand)

    def judge(self, slot: Slot, error: Exception) -> None:
        """Raises what ``error`` means, if that is something else. A partition that cannot be read is lost: it goes to
        another owner, rather than to fail again and again. One that could not be written is opened anew: its database
        takes no more writes."""
        meant = meaning(error)
        if isinstance(meant, StateDamaged) and meant is not slot.lost:
            meant.located(partition=slot.id)
            self._registry.lose(slot, meant)
        elif isinstance(meant, DiskFull | DiskRefused | TooFewFiles):
            self._registry.close_store(slot)
        if meant is not None and meant is not error:
            raise meant from error

    def evolve(self, slot: Slot) -> None:
        """Make its states those that are declared now, which else its first batch would see to. Called with ``work``
        held. Raises LeaseLost, and what :meth:`~stateflow.runtime.host.PartitionHost.evolve` raises."""
        self._lease.check(self._clock.monotonic())
        self._host(slot).evolve(self._clock.now_us())

    def _host(self, slot: Slot) -> PartitionHost:
        """At work, with the code that is deployed by now. Called with ``work`` held."""
        spec, cls = self._registry.operator(slot.id.operator)
        if slot.host is not None and not slot.host.runs(cls):
            slot.host.let_go(self._registry.environment.aside)
            slot.host = None
        if slot.host is None:
            slot.host = PartitionHost(
                cls,
                slot.id,
                self._registry.store(slot),
                slot.lifecycle.epoch,
                cached_keys=self._settings.cached_keys,
                cache=self._cache,
                max_value_bytes=self._settings.value_bytes_max,
                log=self._registry.commits.log,
                on_commit=partial(self._committed, slot),
                clock=self._clock,
                retention=self._retention,
                deployed=partial(self._registry.deployed, slot.id.operator),
                partitions=spec.partitions,
            )
        return slot.host

    @staticmethod
    def _committed(slot: Slot, sequence: int, encode: Callable[[], bytes]) -> None:
        followers = list(slot.logs.values())
        if slot.since is not None:
            if slot.since.changes.overflowed:
                slot.since = None
            else:
                followers.append(slot.since.changes)
        if followers:
            change_set = encode()
            for follower in followers:
                follower.append(sequence, change_set)

    def hold(self, operator: str, seconds: float) -> None:
        """Let requests of an operator wait, for so long at most; 0: go on. Raises InvalidArgument."""
        if not 0 <= seconds <= HOLD_S_MAX:
            raise InvalidArgument(
                f"requests cannot be held for {seconds:g} s",
                remedy=f"hold them for {HOLD_S_MAX:g} s at most, and again",
            )
        self._held[operator] = self._clock.monotonic() + seconds
        if not seconds:
            for slot in self._registry.slots():
                if slot.id.operator == operator:
                    self._registry.on_change(slot.id)

    def _is_held(self, operator: str) -> bool:
        return self._held.get(operator, 0.0) > self._clock.monotonic() if self._held else False


def not_owned(slot: Slot) -> NotOwner:
    return NotOwner("the partition is not owned here", remedy="refresh the assignment", partition=slot.id)


def _stuck(hand: InHand, error: Interrupted) -> OperatorFailed:
    hand.shield()
    return failure("the operator", error, "", operator=hand.partition.operator, partition=hand.partition.partition)
