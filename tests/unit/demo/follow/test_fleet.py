"""Readings of convoys: the same for a seed, and true of where the convoys drive."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from stateflow.demo.follow.fleet import (
    CHANGES,
    COLUMNS,
    CORNERS,
    GATEWAY,
    READING,
    READINGS_S,
    TELEMETRY,
    TELEMETRY_S,
    Fleet,
)
from stateflow.partitioner import partition_of

CONVOYS, VEHICLES = 6, 20


def fleet(seconds: float = 60.0, seed: int = 7) -> Fleet:
    return Fleet(Random(seed), CONVOYS, VEHICLES, seconds)


def test_the_same_seed_tells_the_same() -> None:
    assert list(fleet(10).rows) == list(fleet(10).rows)
    assert list(fleet(10).rows) != list(fleet(10, seed=8).rows)


def test_a_convoy_is_a_partition() -> None:
    for convoy in fleet(10).convoys:
        assert len(convoy.vehicles) == VEHICLES
        assert {partition_of(vehicle, CONVOYS) for vehicle in convoy.vehicles} == {convoy.number}


@pytest.mark.parametrize("seconds", [6.0, 15.0, 60.0, 300.0])
def test_each_convoy_changes_its_site_and_stays_a_while(seconds: float) -> None:
    driven = fleet(seconds)
    for convoy in driven.convoys:
        changes = [change for change in driven.changes() if change.convoy == convoy.number]
        assert len(changes) == 1 + CHANGES
        assert [change.site for change in changes] == list(convoy.stops)
        moments = [*(change.at_s for change in changes), seconds]
        assert min(later - earlier for earlier, later in pairwise(moments)) > 0.7 * seconds / (CHANGES + 1) - READINGS_S


def test_a_site_is_the_nearest_and_nobody_jumps() -> None:
    driven = fleet()
    for convoy in driven.convoys:
        places = [convoy.place(at_s / 10) for at_s in range(600)]
        assert max(math.dist(one, other) for one, other in pairwise(places)) < 110, "metres in a tenth of a second"
        for at_s, place in enumerate(places):
            site = convoy.site(at_s / 10)
            assert math.dist(CORNERS[site], place) == min(math.dist(corner, place) for corner in CORNERS.values())


def test_rows_say_the_site_of_their_convoy_and_are_numbered_in_order() -> None:
    driven = fleet(12)
    rows = list(driven.rows)
    assert sorted(row["seq"] for row in rows) == list(range(len(rows)))
    assert all(list(row) == [column.split()[0] for column in COLUMNS.split(", ")] for row in rows)
    for convoy in driven.convoys:
        for told in driven.readings[convoy.number]:
            assert len(told.rows) == READING
            assert {row["site"] for row in told.rows} == {told.site} == {convoy.site(told.at_s)}
            assert {row["way"] for row in told.rows} == {GATEWAY}
    for told in driven.telemetry:
        assert {row["way"] for row in told.rows} == {TELEMETRY}
        assert Counter(row["vehicle"] for row in told.rows).values() == {1} or len(told.rows) == CONVOYS * VEHICLES
    for source in (driven.telemetry, *driven.readings):
        seqs = [row["seq"] for told in source for row in told.rows]
        assert seqs == sorted(seqs)


def test_moments_are_within_the_drive() -> None:
    driven = fleet(10.0)
    assert [told.at_s for told in driven.telemetry] == [number * TELEMETRY_S for number in range(20)]
    for readings in driven.readings:
        assert len(readings) in (49, 50)
        assert 0 <= readings[0].at_s < READINGS_S
        assert readings[-1].at_s < 10.0
