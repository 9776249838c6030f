"""`stateflow --help` fits a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stateflow.cli.app import app
from stateflow.cli.group import BRIEFLY, PANELS, in_order, panel_of


def groups(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    if below := getattr(command, "commands", None):
        yield path, list(below)
        for name, each in below.items():
            yield from groups(each, (*path, name))


GROUPS = dict(groups(typer.main.get_command(app)))


@pytest.mark.parametrize("path", GROUPS, ids=" ".join)
def test_each_command_takes_one_line(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}, prog_name="stateflow").output
    assert max(map(len, shown.splitlines())) <= 80
    panels = shown[shown.index("╭─ ", shown.index("╰")) :]  # the panels after the options
    lines = [line.strip("│ ").split(" ")[0] for line in panels.splitlines() if line.startswith("│")]
    assert sorted(lines) == sorted(GROUPS[path]), "a line that is longer needs one in BRIEFLY"


def test_panels_come_in_their_order() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}, prog_name="stateflow").output
    titles = [line.split(" ")[1] for line in shown.splitlines() if line.startswith("╭─ ")]
    assert titles == ["Options", *PANELS]


def test_a_command_that_no_panel_names_comes_with_the_tools() -> None:
    assert panel_of("migrate") == "Moving"
    assert panel_of("of tomorrow") == "Tools"
    assert in_order(["of tomorrow", "token", "init"]) == ["init", "token", "of tomorrow"]


def test_what_is_named_is_there() -> None:
    named = [name for names in PANELS.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) <= set(GROUPS[()])
    called = {" ".join((*path, name)) for path, names in GROUPS.items() for name in names}
    assert set(BRIEFLY) <= called
