"""A fleet of two releases, the one before and this one, in processes beside each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stateflow.cli import show
from stateflow.errors import ReleaseMismatch
from stateflow.local.process import Process
from stateflow.release import VERSION
from stateflow.testing import LocalCluster
from tests.formats import BEFORE, unpack_code
from tests.integration.operators import Tally
from tests.integration.support import Model, check_owners, eventually, outputs, rows_of

pytestmark = pytest.mark.processes
REPOSITORY = Path(__file__).parents[2]
#: a client of the release before: sends a batch, and prints the source's position before it and the outputs
CLIENT = """
import json, sys
from stateflow import Cluster

with Cluster(sys.argv[1]).stream("Tally", source="s") as stream:
    position = stream.position
    rows = stream.send(json.load(sys.stdin))
print(json.dumps([position, rows]))
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacks the release before, with today's operators: these are the user's, and stay."""
    return unpack_code(BEFORE, tmp_path_factory.mktemp("release") / BEFORE)


class Mixed(LocalCluster):
    """A cluster whose processes in ``older`` are of the release before; all run with the interpreter of this one."""

    def __init__(self, folder: Path, older: set[str], before: Path) -> None:
        super().__init__(Tally, sites={"cloud": 1, "edge": 1}, partitions=4, data_dir=folder, checkpoint_interval_s=0)
        self.older, self._before = older, before

    def _process(self, name: str, arguments: list[str]) -> Process:
        process = super()._process(name, arguments)
        process._environment = {**process._environment, "PYTHONSAFEPATH": "1"}  # no imports from the working directory
        self._choose(process)
        return process

    def _within(self, name: str) -> list[str]:
        return ["env", "-C", "."]  # a process of its own, not a fork of one that has imported this release

    def _choose(self, process: Process) -> None:
        """Sets a process's release: its import path, and the working directory, where the command line also looks."""
        place = str(self._before if process.name in self.older else REPOSITORY)
        others = [path for path in process._python_path if path not in (str(self._before), str(REPOSITORY))]
        process._python_path, process._within = [place, *others], ["env", "-C", place]

    def become(self, name: str, older: bool) -> None:
        """Stops a process and starts it again as the other release."""
        (self.older.add if older else self.older.discard)(name)
        process = self.processes[name]
        process.stop()
        self._choose(process)
        self.restart(name)


class Run:
    def __init__(self, local: LocalCluster) -> None:
        self.local, self.model, self.batch = local, Model(), 0
        self.stream = local.stream("Tally", source="s")

    def send(self) -> None:
        rows = rows_of("k", self.batch)
        assert outputs(self.stream.send(rows)) == self.model.apply(rows)
        self.batch += 1

    def move_all(self) -> None:
        for to in ("edge", "cloud"):
            self.send()
            assert self.local.migrate("Tally", [0, 1, 2, 3], to).wait().state == "COMPLETED"
            self.send()
        self.local.cluster.checkpoint("Tally")
        check_owners(self.local, "Tally")
        self.model.check(self.local.cluster, "Tally")


ORDERS = {
    "controller first": ["controller", "cloud-0", "edge-0"],
    "replicas first": ["edge-0", "cloud-0", "controller"],
}


@pytest.fixture(params=ORDERS.values(), ids=ORDERS)
def order(request: pytest.FixtureRequest) -> list[str]:
    found: list[str] = request.param
    return found


@pytest.mark.thorough
def test_a_fleet_is_upgraded_process_by_process_and_back(before: Path, order: list[str], tmp_path: Path) -> None:
    """Either release reads what is on disk and in the ledger, on the way to the new one and on the way back."""
    with Mixed(tmp_path / "c", {"controller", "cloud-0", "edge-0"}, before) as local:
        run = Run(local)
        run.move_all()
        for older in (False, True):
            for name in order:
                local.become(name, older)
                _all_there(local)
                run.move_all()
            assert _versions(local) == {BEFORE if older else VERSION}


def test_two_releases_serve_and_move_and_status_says_who_is_of_which(before: Path, tmp_path: Path) -> None:
    with Mixed(tmp_path / "c", {"edge-0"}, before) as local:
        Run(local).move_all()
        assert _versions(local) == {BEFORE, VERSION}
        caption = show.replicas(local.cluster.status().replicas, {}).caption
        assert caption == f"stateflow releases: {BEFORE}: edge-0; {VERSION}: cloud-0"
        with pytest.raises(ReleaseMismatch, match=f"{BEFORE} of replica edge-0 cannot stop sources"):
            local.cluster.restore("Tally", to="edge-0", stop_sources=True)


@pytest.mark.thorough
@pytest.mark.parametrize("older", [{"controller", "cloud-0", "edge-0"}, set()], ids=["older fleet", "newer fleet"])
def test_clients_of_either_release_go_on_with_a_source(before: Path, older: set[str], tmp_path: Path) -> None:
    with Mixed(tmp_path / "c", older, before) as local:
        run = Run(local)
        for _ in range(2):
            run.send()
            rows = rows_of("k", run.batch)
            position, came = _sent_by_older(local, before, rows)
            assert position == run.batch - 1
            assert outputs(came) == run.model.apply(rows)
            run.batch += 1
            run.stream = local.stream("Tally", source="s")
            assert run.stream.position == run.batch - 1
        run.move_all()


@pytest.mark.thorough
def test_a_controller_reads_what_a_newer_one_recorded(before: Path, tmp_path: Path) -> None:
    with Mixed(tmp_path / "c", set(), before) as local:
        run = Run(local)
        run.move_all()
        local.cluster.create_job("hourly", "every 1h", "checkpoint")
        assert [each.fault for each in local.cluster.restore("Tally", stop_sources=True)] == [None] * 4
        run.stream = local.stream("Tally", source="s")
        for older, schedule in ((True, "every 3600"), (False, "every 1h")):
            local.become("controller", older)
            _all_there(local)
            assert [each.schedule for each in local.cluster.jobs()] == [schedule]
            run.move_all()


def _sent_by_older(local: LocalCluster, before: Path, rows: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """Sends a batch with a client of the release before. Returns its position before the batch, and the outputs."""
    command = [sys.executable, "-P", "-c", CLIENT, local.address]
    environment = os.environ | {"PYTHONPATH": str(before)}
    done = subprocess.run(
        command, input=json.dumps(rows), env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    position, came = json.loads(done.stdout)
    return position, came


def _versions(local: LocalCluster) -> set[str]:
    return {each.version for each in local.cluster.status().replicas}


def _all_there(local: LocalCluster) -> None:
    def answers() -> bool:
        replicas = local.cluster.status().replicas
        return len(replicas) == 2 and all(each.alive for each in replicas)

    eventually(answers, "all processes answer")
