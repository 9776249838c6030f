"""Hooks of every test: selection by tier and lane (``tests/gate.py``), and a journal of what ran."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import HealthCheck, settings

from tests.gate import LANES, TIERS, Durations, is_in_gate, lane_of, promises

# both checks depend on how fast the machine is just now
settings.register_profile("stateflow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stateflow")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stateflow")
    group.addoption("--tier", choices=TIERS, default="all", help="which tests: those of the gate, or all of them")
    group.addoption("--lane", choices=tuple(LANES), help="only the tests of one lane")
    group.addoption("--shard", metavar="I/N", help="only the I-th of N parts of the files, from 1 on")
    group.addoption("--journal", metavar="FILE", help="write a line when a test begins and one when it has ended")


def pytest_configure(config: pytest.Config) -> None:
    # SIGUSR1 asks a run that takes too long for its stacks; while a test runs, descriptor 2 is a file of pytest's
    faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True)
    path = config.getoption("--journal")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Journal(Path(path)), "stateflow-journal")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier, lane, shard = (config.getoption(name) for name in ("--tier", "--lane", "--shard"))
    if tier == "all" and lane is None and shard is None:
        return
    held = {promise.test for promise in promises()}
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    part, parts = (int(number) for number in shard.split("/")) if shard else (1, 1)
    of_shard = set(files[part - 1 :: parts])

    def is_wanted(item: pytest.Item) -> bool:
        markers = {mark.name for mark in item.iter_markers()}
        promised = item.nodeid in held or item.nodeid.partition("[")[0] in held
        return (
            (tier == "all" or is_in_gate(markers, promised))
            and (lane is None or lane_of(markers) == lane)
            and item.nodeid.partition("::")[0] in of_shard
        )

    wanted, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (wanted if is_wanted(item) else others).append(item)
    config.hook.pytest_deselected(items=others)
    # longest files first, so that no long file begins when the others have ended
    durations = Durations.read()
    seconds = {file: durations.of_file(file) for file in files}
    items[:] = sorted(wanted, key=lambda item: -seconds[item.nodeid.partition("::")[0]])


class _Journal:
    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w", buffering=1)

    def _write(self, **entry: str | float) -> None:
        self._file.write(json.dumps(entry) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(event="begins", test=nodeid, at=time.time())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "failed" if report.failed else "skipped" if report.skipped else "passed"
        reason = _reason_of(report)
        self._write(event=report.when or "", test=report.nodeid, seconds=report.duration, outcome=outcome, **reason)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a file that skips itself has no tests, so nothing else tells of it
            self._write(event="file", test=report.nodeid, **_reason_of(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(event="ended", test=nodeid)


def _reason_of(report: pytest.TestReport | pytest.CollectReport) -> dict[str, str]:
    """Returns the reason of a skipped test or file as an entry of the journal; empty for others.

    A test that is expected to fail counts as skipped, too, and has no reason.
    """
    if not report.skipped or hasattr(report, "wasxfail"):
        return {}
    said = report.longrepr
    return {"reason": str(said[2] if isinstance(said, tuple | list) else said).removeprefix("Skipped: ")}
