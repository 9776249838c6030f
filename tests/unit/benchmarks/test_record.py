"""Records of benchmarks: verdicts are computed, unknown is not good, and a failure is never silent."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as command
from benchmarks.record import Correctness, Record, Target, commit, ratio, spread, versions

SOUND = Correctness(lost=0, duplicated=0, late=0, state_equal=True)


@pytest.mark.parametrize(
    ("value", "bound", "met"),
    [
        (4.0, "at_least", True),
        (3.999, "at_least", False),
        (5.0, "at_least", True),
        (4.0, "at_most", True),
        (4.001, "at_most", False),
        (0.0, "at_most", True),
        (None, "at_least", False),
        (None, "at_most", False),
    ],
)
def test_met_is_computed_from_value_and_bound(value: float | None, bound: Any, met: bool) -> None:
    target = Target("x", value, 4.0, bound)
    assert target.met is met
    assert target.to_json() == {"name": "x", "value": value, "target": 4.0, "bound": bound, "met": met}


def test_met_cannot_be_set() -> None:
    with pytest.raises(TypeError):
        Target("x", 1.0, 4.0, met=True)  # type: ignore[call-arg]
    with pytest.raises((AttributeError, TypeError)):  # which of the two depends on the version of Python's dataclasses
        Target("x", 1.0, 4.0).met = True  # type: ignore[misc]


@given(st.floats(allow_nan=True) | st.none(), st.floats(allow_nan=False))
def test_met_with_any_figures(value: float | None, bound: float) -> None:
    least, most = Target("x", value, bound), Target("x", value, bound, "at_most")
    if value is None or math.isnan(value):
        assert not least.met
        assert not most.met
    else:
        assert least.met or most.met
        assert (least.met and most.met) == (value == bound)


@pytest.mark.parametrize(
    ("counts", "sound"),
    [
        ((0, 0, 0, True), True),
        ((1, 0, 0, True), False),
        ((0, 1, 0, True), False),
        ((0, 0, 1, True), False),
        ((0, 0, 0, False), False),
        ((None, 0, 0, True), False),
        ((0, 0, 0, None), False),
    ],
)
def test_only_all_zero_and_equal_is_sound(counts: tuple[Any, ...], sound: bool) -> None:
    assert Correctness(*counts).sound is sound


def test_correctness_of_several_is_their_sum_and_unknown_if_one_is() -> None:
    assert Correctness.of_all([SOUND, SOUND]) == SOUND
    assert Correctness.of_all([SOUND, Correctness(2, 1, 0, True), Correctness(1, 0, 0, True)]) == Correctness(
        3, 1, 0, True
    )
    assert Correctness.of_all([SOUND, Correctness(None, 4, None, None)]) == Correctness(None, 4, None, None)
    unequal = Correctness(0, 0, 0, False)
    assert Correctness.of_all([unequal, Correctness(0, 0, 0, None)]).state_equal is False, "known to be wrong"
    nothing = Correctness.of_all([])
    assert nothing == Correctness(None, None, None, None)
    assert not nothing.sound


def test_what_is_inapplicable_counts_neither_for_nor_against() -> None:
    unreadable = Correctness(0, 0, 0, None, inapplicable=("state_equal",))
    assert unreadable.sound
    assert not Correctness(1, 0, 0, None, inapplicable=("state_equal",)).sound
    assert not Correctness(None, 0, 0, None, inapplicable=("state_equal",)).sound
    assert Correctness.of_all([SOUND, unreadable]) == SOUND
    assert Correctness.of_all([unreadable, Correctness(0, 0, 0, False)]).state_equal is False
    assert Correctness.of_all([unreadable, Correctness(0, 0, 0, None)]).sound is False, "one was not compared"
    assert Correctness.of_all([unreadable, unreadable]) == unreadable
    assert unreadable.to_json()["inapplicable"] == ["state_equal"]


def record(correctness: Correctness = SOUND, failures: tuple[str, ...] = ()) -> Record:
    targets = [Target("fast", 2.0, 1.0), Target("slow", None, 1.0)]
    return Record("T0", {"figure": 1}, targets, correctness, {"quick": True}, seed=7, failures=failures)


def test_a_record_is_complete_when_all_was_measured_and_right_whatever_the_targets() -> None:
    assert record().complete
    assert not record(Correctness(1, 0, 0, True)).complete
    assert not record(failures=("a: no result",)).complete


def test_the_json_of_a_record() -> None:
    said = json.loads(json.dumps(record(failures=("a: no result",)).to_json(), allow_nan=False))
    assert list(said) == [
        "experiment",
        "figures",
        "targets",
        "correctness",
        "failures",
        "settings",
        "versions",
        "commit",
        "seed",
    ]
    assert [target["met"] for target in said["targets"]] == [True, False]
    assert said["correctness"] == {"lost": 0, "duplicated": 0, "late": 0, "state_equal": True}
    assert said["failures"] == ["a: no result"]
    assert said["settings"]["quick"] is True
    assert said["settings"]["cpus"] >= 1
    assert said["settings"]["memory_gb"] > 0
    assert said["seed"] == 7


def test_spread_and_ratio() -> None:
    assert spread([3.0, 1.0, 8.0]) == {"median": 3.0, "min": 1.0, "max": 8.0, "values": [3.0, 1.0, 8.0]}
    assert spread([]) == {"median": None, "min": None, "max": None, "values": []}
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(0.0, 2.0) == 0.0
    assert ratio(None, 2.0) is ratio(3.0, None) is ratio(3.0, 0.0) is None


def test_versions_and_commit() -> None:
    found = versions()
    assert found["stateflow"] != "not installed"
    assert found["python"].startswith("3.")
    revision = commit().removesuffix("+changes")
    assert revision == "unknown" or (len(revision) == 40 and int(revision, 16) >= 0)


# -- the command ----------------------------------------------------------------------------------------------


def status_of(arguments: list[str]) -> int:
    """Returns the exit status, whether the command returns it or argparse raises it."""
    try:
        return command.main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_help_names_every_benchmark_and_its_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["--help"]) == 0
    said = capsys.readouterr().out
    for name, benchmark in command.REGISTRY.items():
        assert name in said
        assert benchmark.question in said


@pytest.mark.parametrize("arguments", [["nothing"], []])
def test_an_unknown_or_missing_name_is_one_clear_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    last = said.err.strip().splitlines()[-1]
    assert last.startswith("python -m benchmarks: error: ")
    if arguments:
        assert "'nothing'" in last
        assert all(name in last for name in command.REGISTRY)


def test_an_unknown_experiment_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    for name, benchmark in command.REGISTRY.items():
        assert status_of([name, "--experiment", "T99"]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        known = ", ".join(benchmark.experiments)
        assert said.err == f"invalid_argument: {name} has no experiment 'T99': choose {known}\n"


@pytest.mark.parametrize("name", sorted(command.REGISTRY))
def test_every_registered_module_has_a_run(name: str) -> None:
    import importlib
    import inspect

    benchmark = command.REGISTRY[name]
    assert benchmark.experiments
    run = importlib.import_module(benchmark.module).run
    parameters = inspect.signature(run).parameters
    assert next(iter(parameters)) == "experiment"
    assert {"quick", "seed", "only"} <= set(parameters)


@pytest.mark.parametrize(
    ("made", "status"),
    [(record(), 0), (record(Correctness(0, 0, 0, False)), 1), (record(failures=("x: broke",)), 1)],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_the_exit_status_says_whether_all_was_measured_and_right(
    made: Record,
    status: int,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import benchmarks.spark

    asked: list[Any] = []

    def run(experiment: str, **options: Any) -> Record:
        asked.append((experiment, options))
        return made

    monkeypatch.setattr(benchmarks.spark, "run", run)
    first = command.REGISTRY["spark"].experiments[0]
    arguments = ["spark", "--quick", "--seed", "5", "--only", "ours"] + ["--json"] * as_json
    assert status_of(arguments) == status
    assert asked == [(first, {"quick": True, "seed": 5, "only": ["ours"]})]
    said = capsys.readouterr()
    if as_json:
        [line] = said.out.splitlines()
        assert json.loads(line)["experiment"] == "T0"
    else:
        assert "NOT MET" in said.out
        assert "not measured" in said.out
        assert ("x: broke" in said.out) == bool(made.failures)


@pytest.mark.parametrize("name", sorted(command.REGISTRY))
def test_every_record_says_whether_its_size_is_quick(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib

    module = importlib.import_module(command.REGISTRY[name].module)
    for experiment in command.REGISTRY[name].experiments:
        made = Record(experiment, {}, [], SOUND, {"rows": 1}, seed=1)
        monkeypatch.setattr(module, "run", lambda *_, made=made, **__: made)
        assert status_of([name, "--experiment", experiment, "--quick", "--json"]) == 0
        settings = json.loads(capsys.readouterr().out)["settings"]
        assert (settings["quick"], settings["rows"]) == (True, 1)


def test_an_experiment_that_crashes_has_a_record_with_its_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import benchmarks.plan

    kept: list[Record] = []

    def run(*_: Any, **__: Any) -> Record:
        raise ZeroDivisionError("no batches")

    monkeypatch.setattr(benchmarks.plan, "run", run)
    monkeypatch.setattr(command, "keep", lambda _, made: kept.append(made))
    monkeypatch.setattr(command, "slowness", lambda: 1.0)
    assert status_of(["plan", "--experiment", "S2", "--keep", "--json"]) == 1
    [made] = kept
    assert (made.experiment, made.failures, made.complete) == ("S2", ["ZeroDivisionError: no batches"], False)
    said = capsys.readouterr()
    assert json.loads(said.out)["failures"] == ["ZeroDivisionError: no batches"]
    assert "Traceback" in said.err


@pytest.mark.parametrize(
    ("quick", "took_s", "slowness", "overran"),
    [(True, 120.0, 1.0, False), (True, 121.0, 1.0, True), (True, 121.0, 1.5, False), (False, 9999.0, 1.0, False)],
)
def test_a_quick_experiment_may_take_two_minutes_of_a_quiet_machine(
    quick: bool, took_s: float, slowness: float, overran: bool
) -> None:
    said = replace(record(), settings={"quick": quick}, took_s=took_s, slowness=slowness).to_json()
    assert (said["took_s"], said["slowness"], said["overran"]) == (took_s, slowness, overran)


def test_what_is_kept_says_how_long_it_took_and_how_slow_the_machine_was_at_worst(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import benchmarks.spark

    kept: list[tuple[str, Record]] = []
    monkeypatch.setattr(benchmarks.spark, "run", lambda experiment, **_: record())
    monkeypatch.setattr(command, "keep", lambda name, made: kept.append((name, made)))
    monkeypatch.setattr(command, "slowness", iter([3.0, 2.0]).__next__)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=iter([10.0, 25.5]).__next__))
    assert status_of(["spark", "--quick", "--keep"]) == 0
    assert kept == [("spark", replace(record(), took_s=15.5, slowness=3.0))]
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=iter([10.0, 999.0]).__next__))
    assert status_of(["spark", "--quick", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["took_s"] == 989.0
    assert "overran" not in said, "how slow the machine is was not measured"
