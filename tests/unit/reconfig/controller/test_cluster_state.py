"""The controller's memory: its live state equals a fold of the ledger after any history."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reconfig.controller import cluster_state as cluster_state_module
from reconfig.controller import steps
from reconfig.controller.context import Leadership, Writer
from reconfig.controller.folds import Home
from reconfig.controller.history import APP, OPTIONAL, batch_item, entry
from reconfig.decisions.plan import Limits, PlannedMove, PlannedRestore, PlannedStandby, StrategyName, to_payload
from reconfig.decisions.sweeps import Maintenance
from stateflow.errors import HoldLost, IllegalRecord, InvariantBroken, Locked, MoveCancelled, OperatorNotDeployed
from stateflow.fleet import AgentInfo, Spawned
from stateflow.ledger import App, Board, Entry, Ledger, Record, RecordState
from stateflow.types import MoveOptions, OperatorSpec, PartitionId, ReplicaInfo
from tests.sizes import sized
from tests.writing import Written, deploy, write

SPEC = OperatorSpec("Op", "mod:Op", 4, ("a", "b"), b"\x00schema\xff", '{"x": 1}')
P = PartitionId("Op", 1)
ERROR = {"code": "unavailable", "what": "gone", "remedy": "", "where": {}}


def facts(cluster: Written) -> dict[str, Any]:
    """Returns all that the cluster state knows, in comparable form."""
    return {field.name: getattr(cluster, field.name) for field in dataclasses.fields(Written) if field.name != "now_us"}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield opened
    opened.close()


@pytest.fixture
def cluster(ledger: Ledger) -> Written:
    made = Written(ledger)
    for name in ("a", "b"):
        write(made, steps.register, ReplicaInfo(name, f"site-{name}", f"{name}:1"), Home(f"directory-{name}", "here"))
    deploy(made, SPEC, dict.fromkeys(range(4), "a"))
    return made


def planned(cluster: Written, run: str = "r1", partition: PartitionId = P, target: str = "b") -> PlannedMove:
    source, epoch = cluster.operator("Op").assignment.owner(partition.partition)
    return PlannedMove(
        run, partition, source, target, epoch, cluster.next_epoch(partition), StrategyName.WARM_UP, MoveOptions(20.0)
    )


def recorded(cluster: Written) -> OperatorSpec:
    return replace(SPEC, recorded_us=cluster.versions_us["Op"])


def test_a_deployment_survives_the_ledger(cluster: Written) -> None:
    again = Written.read(cluster.ledger)
    assert again.operator("Op").spec == cluster.operator("Op").spec == recorded(again)
    assert again.operator("Op").assignment.owners == ("a",) * 4
    assert again.operator("Op").assignment.epochs == (1,) * 4
    assert again.planned == {}


def test_an_unfinished_deployment_is_remembered_as_such(ledger: Ledger) -> None:
    cluster = Written(ledger)
    record = write(cluster, steps.plan_deployment, SPEC, dict.fromkeys(range(4), "a"))[-1]
    again = Written.read(ledger)
    assert again.deployed == {}
    assert again.planned["Op"][1] == record
    with pytest.raises(OperatorNotDeployed, match="deployed: none"):
        again.operator("Op")
    write(again, steps.finish_deployment, again.planned["Op"][1])
    assert again.operator("Op").spec == recorded(again)


def test_a_second_deployment_of_the_name_is_refused(cluster: Written) -> None:
    with pytest.raises(IllegalRecord):
        write(cluster, steps.plan_deployment, SPEC, dict.fromkeys(range(4), "b"))
    assert facts(Written.read(cluster.ledger)) == facts(cluster)


def test_a_replica_that_comes_back_unchanged_leaves_no_record(cluster: Written) -> None:
    before = len(list(cluster.ledger.records()))
    write(cluster, steps.register, ReplicaInfo("a", "site-a", "a:1"), Home("directory-a", "here"))
    assert len(list(cluster.ledger.records())) == before
    write(cluster, steps.register, ReplicaInfo("a", "site-a", "a:2"), Home("directory-a", "here"))
    assert cluster.roster.replicas["a"].address == "a:2"
    assert Written.read(cluster.ledger).roster.replicas == cluster.roster.replicas
    write(cluster, steps.register, ReplicaInfo("a", "site-a", "a:2"), Home("directory-a", "there"))
    write(cluster, steps.rehome, "a", "another")
    assert cluster.roster.homes == {"a": Home("another"), "b": Home("directory-b", "here")}
    assert Written.read(cluster.ledger).roster.homes == cluster.roster.homes
    write(cluster, steps.register, ReplicaInfo("a", "site-a", "a:2"), Home("another", "here"))
    assert Written.read(cluster.ledger).roster.homes == cluster.roster.homes
    assert cluster.roster.homes["a"] == Home("another", "here")


def test_a_replica_of_an_earlier_version_has_no_data_directory_yet(cluster: Written) -> None:
    payload = {"site": "site-c", "address": "c:1", "weight": 1}
    write(cluster, lambda _: [entry("replica/c/0f0f", RecordState.NEW, None, payload)])
    assert cluster.roster.replicas["c"] == ReplicaInfo("c", "site-c", "c:1")
    assert "c" not in cluster.roster.homes
    write(cluster, steps.register, ReplicaInfo("c", "site-c", "c:1"), Home("directory-c", "here"))
    assert Written.read(cluster.ledger).roster.homes["c"] == Home("directory-c", "here")


def test_nothing_is_kept_of_a_standby_that_has_ended(cluster: Written) -> None:
    """A standby that has ended takes no memory; every controller kept all that ever failed."""
    standby = PlannedStandby("s1", P, "a", "b", 1)
    write(cluster, steps.plan_moves, [standby])
    assert cluster.open_moves
    write(cluster, steps.move_aborted, standby, ERROR, {})
    assert not cluster.open_moves
    assert not cluster.finished
    assert not cluster.history


def test_a_move_from_plan_to_owner(cluster: Written) -> None:
    move = planned(cluster)
    assert (move.epoch, move.granted_epoch) == (1, 2)
    write(cluster, steps.plan_moves, [move])
    assert not cluster.open_moves[move.item_id].granted
    write(cluster, steps.grant, move)
    assert cluster.open_moves[move.item_id].granted
    assert Written.read(cluster.ledger).open_moves[move.item_id].granted
    write(cluster, steps.move_owned, move, {"pause_ms": 3.5})
    assert cluster.operator("Op").assignment.owner(1) == ("b", 2)
    assert cluster.open_moves == {}
    (finished,) = Written.read(cluster.ledger).finished
    assert finished[0] == move
    columns = {"status": "COMPLETED", "ms": 0, "result": '{"pause_ms": 3.5}'}
    assert finished[1].payload == {"epoch": 2, "owner": "b", "report": {"pause_ms": 3.5}, "set": columns}


def batch_of(ledger: Ledger, id: str) -> tuple[str, list[str]]:
    """Returns the board's status of a reconfiguration, and those of its entities."""
    board = Board(ledger)
    return board.batch(f"reconfiguration/{id}")["status"], [
        e["status"] for e in board.entities(f"reconfiguration/{id}")
    ]


def test_a_reconfiguration_is_a_batch_of_the_board(ledger: Ledger, cluster: Written) -> None:
    moves = [PlannedMove("r1", PartitionId("Op", n), "a", "b", 1, 2, StrategyName.WARM_UP) for n in range(3)]
    write(cluster, steps.plan_moves, moves)
    assert batch_of(ledger, "r1") == ("IN_PROGRESS", ["WAITING"] * 3)
    write(cluster, steps.begin_moves, moves[:2])
    write(cluster, steps.begin_moves, moves[:2])  # a second leader may begin them again
    write(cluster, steps.pause, "r1", True)
    assert batch_of(ledger, "r1") == ("PAUSED", ["IN_PROGRESS", "IN_PROGRESS", "WAITING"])
    write(cluster, steps.grant, moves[0])
    write(cluster, steps.move_owned, moves[0], {"duration_s": 0.25, "pause_ms": 3.0})
    write(cluster, steps.move_aborted, moves[1], ERROR, {})
    write(cluster, steps.pause, "r1", False)
    assert batch_of(ledger, "r1") == ("IN_PROGRESS", ["COMPLETED", "FAILED", "WAITING"])
    write(cluster, steps.grant, moves[2])
    write(cluster, steps.move_owned, moves[2], {})
    assert batch_of(ledger, "r1") == ("DONE", ["COMPLETED", "FAILED", "COMPLETED"])
    told = Board(ledger).batch("reconfiguration/r1")
    assert (told["command"], told["succeeded"], told["failed"]) == ("migrate", 2, 1)
    assert told["extra_stats"]["slowest"][0] == {
        "id": "0",
        "ms": 250,
        "status": "COMPLETED",
        "result": '{"pause_ms": 3.0}',
    }
    assert ledger.verify() == []
    ledger.rebuild()
    assert batch_of(ledger, "r1") == ("DONE", ["COMPLETED", "FAILED", "COMPLETED"])
    with pytest.raises(IllegalRecord, match="`stateflow reconfig`"):
        Board(ledger).retry_batch("reconfiguration/r1")
    write(cluster, steps.pause, "r1", True)
    assert batch_of(ledger, "r1")[0] == "DONE", "what has ended is not paused"


def test_one_that_is_cancelled_while_it_is_paused_ends_so(ledger: Ledger, cluster: Written) -> None:
    moves = [PlannedMove("r1", PartitionId("Op", n), "a", "b", 1, 2, StrategyName.WARM_UP) for n in range(2)]
    write(cluster, steps.plan_moves, moves)
    write(cluster, steps.pause, "r1", True)
    write(cluster, steps.cancel, "r1")
    write(cluster, steps.cancel, "r1")
    assert Written.read(ledger).history["r1"].cancelled
    for move in moves:
        write(cluster, steps.move_aborted, move, MoveCancelled("it was", remedy="-").to_wire(), {})
    assert batch_of(ledger, "r1") == ("CANCELLED", ["CANCELLED", "CANCELLED"])
    again = Written.read(ledger).history["r1"]
    assert (again.state, again.withdrawn) == ("CANCELLED", moves)
    assert facts(Written.read(ledger)) == facts(cluster)


def test_restores_of_one_command_are_a_batch(ledger: Ledger, cluster: Written) -> None:
    restores = [PlannedRestore("x", PartitionId("Op", n), "a", "b", 2) for n in (0, 2)]
    write(cluster, steps.plan_restores, restores)
    board = Board(ledger)
    assert [each["status"] for each in board.entities("restores/x")] == ["IN_PROGRESS", "IN_PROGRESS"]
    again = Written.read(ledger)
    assert (facts(again), again.restores.under_way) == (facts(cluster), restores)
    write(again, steps.restore_owned, restores[0], 2, {"bytes": 7})
    assert board.batch("restores/x")["status"] == "IN_PROGRESS"
    write(again, steps.restore_failed, restores[1], 0, ERROR)
    found = board.batch("restores/x")
    assert (found["status"], found["command"], found["succeeded"], found["failed"]) == ("DONE", "restore", 1, 1)
    assert [each["result"] for each in board.entities("restores/x")] == [
        '{"bytes": 7}',
        '{"error": "unavailable: gone"}',
    ]
    assert facts(Written.read(ledger)) == facts(again)
    assert ledger.verify() == []


def test_a_restore_that_stops_sources_does_so_after_a_restart(ledger: Ledger, cluster: Written) -> None:
    restores = [PlannedRestore("x", PartitionId("Op", n), "a", "b", 2, stop_sources=True) for n in (0, 2)]
    write(cluster, steps.plan_restores, restores)
    again = Written.read(ledger)
    assert (facts(again), again.restores.under_way) == (facts(cluster), restores)
    write(again, steps.restore_owned, restores[0], 2, {"bytes": 7})
    write(again, steps.restore_owned, restores[1], 2, {"bytes": 7})
    assert Board(ledger).batch("restores/x")["status"] == "DONE"
    assert ledger.verify() == []


def test_restores_that_are_called_off_end_so(ledger: Ledger, cluster: Written) -> None:
    restores = [PlannedRestore("x", PartitionId("Op", n), "a", "b", 2) for n in (0, 2)]
    write(cluster, steps.plan_restores, restores)
    for _ in range(2):
        write(cluster, steps.call_off_restore, "x")
    again = Written.read(ledger)
    assert again.restores.cancelled == {"x"}
    write(again, steps.restore_owned, restores[0], 2, {"bytes": 7})
    write(again, steps.restore_failed, restores[1], 0, MoveCancelled("it was", remedy="-").to_wire())
    board = Board(ledger)
    assert board.batch("restores/x")["status"] == "CANCELLED"
    assert [each["status"] for each in board.entities("restores/x")] == ["COMPLETED", "CANCELLED"]
    assert facts(Written.read(ledger)) == facts(again)
    assert not again.restores.cancelled
    assert ledger.verify() == []


def test_a_maintenance_until_it_is_over(cluster: Written) -> None:
    write(cluster, steps.maintain, "a", Maintenance(1, 2))
    write(cluster, steps.maintain, "b", Maintenance(1, 0, "rack"))
    assert cluster.maintained() == {"b"}
    assert facts(Written.read(cluster.ledger)) == facts(cluster)
    write(cluster, steps.maintain, "b", None)
    assert cluster.maintained() == set()
    assert facts(Written.read(cluster.ledger)) == facts(cluster)


def test_a_move_that_waits_goes_elsewhere(cluster: Written) -> None:
    write(cluster, steps.register, ReplicaInfo("c", "site-c", "c:1"), Home("c", "here"))
    move = replace(planned(cluster), reason="job/nightly/7: it is time")
    write(cluster, steps.plan_moves, [move])
    write(cluster, steps.retarget, move, "c", "b does not answer")
    again = Written.read(cluster.ledger)
    (open_move,) = again.open_moves.values()
    assert isinstance(open_move.planned, PlannedMove)
    assert (open_move.planned.target, open_move.planned.reason) == ("c", "job/nightly/7: it is time; b does not answer")
    assert facts(again) == facts(cluster)
    write(cluster, steps.grant, open_move.planned)
    write(cluster, steps.move_owned, open_move.planned, {})
    assert cluster.operator("Op").assignment.owner(1) == ("c", 2)


def test_limits_are_those_of_the_options_until_they_are_edited(cluster: Written) -> None:
    options = MoveOptions(limit=3, per_link=2)
    move = replace(planned(cluster), options=options)
    write(cluster, steps.plan_moves, [move])
    assert cluster.history["r1"].limits == Limits(3, 0, 2)
    write(cluster, steps.edit, "r1", Limits(5, 1))
    write(cluster, steps.edit, "r1", Limits(5, 1))
    assert Written.read(cluster.ledger).history["r1"].limits == Limits(5, 1)
    assert facts(Written.read(cluster.ledger)) == facts(cluster)


def test_a_plan_is_recorded_as_a_whole_or_not_at_all(cluster: Written) -> None:
    moves = [planned(cluster, "r1", PartitionId("Op", number)) for number in (0, 1, 2)]
    other = Written.read(cluster.ledger)
    write(other, steps.plan_moves, [moves[2]])  # the item is now owned by another writer
    before = facts(cluster)
    with pytest.raises((Locked, IllegalRecord)):
        write(cluster, steps.plan_moves, moves)
    assert facts(cluster) == before
    assert Written.read(cluster.ledger).open_moves.keys() == {moves[2].item_id}
    again = [replace(move, reconfiguration="r2", round=n) for n, move in enumerate(moves)]
    write(other, steps.plan_moves, again)
    recorded = Written.read(cluster.ledger).history["r2"]
    assert [move for move, _ in recorded.moves.values()] == again


def test_an_aborted_move_leaves_the_assignment_and_burns_its_grant(cluster: Written) -> None:
    move = planned(cluster)
    write(cluster, steps.plan_moves, [move])
    write(cluster, steps.grant, move)
    write(cluster, steps.move_aborted, move, ERROR, {})
    assert cluster.operator("Op").assignment.owner(1) == ("a", 1)
    assert cluster.next_epoch(P) == 3
    assert Written.read(cluster.ledger).next_epoch(P) == 3
    assert cluster.next_epoch(PartitionId("Op", 2)) == 2, "each partition counts for itself"


@pytest.mark.parametrize("granted", [0, 4])
def test_a_move_after_a_failed_restore_gets_a_newer_epoch(cluster: Written, granted: int) -> None:
    """The target of the restore may have published a checkpoint at its epoch, so the owner needs a newer one."""
    restore = PlannedRestore("x", P, "a", "b" if granted else "a", cluster.next_epoch(P))
    write(cluster, steps.plan_restores, [restore])
    write(cluster, steps.restore_failed, restore, granted, ERROR)
    assert cluster.operator("Op").assignment.owner(1) == ("a", 1)
    assert (
        planned(cluster).granted_epoch == planned(Written.read(cluster.ledger)).granted_epoch == (5 if granted else 3)
    )


def test_a_move_that_was_never_granted_burns_nothing(cluster: Written) -> None:
    move = planned(cluster)
    write(cluster, steps.plan_moves, [move])
    write(cluster, steps.move_aborted, move, ERROR, {})
    assert cluster.next_epoch(P) == 2


def test_an_epoch_is_granted_to_one_move_only(ledger: Ledger, cluster: Written) -> None:
    """Two controllers each believe that they lead: only one is granted the epoch."""
    other = Written.read(ledger)
    mine, theirs = planned(cluster, "r1"), planned(other, "r2", target="a")
    write(cluster, steps.plan_moves, [mine])
    write(other, steps.plan_moves, [theirs])
    write(other, steps.grant, theirs)
    with pytest.raises((Locked, IllegalRecord)):
        write(cluster, steps.grant, mine)
    assert not cluster.open_moves[mine.item_id].granted
    final = Written.read(ledger)
    assert final.open_moves[theirs.item_id].granted
    assert not final.open_moves[mine.item_id].granted


def test_nothing_follows_from_controllers_that_an_earlier_version_recorded(ledger: Ledger, cluster: Written) -> None:
    before = facts(cluster)
    record = entry("controller/c/1", RecordState.NEW, None, {"site": "edge", "labels": {}})
    (told,) = ledger.append([record])
    assert facts(Written.read(ledger)) == before | {"newest": told.record_id}


def test_a_result_is_told_once(cluster: Written) -> None:
    move = planned(cluster)
    write(cluster, steps.plan_moves, [move])
    write(cluster, steps.grant, move)
    late = Written.read(cluster.ledger)
    write(cluster, steps.move_owned, move, {})
    with pytest.raises(Locked):
        write(late, steps.move_aborted, move, ERROR, {})
    assert facts(Written.read(cluster.ledger)) == facts(cluster)


@pytest.mark.parametrize(
    ("said", "owned", "distrusts"),
    [
        (["restore"], False, True),
        (["restore"], True, False),
        (["serve-source"], False, False),
        (["serve-source", "restore", "restore"], False, True),
        (["restore", "serve-source"], False, False),
    ],
)
def test_how_a_move_was_given_up_is_known_until_it_ends_and_so_is_a_source_not_to_be_trusted_from_then_on(
    cluster: Written, said: list[str], owned: bool, distrusts: bool
) -> None:
    move = planned(cluster)
    write(cluster, steps.plan_moves, [move])
    write(cluster, steps.grant, move)
    for how in said:
        write(cluster, steps.resolve, [move], how)
        assert Written.read(cluster.ledger).open_moves[move.item_id].resolution == how
    assert not write(cluster, steps.resolve, [move], said[-1]), "it is recorded already"
    if owned:
        write(cluster, steps.move_owned, move, {})
    else:
        write(cluster, steps.move_aborted, move, ERROR, {})
    assert cluster.distrusted == ({move.move_id} if distrusts else set())
    assert not write(cluster, steps.resolve, [move], "restore"), "it has ended"
    assert facts(Written.read(cluster.ledger)) == facts(cluster)


def test_resolutions_of_early_versions_are_read_and_optional_records_of_later_ones_are_skipped(
    ledger: Ledger, cluster: Written
) -> None:
    move = planned(cluster)
    write(cluster, steps.plan_moves, [move])
    ledger.append([entry(f"resolve/{move.item_id}/1", RecordState.NEW, None, {"how": "restore"})])
    ledger.append([replace(entry("riddle/1", RecordState.NEW, None, {}), app=OPTIONAL)])
    assert Written.read(ledger).open_moves[move.item_id].resolution == "restore"


@pytest.mark.parametrize("resolved", [(True, False), (False, True), (True, True)])
def test_what_a_person_resolved_by_hand_is_told_all_the_same(cluster: Written, resolved: tuple[bool, bool]) -> None:
    move = planned(cluster)
    write(cluster, steps.plan_moves, [move])
    write(cluster, steps.begin_moves, [move])
    write(cluster, steps.grant, move)
    for item, is_resolved in zip((move.item_id, batch_item(move.reconfiguration)), resolved, strict=True):
        if is_resolved:
            cluster.ledger.resolve(item, "it looked stuck")
    write(cluster, steps.move_owned, move, {})
    assert cluster.operator("Op").assignment.owner(1) == ("b", 2)
    assert facts(Written.read(cluster.ledger)) == facts(cluster)


@pytest.mark.parametrize("how", ["paused", "cancelled", "paused and cancelled"])
def test_a_batch_that_a_person_resolved_is_paused_and_cancelled_all_the_same(cluster: Written, how: str) -> None:
    """The record of a pause or a cancellation resolves the batch, too. It was refused after that of a person."""
    move = planned(cluster)
    write(cluster, steps.plan_moves, [move])
    cluster.ledger.resolve(batch_item(move.reconfiguration), "it looked stuck")
    if "paused" in how:
        write(cluster, steps.pause, move.reconfiguration, True)
        assert cluster.paused == {move.reconfiguration}
    if "cancelled" in how:
        write(cluster, steps.cancel, move.reconfiguration)
        write(cluster, steps.move_aborted, move, ERROR, {})
        assert not cluster.open_moves
    assert facts(Written.read(cluster.ledger)) == facts(cluster)


def test_a_ledger_shared_with_others_and_archived(cluster: Written) -> None:
    cluster.ledger.process_new_item("move/that-is/none", App("shredder", "1"), lambda item: None)
    move = planned(cluster)
    write(cluster, steps.plan_moves, [move])
    write(cluster, steps.grant, move)
    write(cluster, steps.move_owned, move, {})
    assert cluster.ledger.archive(timedelta(seconds=-60)) == 4, "the move, its batch, the deployment and the stranger"
    assert facts(Written.read(cluster.ledger)) == facts(cluster)
    again = planned(cluster, "r2", target="a")
    write(cluster, steps.plan_moves, [again])
    assert again.granted_epoch == 3


def test_an_operator_that_was_undeployed_begins_anew_above_all_its_epochs(cluster: Written) -> None:
    """The new deployment's epochs exceed all earlier ones, so that state of the old deployment can be told apart."""
    move = planned(cluster)
    write(cluster, steps.plan_moves, [move])
    write(cluster, steps.grant, move)
    write(cluster, steps.move_aborted, move, ERROR, {})
    write(cluster, steps.want_standbys, "Op", 1)
    write(cluster, steps.undeploy, "Op", cluster.newest_epoch("Op"))
    assert (cluster.deployed, cluster.standbys, cluster.undeployed) == ({}, {}, {"Op": 2})
    with pytest.raises(OperatorNotDeployed):
        cluster.operator("Op")
    deploy(cluster, SPEC, dict.fromkeys(range(4), "b"))
    assert cluster.operator("Op").assignment.epochs == (3,) * 4
    assert cluster.operator("Op").first_epoch == 3
    assert cluster.next_epoch(P) == 4
    assert facts(Written.read(cluster.ledger)) == facts(cluster)
    again = planned(cluster, "r2", target="a")
    write(cluster, steps.plan_moves, [again])
    write(cluster, steps.grant, again)
    write(cluster, steps.move_owned, again, {})
    write(cluster, steps.undeploy, "Op", cluster.newest_epoch("Op"))
    write(cluster, steps.plan_deployment, SPEC, dict.fromkeys(range(4), "a"))
    assert cluster.planned["Op"][0].first_epoch == 5
    assert facts(Written.read(cluster.ledger)) == facts(cluster)


def test_a_replica_that_was_forgotten_is_a_new_one_when_it_comes_back(cluster: Written) -> None:
    write(cluster, steps.forget, "b")
    assert set(cluster.roster.replicas) == set(cluster.roster.homes) == {"a"}
    assert facts(Written.read(cluster.ledger)) == facts(cluster)
    write(cluster, steps.register, ReplicaInfo("b", "elsewhere", "b:2"), Home("another", "there"))
    write(cluster, steps.forget, "b")
    write(cluster, steps.register, ReplicaInfo("b", "elsewhere", "b:2"), Home("another", "there"))
    assert cluster.roster.homes["b"] == Home("another", "there")
    assert facts(Written.read(cluster.ledger)) == facts(cluster)


class Dies(Exception):
    pass


def dying_after(cluster: Written, writes: int) -> None:
    """Ends the process after so many records of a write, as it could if they were not written in one transaction."""
    append = cluster.ledger.append

    def limited(entries: Iterable[Entry], *_: object) -> list[Record]:
        append(list(entries)[:writes])
        raise Dies

    cluster.ledger.append = limited  # type: ignore[method-assign]


def test_what_was_decided_in_a_term_that_has_ended_meanwhile_is_not_written(ledger: Ledger, cluster: Written) -> None:
    """A decision is not written after its term has ended.

    A grant that a locked database held up used to be written after its controller had stopped leading: that controller
    did not carry it out, and the next leader rolled the move back.
    """
    move = planned(cluster)
    write(cluster, steps.plan_moves, [move])
    leadership = Leadership(until=1.0)
    writer = Writer(ledger, cluster)
    writer.check = lambda: leadership.check(2.0)
    with pytest.raises(HoldLost):
        writer.append(steps.grant(cluster, move))
    assert [open_move.granted for open_move in Written.read(ledger).open_moves.values()] == [False]


@pytest.mark.parametrize("writes", [1, 2])
def test_a_move_that_an_earlier_version_planned(ledger: Ledger, cluster: Written, writes: int) -> None:
    """A move recorded by an earlier version can be paused and aborted.

    It was no entity of a batch, and a half-written one must not be stuck for ever.
    """
    move = planned(cluster)
    new = ledger.put(move.item_id, APP, RecordState.NEW, None, to_payload(move), lease_s=math.inf)
    if writes == 2:
        ledger.put(move.item_id, APP, RecordState.PROCESSING, new, lease_s=math.inf)
    again = Written.read(ledger)
    assert len(again.open_moves) == 1
    write(again, steps.pause, "r1", True)
    assert Written.read(ledger).paused == {"r1"}
    for open_move in list(again.open_moves.values()):
        write(again, steps.move_aborted, open_move.planned, ERROR, {})
    assert again.open_moves == {}
    assert facts(Written.read(ledger)) == facts(again)
    retry = planned(again, "r2")
    write(again, steps.plan_moves, [retry])
    write(again, steps.grant, retry)
    write(again, steps.move_owned, retry, {})
    assert again.operator("Op").assignment.owner(1) == ("b", 2)


@pytest.mark.parametrize("writes", [0, 1])
def test_a_crash_between_the_two_records_of_a_deployment(ledger: Ledger, writes: int) -> None:
    cluster = Written(ledger)
    dying_after(cluster, writes)
    with pytest.raises(Dies):
        write(cluster, steps.plan_deployment, SPEC, dict.fromkeys(range(4), "a"))
    del ledger.append  # type: ignore[attr-defined]
    again = Written.read(ledger)
    record = (
        again.planned["Op"][1]
        if writes
        else write(again, steps.plan_deployment, SPEC, dict.fromkeys(range(4), "a"))[-1]
    )
    write(again, steps.finish_deployment, record)
    assert again.operator("Op").spec == recorded(again)


# -- any history --------------------------------------------------------------------------------------------


class ClusterStateMachine(RuleBasedStateMachine):
    """A cluster under operations in any order, where the process may end at any of them.

    The fold of the ledger always equals the live cluster.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger("sqlite://")
        self.cluster = Written(self.ledger, validated=True)
        self.runs = 0
        self.granted: dict[PartitionId, set[int]] = {}
        for name in "ab":
            self.register(name, 1)

    @rule(name=st.sampled_from("ab"), port=st.integers(1, 2))
    def register(self, name: str, port: int) -> None:
        self.runs += 1
        write(
            self.cluster,
            steps.register,
            ReplicaInfo(name, "site", f"{name}:{port}"),
            Home(f"d{self.runs % 2}", f"p{self.runs % 3}"),
        )

    @rule(name=st.sampled_from("ab"))
    def forget(self, name: str) -> None:
        if name in self.cluster.roster.replicas and self.cluster.is_free(name):
            write(self.cluster, steps.forget, name)

    @rule(name=st.sampled_from("xy"), cores=st.integers(1, 2))
    def register_agent(self, name: str, cores: int) -> None:
        self.runs += 1
        info = AgentInfo(name, "site", f"{name}:1", {"disk": "ssd"}, cores)
        write(self.cluster, steps.register_agent, info, Home(f"d{self.runs % 2}", "p"))

    @rule(name=st.sampled_from("xy"))
    def dismiss(self, name: str) -> None:
        if name in self.cluster.roster.agents:
            write(self.cluster, steps.dismiss, name)
            assert not self.cluster.roster.wanted_at(name)

    @precondition(lambda self: self.cluster.roster.agents)
    @rule(names=st.sets(st.sampled_from("abc"), min_size=1), running=st.booleans())
    def spawn(self, names: set[str], running: bool) -> None:
        agent = min(self.cluster.roster.agents)
        wanted = [Spawned(name, agent, running, self.runs + 1) for name in sorted(names)]
        write(self.cluster, steps.spawn, wanted)
        assert [self.cluster.roster.spawned[each.replica] for each in wanted] == wanted

    @rule(name=st.sampled_from(["Op", "Two"]))
    def undeploy(self, name: str) -> None:
        moving = any(each.planned.partition.operator == name for each in self.cluster.open_moves.values())
        if name in self.cluster.deployed and not moving:
            write(self.cluster, steps.undeploy, name, self.cluster.newest_epoch(name))

    @rule(name=st.sampled_from(["Op", "Two"]), finish=st.booleans())
    def deploy(self, name: str, finish: bool) -> None:
        if name in self.cluster.deployed or name in self.cluster.planned or "a" not in self.cluster.roster.replicas:
            return
        spec = replace(SPEC, name=name)
        record = write(self.cluster, steps.plan_deployment, spec, dict.fromkeys(range(4), "a"))[-1]
        if finish:
            write(self.cluster, steps.finish_deployment, record)

    @precondition(lambda self: self.cluster.planned)
    @rule()
    def finish_deployment(self) -> None:
        write(self.cluster, steps.finish_deployment, min(self.cluster.planned.items())[1][1])

    @precondition(lambda self: self.cluster.deployed)
    @rule(data=st.data(), partition=st.integers(0, 1), to=st.sampled_from("ab"))
    def plan_move(self, data: st.DataObject, partition: int, to: str) -> None:
        where = PartitionId(data.draw(st.sampled_from(sorted(self.cluster.deployed))), partition)
        moving = any(each.planned.partition == where for each in self.cluster.open_moves.values())
        if moving or to not in self.cluster.roster.replicas:
            return
        self.runs += 1
        source, epoch = self.cluster.operator(where.operator).assignment.owner(partition)
        move = PlannedMove(
            f"r{self.runs}", where, source, to, epoch, self.cluster.next_epoch(where), StrategyName.WARM_UP
        )
        write(self.cluster, steps.plan_moves, [move])

    def _open(self, data: st.DataObject, granted: bool) -> PlannedMove | None:
        items = [item for item, each in self.cluster.open_moves.items() if each.granted is granted]
        return self.cluster.open_moves[data.draw(st.sampled_from(items))].planned if items else None

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        move = self._open(data, granted=False)
        if move is not None:
            write(self.cluster, steps.grant, move)
            epochs = self.granted.setdefault(move.partition, set())
            assert move.granted_epoch not in epochs, "granted twice"
            assert move.granted_epoch > move.epoch
            epochs.add(move.granted_epoch)

    @rule(data=st.data())
    def own(self, data: st.DataObject) -> None:
        move = self._open(data, granted=True)
        if move is not None:
            write(self.cluster, steps.move_owned, move, {"pause_ms": 1.0})
            owner = self.cluster.operator(move.partition.operator).assignment.owner(move.partition.partition)
            assert owner == (move.target, move.granted_epoch)

    @rule(data=st.data(), granted=st.booleans())
    def abort(self, data: st.DataObject, granted: bool) -> None:
        move = self._open(data, granted)
        if move is not None:
            write(self.cluster, steps.move_aborted, move, ERROR, {})

    @precondition(lambda self: self.cluster.history)
    @rule(data=st.data(), what=st.sampled_from(["pause", "resume", "cancel", "edit", "begin"]), limit=st.integers(0, 2))
    def command(self, data: st.DataObject, what: str, limit: int) -> None:
        id = data.draw(st.sampled_from(sorted(self.cluster.history)))
        match what:
            case "cancel":
                write(self.cluster, steps.cancel, id)
            case "edit":
                write(self.cluster, steps.edit, id, Limits(limit))
            case "begin":
                write(
                    self.cluster, steps.begin_moves, [planned for planned, _ in self.cluster.history[id].moves.values()]
                )
            case _:
                write(self.cluster, steps.pause, id, what == "pause")

    @precondition(lambda self: self.cluster.open_moves)
    @rule(data=st.data(), to=st.sampled_from("ab"))
    def retarget(self, data: st.DataObject, to: str) -> None:
        open_move = self.cluster.open_moves[data.draw(st.sampled_from(sorted(self.cluster.open_moves)))]
        move = open_move.planned
        if isinstance(move, PlannedMove) and not open_move.granted and to in self.cluster.roster.replicas:
            write(self.cluster, steps.retarget, move, to, "it is better there")
            assert self.cluster.open_moves[move.item_id].planned.target == to

    @rule()
    def restart(self) -> None:
        self.cluster = Written.read(self.ledger, validated=True)

    @invariant()
    def the_fold_is_the_live_state(self) -> None:
        assert facts(Written.read(self.ledger, validated=True)) == facts(self.cluster)

    @invariant()
    def records_are_consistent(self) -> None:
        open_items = {r.item_id for r in self.ledger.records() if r.item_id.startswith("move/")}
        for record in self.ledger.records():
            if record.state in (RecordState.PROCESSED, RecordState.FAILED):
                open_items.discard(record.item_id)
        assert open_items == set(self.cluster.open_moves)

    def teardown(self) -> None:
        self.ledger.close()


ClusterStateMachine.TestCase.settings = settings(max_examples=sized(160), stateful_step_count=25)
TestClusterStateMachine = ClusterStateMachine.TestCase


def _second_move(cluster: Written) -> None:
    other = replace(planned(cluster), reconfiguration="r2")
    cluster.open_moves[other.item_id] = replace(cluster.open_moves["move/r1/1"], planned=other)


def _standby_at_the_owner(cluster: Written) -> None:
    open_move = cluster.open_moves["move/r1/1"]
    open_move.planned = PlannedStandby("r1", P, "a", "a", 1)


def _more_partitions(cluster: Written) -> None:
    cluster.deployed["Op"].spec = replace(SPEC, partitions=5)


def _owned_at(cluster: Written, owner: str, epoch: int) -> None:
    deployed = cluster.deployed["Op"]
    deployed.assignment = deployed.assignment.moved(1, owner, epoch)


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (_more_partitions, "covers its operator's partitions"),
        (_second_move, "one move at a time"),
        (_standby_at_the_owner, "not on its owner"),
        (lambda cluster: _owned_at(cluster, "nobody", 2), "owners are registered"),
        (lambda cluster: _owned_at(cluster, "b", 9), "newer than the owned one"),
        (lambda cluster: cluster.roster.replicas.pop("b"), "source and target are registered"),
        (lambda cluster: cluster.deployed.pop("Op"), "a moved partition exists"),
        (lambda cluster: cluster.standbys.update(Gone=1), "belong to deployed operators"),
        (lambda cluster: cluster.undeployed.update(Op=1), "newer than those of the undeployed operator"),
        (lambda cluster: cluster.planned.update(Op=(cluster.deployed["Op"], None)), "either deployed or planned"),
        (lambda cluster: cluster.epochs_granted.clear(), "granted epochs are recorded"),
        (lambda cluster: cluster.roster.spawned.update(r=Spawned("r", "gone")), "has a known agent"),
    ],
)
def test_what_no_ledger_folds_to_is_named(cluster: Written, corrupt: Callable[[Written], Any], words: str) -> None:
    move = planned(cluster)
    write(cluster, steps.plan_moves, [move])
    write(cluster, steps.grant, move)
    cluster.validate()
    corrupt(cluster)
    with pytest.raises(InvariantBroken, match=rf"{words}.*please report it"):
        cluster.validate()


def test_a_corrupted_cluster_is_caught_by_the_next_record(ledger: Ledger) -> None:
    cluster = Written(ledger, validated=True)
    write(cluster, steps.register, ReplicaInfo("a", "site-a", "a:1"), Home("directory-a", "here"))
    deploy(cluster, SPEC, dict.fromkeys(range(4), "a"))
    _owned_at(cluster, "nobody", 2)
    with pytest.raises(InvariantBroken, match="owners are registered"):
        write(cluster, steps.want_standbys, "Op", 1)


def test_every_kind_of_record_that_is_told_of_is_known_and_told_of() -> None:
    assert cluster_state_module.__doc__ is not None
    told = {line[2:].partition("/")[0] for line in cluster_state_module.__doc__.splitlines() if line.startswith("``")}
    assert told == set(cluster_state_module.EVENTS)


def test_what_is_adopted_is_not_what_this_ledger_undeployed_under_the_name(cluster: Written) -> None:
    """An adopted operator is not the one that this ledger undeployed under its name.

    Its epochs are another ledger's, and its replicas were told to delete state up to our ledger's epoch.
    """
    write(cluster, steps.undeploy, "Op", cluster.newest_epoch("Op"))
    assert cluster.undeployed == {"Op": 1}
    write(cluster, steps.adopt, SPEC, dict.fromkeys(range(4), ("a", 1)), dict.fromkeys(range(4), 17))
    for each in (cluster, Written.read(cluster.ledger)):
        assert each.undeployed == {}
        each.validate()
    write(cluster, steps.undeploy, "Op", cluster.newest_epoch("Op"))
    assert cluster.undeployed == {"Op": 17}


def test_versions_of_a_name_are_in_order_whatever_clocks_say(cluster: Written) -> None:
    """Versions of a name increase, though clocks may go back.

    This includes a deployment after an undeployed one, and versions that replicas have from another ledger.
    """
    seen = [cluster.operator("Op").spec.recorded_us]
    for version in ("two", "three"):
        cluster.versions_us["Op"] += 10**9  # as if recorded by a clock that was ahead
        seen.append(cluster.versions_us["Op"])
        write(cluster, steps.upgrade, replace(SPEC, target=f"mod:{version}", recorded_us=seen[-1]))
        seen.append(cluster.operator("Op").spec.recorded_us)
    write(cluster, steps.undeploy, "Op", cluster.newest_epoch("Op"))
    deploy(cluster, SPEC, dict.fromkeys(range(4), "a"))
    seen.append(cluster.operator("Op").spec.recorded_us)
    assert seen == sorted(set(seen))
    ahead = replace(SPEC, name="Other", recorded_us=seen[-1] + 10**9)
    write(cluster, steps.adopt, ahead, dict.fromkeys(range(4), ("a", 1)), dict.fromkeys(range(4), 1))
    assert cluster.operator("Other").spec.recorded_us == ahead.recorded_us + 1


def test_records_without_an_order_count_from_their_time(cluster: Written) -> None:
    payload = SPEC.to_json()
    del payload["name"], payload["recorded_us"]
    before = cluster.operator("Op").spec
    told = entry("upgrade/Op/1", RecordState.NEW, None, {"spec": payload | {"target": "mod:Two"}})
    write(cluster, lambda _: [told])
    after = cluster.operator("Op").spec
    assert after == replace(before, target="mod:Two", recorded_us=after.recorded_us)
    assert after.recorded_us > before.recorded_us
    assert Written.read(cluster.ledger).operator("Op").spec == after


def test_sites_of_a_deployment_are_recorded_and_replaced(tmp_path: Path) -> None:
    spec = OperatorSpec("Op", "m:Op", 1, ("k",), b"", "[]")
    with Ledger(f"sqlite:///{tmp_path / 'sites.db'}") as ledger:
        cluster = Written(ledger)
        deploy(cluster, spec, {0: "a"}, ["edge"])
        assert Written.read(ledger).allowed_sites() == {"Op": ("edge",)}
        write(cluster, steps.allow_sites, "Op", ["cloud", "edge"])
        assert Written.read(ledger).operator("Op").sites == ("cloud", "edge")
        write(cluster, steps.allow_sites, "Op", [])
        assert Written.read(ledger).allowed_sites() == cluster.allowed_sites() == {}
        write(cluster, steps.allow_sites, "Op", ["edge"])
        write(cluster, steps.undeploy, "Op", 1)
        deploy(cluster, spec, {0: "a"})
        write(cluster, steps.allow_sites, "Op", ["cloud"])
        assert Written.read(ledger).allowed_sites() == {"Op": ("cloud",)}


def test_a_deployment_that_an_earlier_version_recorded_may_be_anywhere(tmp_path: Path) -> None:
    spec = OperatorSpec("Op", "m:Op", 1, ("k",), b"", "[]")
    fields = spec.to_json()
    del fields["name"]
    with Ledger(f"sqlite:///{tmp_path / 'older.db'}") as ledger:
        cluster = Written(ledger)
        new = entry("operator/Op", RecordState.NEW, None, {"spec": fields, "owners": ["a"]})
        *_, record = write(cluster, lambda _: [new, entry("operator/Op", RecordState.PROCESSING, new)])
        write(cluster, steps.finish_deployment, record)
        found = Written.read(ledger).operator("Op")
        assert found.sites == ()
        assert found.may_be_at(ReplicaInfo("b", "anywhere", "b:1", 1))
