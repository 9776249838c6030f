"""Hostile or mistaken callers of real processes: each is refused in one line, and the processes serve on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest

from stateflow.code.loading import digest_of
from stateflow.errors import CodeRefused, OperatorNotImportable, StateflowError
from stateflow.operator.operator import describe
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc, replica_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.faults import remote_error
from stateflow.rpc.secure import OPTIONS
from stateflow.rpc.wire import message_of
from stateflow.testing import LocalCluster
from stateflow.types import SOURCE_MAX
from tests.integration.operators import Tally

pytestmark = pytest.mark.processes
ROWS = [{"k": f"a-{number}", "v": number} for number in range(50)]
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("STATEFLOW_REPLICA_WAITING_BYTES_MAX", str(16 * MIB))
        folder = tmp_path_factory.mktemp("strangers")
        with LocalCluster(Tally, sites={"local": 1}, partitions=4, data_dir=folder) as started:
            yield started


@pytest.fixture
def replica(cluster: LocalCluster) -> Iterator[replica_pb2_grpc.ReplicaServiceStub]:
    address = cluster.cluster.status().replicas[0].address
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        yield replica_pb2_grpc.ReplicaServiceStub(channel)


@pytest.fixture
def controller(cluster: LocalCluster) -> Iterator[controller_pb2_grpc.ControllerServiceStub]:
    with grpc.insecure_channel(cluster.address, options=OPTIONS) as channel:
        yield controller_pb2_grpc.ControllerServiceStub(channel)


@pytest.fixture(autouse=True)
def all_goes_on(cluster: LocalCluster) -> Iterator[None]:
    """Checks that the same processes serve before and after a test."""
    pids = {name: process.pid for name, process in cluster.processes.items()}
    yield
    assert all(Path(f"/proc/{pid}").exists() for pid in pids.values())
    assert {name: process.pid for name, process in cluster.processes.items()} == pids
    stream = cluster.stream("Tally", source="honest")
    assert len(stream.send(ROWS)) == len(ROWS)


@contextlib.contextmanager
def refused(*said: str) -> Iterator[None]:
    """Expects an error of the server with these texts, in one line of printable text."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error = remote_error(caught.value, "the server")
    assert isinstance(error, StateflowError)
    assert all(each in str(error) for each in said), str(error)
    assert str(error).isprintable()


def header(**more: Any) -> rpb.ApplyHeader:
    values: dict[str, Any] = {
        "operator": "Tally",
        "source": "stranger",
        "batch": 0,
        "input_schema": SCHEMA.serialize().to_pybytes(),
        "sparse": True,
    }
    return rpb.ApplyHeader(**values | more)


def asked(
    replica: replica_pb2_grpc.ReplicaServiceStub, partitions: Sequence[int], rows: bytes, count: int, **more: Any
) -> list[rpb.ApplyResponse]:
    """Returns the answers to one call, the only one of its stream.

    Args:
        count: rows of each partition.
    """
    said = {"epochs": [1] * len(partitions), "counts": [count] * len(partitions), "rows": rows}
    request = rpb.ApplyRequest(call=1, header=header(**more), partitions=partitions, **said, last=True)
    return list(replica.Apply(iter([request])))


def test_pieces_that_are_never_finished_are_bounded(replica: replica_pb2_grpc.ReplicaServiceStub) -> None:
    """Unfinished pieces are bounded.

    Earlier, 1.2 GB of them stayed with the replica for as long as the caller liked.
    """

    def pieces() -> Iterator[rpb.ApplyRequest]:
        begun = {"partitions": [0], "epochs": [1], "counts": [1], "rows": b"."}
        yield rpb.ApplyRequest(call=1, header=header(), **begun, more=True)
        for _ in range(1200):
            yield rpb.ApplyRequest(call=1, rows=bytes(MIB), more=True)

    (answer,) = replica.Apply(pieces())
    assert (answer.call, answer.last, answer.fault.code) == (1, True, "invalid_argument")
    assert f"more than {8 * MIB} bytes of one batch's rows would be buffered here" in answer.fault.what


def test_a_stranger_creates_nothing(replica: replica_pb2_grpc.ReplicaServiceStub, tmp_path: Path) -> None:
    """A stranger creates nothing, neither as a controller nor with code of its own.

    Earlier, its code was imported before anything was checked.
    """
    proof, code = tmp_path / "ran", tmp_path / "evil.py"
    code.write_text(f"open({str(proof)!r}, 'w')\n")
    spec = message_of(pb.OperatorSpec, describe(Tally, 4, "Evil"))
    spec.target = f"{code}:Evil"
    forged = pb.Command(ledger="some", term=1, session="some")
    for command in ({}, {"command": forged}):
        with refused():
            replica.Create(rpb.CreateRequest(spec=spec, partitions=[0], epoch=1, **command))  # type: ignore[arg-type]
        with refused():
            replica.Restore(rpb.RestoreRequest(restore_id="r", spec=spec, **command))  # type: ignore[arg-type]
        with refused():
            source = pb.Replica(name="s", site="s", address="host:1", weight=1)
            list(replica.Prepare(rpb.PrepareRequest(move_id="m", spec=spec, source=source, **command)))  # type: ignore[arg-type]
    for number in (4294967295, 65_536):
        with refused("is not a valid partition"):
            replica.Create(rpb.CreateRequest(spec=spec, partitions=[number], epoch=1))
    assert not proof.exists()


def test_code_of_who_has_not_the_key_is_not_run(
    cluster: LocalCluster, controller: controller_pb2_grpc.ControllerServiceStub, tmp_path: Path
) -> None:
    """Code is not run when its sender lacks the key.

    A deployment brings its operator's text, and any caller that reaches the controller can send one.
    """
    proof, file = tmp_path / "ran", tmp_path / "ops.py"
    file.write_text(f"open({str(proof)!r}, 'w')\nfrom tests.integration.operators import Tally as Open\n")
    spec = pb.OperatorSpec()
    spec.CopyFrom(message_of(pb.OperatorSpec, describe(Tally, 4, "Open")))
    spec.target = f"{file}:Open"
    for text, mac, refusal in (
        ("", "", OperatorNotImportable.code),  # the file is not taken instead
        (file.read_text(), "", CodeRefused.code),
        (file.read_text(), "0" * 64, CodeRefused.code),
    ):
        spec.source, spec.source_digest, spec.source_mac = text, digest_of(text), mac
        with refused(refusal):
            controller.Deploy(cpb.DeployRequest(spec=spec))
    spec.source, spec.source_mac = "x" * (SOURCE_MAX + 1), ""
    with refused("invalid_argument", "is not a valid source"):
        controller.Deploy(cpb.DeployRequest(spec=spec))
    assert not proof.exists()
    assert [operator.name for operator in cluster.cluster.status().operators] == ["Tally"]


def test_verifying_checkpoints_runs_no_code(cluster: LocalCluster, tmp_path: Path) -> None:
    """Verifying checkpoints runs no code.

    Earlier, a writer to the store could name a module, and `checkpoint verify` imported it.
    """
    cluster.stream("Tally", source="honest").send(ROWS)
    cluster.cluster.checkpoint("Tally")
    proof, package = tmp_path / "ran", tmp_path / "tests" / "integration"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "operators.py").write_text(f"open({str(proof)!r}, 'w')\n")
    store = str(cluster.data_dir / "checkpoints")
    verify = ["checkpoint", "verify", "Tally", "--checkpoints", store, "--json"]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    command = [sys.executable, "-P", "-m", "stateflow", *verify]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sound"]
    assert sum(each["entries"] for each in found["checkpoints"]) > len(ROWS)
    assert not proof.exists()


def test_nobody_else_on_this_machine_reads_state(cluster: LocalCluster) -> None:
    """Other users of the machine read no state.

    Earlier, data directories, checkpoints and the ledger with its log were 0644 in 0755.
    """
    cluster.cluster.checkpoint("Tally")
    found = [cluster.data_dir, *cluster.data_dir.rglob("*")]
    assert {"ledger.db", "CURRENT", "operator.json", "REPLICA", "checkpoints"} <= {path.name for path in found}
    open_to_others = []
    for path in found:
        if path.suffix == ".log" and path.parent == cluster.data_dir:
            continue  # output of the processes, in files of the one that started them
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            if path.stat().st_mode & 0o077:
                open_to_others.append(path)
    assert open_to_others == []


def test_asking_leaves_nothing(cluster: LocalCluster, replica: replica_pb2_grpc.ReplicaServiceStub) -> None:
    """Requests for unknown partitions leave nothing in memory. Earlier, each requested partition had a slot."""

    def ask(operator: str) -> int:
        for begin in range(0, 60_000, 10_000):
            for answer in asked(replica, range(begin, begin + 10_000), b"", 0, operator=operator):
                assert all(result.fault.code == "not_owner" for result in answer.results)
        return _resident_bytes(cluster)

    before = ask("Nobody0")  # what answering takes for a moment is included from here on
    assert (
        max(ask(f"Nobody{number}") for number in range(1, 3)) - before < 60 * MIB
    )  # 120,000 slots and errors were 300


def _resident_bytes(cluster: LocalCluster) -> int:
    pid = next(process.pid for name, process in cluster.processes.items() if name != "controller")
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
