"""Schedules: when jobs are due."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.errors import InvalidArgument
from stateflow.schedule import Schedule

S = 1_000_000
MINUTE = 60 * S


def us(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1e6)


@pytest.mark.parametrize(
    "text",
    [
        *("", "once", "once soon", "once 2030-01-01T00:00:00", "daily"),
        *(
            "every 20 s",
            "every 20ms",
            "every s",
            "every -1s",
            "every 0s",
            "every 1e2s",
            "every infs",
            "every 99999999d",
        ),
        *("every", "every 0", "every -1", "every inf", "every nan", "every 1e99"),
        *("every 0.0000001", "every 0.09"),
        *("cron", "cron * * * *", "cron 61 * * * *", "cron 0 0 31 2 *", "cron 0 18 * * * UTC UTC"),
        *("cron 0 18 * * * Atlantis/Poseidonis", "cron 0 18 * * * ../../etc"),
    ],
)
def test_what_is_no_schedule(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a schedule"):
        Schedule.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "once 2030-01-01T00:00:00+00:00",
        "every 0.5",
        "every 20s",
        "every 1.5h",
        "cron 0 3 * * 1-5",
        "cron */5 0-6/2 1,15 * *",
        "cron 0 18 * * * UTC",
    ],
)
def test_what_is_one(text: str) -> None:
    assert Schedule.parse(text).text == text


@pytest.mark.parametrize(
    ("text", "seconds"), [("every 20s", 20), ("every 15m", 900), ("every 1.5h", 5400), ("every 7d", 604_800)]
)
def test_a_length_of_time_has_its_unit_as_in_other_options(text: str, seconds: int) -> None:
    assert Schedule.parse(text).every_us == seconds * S


def test_once_is_once() -> None:
    at = us("2030-01-01T18:00:00+00:00")
    once = Schedule.parse("once 2030-01-01T19:00:00+01:00")
    assert once.due(at - 1, 0, None, None) is None
    assert once.next_us(at - 1, 0, None, None) == at
    assert once.due(at + 5 * MINUTE, 0, None, None) == at, "it was missed, and is made up for"
    assert once.due(at + 5 * MINUTE, 0, at, at + 1) is None
    assert once.next_us(at, 0, at, at + 1) is None


def test_once_comes_though_it_was_run_by_hand_before() -> None:
    once, at = Schedule.parse("once 2030-01-01T18:00:00Z"), us("2030-01-01T18:00:00+00:00")
    assert once.due(at, 0, at - MINUTE, at - MINUTE + 1) == at
    assert once.due(at + 2, at + 1, at + 1, at + 2) is None


def test_zero_is_a_time() -> None:
    once = Schedule.parse("once 1970-01-01T00:00:00Z")
    assert once.due(S, 0, None, None) == 0
    assert once.next_us(S, 0, None, None) == 0
    assert once.due(S, 0, 0, S) is None


def test_every_counts_from_the_end_of_the_run_before() -> None:
    every = Schedule.parse("every 60")
    assert every.due(59 * S, 0, None, None) is None
    assert every.due(61 * S, 0, None, None) == 60 * S
    assert every.due(130 * S, 0, 60 * S, 100 * S) is None
    assert every.due(170 * S, 0, 60 * S, 100 * S) == 160 * S
    assert every.next_us(130 * S, 0, 60 * S, 100 * S) == 160 * S


def test_a_cron_line_in_a_zone_follows_its_clocks() -> None:
    evening = Schedule.parse("cron 0 18 * * * Europe/Berlin")
    made = us("2026-10-24T00:00:00+00:00")
    first, second = us("2026-10-24T16:00:00+00:00"), us("2026-10-25T17:00:00+00:00")  # clocks go back between the two
    assert evening.due(first - 1, made, None, None) is None
    assert evening.due(first, made, None, None) == first
    assert evening.due(first + 1, made, first, first + 1) is None
    assert evening.next_us(first, made, first, first + 1) == second
    assert evening.due(second, made, first, first + 1) == second


def test_of_many_that_were_missed_the_last_is_made_up_for() -> None:
    hourly = Schedule.parse("cron 0 * * * *")
    made = us("2026-01-01T00:30:00+00:00")
    assert hourly.due(us("2026-01-03T10:59:59+00:00"), made, None, None) == us("2026-01-03T10:00:00+00:00")


def test_what_was_due_before_it_was_made_or_went_on_is_nobodys() -> None:
    hourly = Schedule.parse("cron 0 * * * *")
    assert hourly.due(us("2026-01-01T10:59:00+00:00"), us("2026-01-01T10:30:00+00:00"), None, None) is None


def test_a_clock_that_goes_back_fires_nothing_twice() -> None:
    minutely = Schedule.parse("cron * * * * *")
    fired = us("2026-01-01T11:00:00+00:00")
    assert minutely.due(us("2026-01-01T10:05:00+00:00"), 0, fired, fired + 1) is None
    assert minutely.next_us(us("2026-01-01T10:05:00+00:00"), 0, fired, fired + 1) == fired + MINUTE


@given(st.lists(st.integers(1, 90), min_size=1, max_size=60))
def test_whoever_looks_whenever_each_time_is_run_for_once_at_most(steps: list[int]) -> None:
    schedule, made = Schedule.parse("cron */2 * * * *"), us("2026-01-01T00:00:30+00:00")
    now, fired, ran = made, None, list[int]()
    for step in steps:
        now += step * S
        if (at := schedule.due(now, made, fired, None)) is not None:
            ran.append(at)
            fired = at
            assert at <= now
    assert ran == sorted(set(ran))
    assert all(at > made and at % (2 * MINUTE) == 0 for at in ran)


@pytest.mark.parametrize("line", ["*/10 * * * *", "0 * * * *", "*/30 0-3 * * *", "30 2 * * *"])
@pytest.mark.parametrize("day", ["2026-03-28T22:00:00+00:00", "2026-10-24T22:00:00+00:00"])
def test_a_cron_line_is_due_when_it_is_next_also_on_days_of_23_and_25_hours(line: str, day: str) -> None:
    """A schedule is due at the times that it names as its next ones.

    In the hour that is repeated when summer time ends, no job was due.
    """
    schedule, began = Schedule.parse(f"cron {line} Europe/Berlin"), us(day)
    fired = named = began
    for now in range(began, began + 600 * MINUTE, MINUTE):
        if (at := schedule.due(now, began, fired, None)) is not None:
            named = schedule.next_us(named, began, named, None) or 0
            assert (at, now) == (named, named)
            fired = at
    assert (schedule.next_us(named, began, named, None) or 0) >= began + 600 * MINUTE


def test_the_next_time_of_a_cron_line_is_not_behind_in_the_hour_that_is_repeated() -> None:
    nightly = Schedule.parse("cron 30 2 * * * Europe/Berlin")
    first, again = us("2026-10-25T02:30:00+02:00"), us("2026-10-25T02:15:00+01:00")
    assert nightly.next_us(again, 0, first, first) == us("2026-10-26T02:30:00+01:00")
