"""Real processes that talk TLS: what they do for each other, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from stateflow.client import Cluster, StreamClient
from stateflow.errors import NotAllowed, StateflowError
from stateflow.ledger import Ledger
from stateflow.local.cluster import Certificates
from stateflow.rpc import replica_pb2, replica_pb2_grpc
from stateflow.rpc.faults import remote_error
from stateflow.rpc.secure import CHANNEL_OPTIONS, blocking_channel
from stateflow.security.certificates import LOOK_S
from stateflow.testing import LocalCluster
from tests.integration.operators import Reading, Tally
from tests.integration.support import Streaming, check_owners, eventually, rows_of, wait_alive
from tests.pages import blocks

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def secure() -> Iterator[LocalCluster]:
    sites = {"cloud": 1, "edge": 1}
    with LocalCluster(Tally, Reading, sites=sites, partitions=4, deploy_to=("cloud",), tls=True) as local:
        yield local


@pytest.fixture
def certificates(secure: LocalCluster) -> Certificates:
    assert secure.certificates is not None
    return secure.certificates


def stateflow(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 600
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stateflow", *arguments]
    given = os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment or {})
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=timeout_s, check=False)


def without_tls() -> dict[str, str]:
    return {f"STATEFLOW_TLS_{which}": "" for which in ("CA", "CERT", "KEY", "CRL")}


def test_a_stream_goes_on_through_moves_deaths_and_renewals(secure: LocalCluster, certificates: Certificates) -> None:
    """No batch fails, no row is lost or counted twice."""
    with secure.stream("Tally", "a") as client, Streaming(client, "a") as streaming:
        streaming.more()
        secure.migrate("Tally", [0, 1], "edge").wait()
        for _ in range(2):
            certificates.renew()
            time.sleep(LOOK_S + 0.2)
            streaming.more(5)
            secure.migrate("Tally", [0], "cloud").wait()
            secure.migrate("Tally", [0], "edge").wait()
        secure.kill("edge-0")
        secure.restart("edge-0")
        secure.kill("controller")
        secure.restart("controller")
        wait_alive(secure, "edge-0", "cloud-0")
        streaming.more()
        report = secure.cluster.checkpoint("Tally")
        assert report.partitions == 4
    streaming.model.check(secure.cluster, keys="a")
    check_owners(secure)


def test_commands(secure: LocalCluster, certificates: Certificates) -> None:
    controller = ["--controller", secure.address]
    listed = stateflow("status", "--json", *controller)
    assert {each["name"] for each in json.loads(listed.stdout)["replicas"]} == {"cloud-0", "edge-0"}
    moved = stateflow("migrate", "Reading", "3", "--to", "edge", *controller)
    assert moved.returncode == 0, moved.stderr
    reconfiguration = json.loads(stateflow("reconfig", "list", "--json", "--limit", "1", *controller).stdout)
    newest = reconfiguration["reconfigurations"][0]["id"]
    assert json.loads(stateflow("reconfig", "info", newest, "--json", *controller).stdout)["by"] == "admin/local"
    with Ledger(secure.ledger) as ledger:
        mine = {record.item_id.partition("/")[0] for record in ledger.records() if record.author == "admin/local"}
        others = {record.item_id.partition("/")[0] for record in ledger.records() if record.author == "stateflow"}
    assert {"operator", "move", "reconfiguration"} <= mine
    assert "replica" in others
    for service in ("live", "ready"):
        assert stateflow("health", secure.processes["edge-0"].address, "--service", service).returncode == 0
    reading = certificates.issue("grafana", "read")
    assert stateflow("status", *controller, environment=reading).returncode == 0
    refused = stateflow("rebalance", *controller, environment=reading)
    assert refused.returncode == 1
    assert refused.stderr.startswith("not_allowed: read/grafana may not call Rebalance")
    plain = stateflow("status", *controller, environment=without_tls())
    assert plain.returncode == 1
    assert "closes connections in plain text" in plain.stderr


def test_a_data_client_reaches_what_it_was_given(
    secure: LocalCluster, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in certificates.issue("gw", "data", operators=("Tally",)).items():
        monkeypatch.setenv(name, value)
    with Cluster(secure.address).stream("Tally", "gw") as client:
        assert len(client.send(rows_of("gw", 0))) == 40
    assert Cluster(secure.address).read_state("Tally", "n").num_rows
    with pytest.raises(NotAllowed, match="data/gw may not reach the operator 'Reading'"):
        StreamClient(secure.address, "Reading", "gw")
    with pytest.raises(NotAllowed, match="data/gw may not call Status, which concerns all operators"):
        Cluster(secure.address).status()


#: a process of its own, as its JVM and the JVM's workers keep the environment that it began with
SPARK_PROGRAM = """
import sys
from stateflow.spark import apply_operator
from stateflow.spark.session import local_session
from tests.integration.operators import Tally

address, folder = sys.argv[1:]
spark = local_session("secure", spark__sql__shuffle__partitions="2")
spark.range(100).selectExpr("concat('spark', id % 7) k", "id v").write.parquet(f"{folder}/rows")
rows = spark.readStream.schema("k string, v long").parquet(f"{folder}/rows")
query = apply_operator(rows, Tally, cluster=address).writeStream.format("parquet")
query = query.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
query.start(f"{folder}/out").awaitTermination()
print("OUT", spark.read.parquet(f"{folder}/out").count())
"""


@pytest.mark.spark
def test_a_spark_query_has_its_certificate_from_the_environment(
    secure: LocalCluster, certificates: Certificates, tmp_path: Path
) -> None:
    """A query runs with the certificate of a data client, for its operator only."""
    given = os.environ | {"PYTHONPATH": str(ROOT)} | certificates.issue("query", "data", operators=("Tally",))
    command = [sys.executable, "-c", SPARK_PROGRAM, secure.address, str(tmp_path)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=600, check=False)
    assert "OUT 100" in done.stdout, done.stderr[-3000:]
    counted = secure.cluster.read_state("Tally", "n").to_pylist()
    assert sum(row["value"] for row in counted if row["key"].startswith("spark")) == 100


def test_a_fake_replica_with_a_stolen_name_is_refused(
    secure: LocalCluster, certificates: Certificates, tmp_path: Path
) -> None:
    """A replica with a certificate of the authority for another name cannot use a stolen name."""
    mallory = certificates.issue("mallory", "node", "127.0.0.1")
    arguments = ["replica", "--name", "edge-0", "--site", "edge", "--data-dir", str(tmp_path / "fake")]
    command = [sys.executable, "-m", "stateflow", *arguments, "--controller", secure.address]
    given = os.environ | {"PYTHONPATH": str(ROOT)} | mallory
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=given, stdout=log, stderr=log)
    try:
        said = tmp_path / "log"
        eventually(lambda: "node/mallory may not call Heartbeat for 'edge-0'" in said.read_text(), "it is refused")
        assert secure.processes["edge-0"].address in [each.address for each in secure.cluster.status().replicas]
    finally:
        process.kill()
        process.wait()


def test_a_node_takes_no_partition_from_others(
    secure: LocalCluster, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    (reading,) = [each for each in secure.cluster.status().operators if each.name == "Reading"]
    theirs = reading.owners.index("cloud-0")
    for name, value in certificates.issue("edge-0", "node").items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(secure.address)
    with pytest.raises(NotAllowed, match=f"may not move partition {theirs} away from cloud-0"):
        cluster.migrate("Reading", [theirs], "edge-0")
    with pytest.raises(NotAllowed, match="may not call Migrate for 'cloud-0': a node may act only for itself"):
        cluster.migrate("Reading", [theirs], "cloud-0")
    with pytest.raises(NotAllowed, match="may not call Drain for 'cloud-0'"):
        cluster.drain("cloud-0")
    with pytest.raises(NotAllowed, match="may not call Undeploy"):
        cluster.undeploy("Reading")


def test_a_stranger_follows_nothing_and_confirms_nothing(
    secure: LocalCluster, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node copies only what the controller told it to copy; standbys and moves go on as before."""
    secure.cluster.standby("Reading", 1)
    try:
        eventually(
            lambda: {each.phase for each in secure.cluster.status().standbys} == {"CATCHING_UP"}, "standbys follow"
        )
        (reading,) = [each for each in secure.cluster.status().operators if each.name == "Reading"]
        with Ledger(secure.ledger) as ledger:
            planned = [
                record
                for record in ledger.records()
                if record.item_id.startswith("move/") and (record.payload or {}).get("strategy") == "standby"
            ]
        item = next(each for each in planned[::-1] if each.payload["partition"] == 0)
        move, target = f"{item.item_id.split('/')[1]}-0", item.payload["target"]
        with monkeypatch.context() as patched:
            for name, value in certificates.issue("mallory", "node", "127.0.0.1").items():
                patched.setenv(name, value)
            address = secure.processes[reading.owners[0]].address
            with blocking_channel(address, CHANNEL_OPTIONS) as channel:
                stub = replica_pb2_grpc.ReplicaServiceStub(channel)

                def asked(call: str, request: Any) -> StateflowError:
                    with pytest.raises(grpc.RpcError) as caught:
                        getattr(stub, call)(request, timeout=60)
                    return remote_error(caught.value, address)

                def snapshot(move_id: str) -> Any:
                    return replica_pb2.SnapshotRequest(operator="Reading", move_id=move_id, standby=True)

                assert "the controller has no such move" in str(asked("Snapshot", snapshot("made-up")))
                assert f"it is for {target}" in str(asked("Snapshot", snapshot(move)))
                ids = [f"Reading-0-{move}-{number}" for number in range(1, 9)]
                confirmed = [replica_pb2.ConfirmRequest(snapshot_id=each, sequence=1) for each in ids]
                refused = [asked("Confirm", each) for each in confirmed]
                assert [each for each in refused if f"it is for {target}" in str(each)], refused
    finally:
        secure.cluster.standby("Reading", 0)


def test_an_agents_replicas_have_its_certificate(
    secure: LocalCluster, certificates: Certificates, tmp_path: Path
) -> None:
    given = os.environ | {"PYTHONPATH": str(ROOT)} | certificates.issue("gw", "agent", "127.0.0.1")
    where = ["--site", "gateways", "--name", "gw", "--data-dir", str(tmp_path / "gw"), "--controller", secure.address]
    command = [sys.executable, "-m", "stateflow", "agent", *where, "--json", "--stop-with-parent"]
    with subprocess.Popen(command, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        try:
            eventually(lambda: [each.alive for each in secure.cluster.agents()] == [True], "the agent is there")
            assert secure.cluster.spawn("gateways").wait() == ["gw-0"]
            secure.migrate("Reading", [0], "gateways").wait()
            (reading,) = [each for each in secure.cluster.status().operators if each.name == "Reading"]
            assert reading.owners[0] == "gw-0"
            log = eventually(lambda: b"".join(secure.cluster.logs("gw-0")), "its log is read through the controller")
            assert b"registered as gw-0" in log
            secure.migrate("Reading", [0], "edge").wait()
            secure.cluster.stop_replica("gw-0", drain=True)
        finally:
            agent.terminate()


def test_a_revoked_certificate_is_refused_at_the_next_call(
    secure: LocalCluster, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        for name, value in certificates.issue("eve", "data").items():
            patched.setenv(name, value)
        cluster = Cluster(secure.address)
        with cluster.stream("Tally", "eve") as client:
            client.send(rows_of("eve", 0))
            certificates.revoke("eve")
            time.sleep(LOOK_S + 0.2)
            with pytest.raises(NotAllowed, match="the certificate of data/eve was revoked"):
                cluster.status()
            with pytest.raises(NotAllowed, match="the certificate of data/eve was revoked"):
                client.send(rows_of("eve", 1))


def test_ten_commands_of_the_page_set_up_a_fleet(tmp_path: Path) -> None:
    """The commands of docs/security.md set up a fleet, here in one directory and on one machine."""
    text = next(block.text for block in blocks(ROOT / "docs" / "security.md") if block.kind == "sh")
    ports = {"7070": free_port(), "7071": free_port()}
    text = re.sub(
        r"--host \S+", "--host localhost", re.sub(r"(?:0\.0\.0\.0|ctl|cloud-0):(707\d)", r"localhost:\1", text)
    )
    lines = [re.sub("707[01]", lambda found: ports[found[0]], line).split() for line in text.splitlines()]
    assert len(lines) == 10
    base = os.environ | {"PYTHONPATH": str(ROOT), "STATE_DIRECTORY": str(tmp_path / "state")} | without_tls()
    started: list[subprocess.Popen[str]] = []
    try:
        for _, *words in lines:
            command = [sys.executable, "-m", "stateflow", *words]
            who = {"controller": "ctl", "replica": "cloud-0", "status": "alice"}.get(words[0], "")
            files = {"CA": "ca", "CERT": "cert", "KEY": "key", "CRL": "crl"}
            own = {f"STATEFLOW_TLS_{name}": f"{tmp_path}/{who}/{file}.pem" for name, file in files.items()}
            options: dict[str, Any] = {"env": base | (own if who else {}), "cwd": tmp_path, "text": True}
            if words[0] in ("controller", "replica"):
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE, **options))
                out = started[-1].stdout
                assert out is not None
                assert "listens on" in out.readline()
            elif words[0] == "status":

                def has_joined(command: list[str] = command, options: dict[str, Any] = options) -> bool:
                    return "cloud-0" in subprocess.run(command, check=True, capture_output=True, **options).stdout

                eventually(has_joined, "the replica is in")
            else:
                subprocess.run(command, check=True, capture_output=True, timeout=600, **options)
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_plain_text_stays_on_this_machine(tmp_path: Path) -> None:
    nowhere = ["--data-dir", str(tmp_path / "x"), "--site", "edge"]
    for arguments in (
        ["controller", "--listen", "0.0.0.0:0", "--ledger", f"sqlite:///{tmp_path}/ledger.db"],
        ["controller", "--listen", "127.0.0.1:0", "--advertise", "ctl:7070", "--ledger", f"sqlite:///{tmp_path}/l.db"],
        ["replica", *nowhere, "--listen", "0.0.0.0:0"],
        ["replica", *nowhere, "--controller", "ctl:7070"],
        ["agent", *nowhere, "--listen", "0.0.0.0:0"],
        ["agent", *nowhere, "--advertise", "gw-1"],
        ["status", "--controller", "ctl:7070"],
    ):
        done = stateflow(*arguments, environment=without_tls())
        assert done.returncode == 1, done.stderr
        last = done.stderr.splitlines()[-1]
        assert "insecure: " in last
        assert "STATEFLOW_TLS_CA" in last
        assert "--insecure or STATEFLOW_INSECURE=1" in last
    status = stateflow("--insecure", "status", "--controller", "ctl.invalid:7070", environment=without_tls())
    assert "unavailable: " in status.stderr
    assert "INSECURE: plain text to ctl.invalid:7070" in status.stderr
