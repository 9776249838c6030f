"""Cadence of batches: quiet moments and rates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.errors import BudgetUnreachable
from stateflow.partition.environment import DutyCycle, RateLimit
from stateflow.partition.local_partition import (
    LOOK_S,
    QUIET_SYNC_MS,
    WAIT_S_MAX,
    BatchTiming,
    QuietDisk,
    QuietMoment,
    disk_is_quiet,
)
from stateflow.types import PartitionId


def beating(interval_s: float, busy_s: float, count: int = 8) -> BatchTiming:
    timing = BatchTiming()
    for number in range(count):
        timing.began(number * interval_s)
        timing.ended(number * interval_s + busy_s)
    return timing


def test_a_fence_that_would_meet_the_next_batch_waits_for_it() -> None:
    timing = beating(1.0, 0.2)  # the last batch began at 7.0
    assert timing.wait_s(7.3, 0.02) == 0.0, "it ends long before the next"
    assert timing.wait_s(7.99, 0.02) == pytest.approx(1.5)
    assert timing.rate == pytest.approx(1.0)


def test_what_is_not_waited_for() -> None:
    assert beating(1.0, 0.2, count=3).wait_s(2.99, 0.02) == 0.0, "too little is known"
    assert beating(0.010, 0.009).wait_s(0.079, 0.02) == 0.0, "there is no gap that holds the pause"
    assert beating(1.0, 0.2).wait_s(9.5, 0.02) == 0.0, "the source has stopped"
    irregular = BatchTiming()
    for at in (0.0, 0.1, 2.0, 2.1, 5.0, 5.1, 9.0):
        irregular.began(at)
        irregular.ended(at + 0.01)
    assert irregular.wait_s(9.1, 0.02) == 0.0


def test_a_disk_is_quiet_when_a_durable_write_is_no_longer_than_the_pause() -> None:
    assert disk_is_quiet(1.0, 3.0)
    assert disk_is_quiet(QUIET_SYNC_MS, 3.0), "what is short anyway is not waited for"
    assert not disk_is_quiet(QUIET_SYNC_MS + 1, 3.0)
    assert disk_is_quiet(80.0, 100.0), "a slow disk has long pauses, which are expected"
    assert not disk_is_quiet(101.0, 100.0)


def test_a_fence_waits_for_a_quiet_disk_and_not_for_ever() -> None:
    quiet = QuietDisk(PartitionId("Op", 3), 100.0, pause_ms=3.0)
    assert quiet.has_come(2.0, 100.0)
    assert not quiet.has_come(500.0, 100.0)
    assert not quiet.has_come(500.0, 100.0 + WAIT_S_MAX)
    assert quiet.has_come(2.0, 100.0 + WAIT_S_MAX)
    assert quiet.has_come(500.0, 100.1 + WAIT_S_MAX), "a pause of any length is allowed"


def test_a_disk_whose_writes_are_longer_than_the_budget_refuses_the_fence_when_the_wait_is_over() -> None:
    quiet = QuietDisk(PartitionId("Op", 3), 100.0, pause_ms=3.0, max_pause_ms=50.0)
    assert not quiet.has_come(51.0, 100.0 + WAIT_S_MAX)
    assert quiet.has_come(50.0, 100.1 + WAIT_S_MAX), "it fits"
    with pytest.raises(BudgetUnreachable, match=r"takes 51 ms at the source, the pause limit is 50 ms .*Op"):
        quiet.has_come(51.0, 100.1 + WAIT_S_MAX)


def test_a_fence_comes_right_behind_the_next_commit() -> None:
    moment = QuietMoment(7, until=10.0)
    assert moment.wait_s(9.0, 7) == LOOK_S
    assert moment.wait_s(9.9995, 7) == pytest.approx(0.0005)
    assert moment.wait_s(9.0, 8) == 0.0
    assert moment.wait_s(10.0, 7) == 0.0, "no batch came"
    assert moment.wait_s(10.5, 7) == 0.0
    assert QuietMoment(7, until=9.0).wait_s(9.0, 7) == 0.0, "there was nothing to wait for"


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=50), st.floats(1e5, 1e9))
def test_a_pace_is_kept(sizes: list[int], rate: float) -> None:
    rate_limit, now = RateLimit(rate), 100.0
    for size in sizes:
        now += rate_limit.wait_s(now, size)
    assert now - 100.0 >= sum(sizes) / rate - rate_limit.burst_s - 1e-6
    assert now - 100.0 <= sum(sizes) / rate + 1e-6


def test_no_limit_and_no_other_work_cost_nothing() -> None:
    assert RateLimit(0.0).wait_s(1.0, 1 << 30) == 0.0
    share = DutyCycle(0.5)
    assert share.wait_s(10.0, 0.004, -math.inf) == 0.0
    assert share.wait_s(10.1, 0.004, 10.0) == pytest.approx(0.004)
    assert share.wait_s(10.6, 0.004, 10.0) == 0.0
