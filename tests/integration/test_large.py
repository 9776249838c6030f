"""Large numbers: thousands of partitions at one replica, tens of thousands of reconfigurations in the ledger."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from reconfig.controller import steps
from reconfig.controller.folds import Home
from reconfig.controller.history import APP
from reconfig.decisions.plan import PlannedMove, StrategyName, to_payload
from stateflow.client import Cluster
from stateflow.errors import StateflowError
from stateflow.ledger import Ledger
from stateflow.ledger.records import RECORD
from stateflow.local.process import Process
from stateflow.testing import LocalCluster
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo
from tests.integration.operators import Tally
from tests.integration.support import Model, eventually, outputs, rows_of
from tests.sizes import sized
from tests.writing import Written, deploy, write

pytestmark = pytest.mark.processes
RECONFIGURATIONS = 20_000
PARTITIONS = sized(1024)


def fill(ledger: Ledger) -> None:
    """Writes a deployment and ended moves, each a reconfiguration of its own, directly into a ledger."""
    spec = OperatorSpec("Op", "m:Op", 4, ("k",), b"", "[]")
    cluster = Written(ledger)
    write(cluster, steps.register, ReplicaInfo("a", "x", "127.0.0.1:1"), Home("d", "p"))
    deploy(cluster, spec, dict.fromkeys(range(4), "a"))
    rows: list[dict[str, Any]] = []
    for number in range(RECONFIGURATIONS):
        epoch = 1 + number // 4
        move = PlannedMove(
            f"r{number}", PartitionId("Op", number % 4), "a", "a", epoch, epoch + 1, StrategyName.WARM_UP
        )
        planned = to_payload(move)
        report = {"pause_ms": number / 7, "digest": "0" * 32, "note": "as all the others"}
        for seq, (state, payload) in enumerate(
            [("NEW", planned), ("PROCESSED", {"epoch": epoch + 1, "owner": "a", "report": report})]
        ):
            rows.append(
                {
                    "item_id": move.item_id, "seq": seq, "app_name": APP.name, "app_version": APP.version,
                    "state": state, "author": "test", "timestamp_us": 1000 + number, "run_id": "run",
                    "payload": json.dumps(payload),
                }
            )  # fmt: skip
    ledger.database.write(lambda connection: connection.execute(insert(RECORD), rows))


def said(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "stateflow", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_twenty_thousand_reconfigurations_are_told_of(tmp_path: Path) -> None:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        fill(ledger)
    controller = Process(
        "controller",
        ["controller", "--listen", "127.0.0.1:0", "--ledger", f"sqlite:///{tmp_path / 'ledger.db'}"],
        tmp_path / "controller.log",
        [],
    )
    controller.start()
    try:
        address = controller.wait_ready()
        slowest = said("reconfig", "slowest", "3", "--controller", address, "--json")["moves"]
        assert [move["reconfiguration"] for move in slowest] == [f"r{RECONFIGURATIONS - n}" for n in (1, 2, 3)]
        cluster = Cluster(address)
        everything = [each.id for each in cluster.reconfigurations()]
        assert everything == [f"r{n}" for n in reversed(range(RECONFIGURATIONS))]
        assert [each.id for each in cluster.reconfigurations(20)] == everything[:20]
        assert cluster.reconfiguration("r17").moves[0].state == "COMPLETED"
    finally:
        controller.stop()


def test_many_partitions_are_created_on_one_replica(tmp_path: Path) -> None:
    """A replica creates more partitions than it can while a call waits, and an interrupted deployment goes on."""
    with LocalCluster(data_dir=tmp_path / "cluster", checkpoint_interval_s=0) as local:
        failed: list[StateflowError] = []

        def deploy() -> None:
            try:
                local.cluster.deploy(Tally, PARTITIONS)
            except StateflowError as error:
                failed.append(error)

        deploying = threading.Thread(target=deploy)
        deploying.start()

        def begun() -> bool:
            under_way = local.cluster.status().deploying
            return bool(under_way) and 0 < under_way[0].created < PARTITIONS

        eventually(begun, "some partitions are there")
        local.kill("controller")
        deploying.join(60)
        assert [error.code for error in failed] == ["unavailable"]
        local.restart("controller")
        eventually(lambda: local.cluster.status().operators, "it is gone on with")
        local.cluster.deploy(Tally, PARTITIONS)  # doing it twice is no error
        (replica,) = local.cluster.status().replicas
        assert replica.partitions == PARTITIONS
        stream, model = local.stream("Tally", source="s"), Model()
        assert outputs(stream.send(rows_of("k", 0))) == model.apply(rows_of("k", 0))
        model.check(local.cluster)
