"""Tests the operator without a cluster and without Spark: run `pytest`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from dedup import Once

from stateflow.testing import OperatorHarness

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)


def reading(event: str, device: str = "D1") -> dict[str, object]:
    return {"device": device, "event": event, "at": NOON, "celsius": 20.5}


def test_an_event_comes_through_once() -> None:
    harness = OperatorHarness(Once)
    out = harness.send([reading("a"), reading("b"), reading("a"), reading("a", "D2")])
    assert sorted((row["device"], row["event"]) for row in out) == [("D1", "a"), ("D1", "b"), ("D2", "a")]
    assert harness.send([reading("b"), reading("c")]) == [reading("c")]
    assert harness.state("D1").repeated.value == 2


def test_what_is_seen_is_forgotten_after_a_day() -> None:
    harness = OperatorHarness(Once)
    harness.advance_watermark(NOON)
    harness.send([reading("a")])
    harness.advance_watermark(NOON + timedelta(hours=12))
    harness.send([reading("b")])
    harness.advance_watermark(NOON + timedelta(hours=23, minutes=59))
    assert harness.send([reading("a")]) == [], "seeing it again does not keep it longer"
    harness.advance_watermark(NOON + timedelta(days=1))
    assert harness.state("D1").seen == {"b"}
    assert harness.send([reading("a"), reading("b")]) == [reading("a")]
