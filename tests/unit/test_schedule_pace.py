"""Estimates of the time left, and their intervals."""

from __future__ import annotations

from random import Random

import pytest

from stateflow.schedule import pace_per_s, remaining


def test_before_anything_has_ended_nothing_is_said() -> None:
    assert pace_per_s(0, 5.0) is None
    assert remaining(10, 1, 5.0) is None
    done = remaining(10, 10, 5.0)
    assert done is not None
    assert (done.s, done.low_s, done.high_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("total", "finished"), [(20, 5), (100, 50), (6, 2), (1000, 10)])
def test_the_interval_holds_what_it_promises(total: int, finished: int) -> None:
    """The interval contains the end of 95 % of 4,000 batches whose parts end at random."""
    random, within = Random(7), 0
    for _ in range(4000):
        ends = [0.0]
        for _ in range(total):
            ends.append(ends[-1] + random.expovariate(2.0))
        told = remaining(total, finished, ends[finished])
        assert told is not None
        within += told.low_s <= ends[total] - ends[finished] <= told.high_s
    assert 0.93 <= within / 4000 <= 0.97


def test_it_is_surer_when_more_has_ended() -> None:
    early, late = remaining(1000, 10, 10.0), remaining(1000, 500, 500.0)
    assert early is not None
    assert late is not None
    assert (early.s, late.s) == (990.0, 500.0)
    assert (early.high_s - early.low_s) / early.s > 5 * (late.high_s - late.low_s) / late.s
