"""Progress of a wait is shown on a terminal, and nowhere else."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from stateflow.cli.output import Shown, one_by_one, waiting


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=80, markup=False), out


def test_on_a_terminal_it_says_how_it_stands() -> None:
    console, out = terminal()
    looked = threading.Event()

    def look(shown: Shown) -> None:
        if looked.is_set():
            shown.over.set()
        shown.of(3, 128)
        looked.set()

    with waiting("deploying [red]", look=look, console=console, quiet_s=0.0) as shown:
        assert shown.over.wait(10)
    assert "deploying [red], 3 of 128" in out.getvalue()


def test_one_that_cannot_look_goes_on() -> None:
    console, out = terminal()
    looked = threading.Event()

    def look(shown: Shown) -> None:
        looked.set()
        raise OSError("nobody answers")

    with waiting("deploying", look=look, console=console, quiet_s=0.0):
        assert looked.wait(10)
    assert "deploying" in out.getvalue()


def test_what_is_soon_over_is_not_told() -> None:
    console, out = terminal()
    with waiting("deploying", console=console):
        pass
    assert out.getvalue() == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_in_a_pipe_and_for_machines_nothing_is_drawn(as_json: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=as_json, width=80)
    before = threading.active_count()
    with waiting("deploying", as_json=as_json, console=console, quiet_s=0.0):
        assert threading.active_count() == before
    assert out.getvalue() == ""


def test_what_failed_is_raised_when_the_line_is_gone() -> None:
    console, _ = terminal()
    with pytest.raises(ZeroDivisionError), waiting("dividing", console=console, quiet_s=0.0) as shown:
        _ = 1 / 0
    assert shown.over.is_set()


def test_every_item_comes() -> None:
    assert list(one_by_one("reading", ["a", "b"], as_json=True)) == ["a", "b"]
