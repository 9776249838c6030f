"""A sample of the crash matrix: each participant with each fault, at steps of all kinds.

``make crash-matrix`` runs all cells and writes docs/crash-matrix.md.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from reconfig.decisions import migration as m
from tests.crash_matrix import __main__ as command
from tests.crash_matrix.matrix import ACKNOWLEDGE, Outcome, matrix, run_cell
from tests.crash_matrix.steps import FAULTS, SEEN_AS, SERVICE, Moment, cells, sample, steps


def test_every_instruction_of_the_protocol_is_a_step() -> None:
    assert set(SEEN_AS) == set(get_args(m.Instruction)) - {m.Retry}, "a new instruction: say how it is seen"
    methods = {step.method for step in steps()}
    assert methods <= set(SERVICE.methods_by_name)
    assert {method for method, _ in SEEN_AS.values()} <= methods
    assert len(cells()) == len(steps()) * len(FAULTS)


def test_the_sample_has_every_participant_fault_and_moment() -> None:
    assert {(cell.participant, cell.fault) for cell in sample()} == set(FAULTS)
    assert {cell.step.moment for cell in sample()} == set(Moment)
    assert any(cell.step.cancelled for cell in sample())


@pytest.mark.parametrize("acknowledge", ACKNOWLEDGE)
def test_the_page_says_how_replicas_acknowledged_and_from_which_commit_it_is(acknowledge: str) -> None:
    made = command.page([Outcome(cells()[0], "COMPLETED", 0.2)], acknowledge, "abc123")
    assert f"Replicas acknowledged batches by `{acknowledge}`" in made
    assert f"`python -m tests.crash_matrix --acknowledge {acknowledge}` (commit abc123): 1 cells, 0 bad." in made
    assert ("a third one had a standby" in made) == (acknowledge == "standby")
    assert re.search(r"by `(wal|fsync|standby)`.*\(commit \w+(\+changes)?\)", command.PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("acknowledge", ACKNOWLEDGE)
def test_the_whole_matrix_runs_in_the_mode_that_was_asked_for(
    acknowledge: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All replicas of the cluster get the setting, and each partition a standby where the mode needs one."""
    began: list[tuple[str, bool]] = []
    wanted: list[tuple[str, int]] = []

    class Beginning:
        def __init__(self, *, standbys: bool) -> None:
            self.standbys = standbys
            self.cluster = SimpleNamespace(standby=lambda operator, count: wanted.append((operator, count)))

        def __enter__(self) -> Beginning:
            began.append((os.environ["STATEFLOW_REPLICA_ACKNOWLEDGE"], self.standbys))
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("tests.crash_matrix.matrix.ProxiedCluster", Beginning)
    monkeypatch.setattr(command, "run_cell", lambda local, cell, number: Outcome(cell, "COMPLETED", 0.1))
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(command, "commit", lambda: "abc123")
    monkeypatch.setattr(sys, "argv", ["crash_matrix", "--acknowledge", acknowledge])
    assert command.main() == 0
    assert began == [(acknowledge, acknowledge == "standby")]
    assert wanted == ([("Tally", 1)] if acknowledge == "standby" else [])
    assert f"--acknowledge {acknowledge}` (commit abc123): {len(cells())} cells, 0 bad." in command.PAGE.read_text()


@pytest.mark.processes
@pytest.mark.parametrize("acknowledge", ACKNOWLEDGE)
def test_a_sample_of_the_matrix_is_good(acknowledge: str) -> None:
    with matrix(acknowledge) as local:
        outcomes = [run_cell(local, cell, number) for number, cell in enumerate(sample())]
    problems = {str(outcome.cell): outcome.problem for outcome in outcomes if outcome.problem}
    assert not problems
    assert {outcome.move for outcome in outcomes} == {"COMPLETED", "ABORTED"}
