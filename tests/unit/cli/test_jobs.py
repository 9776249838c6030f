"""JSON of commands on jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from stateflow.cli import jobs
from stateflow.cli.app import app
from stateflow.reports import JobReport, JobRun, JobStage

RUN = JobRun(1, 2, 3, "PROCESSED", ("c1",), "note", "nightly/1", (JobStage("Tally", ("c1",), "none"),))
JOB = JobReport("nightly", "every 3600", "checkpoint", "", (), (0, 3), "", False, 1, (RUN,))
STAGE = {"operator": "Tally", "reconfigurations": ["c1"], "error": "none"}


class Cluster:
    """A cluster with one job, whose first run has ended."""

    def __init__(self, _: str) -> None: ...
    def jobs(self) -> list[JobReport]:
        return [JOB]

    def job(self, _: str) -> JobReport:
        return JOB

    def create_job(self, *_: Any, **__: Any) -> JobReport:
        return replace(JOB, name="new")

    def change_job(self, *_: Any) -> JobReport:
        return JOB

    def run_job(self, _: str) -> JobRun:
        return RUN

    def job_run(self, _: str, **__: Any) -> JobRun:
        return RUN


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("list", ("jobs", 0, "runs", 0)),
        ("info nightly", ("runs", 0)),
        ("create new --schedule x --do checkpoint", ("runs", 0)),
        ("pause nightly", ("runs", 0)),
        ("resume nightly", ("runs", 0)),
        ("delete nightly", ("runs", 0)),
        ("run-now nightly", ()),
        ("result nightly/1", ()),
    ],
)
def test_runs_and_stages_are_objects(words: str, path: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and stages used to be texts of Python."""
    monkeypatch.setattr(jobs, "Cluster", Cluster)
    done = CliRunner().invoke(app, ["job", *words.split(), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    for step in path:
        found = found[step]
    assert (found["id"], found["stages"]) == ("nightly/1", [STAGE])
