"""Tests the operator without a cluster and without Spark: run `pytest`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from fraud import FraudScore

from stateflow.testing import OperatorHarness

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)


def paid(minute: int, country: str, amount: float = 20.0, card: str = "C1") -> dict[str, Any]:
    return {"card": card, "at": NOON + timedelta(minutes=minute), "country": country, "amount": amount}


def test_a_third_country_within_an_hour_is_suspicious() -> None:
    harness = OperatorHarness(FraudScore)
    out = harness.send([paid(0, "DE"), paid(20, "FR"), paid(59, "BR"), paid(60, "BR"), paid(61, "FR", card="C2")])
    assert [row["score"] for row in out if row["card"] == "C1"] == [0, 0, 60, 0], "at 13:00 Germany was an hour ago"
    assert [row["why"] for row in out if row["score"]] == [["3 countries in an hour"]]
    assert [row["score"] for row in out if row["card"] == "C2"] == [0]


def test_ten_times_the_usual_is_suspicious_and_does_not_become_usual() -> None:
    harness = OperatorHarness(FraudScore)
    harness.send([paid(0, "DE", 10.0), paid(1, "DE", 20.0), paid(2, "DE", 30.0)])
    (at_most, above, both) = harness.send([paid(3, "DE", 200.0), paid(4, "FR", 2000.0), paid(5, "BR", 2000.0)])
    assert at_most["score"] == 0, "exactly ten times 20"
    assert (above["score"], above["why"]) == (40, ["an unusual amount"])
    assert (both["score"], both["why"]) == (100, ["3 countries in an hour", "an unusual amount"])
    assert harness.state("C1").usual.value == 65.0, "(10 + 20 + 30 + 200) / 4"


def test_scores_are_the_same_however_rows_are_cut_into_batches() -> None:
    told = [(0, "DE"), (20, "FR"), (59, "BR"), (60, "BR"), (79, "DE"), (80, "DE"), (125, "US"), (130, "FR")]
    rows = [paid(minute, country) for minute, country in told]
    at_once, one_by_one = OperatorHarness(FraudScore), OperatorHarness(FraudScore)
    scores = []
    for row in rows:
        scores += [out["score"] for out in one_by_one.send([row])]
        one_by_one.advance_watermark(row["at"])  # timers come in between
    assert scores == [out["score"] for out in at_once.send(rows)] == [0, 0, 60, 0, 60, 0, 0, 60]


def test_a_timer_forgets_each_country_an_hour_after_its_last_payment() -> None:
    harness = OperatorHarness(FraudScore)
    harness.send([paid(0, "DE"), paid(10, "FR"), paid(30, "DE")])
    assert harness.advance_watermark(NOON + timedelta(minutes=69)) == []
    assert list(harness.state("C1").countries) == ["DE", "FR"]
    harness.advance_watermark(NOON + timedelta(minutes=70))
    assert list(harness.state("C1").countries) == ["DE"], "its timer was reset at 12:30"
    harness.advance_watermark(NOON + timedelta(minutes=90))
    assert not harness.state("C1").countries
