"""Durations of requests: the newest are kept, and are read by number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.replica import applying
from stateflow.replica.applying import Samples


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
    assert made.rows == 7


def test_older_ones_go_and_are_counted_all_the_same(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "SAMPLES_KEPT", 2)
    made = Samples(clock)
    for _ in range(5):
        made.add("Op", 1, started=10.0, held_from=None)
    assert [sample.number for sample in made.after(0)] == [4, 5]
    assert made.rows == 5


def test_of_many_that_are_newer_the_newest_are_enough(clock: Any) -> None:
    made = Samples(clock)
    for _ in range(5):
        made.add("Op", 1, started=10.0, held_from=None)
    assert [sample.number for sample in made.after(1, 2)] == [4, 5]
    assert [sample.number for sample in made.after(4, 2)] == [5]
