"""Surroundings of a demonstration: its directory, its times and the versions that it reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateflow.client import MoveReport
from stateflow.demo.surroundings import fresh, move_row, versions
from stateflow.errors import InvalidArgument, Unavailable


def test_what_was_left_there_is_gone_and_an_earlier_report_is_not(tmp_path: Path) -> None:
    (tmp_path / "work" / "output").mkdir(parents=True)
    (tmp_path / "demo.html").touch()
    work = fresh(tmp_path)
    assert work == tmp_path / "work"
    assert list(work.iterdir()) == []
    assert (tmp_path / "demo.html").exists()


def test_a_report_needs_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=r"the report path is not a directory .*pass a directory with --out"):
        fresh(tmp_path / "file")


def test_times_of_a_move_begin_with_the_stream() -> None:
    moved = MoveReport(
        "m", 3, "a-0", "b-0", "COMPLETED", "warm", pause_ms=7.0, started_us=12_000_000, fenced_us=12_500_000
    )
    row = move_row(moved, 10_000_000)
    assert (row.partition, row.started_s, row.pause_at_s, row.pause_ms, row.completed) == (3, 2.0, 2.5, 7.0, True)
    failed = MoveReport("m", 3, "a-0", "b-0", "ABORTED", "warm", started_us=12_000_000, fault=Unavailable("gone"))
    row = move_row(failed, 10_000_000)
    assert (row.pause_at_s, row.completed) == (2.0, False)
    assert "gone" in row.error


def test_versions_are_of_what_matters() -> None:
    assert {"python", "stateflow", "pyspark", "rocksdict"} <= versions().keys()
