"""Arguments that no request can hold: they are refused, with their field, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stateflow.client import Cluster
from stateflow.errors import InvalidArgument, StateflowError, UnknownPartition
from stateflow.rpc.clients import ControllerClient, ReplicaClient


@pytest.fixture(autouse=True)
def _nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(_: object, method: str, *__: object) -> None:
        raise AssertionError(f"{method} was sent")

    for client in (ControllerClient, ReplicaClient):
        monkeypatch.setattr(client, "call", sent)
    monkeypatch.setattr(ControllerClient, "stream", sent)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda c: c.would_migrate("Op", 3, "x"), "partitions=3 is not a list of partitions"),
        (lambda c: c.would_migrate("Op", ["a"], "x"), r"partitions=\['a'\] is not a list of partitions"),
        (lambda c: c.would_migrate("Op", [1], 7), r"7 is not a valid name \(field=MigrateRequest.to\)"),
        (lambda c: c.standby("Op", "2"), r"'2' is not a valid number of copies .*: use 0 to 100"),
        (lambda c: c.standby("Op", 10**11), r"100000000000 is not a valid number of copies .*: use 0 to 100"),
        (lambda c: c.standby("Op", -1), "the number of standbys cannot be negative"),
        (
            lambda c: c.standby("M\udcfcller", 1),
            r"'M\\udcfcller' is not a valid name \(field=StandbyRequest.operator\)",
        ),
        (lambda c: c.checkpoint_all("Op", limit="2"), r"'2' is not a valid number \(field=BeginSweepRequest.limit\)"),
        (lambda c: c.restart_all(limit=-1), "-1 is not a valid number .*: use 0 to 4294967295"),
        (lambda c: c.maintain("n", for_s="2h"), r"'2h' is not a valid measure \(field=Maintenance.for_s\)"),
        (lambda c: c.maintain("n", one_of=3), r"3 is not a valid name \(field=Maintenance.one_of\)"),
        (lambda c: c.restore("Op", at="s=3"), "at='s=3' is not a position"),
        (lambda c: c.restore("Op", at=3), "at=3 is not a position"),
        (lambda c: c.restore("Op", at=("s", 10**20)), r"is not a valid batch number .*: use -1 to 9999999999999999"),
        (lambda c: c.spawn("s", count="2"), r"'2' is not a valid number of replicas .*: use 1 to 256"),
        (lambda c: c.spawn("s", labels={"a": 3}), r"{'a': 3} is not a valid name \(field=SpawnRequest.labels\)"),
        (lambda c: c.autopilot("load", max_pause_ms="50ms"), r"'50ms' is not a valid \w+ \(field=.*max_pause_ms\)"),
        (lambda c: c.upgrade("Op", "2"), r"'2' is not a valid number \(field=UpgradeRequest.version\)"),
        (lambda c: c.reconfigurations(-1), "-1 is not a valid number .*: use 0 to 4294967295"),
        (lambda c: c.edit("x", limit=True), r"True is not a valid number \(field=EditRequest.limit\)"),
        (lambda c: c.logs("r", lines="9"), r"'9' is not a valid number \(field=LogsRequest.lines\)"),
        (lambda c: c.adopt(dry_run="no"), r"'no' is not a valid truth value \(field=AdoptRequest.dry_run\)"),
        (lambda c: c.versions(3), r"3 is not a valid name \(field=VersionsRequest.operator\)"),
        (lambda c: c.operator(3), r"3 is not a valid name \(field=GetDeploymentRequest.operator\)"),
        (lambda c: c.replica_stats("a:1", -1), r"-1 is not a valid number \(field=StatsRequest.after\)"),
        (lambda c: c.create_job(7, "every 60", "checkpoint"), r"7 is not a valid name \(field=Job.name\)"),
    ],
)
def test_an_argument_that_no_request_can_hold_is_refused(ask: Callable[[Any], Any], said: str) -> None:
    """TypeError and ValueError used to be raised, without the name of the argument."""
    with pytest.raises(InvalidArgument, match=said):
        ask(Cluster("127.0.0.1:1"))


def test_a_partition_that_cannot_be_is_unknown_to_a_dry_run_too() -> None:
    with pytest.raises(UnknownPartition, match="there is no partition -1"):
        Cluster("127.0.0.1:1").would_migrate("Op", [-1], "x")


def test_a_defect_of_a_request_keeps_its_error() -> None:
    """An error of the program itself is no mistake of a caller."""
    from stateflow.rpc import controller_pb2 as cpb
    from stateflow.rpc.clients import request_of

    with pytest.raises(ValueError, match='no "cont" field') as raised:
        request_of(cpb.StandbyRequest, operator="Op", cont=1)
    assert not isinstance(raised.value, StateflowError)
