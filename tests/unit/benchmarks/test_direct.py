"""A rival that is not installed is distinguished from one that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import direct
from benchmarks.direct_common import BYTEWAX, COLUMNS, PLAIN, QUIX, ROWS, Outcome, columns_of, reference, verdict
from benchmarks.direct_worker import CONTEST


def test_a_rival_that_is_not_installed_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(job: direct.Job) -> dict[str, Any]:
        assert job.contestant != QUIX, "what is missing is not started"
        return {"rows_per_s": 1.0, "lost": 0, "duplicated": 0, "state_equal": True}

    monkeypatch.setattr(direct, "QUIX_PYTHON", tmp_path / "none")
    monkeypatch.setattr(direct, "run_worker", worker)
    record = direct.run("T2", quick=True, seed=1, only=[PLAIN, ROWS, QUIX])
    assert record.skipped == "quix streams is not installed: make .venv/.quix"
    assert record.complete
    met = {target.name: target.met for target in record.targets}
    assert met["stateflow rows / dict loop @1,000 keys"]
    assert not met["stateflow rows / quix streams @1,000 keys"]


TIMED, SMALL = columns_of(1, 5, 20, 3), columns_of(2, 5, 10, 2)


def outcomes() -> tuple[Outcome, Outcome]:
    """Returns right outcomes of the timed run and of the small run, with counted outputs and with the states."""
    outputs, state = reference(SMALL, last_only=False)
    timed = Outcome(rows=60, state=reference(TIMED, last_only=True)[1])
    return timed, Outcome(outputs=outputs, rows=20, state=state)


def test_the_state_of_both_runs_is_compared_and_is_unknown_if_it_cannot_be_read() -> None:
    timed, small = outcomes()
    right = {"lost": 0, "duplicated": 0, "state_equal": True}
    assert verdict(TIMED, timed, SMALL, small, last_only=False) == right
    for wrong in (timed, small):
        assert wrong.state is not None
        before, wrong.state = wrong.state, {**wrong.state, 1: (0, 0.0)}
        assert verdict(TIMED, timed, SMALL, small, last_only=False) == {**right, "state_equal": False}
        wrong.state = before
    timed.state = small.state = None
    assert verdict(TIMED, timed, SMALL, small, last_only=False) == {**right, "state_equal": None}


def test_outputs_of_both_runs_are_compared() -> None:
    timed, small = outcomes()
    small.outputs = [*small.outputs[2:], (77, 1, 0.0)]
    found = verdict(TIMED, timed, SMALL, small, last_only=False)
    assert (found["lost"], found["duplicated"]) == (2, 1)
    for rows, lost, duplicated in ((57, 3, 0), (61, 0, 1), (None, 0, 0)):
        timed, small = outcomes()
        timed.rows = rows
        found = verdict(TIMED, timed, SMALL, small, last_only=False)
        assert (found["lost"], found["duplicated"]) == (lost, duplicated)


@pytest.mark.parametrize(("equal", "said"), [(True, True), (False, False), (None, None)])
def test_a_state_that_cannot_be_read_is_not_said_to_be_equal(
    equal: bool | None, said: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"rows_per_s": 1.0, "lost": 0, "duplicated": 0}
    monkeypatch.setattr(direct, "how_to_install", lambda contestant: "")
    monkeypatch.setattr(direct, "run_worker", lambda job: {**found, "state_equal": equal})
    alone = direct.run("T2", quick=True, seed=1, only=[BYTEWAX])
    assert (alone.correctness.state_equal, alone.complete) == (said, equal is not False)
    assert alone.correctness.inapplicable == (("state_equal",) if equal is None else ())
    monkeypatch.setattr(
        direct, "run_worker", lambda job: {**found, "state_equal": equal if job.contestant == BYTEWAX else True}
    )
    both = direct.run("T2", quick=True, seed=1, only=[BYTEWAX, ROWS])
    assert both.correctness.state_equal is (equal is not False)
    assert both.correctness.inapplicable == ()


@pytest.mark.skipif(direct.how_to_install(BYTEWAX) != "", reason="bytewax is not installed here")
def test_bytewax_counts_its_outputs(tmp_path: Path) -> None:
    batches = columns_of(1, 20, 100, 3)
    for keep in (False, True):
        outcome = CONTEST[BYTEWAX](batches, 1, tmp_path / str(keep), keep)
        assert (outcome.rows, len(outcome.outputs), outcome.state) == (300, 300 * keep, None)


@pytest.mark.parametrize("contestant", [ROWS, COLUMNS])
@pytest.mark.thorough
def test_ours_gives_what_the_reference_gives(contestant: str, tmp_path: Path) -> None:
    batches = columns_of(1, 20, 100, 3)
    outcome = CONTEST[contestant](batches, 1, tmp_path / "replica", True)
    outputs, state = reference(batches, last_only=contestant == COLUMNS)
    assert sorted(outcome.outputs) == sorted(outputs)
    assert outcome.state == state
