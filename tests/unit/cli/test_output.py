"""Output of commands and log lines, as terminals and log collectors read it."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from rich.text import Text

from stateflow.cli import app
from stateflow.cli.output import JsonLines, emit, shown_time, telling
from stateflow.cli.show import new_table
from stateflow.reports import JobStage
from stateflow.types import PartitionId


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", r"Z\xfcrich \u2192 \udcff"), ("latin-1", r"Zürich \u2192 \udcff"), ("utf-8", "Zürich → " + r"\udcff")],
)
def test_what_a_terminal_cannot_show_is_escaped(encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that a terminal cannot show are escaped.

    `ledger show` used to end half-way in a UnicodeEncodeError.
    """
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)

    def say() -> None:
        table = new_table("place")
        table.add_row(Text("Zürich → \udcff", "bold"))
        Console(width=60).print(table, Text("Zürich → \udcff"))
        print("Zürich → \udcff")

    monkeypatch.setattr(app, "app_for", lambda _: say)
    app.main()
    stream.flush()
    written = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert sum(shown in line for line in written.splitlines()) == 3


def test_a_width_of_zero_is_none() -> None:
    """Some terminals and containers set COLUMNS=0, with which tables used to be empty."""
    code = "from stateflow.cli.show import console, new_table\ntable = new_table('place')\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}table.add_row('cloud')\nconsole.print(table)"],
        *(), capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "0"},
    )  # fmt: skip
    assert done.stdout.split()[::2] == ["place", "cloud"]


def test_a_forked_process_has_a_pipe_in_place_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process may write to a pipe, which has no position.

    Asking for its position used to keep every process of a local cluster from starting.
    """
    reads, writes = os.pipe()
    with (tmp_path / "null").open("w", encoding="ascii") as file, os.fdopen(reads, encoding="ascii") as reader:
        os.dup2(writes, file.fileno())
        os.close(writes)
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(app, "app_for", lambda _: lambda: print("→", flush=True))
        app.main()
        assert reader.readline() == "\\u2192\n"


def test_lines_of_a_log_are_json_on_any_terminal() -> None:
    line = JsonLines("r").format(record("Zürich → \udcff"))
    assert line.isascii()
    assert json.loads(line)["message"] == "Zürich → \udcff"


def record(message: str, *arguments: object, error: bool = False) -> logging.LogRecord:
    info = None
    if error:
        try:
            raise ValueError("one\ntwo")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("stateflow.replica", logging.WARNING, "f.py", 1, message, arguments, info)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), None),
        ((1, [float("-inf")]), [1, [None]]),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02 03:04:05+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (time(3, 4), "03:04:00"),
        (timedelta(minutes=90), "1:30:00"),
        (Decimal("1.50"), "1.50"),
        (uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (b"\xff", "b'\\xff'"),
    ],
)
def test_a_value_of_a_state_has_a_text_in_json(value: Any, said: Any, capsys: pytest.CaptureFixture[str]) -> None:
    emit({"value": value})
    assert json.loads(capsys.readouterr().out) == {"value": said}


@pytest.mark.parametrize("value", [JobStage("Tally"), PartitionId("Tally", 3), {1, 2}, ValueError("x")])
def test_an_object_without_a_form_in_json_is_refused(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Python's text of a report used to stand in the JSON of `rebalance --dry-run` and `job list`."""
    with pytest.raises(TypeError, match="has no form in JSON"):
        emit({"values": [value]})
    assert capsys.readouterr().out == ""


def test_each_is_one_object_on_one_line() -> None:
    line = JsonLines("edge-0").format(record('move %s: "so"\nand é', "m-1"))
    assert "\n" not in line
    said = json.loads(line)
    assert said["message"] == 'move m-1: "so"\nand é'
    assert {key: said[key] for key in ("level", "who", "logger")} == {
        "level": "warning",
        "who": "edge-0",
        "logger": "stateflow.replica",
    }
    assert "exception" not in said
    assert datetime.fromisoformat(said["time"]).utcoffset() is not None
    assert said["time"].endswith("Z")


def test_an_exception_is_in_it_whole() -> None:
    line = JsonLines("r").format(record("it failed", error=True))
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: one\ntwo")


@pytest.mark.parametrize(
    ("at_us", "exactly", "shown"),
    [
        (1_700_000_000_123_456, False, "2023-11-14 22:13:20"),
        (1_700_000_000_123_456, True, "2023-11-14 22:13:20.123"),
        (0, False, "1970-01-01 00:00:00"),
        (-1, True, "1969-12-31 23:59:59.999"),
        (None, True, ""),
        (1 << 70, True, f"{1 << 70} µs"),
    ],
)
def test_a_time_is_of_utc(at_us: int | None, exactly: bool, shown: str) -> None:
    assert shown_time(at_us, exactly=exactly) == shown


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a" * 400, "File name too long"),
        (".", "Is a directory"),
        ("file/x", "Not a directory"),
        ("file", "File exists"),
    ],
)
def test_a_path_that_cannot_be_used_is_one_line(
    path: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(typer.Exit), telling():
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert "".join(capsys.readouterr().err).startswith("invalid_argument: a path cannot be used: " + said)


def test_a_directory_that_the_file_system_does_not_make_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), telling():
        Path("/proc/x/y").mkdir(parents=True, exist_ok=True)
    said = "invalid_argument: a path cannot be used: No such file or directory (path=/proc/x):"
    assert "".join(capsys.readouterr().err).startswith(said)


def test_a_loop_of_links_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Versions of Python before 3.13 raise RuntimeError for it."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(typer.Exit), telling():
        try:
            (tmp_path / "loop" / "x").resolve(strict=True)
        except OSError:
            (tmp_path / "loop" / "x").stat()
    assert "".join(capsys.readouterr().err).startswith("invalid_argument: a path cannot be used: ")


def test_a_missing_file_of_the_program_itself_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), telling():
        (tmp_path / "none").read_text()
