"""Contract of the ledger's leader lease: one process leads, and each of its writes checks that in its transaction."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

import pytest
from sqlalchemy import text, update

from stateflow.errors import HoldLost, LedgerReplaced
from stateflow.ledger import App, Entry, Holder, Ledger
from stateflow.ledger.records import HOLD

ONE, TWO = Holder("one", "host-1", "a:1", 17), Holder("two", "host-2", "b:1", 18)
APP = App("decides")
LONG_S = 600.0


def expired(ledger: Ledger) -> None:
    deadline = time.monotonic() + 60
    while ledger.hold().left_s > 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)


class HoldContract:
    def test_a_ledger_has_an_id_made_once(self, fresh: Ledger, fresh_url: str) -> None:
        with Ledger(fresh_url) as again:
            assert again.id == fresh.id
        assert len(fresh.id) == 32

    def test_one_holds_and_the_other_is_told_who(self, fresh: Ledger, fresh_url: str) -> None:
        assert fresh.hold().holder.id == ""
        hold = fresh.take_leadership(ONE, LONG_S)
        assert (hold.term, hold.holder, hold.grace_s) == (1, ONE, 0.0)
        with Ledger(fresh_url) as other:
            seen = other.take_leadership(TWO, LONG_S)
            assert (seen.term, seen.holder) == (1, ONE)
            assert 0 < seen.left_s <= LONG_S
            assert seen.since_us > 0
            with pytest.raises(HoldLost, match="leader lease of this ledger was not taken"):
                other.renew_leadership(LONG_S)
            other.put("of-others", APP, "NEW")  # a ledger opened only to record needs no hold
        fresh.renew_leadership(LONG_S)
        fresh.put("mine", APP, "NEW")

    def test_what_a_former_holder_writes_is_refused_in_its_transaction(self, fresh: Ledger, fresh_url: str) -> None:
        """A write of a former leader is refused, and the error names the process that took over."""
        fresh.take_leadership(ONE, 0.05)
        fresh.put("before", APP, "NEW")
        expired(fresh)
        fresh.put("nobody-else-has-it", APP, "NEW")
        with Ledger(fresh_url) as other:
            hold = other.take_leadership(TWO, LONG_S)
            assert (hold.term, hold.holder.id, hold.grace_s) == (2, "two", 0.05)
            for attempt in (
                lambda: fresh.put("after", APP, "NEW"),
                lambda: fresh.renew_leadership(LONG_S),
                lambda: fresh.put_many([]) or fresh.put("after", APP, "NEW"),
            ):
                with pytest.raises(HoldLost, match="taken by process 18 on host-2 at b:1") as lost:
                    attempt()
                assert lost.value.where["leader"] == "b:1"
            fresh.give_back_leadership()
            assert other.hold().holder == TWO, "only one's own is given back"
            other.put("after", APP, "NEW")
            other.give_back_leadership()
            again = fresh.take_leadership(ONE, LONG_S)
            assert (again.term, again.grace_s) == (3, 0.0), "it was given back: nothing is granted any more"

    def test_what_was_decided_in_an_earlier_term_is_not_recorded_in_a_later_one(self, fresh: Ledger) -> None:
        """A write of an earlier term of the same process is refused if it arrives in a later term.

        The state that the process read at the start of its new term does not contain that write.
        """
        late = fresh.take_leadership(ONE, LONG_S).term
        again = fresh.take_leadership(ONE, LONG_S).term
        with pytest.raises(HoldLost, match="earlier term"):
            fresh.put_many([Entry("late", APP, "NEW")], late)
        assert fresh.item("late") is None
        fresh.put_many([Entry("in-time", APP, "NEW")], again)

    def test_a_holder_of_a_newer_release_is_known(self, fresh: Ledger, fresh_url: str) -> None:
        """A lease can be read, and is respected, although its holder is described by a field unknown here."""
        hold = fresh.take_leadership(ONE, LONG_S)
        about = json.dumps(asdict(ONE) | {"added_later": [1]})
        fresh.database.write(lambda connection: connection.execute(update(HOLD).values(about=about)))
        with Ledger(fresh_url) as other:
            assert other.take_leadership(TWO, LONG_S).holder == other.hold().holder == hold.holder

    def test_one_that_is_gone_is_followed_at_once(self, fresh: Ledger, fresh_url: str) -> None:
        fresh.take_leadership(ONE, LONG_S)
        with Ledger(fresh_url) as other:
            assert other.take_leadership(TWO, LONG_S, lambda holder: holder == ONE).term == 2
        assert fresh.hold().grace_s == 0.0

    def test_one_that_is_over_by_another_clock_is_taken_unless_it_was_renewed(
        self, fresh: Ledger, fresh_url: str
    ) -> None:
        """A process takes a leader lease that is not renewed, even if it has not lapsed by the database's clock.

        That clock may have been set back by an hour. The waiting process measures the time with its own clock, and
        names the end of the lease that it saw. A leader that has renewed its lease since then keeps it.
        """
        fresh.take_leadership(ONE, LONG_S)
        with Ledger(fresh_url) as other:
            seen = other.hold().until_us
            fresh.renew_leadership(LONG_S + 1)
            assert other.take_leadership(TWO, LONG_S, over_us=seen).holder == ONE
            taken = other.take_leadership(TWO, LONG_S, over_us=other.hold().until_us)
            assert (taken.term, taken.holder, taken.grace_s) == (2, TWO, LONG_S)
            with pytest.raises(HoldLost):
                fresh.put("after", APP, "NEW")

    def test_of_many_that_take_it_at_once_one_has_it(self, fresh: Ledger, fresh_url: str) -> None:
        fresh.take_leadership(ONE, 0.01)
        expired(fresh)
        start, got = threading.Barrier(4), []

        def take(number: int) -> None:
            with Ledger(fresh_url) as mine:
                start.wait(60)
                got.append(mine.take_leadership(Holder(f"t{number}"), LONG_S))

        threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(got) == 4
        assert {(hold.term, hold.holder.id) for hold in got} == {(2, fresh.hold().holder.id)}

    def test_another_ledger_in_its_place_is_noticed(self, fresh: Ledger) -> None:
        fresh.take_leadership(ONE, LONG_S)
        with fresh.database.engine.begin() as connection:
            connection.execute(text("UPDATE ledger_identity SET id = 'another'"))
        for attempt in (lambda: fresh.put("x", APP, "NEW"), lambda: fresh.take_leadership(ONE, LONG_S)):
            with pytest.raises(LedgerReplaced):
                attempt()
