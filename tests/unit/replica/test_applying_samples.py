"""Durations of requests: the newest are kept, and are read by number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.replica import applying
from stateflow.replica.applying import OTHERS, Samples


@pytest.fixture
def clock() -> Any:
    return SimpleNamespace(monotonic=lambda: 10.0, now_us=lambda: 77)


def test_a_sample_says_how_long_it_was_held_of_all_it_took(clock: Any) -> None:
    made = Samples(clock)
    made.add("Op", 3, started=9.0, held_from=9.75)
    made.add("Op", 4, started=9.5, held_from=None)
    one, two = made.after(0)
    assert (one.number, one.at_us, one.rows, one.total_ms, one.held_ms) == (1, 77, 3, 1000.0, 250.0)
    assert (two.number, two.total_ms, two.held_ms) == (2, 500.0, 0.0)
    assert made.after(1) == [two]


def test_older_ones_go_and_are_counted_all_the_same(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "SAMPLES_KEPT", 2)
    made = Samples(clock)
    for _ in range(5):
        made.add("Op", 1, started=10.0, held_from=None)
    assert [sample.number for sample in made.after(0)] == [4, 5]
    assert made.by_operator["Op"].took.count == 5


def test_beyond_the_most_operators_rows_and_requests_are_those_of_others(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "OPERATORS_MAX", 1)
    made = Samples(clock)
    for operator in ("Op", "Invented", "Invented too", "Op"):
        made.applied(operator, 3)
        made.add(operator, 3, started=10.0, held_from=None)
    assert {name: (of.rows, of.took.count) for name, of in made.by_operator.items()} == {"Op": (6, 2), OTHERS: (6, 2)}
    assert made.rows == 12
    assert [sample.operator for sample in made.after(0)] == ["Op", OTHERS, OTHERS, "Op"]


def test_of_many_that_are_newer_the_newest_are_enough(clock: Any) -> None:
    made = Samples(clock)
    for _ in range(5):
        made.add("Op", 1, started=10.0, held_from=None)
    assert [sample.number for sample in made.after(1, 2)] == [4, 5]
    assert [sample.number for sample in made.after(4, 2)] == [5]
