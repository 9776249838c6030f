"""Heartbeats of a replica: the controller's answer to the question who may copy its partitions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import steps
from reconfig.controller.folds import Home
from reconfig.controller.registration import Beat, Incoming, Registration
from reconfig.decisions.plan import PlannedMove, PlannedStandby
from stateflow.ledger import Ledger
from stateflow.partition.control import NamedFollower
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo, StrategyName
from tests.writing import Written, deploy, write

SPEC = OperatorSpec("Op", "m:Op", 4, ("k",), b"", "[]")
ERROR = {"code": "move_aborted", "what": "w", "remedy": "r", "where": {}}
P0, P1 = PartitionId("Op", 0), PartitionId("Op", 1)
MOVE = PlannedMove("r", P0, "a", "b", 1, 2, StrategyName.WARM_UP)
STANDBY = PlannedStandby("s", P1, "a", "c", 1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Written]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        made = Written(ledger)
        deploy(made, SPEC, dict.fromkeys(range(4), "a"))
        write(made, steps.plan_moves, [MOVE])
        write(made, steps.plan_moves, [STANDBY])
        yield made


def told(cluster: Written, replica: str, *copies: tuple[PartitionId, str]) -> list[NamedFollower]:
    """Returns the answer to a replica that asks who may have these copies."""
    nothing = lambda *_: None  # noqa: E731 - a stand-in for several methods
    members = SimpleNamespace(beat=lambda *_: True, says=nothing, runs=nothing)
    context: Any = SimpleNamespace(
        cluster=cluster, members=members, names=None, ledger_id="l", settings=ControllerSettings()
    )
    claims: Any = SimpleNamespace(heard=lambda _: False)
    registration = Registration(context, claims, SimpleNamespace())  # type: ignore[arg-type]
    outgoing = [Incoming(*copy) for copy in copies]
    beat = Beat(ReplicaInfo(replica, "cloud", "127.0.0.1:1"), Home(), "i", outgoing=outgoing)
    return list(registration.heard(beat).followers)


def test_the_targets_of_open_moves_and_standbys_are_named(cluster: Written) -> None:
    assert told(cluster, "a", (P0, MOVE.move_id), (P1, STANDBY.move_id)) == [
        NamedFollower(P0, MOVE.move_id, "b"),
        NamedFollower(P1, STANDBY.move_id, "c", standby=True),
    ]
    assert told(cluster, "a") == []


def test_nobody_is_named_for_what_the_controller_did_not_begin(cluster: Written) -> None:
    for copy in ((P0, "made-up"), (P0, STANDBY.move_id), (P1, MOVE.move_id)):
        assert told(cluster, "a", copy) == [NamedFollower(*copy)]
    other = P0, MOVE.move_id
    assert told(cluster, "b", other) == [NamedFollower(*other)], "it is copied from another replica"
    write(cluster, steps.move_aborted, MOVE, ERROR, {})
    assert told(cluster, "a", other) == [NamedFollower(*other)], "it is over"
