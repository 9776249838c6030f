"""Outages of the ledger, however long: they delay moves, and neither fail nor strand them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import Signals

import pytest

from stateflow.client import Cluster
from stateflow.errors import HoldLost, NotLeading
from stateflow.ledger import Ledger, RecordState
from stateflow.local.process import Process
from stateflow.reports import Reconfiguration
from stateflow.testing import LocalCluster
from tests.integration.mounts import Mount
from tests.integration.operators import Tally
from tests.integration.postgres import FAST, IMMEDIATE, Postgres, postgres
from tests.integration.support import Model, Streaming, check_owners, eventually, outputs, rows_of, wait_alive
from tests.integration.test_full_disk import fill

pytestmark = pytest.mark.processes
MOVES = 20
OUTAGE_S = 60.0
REPLICAS = ("cloud-0", "edge-0", "spare-0")


class Ledgered(LocalCluster):
    """A cluster whose ledger is the one at ``url``."""

    url = ""

    def _process(self, name: str, arguments: list[str]) -> Process:
        if name == "controller" and self.url:
            arguments[arguments.index("--ledger") + 1] = self.url
        return super()._process(name, arguments)


@contextlib.contextmanager
def cluster_at(url: str, directory: Path) -> Iterator[Ledgered]:
    """A cluster with all of ``Tally`` at the cloud, and all of ``Spare`` at a replica that the moves do not need."""
    local = Ledgered(sites={"cloud": 1, "edge": 1, "spare": 1}, data_dir=directory, checkpoint_interval_s=0)
    local.url = url or f"sqlite:///{directory / 'ledger.db'}"
    with local:
        local.cluster.deploy(Tally, MOVES, sites=["cloud"])
        local.cluster.deploy(Tally, 2, sites=["spare"], name="Spare")
        yield local


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets leases that an outage outlives, and few moves at a time, so that the outage meets some in the middle."""
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HOLD_S", "3")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "3")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_COLD_START_WAIT_S", "0")  # the replica that is killed stays away
    monkeypatch.setenv("STATEFLOW_CONTROLLER_CONCURRENT_MOVES", "2")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.3")


@pytest.fixture
def server() -> Iterator[Postgres]:
    with postgres() as server:
        yield server


def fed(local: LocalCluster, operator: str) -> Model:
    """Sends some batches, takes a checkpoint of all of them, and returns their model."""
    stream, model = local.stream(operator, source="fed"), Model()
    for batch in range(3):
        assert outputs(stream.send(rows_of("f", batch))) == model.apply(rows_of("f", batch))
    local.cluster.checkpoint(operator)
    return model


def moved_through(local: Ledgered, streaming: Streaming, fault: Callable[[], None]) -> Reconfiguration:
    """Injects a fault in the middle of 20 moves under load, and returns how the moves ended."""
    streaming.more(3)
    moving = local.migrate("Tally", list(range(MOVES)), "edge")
    eventually(lambda: any(m.state == "COMPLETED" for m in local.cluster.reconfiguration(moving.id).moves), "one moved")
    fault()
    moved: Reconfiguration | None = eventually(lambda: ended(local.cluster, moving.id), "the moves end")
    assert moved is not None
    streaming.more(3)
    return moved


def ended(cluster: Cluster, reconfiguration: str) -> Reconfiguration | None:
    try:
        found = cluster.reconfiguration(reconfiguration)
    except (NotLeading, HoldLost):  # a term has ended, the next has not begun
        return None
    return found if found.state in ("COMPLETED", "FAILED") else None


def owners_agree(local: Ledgered, operator: str) -> bool:
    try:
        check_owners(local, operator)
    except AssertionError:
        return False
    return True


def check_nothing_stranded(local: Ledgered, moved: Reconfiguration) -> None:
    """Checks that every move reached its target once, and that nothing is open any more."""
    assert [move.error for move in moved.moves if move.error] == []
    assert {each.state for each in local.cluster.reconfigurations()} == {"COMPLETED"}
    tally = next(each for each in local.cluster.status().operators if each.name == "Tally")
    assert set(tally.owners) == {"edge-0"}
    check_owners(local)
    with Ledger(local.url) as ledger:
        newest = {record.item_id: record.state for record in ledger.records(archived=True)}
        assert ledger.verify() == []
    moves = [state for item, state in newest.items() if item.startswith(f"move/{moved.id}/")]
    assert moves == [RecordState.PROCESSED] * MOVES
    assert RecordState.PROCESSING not in newest.values(), "an item is locked for ever"
    for name in ("controller", *REPLICAS):
        log = (local.data_dir / f"{name}.log").read_text()
        assert "Traceback" not in log, log[-5000:]


def through_a_long_outage(local: Ledgered, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Moves partitions through an outage, in the middle of which one replica is killed."""
    spare = fed(local, "Spare")

    def outage() -> None:
        began = time.monotonic()
        begin()
        time.sleep(OUTAGE_S / 2)
        local.kill("spare-0")
        time.sleep(began + OUTAGE_S - time.monotonic())
        end()

    with Streaming(local.stream("Tally", source="s"), "k") as streaming:
        moved = moved_through(local, streaming, outage)
    streaming.model.check(local.cluster)
    spare.check(local.cluster, "Spare")  # taken over by another
    local.restart("spare-0")
    wait_alive(local, *REPLICAS)
    eventually(lambda: owners_agree(local, "Spare"), "it has heard what it owns no more")
    check_nothing_stranded(local, moved)


@pytest.mark.parametrize("how", [FAST, IMMEDIATE], ids=["fast", "immediate"])
def test_postgres_is_stopped_for_a_minute(short: None, server: Postgres, tmp_path: Path, how: Signals) -> None:
    """An outage of PostgreSQL fails no move.

    Earlier, moves that were not granted when the controller's leader lease ended were rolled back.
    """
    with cluster_at(server.url, tmp_path / "c") as local:
        through_a_long_outage(local, lambda: server.stop(how), server.start)


def test_sqlite_is_locked_for_a_minute(short: None, tmp_path: Path) -> None:
    with cluster_at("", tmp_path / "c") as local, contextlib.ExitStack() as lock:

        def begin() -> None:
            lock.enter_context(locked(local.data_dir / "ledger.db"))

        through_a_long_outage(local, begin, lock.close)


LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Locks a database file from another process."""
    process = subprocess.Popen([sys.executable, "-c", LOCK, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    try:
        yield
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(30)


def read_only(server: Postgres) -> None:
    """Makes the database read-only for longer than a leader lease."""
    server.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
    server.cut()
    time.sleep(5.0)
    server.execute("SET default_transaction_read_only = off", "ALTER DATABASE postgres RESET ALL")
    server.cut()


def connections_cut(server: Postgres) -> None:
    for _ in range(10):
        server.cut()
        time.sleep(0.2)


@pytest.mark.parametrize("fault", [read_only, connections_cut])
def test_shorter_faults_of_postgres(
    short: None, server: Postgres, tmp_path: Path, fault: Callable[[Postgres], None]
) -> None:
    with cluster_at(server.url, tmp_path / "c") as local:
        through_a_short_fault(local, lambda: fault(server))


def test_the_disk_of_sqlite_is_full_for_a_while(short: None, mount: Mount) -> None:
    disk = mount("ledger", 8 << 20)

    def full() -> None:
        ballast = fill(disk)
        time.sleep(5.0)
        ballast.unlink()

    with cluster_at(f"sqlite:///{disk / 'ledger.db'}", disk.parent / "c") as local:
        through_a_short_fault(local, full)


def through_a_short_fault(local: Ledgered, fault: Callable[[], None]) -> None:
    with Streaming(local.stream("Tally", source="s"), "k") as streaming:
        moved = moved_through(local, streaming, fault)
    streaming.model.check(local.cluster)
    check_nothing_stranded(local, moved)
