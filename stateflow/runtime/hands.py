"""Running batches of the threads: each has a batch of one partition, and a group of processed batches of others to be
committed together with it. All are taken away from a thread when the operator does not return."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from stateflow.runtime.groups import Group, Member
from stateflow.runtime.registry import PartitionRegistry
from stateflow.runtime.sending import Sender
from stateflow.runtime.slot import Slot
from stateflow.runtime.watchdog import InHand

log = logging.getLogger(__name__)


class Hands:
    """Running batches of one replica. Thread-safe."""

    def __init__(self, registry: PartitionRegistry, sender: Sender) -> None:
        self._registry, self._sender, self._clock = registry, sender, registry.clock
        self._with: dict[int, InHand] = {}  # by thread
        self._groups: dict[int, Group] = {}  # by thread

    # -- in the thread itself -----------------------------------------------------------------------------

    @contextmanager
    def group(self) -> Iterator[Group]:
        """Opens a group for this thread. Members that are not committed at the end are dropped."""
        thread, group = threading.get_ident(), Group()
        self._groups[thread] = group
        try:
            yield group
        finally:
            del self._groups[thread]
            self._let_go(group.take(ends=True))

    def take(self, slot: Slot, began: float) -> InHand:
        """Begins a running batch on this thread. Callers have called the lifecycle's ``begin``. Args: began: monotonic
        seconds."""
        hand = InHand(slot.id, began)
        self._with[hand.thread] = hand
        return hand

    def put_down(self, hand: InHand) -> None:
        """Sets a processed batch aside until its group is committed."""
        del self._with[hand.thread]

    def take_up(self, hand: InHand, now: float) -> None:
        hand.began = now
        self._with[hand.thread] = hand

    def end(self, slot: Slot, hand: InHand) -> None:
        """Ends a batch that is committed or rolled back, or that was taken away and whose operator returns at last.
        Seals the partition if a seal waited for the batch, and raises what that raises."""
        self._with.pop(hand.thread, None)
        if hand.end():
            with slot.mutex:
                if hand.interrupted and slot.host is not None:
                    slot.host.discard()
                    slot.host = None
                sealing = slot.lifecycle.finish()
                if slot.host is not None and slot.host.is_unsure:
                    # the database is read again, and followers start over: they may have missed the last commit
                    self._registry.close_store(slot)
                if sealing:
                    self._sender.seal(slot)
            return
        with slot.mutex:
            if hand.host is not None:
                hand.host.discard()
            if slot.stuck is hand:
                slot.stuck = None
        log.warning("%s is served again: its operator returned", slot.id)
        self._registry.on_change(slot.id)

    # -- in other threads ---------------------------------------------------------------------------------

    def in_hand(self) -> list[InHand]:
        """Returns the running batches, except those whose thread was left behind."""
        return [hand for hand in list(self._with.values()) if not hand.left]

    @property
    def is_stuck(self) -> bool:
        """Tells whether a thread that was left behind still works on its batch."""
        return any(hand.left for hand in list(self._with.values()))

    def overdue(self, limit_s: float) -> InHand | None:
        """Returns a batch that has been running for longer than ``limit_s``. None: there is none."""
        before = self._clock.monotonic() - limit_s
        return next((hand for hand in self.in_hand() if hand.began < before), None)

    def take_away(self, hand: InHand) -> bool:
        """Takes a batch that cannot be interrupted away from its thread, with the thread's group.

        The batch will never commit, and this replica does not serve the partition before the thread returns from the
        operator. In the state before the batch, the partition may move away, be checkpointed and be taken over. Returns
        False where the batch has ended, or is just being committed.
        """
        slot, group = self._registry.slot(hand.partition), self._groups.get(hand.thread)
        members: list[Member] = []
        try:
            with slot.mutex:
                if not hand.take_away():
                    return False
                members = [] if group is None else group.take(ends=True)
                slot.stuck, hand.host, slot.host = hand, slot.host, None
                slot.work.take_away()
                if slot.lifecycle.finish():
                    self._sender.seal(slot)
        finally:
            self._leave(members)
        self._registry.on_change(slot.id)
        return True

    def leave_behind(self) -> None:
        """Takes all groups away, when a thread does not return though it has no running batch."""
        self._leave([member for group in list(self._groups.values()) for member in group.take(ends=True)])

    def keeps_waiting(self, limit_s: float) -> bool:
        """Tells whether processed batches have waited for ``limit_s`` to be committed together with a slow batch."""
        before = self._clock.monotonic() - limit_s
        return any(group.has_waited(before) for group in list(self._groups.values()))

    def spare(self, limit_s: float) -> None:
        """Drops processed batches that have waited for ``limit_s``, as a move may need their partitions. They are sent
        again after the slow batch."""
        before = self._clock.monotonic() - limit_s
        self._leave([member for group in list(self._groups.values()) for member in group.take(before=before)])

    def _leave(self, members: list[Member]) -> None:
        if members:
            self._registry.environment.aside(partial(self._let_go, members))  # each may have to wait for its disk

    def _let_go(self, members: list[Member]) -> None:
        """Drops processed batches as if they had never arrived, and takes ``work`` of their slots away from the thread
        that held it."""
        for member in members:
            slot = member.slot
            try:
                with slot.mutex:
                    member.host.discard()
                    if slot.host is member.host:
                        slot.host = None
                    slot.work.take_away()
                    if slot.lifecycle.finish():
                        self._sender.seal(slot)
            except Exception:  # of a seal that waited for the batch, for example: the controller asks for it again
                log.exception("%s: failed to drop a processed batch", slot.id)
            self._registry.on_change(slot.id)
