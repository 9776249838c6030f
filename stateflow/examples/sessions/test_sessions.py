"""Tests the operator without a cluster and without Spark: run `pytest`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sessions import Visits

from stateflow.testing import OperatorHarness

NINE = datetime(2026, 3, 2, 9, tzinfo=UTC)


def at(minute: int) -> datetime:
    return NINE + timedelta(minutes=minute)


def click(minute: int, page: str, user: str = "ann") -> dict[str, object]:
    return {"user": user, "at": at(minute), "page": page}


def test_a_visit_is_over_half_an_hour_after_its_last_click() -> None:
    harness = OperatorHarness(Visits)
    assert harness.send([click(0, "/"), click(12, "/shoes"), click(20, "/"), click(5, "/", "bob")]) == []
    assert harness.advance_watermark(at(39)) == [], "bob's visit ended at 9:35, and clicks may be five minutes late"
    (bob,) = harness.advance_watermark(at(40))
    assert bob == {"user": "bob", "began": at(5), "minutes": 0.0, "clicks": 1, "pages": ["/"]}
    (ann,) = harness.advance_watermark(at(55))
    assert ann == {"user": "ann", "began": at(0), "minutes": 20.0, "clicks": 3, "pages": ["/", "/shoes"]}


def test_a_click_between_two_visits_makes_one_of_them() -> None:
    harness = OperatorHarness(Visits)
    harness.send([click(0, "/"), click(50, "/cart"), click(51, "/pay")])
    harness.send([click(25, "/shoes")])
    (visit,) = harness.advance_watermark(at(90))
    assert (visit["began"], visit["minutes"], visit["clicks"]) == (at(0), 51.0, 4)
    assert visit["pages"] == ["/", "/cart", "/pay", "/shoes"]


def test_a_click_that_comes_when_its_visit_is_over_is_late() -> None:
    harness = OperatorHarness(Visits)
    harness.send([click(0, "/")])
    assert [row["clicks"] for row in harness.advance_watermark(at(60))] == [1]
    assert harness.send([click(10, "/shoes"), click(55, "/")]) == []
    assert harness.side_outputs["late"] == [{"user": "ann", "at": at(10), "page": "/shoes"}]
    assert [row["began"] for row in harness.advance_watermark(at(200))] == [at(55)]
