"""A controller among several of one ledger: it leads while it holds the ledger, and says who does while it does not.

Each term is a controller of its own: the ledger is read anew when the hold was taken, every replica has to register,
and what was under way is carried on, as after a restart. When the hold is lost, or could not be renewed in time, or the
ledger is not the one that was opened, the term ends: nothing is granted, commanded or written any more, and this
process waits for the hold like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar

from reconfig.controller.context import ClusterStates
from reconfig.controller.controller import Controller
from reconfig.tenure import Tenure, Unrenewed
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
from stateflow.ledger import Hold, Holder, Ledger
from stateflow.settings import ControllerSettings

log = logging.getLogger(__name__)
T = TypeVar("T")


class Leading:
    """Call :meth:`try_once` or not, then :meth:`run`, then :meth:`close`.

    Args:
        me: as the ledger is to name the holder.
        gone: is this former holder a process that has ended?
        make: a controller for one term.
    """

    def __init__(
        self,
        ledger: Ledger,
        me: Holder,
        gone: Callable[[Holder], bool],
        settings: ControllerSettings,
        clock: Clock,
        make: Callable[[Tenure, ClusterStates, float], Controller],
    ) -> None:
        self._ledger, self._me, self._gone = ledger, me, gone
        self._settings, self._clock, self._make = settings, clock, make
        self.serving: Controller | None = None
        self._tenure = Tenure(0, settings.hold_s, 0.0)
        self._leader: Hold | None = None  # another one
        self._unrenewed = Unrenewed(settings.lease_margin)
        # a former holder that did not give its hold back may grant until then, whichever of this one's terms it is
        self._predecessor_until = -math.inf
        self._taking_from_s = 0.0  # such a one's lease, while it is not known whether its hold was taken
        self._said = ""
        self._waits_for: StateflowError | None = None  # with the ledger
        # one thread: a renewal that hangs is not overtaken by the next
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hold")
        self._loop = asyncio.get_running_loop()
        self._renew_now = asyncio.Event()
        self._requests: set[asyncio.Task[Any]] = set()  # of the term

    # -- requests -----------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self.serving is not None and self._tenure.left_s(self._clock.monotonic()) > 0

    def who(self) -> tuple[str, str]:
        """This one's address, and that of the one that leads; empty where that is not known."""
        return self._me.address, "" if self._leader is None else self._leader.holder.address

    def leader(self) -> Controller:
        """Of the term that holds now. Raises NotLeading."""
        if self.serving is not None and self.leads:
            return self.serving
        if (other := self._leader) is not None:
            what, remedy, leader = f"{other.holder} does", "ask that one", other.holder.address or None
        elif self._waits_for is not None:
            what, remedy, leader = self._waits_for.what, self._waits_for.remedy, None
        else:
            what, remedy, leader = "its term has just ended", "try again; see its log if it stays so", None
        raise NotLeading(f"this controller does not lead: {what}", remedy=remedy, leader=leader)

    @contextlib.asynccontextmanager
    async def term(self) -> AsyncIterator[Controller]:
        """For a request, which ends with the term. Raises NotLeading, and what has ended the term."""
        controller = self.leader()
        me = asyncio.current_task()
        assert me is not None
        self._requests.add(me)
        try:
            yield controller
        except asyncio.CancelledError:
            if controller is self.serving:
                raise
            why = controller.over.result() if controller.over.done() else HoldLost("the term is over")
            raise why from None
        finally:
            self._requests.discard(me)

    def heard_of(self, ledger: str, term: int, who: str) -> None:
        """A replica has heard a controller of this term. If it is newer than this one's, this one may have been
        stopped for a while; what is so is in the ledger."""
        if self.serving is not None and ledger == self._ledger.id and term > self._tenure.term:
            self._say(f"{who} has heard of term {term} of this ledger, this controller's is {self._tenure.term}")
            self._renew_now.set()

    # -- terms --------------------------------------------------------------------------------------------

    async def try_once(self) -> bool:
        """Lead from now on, if nobody else does, and what the ledger holds can be read."""
        sent_at = self._clock.monotonic()
        hold = await self._try()
        return hold is not None and await self._begin(hold, sent_at)

    async def run(self) -> None:
        """Wait for the hold, lead, and again, until cancelled."""
        while True:
            if self.serving is None and not await self.try_once():
                await self._wait()
                continue
            assert self.serving is not None
            why = await self._lead(self.serving)
            log.error("term %d ends here: %s", self._tenure.term, why)
            if not self.serving.over.done():  # requests under way are told the reason
                self.serving.over.set_result(why)
            await self._end()

    async def _wait(self) -> None:
        """For the next try; that a process of this machine is gone is seen before, without asking the ledger."""
        left_s = self._wait_s()
        while left_s > 0 and not (self._leader is not None and self._gone(self._leader.holder)):
            await asyncio.sleep(min(left_s, self._settings.retry_interval_s))
            left_s -= self._settings.retry_interval_s

    def _wait_s(self) -> float:
        """Until the other's hold lapses, and no longer: what nobody decides waits, too. It may be renewed, or given
        back, meanwhile."""
        left_s = self._leader.left_s if self._leader is not None else 0.0
        return min(left_s if left_s > 0 else self._settings.retry_interval_s, self._tenure.renew_s)

    async def _try(self) -> Hold | None:
        """The hold, if it is this one's now."""
        try:
            now = await self._in_thread(self._ledger.hold)
            clean = not now.holder.id or now.holder.id == self._me.id or self._gone(now.holder)
            over = self._unrenewed.over(now.term, now.until_us, now.lease_s, self._clock.monotonic())
            if clean or over or now.left_s <= 0:
                self._taking_from_s = max(self._taking_from_s, 0.0 if clean else now.lease_s)
                asked = self._me, self._settings.hold_s, self._gone, now.until_us if over else None
                now = await self._in_thread(self._ledger.take_hold, *asked)
        except StateflowError as error:
            self._leader, self._waits_for = None, error
            self._say(f"waits: {error}")
            return None
        if now.holder.id == self._me.id:
            return now
        self._leader, self._waits_for = now, None
        self._note_predecessor(0.0)
        since = datetime.fromtimestamp(now.since_us / 1e6, UTC).isoformat(timespec="seconds")
        self._say(f"waits: {now.holder} leads, term {now.term}, since {since}")
        return None

    async def _begin(self, hold: Hold, sent_at: float) -> bool:
        self._tenure = Tenure(hold.term, self._settings.hold_s, sent_at + self._settings.hold_s)
        self._leader = None
        self._note_predecessor(hold.grace_s)
        reading = asyncio.ensure_future(
            self._in_other_thread(ClusterStates.read, self._ledger, hold.term, self._settings.debug_validate)
        )
        try:
            while not reading.done():  # a long ledger must not cost the hold
                await asyncio.wait([reading], timeout=self._tenure.renew_s)
                if not reading.done():
                    await self._renew()
            states = reading.result()
        except StateflowError as error:
            reading.cancel()
            self._waits_for = error
            self._say(f"waits: {error}")
            return False
        self._said, self._waits_for = "", None
        log.info("leads from now on, term %d of ledger %s", hold.term, self._ledger.id)
        left_s = max(0.0, self._predecessor_until - self._clock.monotonic())
        self.serving = self._make(self._tenure, states, left_s / (1 + self._settings.lease_margin))  # which it adds
        self.serving.resume()
        return True

    def _note_predecessor(self, grace_s: float) -> None:
        """Its grace is said once, to the term that took its hold; that one may end before it has begun, and the answer
        that said it may be lost."""
        grace_s = max(grace_s, self._taking_from_s)
        self._taking_from_s = 0.0
        if grace_s:
            until = self._clock.monotonic() + grace_s * (1 + self._settings.lease_margin)
            self._predecessor_until = max(self._predecessor_until, until)

    async def _lead(self, server: Controller) -> StateflowError:
        """Until the term has ended; why."""
        wait_s = self._tenure.renew_s
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
                wait_s = self._tenure.renew_s
            except (HoldLost, LedgerReplaced) as error:
                return error
            except (Unavailable, LedgerReadOnly, WriteUncertain) as error:  # it lasts as long as was said last
                self._say(f"the hold is not renewed: {error}")
                wait_s = self._settings.retry_interval_s
            except StateflowError as error:
                return error

    async def _renew(self) -> None:
        """Raises HoldLost, also where nothing is heard until the hold is over."""
        sent_at = self._clock.monotonic()
        self._tenure.check(sent_at)
        renewing = asyncio.ensure_future(self._in_thread(self._ledger.renew_hold, self._settings.hold_s))
        await asyncio.wait([renewing], timeout=self._tenure.left_s(sent_at))
        if not renewing.done():
            renewing.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._tenure.check(self._clock.monotonic())
            raise HoldLost("the ledger did not answer", remedy="see to its database", term=self._tenure.term)
        renewing.result()
        self._tenure.renewed(sent_at)

    async def _end(self) -> None:
        server, self.serving = self.serving, None
        self._tenure.until = 0.0
        if server is not None:
            for request in list(self._requests):
                request.cancel()
            await server.close()

    async def close(self) -> None:
        """Give the hold back, where it is held."""
        await self._end()
        try:
            await asyncio.wait_for(self._in_thread(self._ledger.give_back_hold), self._settings.rpc_timeout_s)
        except (StateflowError, TimeoutError) as error:
            log.warning("the hold was not given back, and ends by itself: %s", error)
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
        finally:  # whoever is cancelled does not wait, and so hold up the loop, for a ledger that does not answer
            thread.shutdown(wait=False, cancel_futures=True)
