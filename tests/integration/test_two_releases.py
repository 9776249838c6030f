"""A fleet of two releases: the one before, as it was committed, and this one, in processes beside each other."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from stateflow.cli import show
from stateflow.local.process import Process
from stateflow.release import FIRST, VERSION
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import Model, check_owners, eventually, outputs, rows_of

pytestmark = pytest.mark.processes
REPOSITORY = Path(__file__).parents[2]
#: the newest commit whose message begins so is the last one of the release before
BEFORE = f"Release {FIRST.version}:"
MODULE = "tests/integration/operators.py"


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, check=False)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Code of the release before, with today's module of the operator: that one is the user's, and stays."""
    commit = git("log", "-1", "--format=%H", f"--grep=^{BEFORE}").stdout.decode().strip()
    if not commit:
        pytest.skip(f"no commit of this clone is called {BEFORE!r}")
    made = git("archive", commit, "stateflow", "reconfig")
    assert made.returncode == 0, made.stderr
    folder = tmp_path_factory.mktemp("release") / FIRST.version
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    for path in (MODULE, "tests/__init__.py", "tests/integration/__init__.py"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes((REPOSITORY / path).read_bytes())
    return folder


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
        assert _versions(local) == {""}, "one that says nothing of releases"


def test_status_says_who_is_of_which(before: Path, tmp_path: Path) -> None:
    with Mixed(tmp_path / "c", {"edge-0"}, before) as local:
        assert _versions(local) == {FIRST.version, VERSION}
        caption = show.replicas(local.cluster.status().replicas, {}).caption
        assert caption == f"stateflow releases: {FIRST.version}: edge-0; {VERSION}: cloud-0"


def _versions(local: LocalCluster) -> set[str]:
    return {each.version for each in local.cluster.status().replicas}


def _all_there(local: LocalCluster) -> None:
    def answers() -> bool:
        replicas = local.cluster.status().replicas
        return len(replicas) == 2 and all(each.alive for each in replicas)

    eventually(answers, "all processes answer")
