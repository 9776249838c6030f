"""`stateflow state get`: which key is meant, and the error for a missing key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from stateflow.cli import state
from stateflow.cli.app import app

MICROS = pa.timestamp("us", tz="UTC")
NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)


class Cluster:
    """A cluster with one entry, for the key -5."""

    def __init__(self, _: str) -> None: ...

    def scan_state(self, operator: str, name: str, key: Any = None) -> Iterator[bytes]:
        if name == "windowed":
            yield page([], key=pa.null(), window_start=MICROS, map_key=pa.null(), value=pa.null(), partition=pa.int32())
            row = {"key": -5, "window_start": NOON, "map_key": None, "value": 7, "partition": 3}
            yield page(
                [row], key=pa.int64(), window_start=MICROS, map_key=pa.null(), value=pa.int64(), partition=pa.int32()
            )
            return
        rows = [{"key": -5, "map_key": None, "value": "here", "partition": 3}] if key == -5 else []
        yield page(rows, key=pa.int64(), map_key=pa.null(), value=pa.string(), partition=pa.int32())


def page(rows: list[dict[str, Any]], **types: pa.DataType) -> bytes:
    table = pa.Table.from_pylist(rows, pa.schema(list(types.items())))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


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


def test_keys_and_values_neither_command_the_terminal_nor_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows bring keys and values from anywhere, and a narrow terminal shows all of them."""
    row = {"key": "\x1b[2J\u202ekey", "map_key": None, "value": "v" * 90, "partition": 3}
    types = {"key": pa.string(), "map_key": pa.null(), "value": pa.string(), "partition": pa.int32()}
    monkeypatch.setattr(Cluster, "scan_state", lambda *_: iter([page([row], **types)]))
    monkeypatch.setattr(state, "console", Console(width=60))
    shown = CliRunner().invoke(app, ["state", "scan", "Op", "seen"]).stdout
    assert r"\x1b[2J\u202ekey" in shown
    assert "\x1b" not in shown
    assert shown.count("v") == 90 + len("v")  # of the heading


def test_columns_of_windows_are_shown_and_exported(tmp_path: Path) -> None:
    """A partition where the tag was not used knows no types; its page fits those of the others."""
    shown = CliRunner().invoke(app, ["state", "get", "Op", "windowed", "--", "-5"]).stdout
    assert shown.split()[:5] == ["key", "window_start", "map_key", "value", "partition"]
    assert "2013-01-01 12:00:00+00:00" in shown
    out = tmp_path / "windowed.parquet"
    made = CliRunner().invoke(app, ["state", "export", "Op", "windowed", "--out", str(out), "--json"])
    assert (made.exit_code, json.loads(made.stdout)["rows"]) == (0, 1)
    table = pq.read_table(out)
    assert table.column_names == ["key", "window_start", "map_key", "value", "partition"]
    assert (table["window_start"].to_pylist(), table["value"].to_pylist()) == ([NOON], [7])


def test_a_directory_is_refused_before_the_state_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_pages", lambda *_: pytest.fail("the state was read"))
    out = tmp_path / "out.parquet"
    out.mkdir()
    ran = CliRunner().invoke(app, ["state", "export", "Count", "n", "--out", str(out)])
    assert ran.exit_code == 1
    assert ran.stderr.startswith("invalid_argument: a directory has this name")
