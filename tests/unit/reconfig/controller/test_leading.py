"""Terms of one controller: what it carries from one term to the next, and what ends a term."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import steps
from reconfig.controller.controller import Controller
from reconfig.controller.leading import Leading, is_cold
from stateflow.clock import ManualClock
from stateflow.errors import (
    HoldLost,
    LedgerCorrupt,
    LedgerReadOnly,
    LedgerReplaced,
    NotLeading,
    StateflowError,
    Unavailable,
    WriteUncertain,
)
from stateflow.ledger import Holder, LeaderLease, Ledger
from stateflow.settings import ControllerSettings

SETTINGS = ControllerSettings(lease_margin=0.1, hold_s=5.0, retry_interval_s=0.001)
ME, OTHER = Holder("me", "here", "a:1"), Holder("other", "there", "b:1")
READ_ONLY = LedgerReadOnly("the ledger is read-only", remedy="let this user write it")
AWAY = Unavailable("the ledger is away", remedy="see to its database")


class Held:
    """A ledger whose hold another controller had and did not give back.

    ``fails``: by the name of a call, the error that it raises once, after it was done.
    """

    id = "L"

    def __init__(self) -> None:
        self.now, self.clock = LeaderLease(1, OTHER, 0, SETTINGS.hold_s, -1.0), ManualClock(10**9)
        self.fails: dict[str, StateflowError] = {}

    def hold(self) -> LeaderLease:
        return self.now

    def take_leadership(
        self, me: Holder, lease_s: float, gone: Callable[[Holder], bool], over_us: int | None = None
    ) -> LeaderLease:
        before, self.now = self.now, LeaderLease(self.now.term + 1, me, 0, lease_s, lease_s)
        self._fail("take_leadership")
        return replace(self.now, grace_s=0.0 if before.holder.id == me.id else before.lease_s)

    def renew_leadership(self, lease_s: float) -> None:
        self._fail("renew_leadership")

    def give_back_leadership(self) -> None: ...

    def records(self, archived: bool) -> list[Any]:
        self._fail("records")
        return []

    def _fail(self, call: str) -> None:
        if call in self.fails:
            raise self.fails.pop(call)


class Terms:
    def __init__(self) -> None:
        self.ledger, self.clock = Held(), ManualClock(10**9)
        self.graces: list[float] = []
        self.cold_for_s: list[float] = []  # at the begin of each term, how long owners are waited for
        ledger: Any = self.ledger
        self.leading = Leading(ledger, ME, lambda _: False, SETTINGS, self.clock, self._make)

    def _make(self, leadership: Any, writer: Any, grace_s: float) -> Any:
        async def close() -> None: ...

        self.graces.append(grace_s)
        self.cold_for_s.append(max(0.0, leadership.cold_until - self.clock.monotonic()))
        over = asyncio.get_running_loop().create_future()
        return SimpleNamespace(resume=lambda: None, close=close, over=over)


@pytest.mark.parametrize(("lost", "left_s"), [("records", (5.5 - 1) / 1.1), ("take_leadership", 5.0)])
def test_what_a_predecessor_may_grant_outlives_a_term_that_does_not_begin(lost: str, left_s: float) -> None:
    """A predecessor's grace still counts after a term that failed to begin.

    At the second attempt the hold was already this controller's own, and the ledger named no predecessor. The
    predecessor's clock may be slower by a tenth; if the answer was lost, it is unknown since when the hold is this
    controller's.
    """

    async def scenario() -> None:
        terms = Terms()
        terms.ledger.fails[lost] = AWAY
        await terms.leading.try_once()
        assert terms.leading.serving is None
        terms.clock.advance(1.0)
        await terms.leading.try_once()
        assert terms.leading.serving is not None
        assert terms.graces == [pytest.approx(left_s)]
        await terms.leading.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [AWAY, LedgerCorrupt("a record cannot be read", remedy="verify it")])
def test_it_waits_on_when_what_the_ledger_holds_cannot_be_read(error: StateflowError) -> None:
    """The controller waits on when the records of the ledger cannot be read.

    The controller had the hold by then, and took for granted that it led: the process ended in an AssertionError.
    """

    async def scenario() -> None:
        terms = Terms()
        terms.ledger.fails["records"] = error
        await terms.leading.try_once()
        with pytest.raises(NotLeading, match=error.what):
            terms.leading.leader()
        terms.ledger.fails["records"] = error
        running = asyncio.create_task(terms.leading.run())
        async with asyncio.timeout(10):
            while terms.leading.serving is None and not running.done():
                await asyncio.sleep(0.001)
        assert not running.done()
        assert terms.leading.leader() is terms.leading.serving
        running.cancel()
        await terms.leading.close()

    asyncio.run(scenario())


def test_what_a_predecessor_may_grant_outlives_a_term_that_ends_at_once() -> None:
    async def scenario() -> None:
        terms = Terms()
        for _ in range(3):
            await terms.leading.try_once()
            await terms.leading._end()
            terms.clock.advance(2.0)
        terms.clock.advance(2.0)
        await terms.leading.try_once()
        assert terms.graces == pytest.approx([5.0, 3.5 / 1.1, 1.5 / 1.1, 0.0])
        await terms.leading.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("left_s", "wait_s"), [(0.0003, 0.0003), (1.2, 1.2), (4.9, 5.0 / 3), (0.0, 0.001), (-3.0, 0.001)]
)
def test_it_waits_for_the_end_of_another_ones_hold_and_no_longer(left_s: float, wait_s: float) -> None:
    """The controller waits for another one's hold as long as it lasts, and no longer.

    It used to wait for a retry interval at least, and decided that much later.
    """

    async def scenario() -> None:
        terms = Terms()
        terms.leading._leader = LeaderLease(1, OTHER, 0, SETTINGS.hold_s, left_s)
        terms.leading._leadership.lease_s = SETTINGS.hold_s
        assert terms.leading._wait_s() == pytest.approx(wait_s)
        await terms.leading.close()

    asyncio.run(scenario())


def test_a_hold_that_is_not_renewed_is_over_though_the_databases_clock_was_put_back() -> None:
    """A hold that is not renewed ends, though the database's clock was put back.

    The leader died, and the clock was put back by an hour: for an hour no controller led.
    """

    async def scenario() -> None:
        terms = Terms()
        terms.ledger.now = LeaderLease(1, OTHER, 0, SETTINGS.hold_s, 3600.0, until_us=7)
        for _ in range(11):
            await terms.leading.try_once()
            assert terms.leading.serving is None
            terms.clock.advance(0.5)
        terms.ledger.now = replace(terms.ledger.now, until_us=8)  # the holder is alive
        for _ in range(12):
            await terms.leading.try_once()
            assert terms.leading.serving is None
            terms.clock.advance(0.5)
        await terms.leading.try_once()
        assert terms.leading.serving is not None
        assert terms.graces == [pytest.approx(SETTINGS.hold_s)], "it may go on granting by its own clock"
        await terms.leading.close()

    asyncio.run(scenario())


def test_a_process_that_is_gone_is_seen_before_its_hold_is_looked_at_again() -> None:
    async def scenario() -> None:
        terms = Terms()
        terms.leading._leader = LeaderLease(1, OTHER, 0, SETTINGS.hold_s, 3600.0)
        asked: list[Holder] = []

        def gone(other: Holder) -> bool:
            asked.append(other)
            return len(asked) == 3

        terms.leading._gone = gone
        terms.leading._leadership.lease_s = 3600.0
        await asyncio.wait_for(terms.leading._wait(), 10)
        assert asked == [OTHER] * 3
        await terms.leading.close()

    asyncio.run(scenario())


def test_the_loop_goes_on_when_a_book_that_is_being_read_is_not_wanted_any_more() -> None:
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        go_on.wait(10)
        over.set()

    async def scenario() -> None:
        terms = Terms()
        reading = asyncio.create_task(terms.leading._in_other_thread(read))
        await asyncio.to_thread(begun.wait, 10)
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        assert not over.is_set()
        go_on.set()
        await asyncio.to_thread(over.wait, 10)
        await terms.leading.close()

    asyncio.run(scenario())


def test_a_record_waits_for_a_ledger_that_can_only_be_read(tmp_path: Path) -> None:
    """A record waits while the ledger is read-only, as PostgreSQL is for some seconds when it fails over.

    The move of that record used to stay open, with no runner to carry it out.
    """

    async def scenario() -> None:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            server = Controller(ledger, ControllerSettings(retry_interval_s=0.001))
            refusals, append = [READ_ONLY, AWAY, READ_ONLY], ledger.append

            def refusing(*arguments: Any) -> Any:
                if refusals:
                    raise refusals.pop()
                return append(*arguments)

            ledger.append = refusing  # type: ignore[method-assign]
            (record,) = await server.context.record(steps.adopt_ledger, "other")
            assert (record.item_id, server.cluster.newest) == ("adopted/other", record.record_id)
            assert not server.over.done()
            await server.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [AWAY, READ_ONLY, WriteUncertain("the ledger went away", remedy="-")])
def test_a_renewal_that_failed_is_tried_again_while_the_hold_lasts(error: StateflowError) -> None:
    """A renewal that failed is retried while the hold lasts, after any error.

    Only an unreachable ledger used to leave the term alive.
    """

    async def scenario() -> None:
        terms = Terms()
        terms.leading._settings = SETTINGS.model_copy(update={"retry_interval_s": 0.001, "hold_s": 5.0})
        await terms.leading.try_once()
        terms.leading._leadership.lease_s = 0.01  # makes it renew often
        terms.ledger.fails["renew_leadership"] = error
        assert terms.leading.serving is not None
        leading = asyncio.ensure_future(terms.leading._lead(terms.leading.serving))
        await asyncio.sleep(0.1)
        assert not terms.ledger.fails
        assert not leading.done()
        leading.cancel()
        await terms.leading.close()

    asyncio.run(scenario())


def test_a_ledger_that_stays_so_ends_the_term_and_what_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            terms = Terms()
            await terms.leading.try_once()
            leadership = terms.leading._leadership
            leadership.lease_s = 0.01  # makes it renew often
            server = Controller(ledger, ControllerSettings(retry_interval_s=0.001), terms.clock, leadership=leadership)
            refused = asyncio.Event()
            loop = asyncio.get_running_loop()

            def refusing(*_: Any) -> Any:
                loop.call_soon_threadsafe(refused.set)
                raise READ_ONLY

            ledger.append = refusing  # type: ignore[method-assign]
            record = asyncio.ensure_future(server.context.record(steps.adopt_ledger, "other"))
            await refused.wait()
            terms.clock.advance(SETTINGS.hold_s)
            assert isinstance(await terms.leading._lead(server), HoldLost)
            await terms.leading._end()
            with pytest.raises(HoldLost):
                await record
            await server.close()
            await terms.leading.close()

    asyncio.run(scenario())


def test_a_request_under_way_is_told_why_the_term_ended() -> None:
    """A request in progress hears why the term ended, also where the renewal was first to find out."""
    moved = LedgerReplaced("the ledger's file was deleted or moved", remedy="put it back")

    async def scenario() -> None:
        terms = Terms()
        await terms.leading.try_once()
        terms.leading._leadership.lease_s = 0.01  # makes it renew often
        begun = asyncio.Event()

        async def request() -> None:
            async with terms.leading.term():
                begun.set()
                await asyncio.Event().wait()

        asked = asyncio.ensure_future(request())
        await begun.wait()
        terms.ledger.fails["renew_leadership"] = moved
        running = asyncio.ensure_future(terms.leading.run())
        with pytest.raises(LedgerReplaced):
            await asked
        running.cancel()
        await terms.leading.close()

    asyncio.run(scenario())


def test_nothing_follows_from_a_record_of_which_nobody_knows_whether_it_was_written(tmp_path: Path) -> None:
    """An uncertain write ends the term before anything else is decided.

    A request beside it would be decided by a view that may lack the record: two takeovers were planned with one epoch
    for both, and the term that read both could never grant the second.
    """

    async def scenario() -> None:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            terms = Terms()
            await terms.leading.try_once()
            server = Controller(ledger, SETTINGS, terms.clock, leadership=terms.leading._leadership)
            append = ledger.append

            def lost(*arguments: Any) -> Any:
                append(*arguments)
                raise WriteUncertain("the ledger went away", remedy="-")

            ledger.append = lost  # type: ignore[method-assign]
            context = server.context
            records = [asyncio.ensure_future(context.record(steps.pause, name, True)) for name in ("r1", "r2")]
            await asyncio.wait(records)
            assert [type(record.exception()) for record in records] == [WriteUncertain, WriteUncertain]
            ledger.append = append  # type: ignore[method-assign]
            assert server.over.done()
            with pytest.raises(HoldLost, match="went away"):
                await context.record(steps.pause, "r3", True)
            with pytest.raises(HoldLost, match="went away"):
                context.check_leads()
            assert [record.item_id for record in ledger.records()] == ["pause/r1/1"]
            await server.close()
            await terms.leading.close()

    asyncio.run(scenario())


# -- cold starts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holder", "left_s", "cold"),
    [
        (Holder(""), 0.0, True),  # given back, or nobody ever led
        (OTHER, -5.1, True),
        (OTHER, -5.0, False),  # it lapsed just now
        (OTHER, 3.0, False),  # its process is gone
        (OTHER, 3600.0, False),  # the database's clock was put back
        (ME, -5.1, True),  # the ledger was away
        (ME, 3.0, False),
        (replace(ME, id="former", boot="b1"), 3.0, False),
        (replace(ME, id="former", boot="b0"), 3.0, True),  # this machine was restarted
        (replace(OTHER, boot="b0"), 3.0, False),  # another machine
        (replace(OTHER, host=ME.host, boot="b0"), 3.0, False),  # another machine, of the same name
        (replace(ME, id="former", boot=""), 3.0, False),
    ],
)
def test_a_cold_start_is_one_after_which_replicas_may_be_starting(holder: Holder, left_s: float, cold: bool) -> None:
    assert is_cold(LeaderLease(7, holder, 0, 5.0, left_s), replace(ME, boot="b1")) is cold


@pytest.mark.parametrize("lost", ["", "records", "take_leadership"])
def test_owners_are_waited_for_from_when_the_first_term_after_a_cold_start_serves(lost: str) -> None:
    """The wait begins with the first term that serves, even if an earlier attempt took the lease, and later terms of
    the same controller make it neither longer nor shorter."""

    async def scenario() -> None:
        terms = Terms()
        terms.ledger.now = replace(terms.ledger.now, left_s=-100.0)
        if lost:
            terms.ledger.fails[lost] = AWAY
            await terms.leading.try_once()
            assert terms.cold_for_s == []
            terms.clock.advance(50.0)
        await terms.leading.try_once()
        await terms.leading._end()
        terms.clock.advance(20.0)
        await terms.leading.try_once()
        await terms.leading._end()
        terms.clock.advance(41.0)
        await terms.leading.try_once()
        assert terms.cold_for_s == [pytest.approx(60.0), pytest.approx(40.0), 0.0]
        await terms.leading.close()

    asyncio.run(scenario())


def test_a_controller_that_follows_another_one_does_not_start_cold() -> None:
    async def scenario() -> None:
        terms = Terms()
        terms.ledger.now = replace(terms.ledger.now, left_s=-100.0)
        terms.ledger.fails["take_leadership"] = AWAY
        await terms.leading.try_once()
        terms.ledger.now = LeaderLease(3, OTHER, 0, SETTINGS.hold_s, 5.0)  # that one was faster, and serves
        await terms.leading.try_once()
        terms.ledger.now = replace(terms.ledger.now, left_s=-0.1)
        await terms.leading.try_once()
        assert terms.cold_for_s == [0.0]
        await terms.leading.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("given_back", [False, True])
def test_a_lease_that_was_given_back_in_a_real_ledger_is_followed_by_a_cold_start(
    given_back: bool, tmp_path: Path
) -> None:
    async def scenario() -> None:
        terms, url = Terms(), f"sqlite:///{tmp_path / 'ledger.db'}"
        with Ledger(url) as former, Ledger(url) as ledger:
            former.take_leadership(OTHER, 5.0)
            if given_back:
                former.give_back_leadership()
            leading = Leading(ledger, ME, lambda _: True, SETTINGS, terms.clock, terms._make)
            await leading.try_once()
            assert terms.cold_for_s == [pytest.approx(60.0) if given_back else 0.0]
            await leading.close()

    asyncio.run(scenario())
