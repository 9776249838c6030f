"""Followers: when a copy confirms, and whether a broken transfer goes on."""

from __future__ import annotations

import pytest

from stateflow.partition.change_feed import CONFIRM_BYTES, RESTARTS_MAX, Confirming, Persistence, Rate


def test_a_move_goes_on_until_nothing_came_for_too_long_and_a_standby_for_ever() -> None:
    move, standby = Persistence(False, 10.0), Persistence(True, 10.0)
    assert move.goes_on(10.0)
    assert not move.goes_on(10.1)
    assert standby.goes_on(1e9)


def test_a_move_begins_anew_a_few_times_and_a_standby_always() -> None:
    move, standby = Persistence(False, 10.0), Persistence(True, 10.0)
    assert [move.begins_anew() for _ in range(RESTARTS_MAX + 1)] == [True] * RESTARTS_MAX + [False]
    assert all(standby.begins_anew() for _ in range(10 * RESTARTS_MAX))


def test_a_standby_confirms_what_it_has_when_it_has_caught_up() -> None:
    standby = Confirming(True)
    assert standby.is_due(0, 0, True), "even nothing, for its owner does not know that"
    assert not standby.is_due(0, 0, True), "once"
    assert not standby.is_due(10, 1, False)
    assert standby.is_due(10, 2, True)


@pytest.mark.parametrize("standby", [True, False])
def test_a_source_hears_of_much_before_its_copy_has_caught_up(standby: bool) -> None:
    copy = Confirming(standby)
    assert not copy.is_due(CONFIRM_BYTES, 1, False)
    assert copy.is_due(1, 2, False)
    assert not copy.is_due(CONFIRM_BYTES, 3, False), "it is counted from there"


def test_a_copy_of_a_move_confirms_nothing_because_it_has_caught_up() -> None:
    assert not Confirming(False).is_due(10, 5, True)


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(0.0)
    assert rate.add(0, 0.0) == 0.0
    for second in range(1, 20):
        found = rate.add(100, float(second))
    assert found == pytest.approx(100.0)
    for second in range(20, 40):
        found = rate.add(0, float(second))
    assert found < 0.01
