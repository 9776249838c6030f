"""Tests of the gate: which tests it has, in which lane, and that it stays within its time."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from random import Random

import pytest

from tests import hunt
from tests.conftest import _Journal
from tests.gate import (
    BUDGET_S,
    LANES,
    MAX_FLAKY,
    PROMISES_PAGE,
    ROOT,
    Durations,
    Gate,
    Journal,
    Promise,
    flaky_entries,
    is_accepted,
    is_in_gate,
    lane_of,
    promises,
    table_of,
)


def exists(test: str) -> bool:
    file, _, name = test.partition("[")[0].partition("::")
    path, defined = ROOT / file, rf"^ *(async )?def {name.rpartition('::')[2]}\("
    places = [path, *path.parent.glob("*_suite.py")]  # contracts are inherited
    return path.exists() and any(re.search(defined, place.read_text(), re.MULTILINE) for place in places)


@pytest.mark.parametrize(
    ("markers", "lane"),
    [
        ((), "cpu"),
        (("parametrize", "thorough"), "cpu"),
        (("processes",), "waiting"),
        (("browser", "processes"), "waiting"),
        (("spark",), "spark"),
        (("spark", "processes"), "spark"),
        (("spark", "processes", "alone"), "alone"),
    ],
)
def test_a_lane_is_what_a_test_needs(markers: tuple[str, ...], lane: str) -> None:
    assert lane_of(markers) == lane


def test_processes_are_in_the_gate_where_they_are_promised() -> None:
    assert is_in_gate((), promised=False)
    assert not is_in_gate(("thorough",), promised=False)
    assert not is_in_gate(("processes",), promised=False)
    assert is_in_gate(("processes",), promised=True)


def test_a_promise_is_held_by_all_cases_of_its_test_or_by_the_one_it_names() -> None:
    tests = ["f.py::test_a", "f.py::test_a[1]", "f.py::test_a[12]", "f.py::test_ab"]
    every, one = Promise("", "", "f.py::test_a"), Promise("", "", "f.py::test_a[1]")
    assert [test for test in tests if every.is_held_by(test)] == tests[:3]
    assert [test for test in tests if one.is_held_by(test)] == tests[1:2]


def test_every_promise_has_a_test() -> None:
    named = [promise.test for promise in promises()]
    assert [test for test in named if not exists(test)] == []
    assert len(set(named)) == len(named)


def test_contributing_has_the_promises_of_now() -> None:
    assert table_of(promises(), Durations.read()) in PROMISES_PAGE.read_text(), "write it: make durations"


def test_the_gate_stays_within_its_budget() -> None:
    """A test that makes it too long needs another to move out: by ``@pytest.mark.thorough``, or out of the promises."""
    known = Durations.read()
    assert known.lanes, "write them: make durations"
    assert known.wall_s() < BUDGET_S
    assert known.too_long() == {}


def test_few_tests_are_flaky_and_all_of_them_exist() -> None:
    entries = flaky_entries()
    assert len(entries) <= MAX_FLAKY
    assert [entry["test"] for entry in entries if not exists(entry["test"])] == []
    assert all({"seed", "day", "suspected"} <= entry.keys() for entry in entries)


def test_a_journal_knows_what_failed_and_what_was_running(tmp_path: Path) -> None:
    lines = [
        {"event": "begins", "test": "a", "at": 1.0},
        {"event": "setup", "test": "a", "seconds": 0.5, "outcome": "passed"},
        {"event": "call", "test": "a", "seconds": 1.0, "outcome": "failed"},
        {"event": "teardown", "test": "a", "seconds": 0.25, "outcome": "passed"},
        {"event": "ended", "test": "a"},
        {"event": "begins", "test": "b", "at": 2.0},
        {"event": "setup", "test": "b", "seconds": 0.0, "outcome": "skipped"},
        {"event": "teardown", "test": "b", "seconds": 0.0, "outcome": "passed"},
        {"event": "ended", "test": "b"},
        {"event": "begins", "test": "c", "at": 3.0},
    ]
    path = tmp_path / "lane.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    journal = Journal.read(path)
    assert journal.failed() == ["a"]
    assert journal.outcomes == {"a": "failed", "b": "skipped"}
    assert journal.seconds["a"] == 1.75
    assert list(journal.running) == ["c"]
    assert Journal.read(tmp_path / "none").outcomes == {}


def test_a_journal_knows_why_tests_were_skipped(tmp_path: Path) -> None:
    at = ("tests/a.py", 1, ())
    reports = [
        pytest.TestReport("a", at, {}, "skipped", ("tests/a.py", 1, "Skipped: told by /proc"), "setup"),
        pytest.TestReport("b", at, {}, "passed", None, "call"),
        pytest.TestReport("c", at, {}, "skipped", ("tests/a.py", 1, "Skipped: it is odd"), "call"),
        expected := pytest.TestReport("d", at, {}, "skipped", "it fails", "call"),
    ]
    expected.wasxfail = "a difference that is known"  # type: ignore[attr-defined]
    hooks = _Journal(tmp_path / "lane.jsonl")
    for report in reports:
        hooks.pytest_runtest_logreport(report)
    hooks.pytest_collectreport(pytest.CollectReport("f.py", "passed", None, []))
    hooks.pytest_collectreport(pytest.CollectReport("g.py", "skipped", ("g.py", 1, "Skipped: it is gone"), []))
    journal = Journal.read(tmp_path / "lane.jsonl")
    assert journal.skipped == {"a": "told by /proc", "c": "it is odd", "g.py": "it is gone"}
    assert journal.unaccepted() == {"c": "it is odd", "g.py": "it is gone"}
    assert journal.outcomes == {"a": "skipped", "b": "passed", "c": "skipped", "d": "skipped"}


@pytest.mark.parametrize(("reason", "red"), [("told by /proc", 0), ("no commit of this clone is called so", 1)])
def test_a_reason_that_is_not_accepted_turns_a_run_red(
    reason: str, red: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(outcomes={"a": "passed", "b": "skipped"}, skipped={"b": reason})
    gate = Gate("gate", "", [], tmp_path)
    assert gate._tell({"cpu": 0}, {"cpu": journal}, {"cpu": []}, {}, 1.0) == red
    said = capsys.readouterr().out
    assert f"skipped 1: {reason}" in said
    assert (f"SKIPPED: b: {reason}" in said) == bool(red)


@pytest.mark.parametrize(
    ("reason", "accepted"),
    [
        ("STATEFLOW_TEST_POSTGRES_URL names no postgresql server", True),
        ("real-time mode needs PySpark 4.3 or newer, and this is 4.2.0.dev1", True),
        ("its other blocks run; a.md, 7: the JetStream source needs PySpark 4.2 or newer, and this is 4.1.0", True),
        ("could not import 'pandas': No module named 'pandas'", True),
        ("could not import 'stateflow': No module named 'stateflow'", False),
        ("got empty parameter set for (folder)", False),
        ("unconditional skip", False),
        ("", False),
    ],
)
def test_reasons_that_lie_in_the_machine_are_accepted(reason: str, accepted: bool) -> None:
    assert is_accepted(reason) is accepted


def test_reasons_in_the_tests_are_accepted() -> None:
    """A reason that is computed is checked when it is given, by the gate."""
    found = {
        (str(path.relative_to(ROOT)), said.value)
        for path in (ROOT / "tests").rglob("*.py")
        if "skip" in (text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("pytest.skip", "pytest.mark.skipif")
        for said in [*call.args[:1], *(each.value for each in call.keywords if each.arg == "reason")]
        if isinstance(said, ast.Constant) and isinstance(said.value, str)
    }
    assert ("tests/integration/test_open_files.py", "prlimit is not here") in found
    assert [each for each in sorted(found) if not is_accepted(each[1])] == []


def test_durations_are_kept_and_added_up(tmp_path: Path) -> None:
    lanes = {
        "cpu": {"a.py": 4.0, "a.py::test_b": 4.5},
        "waiting": {"c.py::test_d": 60.0},
        "spark": {"e.py::test_f": 12.0},
    }
    path = tmp_path / "durations.json"
    Durations(lanes).write(path)
    known = Durations.read(path)
    assert known.of_file("a.py") == 8.5
    assert known.wall_s() == 8.5 / 2 + max(60.0 / LANES["waiting"], 12.0)
    assert known.too_long() == {"a.py::test_b": 4.5, "c.py::test_d": 60.0}


def test_a_hunt_draws_everything_and_plants_a_mistake_now_and_then() -> None:
    random = Random(1)
    drawn = [hunt.draw(random, number) for number in range(1000)]
    assert {quarry for quarry, _ in drawn} == {*hunt.QUARRIES, hunt.PLANTED}
    assert sum(quarry is hunt.PLANTED for quarry, _ in drawn) == 10
    assert len({seed for _, seed in drawn}) == 1000
    assert all(quarry.command(seed) for quarry, seed in drawn)
