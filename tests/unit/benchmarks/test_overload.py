"""A hostile client that gave up early is distinguished from one that lasted, and an overload from a mere load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import overload
from benchmarks.overload import Client
from benchmarks.record import Correctness

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


@pytest.mark.parametrize(
    ("changed", "unmet"),
    [
        ({}, []),
        ({"offered_batches_per_s": 150.0}, ["offered, of twice the peak"]),
        ({"answered_batches_per_s": 80.0}, ["throughput of twice the peak, of the peak"]),
        ({"waited": 100}, ["told to wait, of the offered batches"]),
        ({"p99_ms": 2_000.0}, ["p99 from when a batch was due, ms"]),
        ({"replica_bytes_most": 10**9}, ["growth of the replica's memory, GB"]),
    ],
)
def test_what_an_overload_has_to_keep(changed: dict[str, float], unmet: list[str]) -> None:
    found = {
        "peak_batches_per_s": 100.0,
        "offered_batches_per_s": 200.0,
        "answered_batches_per_s": 95.0,
        "offered": 800,
        "waited": 790,
        "p99_ms": 400.0,
        "replica_bytes_before": 3 * 10**8,
        "replica_bytes_most": 4 * 10**8,
    }
    targets = overload._targets([found | changed], Correctness(0, 0, 0, True))
    assert [target.name for target in targets if not target.met] == unmet


def test_rows_lost_or_duplicated_in_an_overload_miss_a_target() -> None:
    names = ("offered", "answered", "waited", "peak_batches_per_s", "offered_batches_per_s", "answered_batches_per_s")
    found = dict.fromkeys((*names, "p99_ms", "replica_bytes_before", "replica_bytes_most"), 1.0)
    targets = overload._targets([found], Correctness(1, 2, 0, False))
    assert {"output rows lost", "output rows duplicated"} <= {target.name for target in targets if not target.met}
