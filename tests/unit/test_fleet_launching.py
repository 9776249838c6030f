"""Reports of a process that is ready, or that says why it is not."""

from __future__ import annotations

import json

import pytest

from stateflow.errors import PortInUse
from stateflow.fleet import Listening, heard


def test_where_it_listens_and_its_figures_are() -> None:
    assert heard('{"address": "h:1"}\n') == Listening("h:1")
    assert heard(b'{"address": "h:1", "metrics": {"r": "h:2"}}\n') == Listening("h:1", {"r": "h:2"})


def test_why_it_does_not() -> None:
    error = PortInUse("the address cannot be bound", remedy="choose another port", address="h:1")
    said = heard(json.dumps({"error": error.to_wire()}))
    assert isinstance(said, PortInUse)
    assert said.where == {"address": "h:1"}


@pytest.mark.parametrize("line", ["", "nonsense", "[]", "7", "{}", '{"address": "h:1", "metrics": 7}', b"\xff"])
def test_something_else(line: str | bytes) -> None:
    assert heard(line) is None
