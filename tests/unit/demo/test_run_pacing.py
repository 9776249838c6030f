"""The demonstration ends soon, on any machine."""

from __future__ import annotations

from typing import Any

from stateflow.client import MoveReport
from stateflow.demo.run import AHEAD, BUDGET_MS, PATIENCE_THEN_S, STREAM_LEAST_S, Budget, is_refused, stretch_of
from stateflow.errors import BudgetUnreachable, Unavailable


def test_a_machine_that_is_fast_reads_everything() -> None:
    stretch = stretch_of(10, demo_began_s=100.0)
    assert stretch.until_s == 175.0
    for done, allowed in ((0, AHEAD), (3, 7), (8, 10), (10, 10)):
        stretch.look(done, 120.0)
        assert stretch.allowed == allowed
    assert not stretch.is_over(9)
    assert stretch.is_over(10)


def test_nothing_is_over_while_more_may_come() -> None:
    stretch = stretch_of(10, demo_began_s=100.0)
    stretch.look(1, 120.0)
    assert not stretch.is_over(stretch.allowed)


def test_on_one_that_is_slow_nothing_comes_any_more_once_time_is_over() -> None:
    stretch = stretch_of(50, demo_began_s=100.0)
    stretch.look(2, 130.0)
    for now_s in (175.0, 200.0):
        stretch.look(5, now_s)
        assert stretch.allowed == 2 + AHEAD, "what is under way is all that comes"
    assert not stretch.is_over(5)
    assert stretch.is_over(2 + AHEAD)


def test_something_is_streamed_however_late_it_began() -> None:
    stretch = stretch_of(50, demo_began_s=0.0)
    stretch.look(0, 300.0)
    assert (stretch.allowed, stretch.closed, stretch.share(0, 300.0)) == (AHEAD, False, 0.0)
    stretch.look(1, 310.0)
    assert stretch.until_s == 310.0 + STREAM_LEAST_S
    assert stretch.share(1, 320.0) == 0.5


def test_as_many_as_somebody_asked_for_are_streamed() -> None:
    stretch = stretch_of(50, demo_began_s=0.0, whole=True)
    stretch.look(40, 1e6)
    assert stretch.allowed == 40 + AHEAD
    assert not stretch.is_over(40 + AHEAD)
    assert stretch.share(25, 2e6) == 0.5


def test_the_story_goes_on_by_what_was_read_or_by_the_time_it_has() -> None:
    stretch = stretch_of(10, demo_began_s=0.0)
    stretch.look(1, 25.0)
    assert stretch.share(5, 25.0) == 0.5
    assert stretch.share(1, 50.0) == 0.5
    assert stretch.share(1, 75.0) == 1.0


def move(**told: Any) -> MoveReport:
    return MoveReport("m", 3, "cloud-0", "JFK-0", "ABORTED", "warm-up", **told)


def refused(predicted_ms: float, margin_ms: float) -> MoveReport:
    fault = BudgetUnreachable("a pause of …", remedy="raise it")
    return move(predicted_pause_ms=predicted_ms, margin_ms=margin_ms, fault=fault)


def test_a_budget_that_holds_stays() -> None:
    budget = Budget()
    failed = move(fault=Unavailable("nobody is there", remedy="wait"))
    assert budget.after([MoveReport("m", 3, "a", "b", "COMPLETED", "warm-up", pause_ms=12.0), failed]) == ""
    assert (budget.ms, is_refused(failed)) == (BUDGET_MS, False)


def test_one_that_is_refused_becomes_what_the_machine_can_promise() -> None:
    budget = Budget()
    said = budget.after([refused(40.0, 250.0), refused(30.0, 200.0)])
    assert budget.ms == 450.0, "room above the 290 ms that were needed"
    assert budget.patience_s == PATIENCE_THEN_S
    assert said == (
        "2 partitions were not moved: pauses vary on this machine, and 250 ms could not be guaranteed; the budget is "
        "now 450 ms"
    )


def test_in_the_end_any_pause_will_do() -> None:
    budget = Budget()
    assert budget.after([refused(float("inf"), 0.0)]).endswith("from now on any pause is allowed")
    assert budget.ms is None
    assert str(budget) == "250, then none"
    assert budget.after([refused(1.0, 1.0)]) == "", "there is nothing left to try"


def test_whoever_asks_for_a_budget_keeps_it_and_does_not_wait_for_long() -> None:
    budget = Budget(20.0, asked=True)
    assert budget.after([refused(30.0, 10.0)]) == ""
    assert (budget.ms, budget.patience_s) == (20.0, PATIENCE_THEN_S)
