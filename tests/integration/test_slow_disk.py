"""A disk with slow durable writes: a move keeps its pause budget or is refused, and no other thread waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.testing import LocalCluster
from tests.integration.disk_faults import DiskFaults, needs_compiler
from tests.integration.operators import Tally
from tests.integration.support import Streaming, check_owners, eventually

pytestmark = [pytest.mark.processes, pytest.mark.alone, needs_compiler]
#: below what a durable write takes on the slow disk
BUDGET_MS = 250.0


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> DiskFaults:
    return DiskFaults(tmp_path_factory.mktemp("slow"))


@pytest.fixture(scope="module")
def local(disk: DiskFaults) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in disk.environment.items():
            patch.setenv(name, value)
        with LocalCluster(Tally, sites={"a": 1, "b": 1}, partitions=4, deploy_to=("a",)) as cluster:
            yield cluster


def direction(local: LocalCluster) -> tuple[str, str]:
    """Returns the sites (from, to) that partition 0 is to move between."""
    (operator,) = local.cluster.status().operators
    return ("a", "b") if operator.owners[0] == "a-0" else ("b", "a")


def pid_of(local: LocalCluster, side: str) -> int:
    """Returns the process id of the source or the target of a move of partition 0."""
    source, target = direction(local)
    return local.processes[f"{source if side == 'source' else target}-0"].pid


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_budget_that_the_disk_does_not_allow_is_refused(local: LocalCluster, disk: DiskFaults, side: str) -> None:
    source, target = direction(local)
    with Streaming(local.stream("Tally", f"refused {side}"), f"refused-{side}-") as streaming:
        with disk.slow(pid_of(local, side)):
            report = local.migrate("Tally", [0], target, max_pause_ms=BUDGET_MS, patience_s=1).wait()
        streaming.more()
    (move,) = report.moves
    assert move.state == "ABORTED"
    assert move.error.startswith("budget_unreachable: ")
    assert direction(local) == (source, target)
    check_owners(local)
    streaming.model.check(local.cluster, keys=f"refused-{side}-")


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_cutover_waits_until_the_disk_is_quiet(local: LocalCluster, disk: DiskFaults, side: str) -> None:
    source, target = direction(local)
    with Streaming(local.stream("Tally", f"quiet {side}"), f"quiet-{side}-") as streaming:
        with disk.slow(pid_of(local, side)):
            migration = local.migrate("Tally", [0], target, max_pause_ms=BUDGET_MS)
            for report in migration.progress():
                if report.moves[0].state in ("CATCHING_UP", "FENCED"):
                    break
            before = streaming.batches
            eventually(lambda: streaming.batches > before, "batches while it waits")
            assert direction(local) == (source, target)
        report = migration.wait()
        streaming.more()
    (move,) = report.moves
    assert move.state == "COMPLETED", move.error
    assert move.pause_ms <= BUDGET_MS
    streaming.model.check(local.cluster, keys=f"quiet-{side}-")


PROGRESS = """
import os, pathlib, sys, threading, time
from stateflow.changes import Mutations
from stateflow.storage import RocksEngine

store = RocksEngine().open(pathlib.Path(sys.argv[1]), create=True)
store.apply(Mutations(puts=[(b"k", b"1")]), sync=True)
flag = pathlib.Path(os.environ["DISK_FAULTS"], f"{os.getpid()}.slow")
ticks, done = 0, threading.Event()

def tick():
    global ticks
    while not done.wait(0.001):
        ticks += 1

thread = threading.Thread(target=tick)
thread.start()
flag.touch()
before = ticks
store.apply(Mutations(puts=[(b"k", b"2")]), sync=True)
during = ticks - before
flag.unlink()
done.set()
thread.join()
print(during)
"""


def test_a_durable_write_holds_no_other_thread_up(disk: DiskFaults, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRESS, str(tmp_path / "store")],
        env=os.environ | disk.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ended.stdout) > 20  # of about 300
