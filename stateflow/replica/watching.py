"""The watchdog of batches that do not come back.

Their callers hear that the batches are worked on, and no operator delays the others for longer than it may.
:mod:`stateflow.runtime.watchdog` says how a batch is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from stateflow.clock import Clock
from stateflow.replica.troubles import Troubles
from stateflow.replica.turns import Turns
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.watchdog import InHand, stalled_s

log = logging.getLogger(__name__)
#: interval at which a caller whose batch takes long is told that it is being worked on, in seconds
BEAT_S = 5.0
#: interval of checking for batches that do not come back, in seconds
LOOK_S = 1.0
INTERRUPT_EVERY_S = 0.02
INTERRUPTS = 50


@dataclass(slots=True, eq=False)
class Caller:
    """A caller that waits for the batch thread. ``beat``: the last sign of life, perhaps still on its way."""

    tell: Callable[[], Awaitable[None]]
    said_at: float
    beat: asyncio.Task[None] | None = None

    async def said(self) -> None:
        """Waits until no sign of life is on its way: messages are sent one at a time."""
        if self.beat is not None:
            await asyncio.wait((self.beat,))


class Watch:
    def __init__(self, node: ReplicaNode, turns: Turns, clock: Clock) -> None:
        self._node, self._turns, self._clock = node, turns, clock
        self._callers: set[Caller] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="watchdog")
        self._loop = asyncio.get_running_loop()

    @contextlib.contextmanager
    def telling(self, tell: Callable[[], Awaitable[None]]) -> Iterator[Caller]:
        """Calls ``tell`` now and then, while the batch thread has the work that the caller waits for."""
        caller = Caller(tell, self._clock.monotonic())
        self._callers.add(caller)
        try:
            yield caller
        finally:
            self._callers.remove(caller)

    async def run(self) -> None:
        """Checks regularly, until cancelled."""
        limit_s, troubles = self._node.settings.batch_timeout_s, Troubles(log, "batch watchdog failed")
        while True:
            await asyncio.sleep(min(LOOK_S, limit_s / 4) if limit_s else LOOK_S)
            with troubles.survived():
                await self._look(limit_s)

    async def _look(self, limit_s: float) -> None:
        self._give_signs_of_life()
        hands = self._node.batches.hands
        if hands.keeps_waiting(LOOK_S):
            await self._loop.run_in_executor(self._thread, hands.spare, LOOK_S)
        if not limit_s:
            return
        if (hand := hands.overdue(limit_s)) is not None:
            await self.end(hand)
            return
        now, in_hand = self._clock.monotonic(), bool(hands.in_hand())
        if stalled_s(self._turns.busy_since, in_hand, self._node.served_at, now) > limit_s:
            log.error("batch thread is stuck, continuing in a new thread")
            hands.leave_behind()
            self._turns.leave_behind()

    def _give_signs_of_life(self) -> None:
        now = self._clock.monotonic()
        for caller in self._callers:
            if now - caller.said_at > BEAT_S and (caller.beat is None or caller.beat.done()):
                caller.said_at = now
                caller.beat = self._loop.create_task(_told(caller.tell))

    async def end(self, hand: InHand) -> None:
        """Interrupts a batch, or goes on without its thread."""
        for _ in range(INTERRUPTS):
            hand.interrupt()
            await asyncio.sleep(INTERRUPT_EVERY_S)
            if hand.ended:
                return
        try:
            taken = await self._loop.run_in_executor(self._thread, self._node.batches.hands.take_away, hand)
        except Exception as error:
            if not (taken := hand.taken):
                raise
            # for example the seal that waited for the batch: its caller asks again, and the thread is gone all the same
            Troubles(log, f"{hand.partition} was taken from a stuck thread, but not completely").met(error)
        if taken:
            log.error("%s", self._node.batches.refusal(hand.partition))
        elif hand.ended:
            return
        else:
            log.error("write of %s is stuck, continuing in a new thread", hand.partition)
        hand.left = True
        self._turns.leave_behind()

    async def end_all(self) -> None:
        """Ends all running batches: the replica stops, and they take too long."""
        for hand in self._node.batches.hands.in_hand():
            with Troubles(log, "cannot end a running batch").survived():
                await self.end(hand)


async def _told(tell: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(Exception):  # the caller that waits for the batch finds out
        await tell()
