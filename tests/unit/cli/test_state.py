"""`stateflow state get`: which key is meant, and the error for a missing key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from stateflow.cli import state
from stateflow.cli.app import app


class Cluster:
    """A cluster with one entry, for the key -5."""

    def __init__(self, _: str) -> None: ...

    def scan_state(self, operator: str, name: str, key: Any) -> Iterator[bytes]:
        rows = [{"key": -5, "map_key": None, "value": "here", "partition": 3}] if key == -5 else []
        table = pa.Table.from_pylist(
            rows,
            pa.schema([("key", pa.int64()), ("map_key", pa.null()), ("value", pa.string()), ("partition", pa.int32())]),
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        yield bytes(sink.getvalue().to_pybytes())


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "Cluster", Cluster)


def get(*words: str) -> Any:
    return CliRunner().invoke(app, ["state", "get", "Op", "seen", *words])


def test_a_negative_key_is_no_option() -> None:
    assert "here" in get("-5").stdout
    assert json.loads(get("-5", "--json").stdout)["entries"][0]["value"] == "here"
    assert get("-5", "--jsn").exit_code == 2, "what is misspelt is said"


def test_a_key_that_is_not_there_is_said_with_status_1() -> None:
    """A missing key gives an error with status 1; it used to give an empty table with status 0."""
    found = get("-6")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.strip() == "seen of Op has no entry for the key '-6': see `stateflow state scan`"
    found = get("null", "--json")
    assert (found.exit_code, json.loads(found.stdout)) == (1, {"entries": []})
