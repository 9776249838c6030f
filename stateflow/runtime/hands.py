"""What threads have in hand: a batch of one partition, and of others what is to be committed together with it. It is
taken away when the operator does not return."""

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
    """Of one replica. Called from several threads."""

    def __init__(self, registry: PartitionRegistry, sender: Sender) -> None:
        self._registry, self._sender, self._clock = registry, sender, registry.clock
        self._with: dict[int, InHand] = {}  # by thread
        self._groups: dict[int, Group] = {}  # by thread

    # -- in the thread itself -----------------------------------------------------------------------------

    @contextmanager
    def group(self) -> Iterator[Group]:
        """What is not committed at the end is let go."""
        thread, group = threading.get_ident(), Group()
        self._groups[thread] = group
        try:
            yield group
        finally:
            del self._groups[thread]
            self._let_go(group.take())

    def take(self, slot: Slot, began: float) -> InHand:
        """Behind its lifecycle's ``begin``. Args: began: monotonic seconds."""
        hand = InHand(slot.id, began)
        self._with[hand.thread] = hand
        return hand

    def put_down(self, hand: InHand) -> None:
        """Until it is committed."""
        del self._with[hand.thread]

    def take_up(self, hand: InHand, now: float) -> None:
        hand.began = now
        self._with[hand.thread] = hand

    def end(self, slot: Slot, hand: InHand) -> None:
        """Its batch is committed or rolled back; or it was taken away, and comes back at last. Raises what the seal
        does that waited for it."""
        self._with.pop(hand.thread, None)
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
        with slot.mutex:
            if hand.host is not None:
                hand.host.discard()
            if slot.stuck is hand:
                slot.stuck = None
        log.warning("%s is served again: its operator came back", slot.id)
        self._registry.on_change(slot.id)

    # -- in others ----------------------------------------------------------------------------------------

    def in_hand(self) -> list[InHand]:
        """Batches that are being worked on."""
        return [hand for hand in list(self._with.values()) if not hand.left]

    @property
    def is_stuck(self) -> bool:
        """Does a thread work on a batch that was given up?"""
        return any(hand.left for hand in list(self._with.values()))

    def overdue(self, limit_s: float) -> InHand | None:
        """A batch that has been in hand for longer than that."""
        before = self._clock.monotonic() - limit_s
        return next((hand for hand in self.in_hand() if hand.began < before), None)

    def take_away(self, hand: InHand) -> bool:
        """Give a batch up that cannot be interrupted: it never commits, and its partition is not served here before its
        thread comes back. It may move away, be checkpointed, and taken over, as it was before the batch. False: it has
        ended, or is just being committed."""
        slot, group = self._registry.slot(hand.partition), self._groups.get(hand.thread)
        members: list[Member] = []
        try:
            with slot.mutex:
                if not hand.take_away():
                    return False
                members = [] if group is None else group.take()
                slot.stuck, hand.host, slot.host = hand, slot.host, None
                slot.work.take_away()
                if slot.lifecycle.finish():
                    self._sender.seal(slot)
        finally:
            self._leave(members)
        self._registry.on_change(slot.id)
        return True

    def leave_behind(self) -> None:
        """The thread does not come back, though it has no batch in hand: what it would commit together is let go."""
        self._leave([member for group in list(self._groups.values()) for member in group.take()])

    def _leave(self, members: list[Member]) -> None:
        if members:
            self._registry.environment.aside(partial(self._let_go, members))  # each may wait for its disk

    def _let_go(self, members: list[Member]) -> None:
        """Their batches are as if they had never come. Whoever had them has ``work`` of their slots no more."""
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
            except Exception:  # the seal that waited for it, say: whoever wants that asks again
                log.exception("%s was let go, and not all of that done", slot.id)
            self._registry.on_change(slot.id)
