"""The throttle lets each caller pass once in an interval, at a cost that does not grow with the number of callers."""

from __future__ import annotations

from stateflow.clock import ManualClock, Throttle


def test_each_caller_passes_once_in_an_interval() -> None:
    clock = ManualClock()
    throttle = Throttle(clock, 60.0)
    assert [throttle.passes(each) for each in "aabab"] == [True, False, True, False, False]
    clock.advance(59.9)
    assert not throttle.passes("a")
    clock.advance(0.1)
    assert throttle.passes("a")
    assert not throttle.passes("a")
    assert throttle.passes("b")


def test_of_many_callers_the_one_that_passed_longest_ago_is_forgotten() -> None:
    clock = ManualClock()
    throttle = Throttle(clock, 60.0, callers_max=3)
    for each in "abc":
        assert throttle.passes(each)
        clock.advance(20.0)
    assert throttle.passes("a"), "its interval is over"
    assert throttle.passes("d"), "instead of b, which passed before c and a"
    assert [throttle.passes(each) for each in "cad"] == [False, False, False]
    assert throttle.passes("b")
    assert len(throttle._passed_at) == 3
