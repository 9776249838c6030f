"""A hostile client that gave up early is distinguished from one that lasted to the end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import overload
from benchmarks.overload import Client

SAYS = "import sys; sys.stdin.read(); print('{\"goes_on\": %s}')"


@pytest.mark.parametrize(
    ("program", "goes_on"), [(SAYS % "true", True), (SAYS % "false", False), ("raise SystemExit(1)", False)]
)
def test_whether_it_was_at_it(program: str, goes_on: bool) -> None:
    assert stopped(program) == goes_on


def test_one_that_hangs_was_not_at_it_and_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "ANSWER_S", 0.1)
    assert not stopped("import time; time.sleep(600)")


def stopped(program: str) -> bool:
    client = Client.__new__(Client)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        client._process, client._in, client._out = process, process.stdin, process.stdout
        return client.stop()
