"""A sample of the crash matrix: each participant with each fault, at steps of all kinds.

``make crash-matrix`` runs all cells and writes docs/crash-matrix.md.
"""

from __future__ import annotations

from typing import get_args

import pytest

from reconfig.decisions import migration as m
from tests.crash_matrix.matrix import matrix, run_cell
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


@pytest.mark.processes
@pytest.mark.parametrize("acknowledge", ["wal", "fsync"])
def test_a_sample_of_the_matrix_is_good(acknowledge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEFLOW_REPLICA_ACKNOWLEDGE", acknowledge)
    with matrix() as local:
        outcomes = [run_cell(local, cell, number) for number, cell in enumerate(sample())]
    problems = {str(outcome.cell): outcome.problem for outcome in outcomes if outcome.problem}
    assert not problems
    assert {outcome.move for outcome in outcomes} == {"COMPLETED", "ABORTED"}
