"""Two controllers of one ledger, on real processes: one decides, and nothing acknowledged is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from stateflow.client import Cluster, Reconfiguration
from stateflow.errors import NotLeading, StateflowError
from stateflow.ledger import Ledger
from stateflow.local.process import Process
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc
from stateflow.rpc.faults import remote_error
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import Model, Streaming, check_owners, eventually, one_line, outputs, rows_of, wait_alive

pytestmark = pytest.mark.processes
HOLD_S = "2"
SECOND = "controller-1"


class Pair(LocalCluster):
    """A cluster of two controllers."""

    @property
    def first(self) -> str:
        """Address of the controller that leads at first."""
        return self.processes["controller"].address

    @property
    def second(self) -> str:
        return self.processes[SECOND].address

    def said(self, name: str) -> str:
        return (self.data_dir / f"{name}.log").read_text()

    def hold(self) -> int:
        with Ledger(self.ledger) as ledger:
            return ledger.hold().term


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two controllers that do not see each other's process, as on two machines; the leader lease outlives the test."""
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HOLD_S", "60")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_NOTICE_GONE", "false")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "60")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.3")
    with Pair(Tally, sites={"cloud": 1, "edge": 1}, partitions=4, data_dir=tmp_path / "c", controllers=2) as pair:
        yield pair


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HOLD_S", HOLD_S)
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "3")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.3")
    with Pair(Tally, sites={"cloud": 1, "edge": 1}, partitions=4, data_dir=tmp_path / "c", controllers=2) as pair:
        yield pair


def test_the_second_controller_waits_and_says_who_leads(pair: Pair) -> None:
    second = pair.second
    with grpc.insecure_channel(second) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Status(cpb.StatusRequest(), timeout=30)
    meant = remote_error(refused.value, second)
    assert isinstance(meant, NotLeading)
    assert pair.first in one_line(meant)
    assert f"at {pair.first} leads, term 1" in pair.said(SECOND)
    assert len(Cluster(second).status().operators) == 1, "clients ask the one that leads"


def test_one_that_is_stopped_and_goes_on_does_no_harm(pair: Pair) -> None:
    """A frozen leader steps down when it goes on.

    Earlier, both decided: the second took the replicas of the first for lapsed and restored what still served.
    """
    with Streaming(pair.stream("Tally", source="s"), "k") as streaming:
        streaming.more(3)
        pair.freeze("controller")
        eventually(lambda: "now leading, term 2" in pair.said(SECOND), "the second leads")
        wait_alive(pair, "cloud-0", "edge-0")
        streaming.more(3)
        pair.thaw("controller")
        eventually(lambda: "term 1 ended: hold_lost" in pair.said("controller"), "the first steps down")
        pair.migrate("Tally", [0, 1, 2, 3], "edge").wait()
        streaming.more(3)
    streaming.model.check(pair.cluster)
    check_owners(pair)
    assert not [each for each in pair.cluster.reconfigurations() if each.kind == "failover"]
    assert pair.hold() == 2


def test_clients_wait_for_one_that_was_stopped_until_it_leads_again(pair: Pair) -> None:
    """Clients wait while a leader is between two terms.

    Earlier, its answer that the term had ended was an error for them.
    """
    pair.processes[SECOND].stop()
    controller = pair.first
    pair.freeze("controller")
    with ThreadPoolExecutor(2) as threads:
        opened = threads.submit(Cluster(controller).stream, "Tally", "s")
        asked = threads.submit(Cluster(controller).status)
        try:
            with Ledger(pair.ledger) as ledger:
                eventually(lambda: ledger.hold().left_s <= 0, "its hold is over")
            assert not opened.done()
            assert not asked.done()
        finally:
            pair.thaw("controller")
        stream, status = opened.result(60), asked.result(60)
    assert [each.name for each in status.operators] == ["Tally"]
    eventually(lambda: pair.hold() == 2, "it was between two terms")
    rows = rows_of("k", 0)
    assert outputs(stream.send(rows)) == Model().apply(rows)


def test_a_killed_controller_is_followed_at_once_on_its_machine(pair: Pair) -> None:
    """A controller sees that a leader's process on its machine is gone, and does not wait for the end of its lease."""
    pair.kill(SECOND)
    os.kill(pair.processes["controller"].pid, signal.SIGKILL)
    pair.kill("controller")
    pair.restart("controller")
    assert "waits" not in pair.said("controller")
    assert pair.hold() == 2
    wait_alive(pair, "cloud-0", "edge-0")
    pair.processes["controller"].stop()
    pair.restart(SECOND)
    assert pair.said(SECOND).count("now leading, term 3") == 1, "it was given back"


def test_a_ledger_that_is_moved_away_is_noticed_before_the_next_decision(pair: Pair) -> None:
    """A leader whose ledger is moved away decides nothing.

    Earlier, it went on deciding into a file that no controller would find again.
    """
    pair.processes[SECOND].stop()
    database, elsewhere = pair.data_dir / "ledger.db", pair.data_dir / "elsewhere.db"
    database.rename(elsewhere)
    refused: list[StateflowError] = []
    try:
        Cluster(pair.first).deploy(Tally, 4, name="Other")
    except StateflowError as error:
        refused.append(error)
    assert refused[0].code in ("ledger_replaced", "not_leading"), refused[0]
    one_line(refused[0])
    eventually(lambda: "ledger_replaced: the ledger's file was deleted or moved" in pair.said("controller"), "said")
    assert not database.exists(), "none is made in its place"
    elsewhere.rename(database)
    eventually(lambda: Cluster(pair.first).status().operators, "it goes on with what it had")
    assert [each.name for each in Cluster(pair.first).status().operators] == ["Tally"]


def _at_cloud(cluster: Cluster) -> int:
    """Returns a partition that ``cloud-0`` owns."""
    return cluster.status().operators[0].owners.index("cloud-0")


def _read_of(cluster: Cluster, moved: Reconfiguration) -> None:
    """Checks what a follower answers once a partition has moved to the edge."""
    number = moved.moves[0].partition
    status = cluster.status()
    assert status.follower is not None
    assert {each.alive for each in status.replicas} == {None}
    (tally,) = status.operators
    assert (tally.owners[number], tally.epochs[number]) == ("edge-0", 2)
    (recorded,) = cluster.reconfigurations()
    assert (recorded.id, recorded.state, recorded.moves[0].epoch) == (moved.id, "COMPLETED", 2)
    assert recorded.follower is not None
    assert cluster.reconfiguration(moved.id).moves == recorded.moves
    assert cluster.operator("Tally").partitions == 4


def test_reads_are_answered_while_nobody_leads_and_no_state_is_older_than_what_was_seen(apart: Pair) -> None:
    """Followers answer reads, never with older state than the caller has seen.

    Earlier, a caller was only told who had led.
    """
    leader, second = apart.first, apart.second
    seen, fresh = Cluster(f"{leader},{second}"), Cluster(f"{second},{leader}")
    assert seen.status().follower is None
    moved = seen.migrate("Tally", [_at_cloud(seen)], "edge").wait()
    assert moved.state == "COMPLETED"
    apart.kill("controller")
    with Streaming(Cluster(f"{leader},{second}").stream("Tally", source="s"), "k") as streaming:
        streaming.more(2)  # a router asks any controller that answers
        for cluster in (seen, fresh, Cluster(second)):
            _read_of(cluster, moved)
        streaming.more(2)
    streaming.model.check(Cluster(f"{second},{leader}"))
    with pytest.raises(StateflowError) as refused:
        Cluster(second).migrate("Tally", [1], "edge")
    assert refused.value.code in ("not_leading", "unavailable"), refused.value
    answered = seen.status().follower
    assert answered is not None
    assert (answered.address, answered.leader) == (second, leader)
    apart.restart("controller")
    eventually(lambda: "waiting to lead" in apart.said("controller"), "its predecessor's hold is not its own")
    _read_of(Cluster(leader), moved)


def test_what_is_watched_is_told_of_by_whoever_leads(pair: Pair) -> None:
    """A watch goes on with the next leader. Earlier, it ended with its controller."""
    cluster = pair.cluster
    cluster.stream("Tally", source="s").send(rows_of("k", 0))
    moving = cluster.migrate("Tally", [_at_cloud(cluster)], "edge", max_pause_ms=1e-6, patience_s=600.0)
    told = moving.progress()
    assert next(told).state == "RUNNING"
    pair.kill("controller")
    with ThreadPoolExecutor(1) as threads:
        last = threads.submit(lambda: list(told)[-1])
        eventually(lambda: pair.hold() == 2, "the second leads")
        cluster.cancel(moving.id)
        report = last.result(60)
    assert (report.id, report.state, report.moves[0].state) == (moving.id, "CANCELLED", "ABORTED")
    assert report.follower is None


def test_without_a_ledger_named_there_is_one_place_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default ledger is one file in the user's state directory, which the log names.

    Earlier, it was a file in the working directory of the controller.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("STATEFLOW_LEDGER", raising=False)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    process = Process("c", ["controller", "--listen", "127.0.0.1:0"], tmp_path / "c.log", [str(Path.cwd())])
    process.start()
    try:
        process.wait_ready()
        file = tmp_path / "state" / "stateflow" / "ledger.db"
        assert file.exists()
        assert f"at sqlite:///{file}" in (tmp_path / "c.log").read_text()
    finally:
        process.stop()
