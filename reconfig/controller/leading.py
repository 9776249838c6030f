"""Leader election: one of several controllers of a ledger leads while it has the leader lease; the others name the
leader.

The leader lease is kept in the ledger. Each term has a controller object of its own: once the lease is taken, the
ledger is read afresh, every replica has to register, and unfinished work is resumed, as after a restart. A term ends
when the lease is lost, when it could not be renewed in time, or when the ledger is not the one that was opened. From
then on this process grants, commands and writes nothing, and waits for the lease like any other controller.

A controller counts its lease on its own monotonic clock, from just before it *sends* a renewal, as a replica does. The
next process that takes the lease waits before it leads: for as long as the former holder may still believe that it has
the lease, plus a margin for clock drift. So no two controllers decide at once, whatever the database's clock does. That
clock only says when to try to take the lease. If it was set back by an hour, it reports the end of the lease an hour
late. A waiting controller therefore also counts, on its own clock, for how long it has seen no renewal
(:class:`Unrenewed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random  # noqa: TID251 - the type; which one is handed in
from typing import Any, TypeVar

from reconfig.controller.context import Leadership, Writer
from reconfig.controller.controller import Controller
from stateflow.clock import Clock
from stateflow.errors import (
    HoldLost,
    LedgerReadOnly,
    LedgerReplaced,
    NotLeading,
    StateflowError,
    Unavailable,
    WriteUncertain,
)
from stateflow.ledger import Holder, LeaderLease, Ledger
from stateflow.schedule import jittered
from stateflow.settings import ControllerSettings

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class Unrenewed:
    """Counts for how long another controller has not renewed its leader lease.

    Args:
        margin: fraction by which clocks may drift apart.
    """

    margin: float
    _seen: tuple[int, int] | None = None  # term, and its end by the database's clock, which each renewal changes
    _since: float = 0.0

    def over(self, term: int, until_us: int, lease_s: float, now: float) -> bool:
        """Notes the other controller's lease, as just read from the ledger. Returns whether the lease has lapsed: no
        renewal was seen for its whole duration, margin included.
        """
        if self._seen != (term, until_us):
            self._seen, self._since = (term, until_us), now
        return now - self._since > lease_s * (1 + self.margin)


def is_cold(former: LeaderLease, me: Holder) -> bool:
    """Tells whether a term begins with a cold start: the whole cluster may have been down, so that replicas are
    starting now, together with this controller.

    It is one if the former leader gave its lease back, if no controller led for longer than that lease, or if the
    former leader was this controller before its machine was restarted. It is none if the former leader has just died,
    because the replicas that it led run.

    Args:
        former: the leader lease before this process takes it.
        me: this process.
    """
    holder = former.holder
    if not holder.id or former.left_s < -former.lease_s:
        return True
    if not holder.boot or not me.boot:
        return False
    # the address, too, because small boards are often clones with one host name
    return (holder.host, holder.address) == (me.host, me.address) and holder.boot != me.boot


class Leading:
    """Takes part in the election of the leader.

    Call :meth:`try_once` (optional), then :meth:`run`, and :meth:`close` at the end.

    Args:
        me: this process, as the ledger names a holder.
        gone: tells whether the process of a holder has ended.
        make: creates the controller of one term from its leadership, the writer, and the seconds for which a
            predecessor may still grant leases.
        random: varies the pauses before retries; None: one with a fixed seed, for tests.
    """

    def __init__(
        self,
        ledger: Ledger,
        me: Holder,
        gone: Callable[[Holder], bool],
        settings: ControllerSettings,
        clock: Clock,
        make: Callable[[Leadership, Writer, float], Controller],
        random: Random | None = None,
    ) -> None:
        self._ledger, self._me, self._gone = ledger, me, gone
        self._settings, self._clock, self._make = settings, clock, make
        self._random = random or Random(0)
        self.serving: Controller | None = None
        self._leadership = Leadership(0, settings.hold_s, 0.0)
        self._leader: LeaderLease | None = None  # leader lease of another controller
        self._unrenewed = Unrenewed(settings.lease_margin)
        # time until which a former holder that did not give its lease back may grant leases; kept across terms of this
        # controller
        self._predecessor_until = -math.inf
        # while the leader lease is being taken from another holder: duration of that holder's lease, in seconds; 0:
        # that holder cannot grant leases any more
        self._taking_from_s = 0.0
        self._is_cold = False  # the term that is to begin begins with a cold start
        # time until which owners that have not registered are waited for; kept across terms of this controller
        self._cold_until = -math.inf
        self._said = ""
        self._waits_for: StateflowError | None = None  # why the ledger cannot be used
        # one thread, so that no renewal overtakes an earlier one that hangs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hold")
        self._loop = asyncio.get_running_loop()
        self._renew_now = asyncio.Event()
        self._requests: set[asyncio.Task[Any]] = set()  # under way in this term

    # -- requests -----------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self.serving is not None and self._leadership.left_s(self._clock.monotonic()) > 0

    def who(self) -> tuple[str, str]:
        """Returns the addresses of this controller and of the leader. The second is empty if no other leader is
        known."""
        return self._me.address, "" if self._leader is None else self._leader.holder.address

    def leader(self) -> Controller:
        """Returns the controller of the current term. Raises NotLeading."""
        if self.serving is not None and self.leads:
            return self.serving
        if (other := self._leader) is not None:
            what, remedy, leader = f"{other.holder} does", "ask that controller", other.holder.address or None
        elif self._waits_for is not None:
            what, remedy, leader = self._waits_for.what, self._waits_for.remedy, None
        else:
            what, remedy, leader = "its term has just ended", "try again; if this persists, see its log", None
        raise NotLeading(f"this controller does not lead: {what}", remedy=remedy, leader=leader)

    @contextlib.asynccontextmanager
    async def term(self) -> AsyncIterator[Controller]:
        """Gives a request the controller of the current term, and cancels the request when the term ends.

        Raises NotLeading, or the error that ended the term.
        """
        controller = self.leader()
        me = asyncio.current_task()
        assert me is not None
        self._requests.add(me)
        try:
            yield controller
        except asyncio.CancelledError:
            if controller is self.serving:
                raise
            why = (
                controller.over.result()
                if controller.over.done()
                else HoldLost("this controller's term is over", remedy="ask the controller that leads now")
            )
            raise why from None
        finally:
            self._requests.discard(me)

    def heard_of(self, ledger: str, term: int, who: str) -> None:
        """Takes note of the newest term that a replica knows.

        A term newer than this one may mean that this process was suspended for a while. This process then renews its
        leader lease at once, and so learns from the ledger whether it still leads.
        """
        if self.serving is not None and ledger == self._ledger.id and term > self._leadership.term:
            self._say(f"{who} knows term {term} of this ledger, this controller is in term {self._leadership.term}")
            self._renew_now.set()

    # -- terms --------------------------------------------------------------------------------------------

    async def try_once(self) -> bool:
        """Becomes the leader if no other controller leads and the ledger can be read. Returns whether it leads now."""
        sent_at = self._clock.monotonic()
        hold = await self._try()
        return hold is not None and await self._begin(hold, sent_at)

    async def run(self) -> None:
        """Waits for the leader lease, leads, and waits again, until cancelled."""
        while True:
            if self.serving is None and not await self.try_once():
                await self._wait()
                continue
            assert self.serving is not None
            why = await self._lead(self.serving)
            log.error("term %d ended: %s", self._leadership.term, why)
            if not self.serving.over.done():  # requests under way are told the reason
                self.serving.over.set_result(why)
            await self._end()

    async def _wait(self) -> None:
        """Waits until the next try is due, or until the leader's process, if it is on this machine, has ended."""
        left_s = self._wait_s()
        while left_s > 0 and not (self._leader is not None and self._gone(self._leader.holder)):
            pause_s = min(left_s, jittered(self._settings.retry_interval_s, self._random))
            await asyncio.sleep(pause_s)
            left_s -= pause_s

    def _wait_s(self) -> float:
        """Returns the seconds until the next try.

        The next try is due when the other leader's lease lapses, because decisions wait for a leader. It is due after
        ``renew_s`` at the latest, because the lease may be renewed or given back earlier.
        """
        left_s = self._leader.left_s if self._leader is not None else 0.0
        return min(left_s if left_s > 0 else self._settings.retry_interval_s, self._leadership.renew_s)

    async def _try(self) -> LeaderLease | None:
        """Tries to take the leader lease, and returns it; None: another controller has it, or the ledger cannot be
        used."""
        try:
            now = await self._in_thread(self._ledger.hold)
            clean = not now.holder.id or now.holder.id == self._me.id or self._gone(now.holder)
            over = self._unrenewed.over(now.term, now.until_us, now.lease_s, self._clock.monotonic())
            if clean or over or now.left_s <= 0:
                self._taking_from_s = max(self._taking_from_s, 0.0 if clean else now.lease_s)
                self._is_cold |= is_cold(now, self._me)  # an earlier attempt may have taken the lease unnoticed
                asked = self._me, self._settings.hold_s, self._gone, now.until_us if over else None
                now = await self._in_thread(self._ledger.take_leadership, *asked)
        except StateflowError as error:
            self._leader, self._waits_for = None, error
            self._say(f"waiting to lead: {error}")
            return None
        if now.holder.id == self._me.id:
            return now
        self._leader, self._waits_for = now, None
        self._is_cold = False
        self._note_predecessor(0.0)
        since = datetime.fromtimestamp(now.since_us / 1e6, UTC).isoformat(timespec="seconds")
        self._say(f"waiting to lead: {now.holder} leads, term {now.term}, since {since}")
        return None

    async def _begin(self, hold: LeaderLease, sent_at: float) -> bool:
        self._leadership = Leadership(hold.term, self._settings.hold_s, sent_at + self._settings.hold_s)
        self._leader = None
        self._note_predecessor(hold.grace_s)
        reading = asyncio.ensure_future(
            self._in_other_thread(Writer.read, self._ledger, hold.term, self._settings.debug_validate)
        )
        try:
            while not reading.done():  # the lease must not lapse while a long ledger is read
                await asyncio.wait([reading], timeout=self._leadership.renew_s)
                if not reading.done():
                    await self._renew()
            writer = reading.result()
        except StateflowError as error:
            reading.cancel()
            self._waits_for = error
            self._say(f"waiting to lead: {error}")
            return False
        self._said, self._waits_for = "", None
        log.info("now leading, term %d of ledger %s", hold.term, self._ledger.id)
        if self._is_cold:  # counted from here, because no replica can register while the ledger is read
            self._is_cold, self._cold_until = False, self._clock.monotonic() + self._settings.cold_start_wait_s
        self._leadership.cold_until = self._cold_until
        left_s = max(0.0, self._predecessor_until - self._clock.monotonic())
        # divided by the margin, because Members multiplies by it
        self.serving = self._make(self._leadership, writer, left_s / (1 + self._settings.lease_margin))
        self.serving.resume()
        return True

    def _note_predecessor(self, grace_s: float) -> None:
        """Remembers for how long a predecessor may still grant leases, given its grace in seconds.

        The ledger reports the grace once, to the term that took the lease. That term may end before its controller
        serves, or the ledger's answer may be lost. The predecessor is therefore assumed to grant leases for at least
        the duration of its own lease.
        """
        grace_s = max(grace_s, self._taking_from_s)
        self._taking_from_s = 0.0
        if grace_s:
            until = self._clock.monotonic() + grace_s * (1 + self._settings.lease_margin)
            self._predecessor_until = max(self._predecessor_until, until)

    async def _lead(self, server: Controller) -> StateflowError:
        """Renews the leader lease until the term has ended. Returns the reason."""
        wait_s = self._leadership.renew_s
        while True:
            self._renew_now.clear()
            waking = asyncio.ensure_future(self._renew_now.wait())
            either: list[asyncio.Future[Any]] = [server.over, waking]
            await asyncio.wait(either, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            waking.cancel()
            if server.over.done():
                return server.over.result()
            try:
                await self._renew()
                wait_s = self._leadership.renew_s
            except (HoldLost, LedgerReplaced) as error:
                return error
            except (Unavailable, LedgerReadOnly, WriteUncertain) as error:  # the lease lasts as the last renewal said
                self._say(f"leader lease not renewed: {error}")
                wait_s = jittered(self._settings.retry_interval_s, self._random)
            except StateflowError as error:
                return error

    async def _renew(self) -> None:
        """Renews the leader lease. Raises HoldLost, also if the ledger does not answer before the lease lapses."""
        sent_at = self._clock.monotonic()
        self._leadership.check(sent_at)
        renewing = asyncio.ensure_future(self._in_thread(self._ledger.renew_leadership, self._settings.hold_s))
        await asyncio.wait([renewing], timeout=self._leadership.left_s(sent_at))
        if not renewing.done():
            renewing.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._leadership.check(self._clock.monotonic())
            raise HoldLost(
                "the ledger did not answer before the leader lease lapsed",
                remedy="check the ledger's database",
                term=self._leadership.term,
            )
        renewing.result()
        self._leadership.renewed(sent_at)

    async def _end(self) -> None:
        server, self.serving = self.serving, None
        self._leadership.until = 0.0
        if server is not None:
            for request in list(self._requests):
                request.cancel()
            await server.close()

    async def close(self) -> None:
        """Ends the term, and gives the leader lease back if this controller has it."""
        await self._end()
        try:
            await asyncio.wait_for(self._in_thread(self._ledger.give_back_leadership), self._settings.rpc_timeout_s)
        except (StateflowError, TimeoutError) as error:
            log.warning("leader lease not released, it will lapse: %s", error)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- plumbing -----------------------------------------------------------------------------------------

    def _say(self, what: str) -> None:
        if what != self._said:
            self._said = what
            log.warning("%s", what)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self._thread, work, *arguments)

    async def _in_other_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        thread = ThreadPoolExecutor(1, thread_name_prefix="cluster")
        try:
            return await self._loop.run_in_executor(thread, work, *arguments)
        finally:  # no waiting: a caller that is cancelled must not block the loop on a ledger that does not answer
            thread.shutdown(wait=False, cancel_futures=True)
