"""Lines of a log that a collector reads."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime

import pytest

from stateflow.cli.output import JsonLines, shown_time


def record(message: str, *arguments: object, error: bool = False) -> logging.LogRecord:
    info = None
    if error:
        try:
            raise ValueError("one\ntwo")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("stateflow.replica", logging.WARNING, "f.py", 1, message, arguments, info)


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
