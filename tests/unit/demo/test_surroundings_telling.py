"""The demonstration is never silent for longer than three seconds."""

from __future__ import annotations

import io

from rich.console import Console

from stateflow.clock import ManualClock
from stateflow.demo.surroundings import ProgressPrinter


def test_from_the_third_second_on_it_says_what_goes_on() -> None:
    out, clock = io.StringIO(), ManualClock()
    telling = ProgressPrinter(Console(file=out, markup=False, width=80), clock)
    with telling.of("computing"):
        for seconds in (1.0, 1.5):
            clock.advance(seconds)
            telling.tick()
        assert out.getvalue() == ""
        clock.advance(0.5)
        telling.say("comparing [red]")
        telling.tick()
        telling.tick()
        clock.advance(3.0)
        telling.tick()
    assert out.getvalue().splitlines() == ["  … comparing [red] (3 s)", "  … comparing [red] (6 s)"]


def test_on_a_terminal_one_line_changes() -> None:
    out, clock = io.StringIO(), ManualClock()
    telling = ProgressPrinter(Console(file=out, markup=False, width=80, force_terminal=True), clock)
    with telling.of("computing"):
        clock.advance(7.0)
        telling.tick()
    assert "computing (7 s)" in out.getvalue()
    assert "…" not in out.getvalue()
