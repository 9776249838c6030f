"""What a replica says crosses the wire whole."""

from __future__ import annotations

from dataclasses import fields

import pytest

from stateflow.errors import MoveUnknown
from stateflow.replica.messages import progress_to_pb
from stateflow.replica.progress import Phase, Progress
from stateflow.rpc.wire import error_of


@pytest.mark.parametrize("phase", Phase)
def test_every_field_of_a_progress_crosses(phase: Phase) -> None:
    numbers = {field.name: number for number, field in enumerate(fields(Progress), 1)}
    fault = MoveUnknown("it is gone", remedy="start a new one")
    said = Progress(**{**numbers, "phase": phase, "digest": "d", "fault": fault})  # type: ignore[arg-type]
    sent = progress_to_pb(said)
    assert {field.name for field, _ in sent.ListFields()} | {"phase"} == set(numbers)
    assert sent.Phase.Name(sent.phase) == phase.name
    assert str(error_of(sent.fault)) == str(fault)
    plain = set(numbers) - {"phase", "digest", "fault"}
    assert {name: getattr(sent, name) for name in plain} == {name: numbers[name] for name in plain}


def test_a_progress_without_a_fault_has_none() -> None:
    assert not progress_to_pb(Progress()).HasField("fault")
