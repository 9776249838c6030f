"""Results of a drive: where state was when a gateway waited, and the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from stateflow.demo.follow.result import Band, FollowResult, Phase, Sample, Whereabouts, bands_of, by_phase, share_near
from stateflow.demo.result import Comparison
from tests.unit.demo.follow.conftest import move

Driven = Callable[..., FollowResult]
#: cloud → east at 5 s, east → west at 10 s, and a move that was aborted at 15 s
MOVES = [
    move(0, "cloud", "east", 5.0),
    move(0, "east", "west", 10.0),
    move(0, "west", "north", 15.0, state="ABORTED", pause_ms=0.0),
]


def sample(at_s: float, site: str = "east", took_ms: float = 10.0, rows: int = 1) -> Sample:
    return Sample(at_s, took_ms, 0, site, rows)


@pytest.mark.parametrize(
    ("at_s", "site"), [(0.0, "cloud"), (5.0, "cloud"), (5.02, "east"), (10.005, "east"), (10.1, "west"), (20.0, "west")]
)
def test_state_is_where_it_is_served_again(at_s: float, site: str) -> None:
    assert Whereabouts(MOVES).site(0, at_s) == site
    assert Whereabouts(MOVES).site(1, at_s) == "cloud", "another convoy"


@pytest.mark.parametrize(
    ("at_s", "phase"),
    [
        (1.0, Phase.AWAY),
        (4.495, Phase.MOVING),
        (5.05, Phase.MOVING),
        (5.2, Phase.NEAR),
        (9.4, Phase.NEAR),
        (9.6, Phase.MOVING),
        (11.0, Phase.AWAY),
        (14.6, Phase.MOVING),
        (16.0, Phase.AWAY),
    ],
)
def test_a_wait_belongs_to_the_move_it_overlaps(at_s: float, phase: Phase) -> None:
    assert Whereabouts(MOVES).phase(sample(at_s)) is phase


def test_the_share_is_of_rows_and_where_they_were_answered() -> None:
    where = Whereabouts(MOVES)
    samples = [sample(4.0, rows=3), sample(4.999, took_ms=500.0, rows=3), sample(5.5), sample(7.5, site="west", rows=2)]
    assert share_near(samples, where) == [(4.5, 0.0), (5.5, 1.0), (7.5, 0.0)]
    assert share_near(samples, where, 10.0) == [(5.0, 4 / 9)]


def test_bands_end_where_the_next_begins() -> None:
    stays = [(0.0, "cloud"), (5.0, "east"), (12.0, "west")]
    assert bands_of(3, stays, 10.0) == [Band(3, "cloud", 0.0, 5.0), Band(3, "east", 5.0, 10.0)]


def test_the_verdict(driven: Driven) -> None:
    result = driven()
    summary = result.summary()
    phases = by_phase(result.samples, Whereabouts(result.moves))
    assert sum(map(len, phases.values())) == len(result.samples)
    assert summary["away_ms_median"] == statistics.median(each.took_ms for each in phases[Phase.AWAY])
    assert 43 < summary["away_ms_median"] < 46
    assert 3 < summary["near_ms_median"] < 6
    assert summary["moving_ms_max"] > 40
    assert (summary["moves_completed"], summary["moves_failed"], summary["site_changes"]) == (6, 1, 4)
    assert (summary["pause_ms_max"], summary["budget_kept"]) == (10.0, True)
    assert (summary["lost"], summary["duplicated"]) == (0, 0)
    assert summary["rows"] == 2100
    assert 0.5 < summary["served_near"] < 0.8
    assert result.held


def test_a_pause_over_the_budget_is_said(driven: Driven) -> None:
    result = driven(budget_ms=9.0)
    assert result.summary()["budget_kept"] is False
    assert result.held, "nothing differs"


@pytest.mark.parametrize("which", ["state", "output", "answers"])
def test_a_difference_anywhere_is_the_verdict(driven: Driven, which: str) -> None:
    result = driven(**{which: Comparison(False, 9, 2, 3, 1, ["seq 1: expected, absent"])})
    assert not result.held
    assert result.differences == [f"{which}: seq 1: expected, absent"]
    assert (result.lost, result.duplicated) == ((0, 0) if which == "state" else (2, 3))


def test_a_drive_without_moves_shows_nothing(driven: Driven) -> None:
    result = driven(moves=[])
    assert not result.held
    summary = result.summary()
    assert (
        summary["near_ms_median"]
        is summary["moving_ms_max"]
        is summary["pause_ms_max"]
        is summary["budget_kept"]
        is None
    )
    assert summary["served_near"] == 0
