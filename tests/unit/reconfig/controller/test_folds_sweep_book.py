"""Sweeps in the ledger: however they end, a fresh reader of the ledger sees the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reconfig.controller import steps
from reconfig.controller.folds import KEPT, MOVED, Home, Outcome
from reconfig.controller.history import APP, entry
from reconfig.decisions.plan import PlannedRestore
from reconfig.decisions.sweeps import Chore, Plan
from stateflow.clock import ManualClock
from stateflow.fleet import AgentInfo, Spawned
from stateflow.ledger import Board, Ledger
from stateflow.ledger import RecordState as S
from stateflow.ledger.records import Kind
from stateflow.ledger.rules import EntityStatus
from stateflow.reports import PartitionFault
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo
from tests.sizes import sized
from tests.writing import Written, deploy, write

NODES = ("gw-0", "gw-1", "gw-2", "gw-3")


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    folder: Path = tmp_path_factory.mktemp("rolls")
    with Ledger(f"sqlite:///{folder / 'ledger.db'}", clock=ManualClock(1)) as opened:
        yield opened


@pytest.fixture(scope="module")
def cluster(ledger: Ledger) -> Written:
    made = Written.read(ledger, validated=True)
    write(made, steps.register_agent, AgentInfo("gw", "edge", "127.0.0.1:1"), Home())
    write(made, steps.spawn, [Spawned(node, "gw", True, 1, 1, 1, 0) for node in NODES])
    return made


def of(cluster: Written, roll: str, *statuses: EntityStatus) -> list[str]:
    return [task.node for task in cluster.sweeps.there[roll].of(*statuses)]


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    return iter(range(10_000))


@settings(max_examples=sized(240), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["begin", "end", "fail", "cancel", "another leads"]), max_size=14))
def test_whatever_becomes_of_it_it_ends_once_and_reads_the_same(
    ledger: Ledger, cluster: Written, numbers: Iterator[int], acts: list[str]
) -> None:
    roll = f"r{next(numbers)}"
    cluster = Written.read(ledger, validated=True)
    write(cluster, steps.plan_sweep, roll, Plan(Chore.RESTART, NODES, "edge", 2))
    generations = {node: cluster.roster.spawned[node].generation for node in NODES}
    failed = cancelled = False
    for act in acts:
        waiting, going = of(cluster, roll, EntityStatus.WAITING), of(cluster, roll, EntityStatus.IN_PROGRESS)
        if act == "begin" and waiting:
            assert write(cluster, steps.begin_swept, roll, waiting[0])
            assert cluster.roster.spawned[waiting[0]].generation == generations[waiting[0]] + 1
        elif act in ("end", "fail") and going:
            failed |= act == "fail"
            write(cluster, steps.end_swept, roll, going[0], Outcome("it died" if act == "fail" else ""), 7)
        elif act == "cancel" and not cluster.sweeps.there[roll].over and not cancelled:
            cancelled = True
            write(cluster, steps.call_off_sweep, roll)
        elif act == "another leads":
            cluster = Written.read(ledger, validated=True)
        known = cluster.sweeps.there[roll]
        waiting, going = of(cluster, roll, EntityStatus.WAITING), of(cluster, roll, EntityStatus.IN_PROGRESS)
        assert not (waiting and (failed or cancelled)), "nothing more begins"
        assert known.over is not bool(waiting or going)
    report = cluster.sweeps.rolling(roll)
    again = Written.read(ledger)
    assert again.sweeps.rolling(roll) == report
    begun = [each for each in report.nodes if each.status != "WAITING" and each.status != "CANCELLED"]
    assert {n: cluster.roster.spawned[n].generation - generations[n] for n in NODES} == {
        node: int(node in {each.node for each in begun}) for node in NODES
    }
    if report.over:
        assert report.state == ("FAILED" if failed else "CANCELLED" if cancelled else "DONE")
        status = Board(ledger).batch(f"roll/{roll}")
        assert status["status"] == report.state
        assert {each.node: each.status for each in report.nodes} == {
            each["entity"]: each["status"] for each in Board(ledger).entities(f"roll/{roll}")
        }


STEPS = ["begin", "end", "fail", "not begun", "cancel", "interrupted", "another leads"]


@settings(max_examples=sized(240), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(STEPS), max_size=18))
def test_of_what_is_about_partitions_a_failure_holds_up_no_other_node(
    ledger: Ledger, cluster: Written, numbers: Iterator[int], acts: list[str]
) -> None:
    """A node that fails holds up no other node of a sweep over partitions, and partitions that moved come last.

    ``not begun``: the node fails before it began.
    """
    sweep = f"s{next(numbers)}"
    scope = {"Tally": list(range(8)), "Other": [3]}
    cluster = Written.read(ledger, validated=True)
    write(cluster, steps.plan_sweep, sweep, Plan(Chore.CHECKPOINT, NODES, "edge", 2, "", scope))
    failed = cancelled = False
    done: set[int] = set()
    for act in acts:
        known = cluster.sweeps.there[sweep]
        waiting, going = of(cluster, sweep, EntityStatus.WAITING), of(cluster, sweep, EntityStatus.IN_PROGRESS)
        if act == "begin" and (due := known.next(going)):
            assert len(due) + len(going) <= 2
            assert due == [MOVED] if waiting == [MOVED] else MOVED not in due
            assert write(cluster, steps.begin_swept, sweep, due[0])
        elif act == "end" and going:
            number = len(done)
            done.add(number)
            outcome = Outcome("", {"Tally": [number]}, {"partitions": 1, "bytes_new": 5})
            write(cluster, steps.end_swept, sweep, going[0], outcome, 7)
        elif act == "fail" and going:
            failed = True
            fault = PartitionFault("Tally", 7, going[0], "it is damaged")
            write(cluster, steps.end_swept, sweep, going[0], Outcome("it died", faults=(fault,)), 7)
        elif act == "not begun" and (due := known.next(going)):
            failed = True
            write(cluster, steps.end_swept, sweep, due[0], Outcome("it is away"), 7)
        elif act == "cancel":
            cancelled |= not known.over
            write(cluster, steps.call_off_sweep, sweep)
        elif act == "interrupted" and going and cancelled:
            write(cluster, steps.end_swept, sweep, going[0], Outcome(cancelled=True), 7)
        elif act == "another leads":
            cluster = Written.read(ledger, validated=True)
        known = cluster.sweeps.there[sweep]
        waiting, going = of(cluster, sweep, EntityStatus.WAITING), of(cluster, sweep, EntityStatus.IN_PROGRESS)
        assert known.over is not bool(waiting or going)
        assert not (waiting and cancelled), "nothing more begins"
        assert bool(known.next(going)) <= bool(waiting)
        if waiting and not going:
            assert known.next([]), "it goes on"
    again = Written.read(ledger)
    report, known = again.sweeps.report(sweep), again.sweeps.there[sweep]
    assert report == cluster.sweeps.report(sweep)
    assert known.left() == {"Other": [3], "Tally": [n for n in range(8) if n not in done]}
    assert [each.node for each in report.nodes] == [*NODES, MOVED]
    for node in of(again, sweep, EntityStatus.CANCELLED):
        assert not write(again, steps.begin_swept, sweep, node), "it does not begin any more"
        write(again, steps.end_swept, sweep, node, Outcome(), 1)
        assert again.sweeps.report(sweep) == report
    if report.over:
        assert report.state == ("FAILED" if failed else "CANCELLED" if cancelled else "DONE") or not report.faults()
        status = Board(ledger).batch(f"sweep/{sweep}")
        assert status["status"] == report.state
        assert {each.node: each.status for each in report.nodes} == {
            each["entity"]: each["status"] for each in Board(ledger).entities(f"sweep/{sweep}")
        }


@pytest.mark.parametrize("resolved", [("swept",), ("sweep",), ("swept", "sweep")])
@pytest.mark.parametrize("cancelled", [None, "before", "at its end"])
def test_a_sweep_that_a_person_resolved_by_hand_ends_all_the_same(
    ledger: Ledger, numbers: Iterator[int], resolved: tuple[str, ...], cancelled: str | None
) -> None:
    """A sweep ends although a person resolved its batch or one of its nodes.

    It could neither end nor be cancelled, also under the next leader, and no other sweep of its chore began.
    """
    sweep = f"h{next(numbers)}"
    cluster = Written.read(ledger, validated=True)
    write(cluster, steps.plan_sweep, sweep, Plan(Chore.VERIFY, NODES[:1], "", 1, "", {"Tally": [0]}))
    write(cluster, steps.begin_swept, sweep, NODES[0])
    for item in resolved:
        ledger.resolve(f"swept/{sweep}/{NODES[0]}" if item == "swept" else f"sweep/{sweep}", "it looked stuck")
    if cancelled == "before":
        write(cluster, steps.call_off_sweep, sweep)
    write(cluster, steps.end_swept, sweep, NODES[0], Outcome(), 1)
    if cancelled == "at its end":
        write(cluster, steps.call_off_sweep, sweep)
    elif cancelled is None:
        write(cluster, steps.end_swept, sweep, MOVED, Outcome(), 1)
    report = Written.read(ledger).sweeps.report(sweep)
    assert report == cluster.sweeps.report(sweep)
    assert report.state == ("CANCELLED" if cancelled else "DONE")
    assert Board(ledger).batch(f"sweep/{sweep}")["status"] == report.state


def test_of_those_that_are_over_the_newest_are_told_of(ledger: Ledger) -> None:
    cluster = Written.read(ledger)
    for number in range(KEPT + 5):
        roll = f"old{number}"
        write(cluster, steps.plan_sweep, roll, Plan(Chore.RESTART, NODES[:1]))
        write(cluster, steps.begin_swept, roll, NODES[0])
        write(cluster, steps.end_swept, roll, NODES[0], Outcome(), 1)
    again = Written.read(ledger)
    over = [each for each, known in again.sweeps.there.items() if known.over and known.chore is Chore.RESTART]
    assert over[-1] == f"old{KEPT + 4}"
    assert len(over) <= KEPT
    assert "old0" not in over


DAMAGED = PartitionFault("Tally", 3, "gw-0", "state_damaged: a block is")


def verify(cluster: Written, sweep: str, outcome: Outcome, site: str = "") -> Written:
    """Ends a verification, and returns the cluster's state as read from the ledger afterwards."""
    write(cluster, steps.plan_sweep, sweep, Plan(Chore.VERIFY, NODES[:1], site, 1, "", {"Tally": list(range(8))}))
    for node, each in ((NODES[0], outcome), (MOVED, Outcome())):
        write(cluster, steps.begin_swept, sweep, node)
        write(cluster, steps.end_swept, sweep, node, each, 1)
    again = Written.read(cluster.ledger)
    assert again.sweeps.damaged() == cluster.sweeps.damaged()
    assert again.sweeps.whole_us == cluster.sweeps.whole_us
    return again


def found(*faults: PartitionFault) -> Outcome:
    return Outcome("wrong" if faults else "", {"Tally": [each.partition for each in faults] or [3]}, {}, faults)


@pytest.fixture
def verified(tmp_path: Path) -> Iterator[Written]:
    """Yields a cluster in which Tally/3 is damaged."""
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=ManualClock(1)) as ledger:
        cluster = Written.read(ledger)
        write(cluster, steps.register, ReplicaInfo("gw-0", "edge", "127.0.0.1:1"), Home())
        spec = OperatorSpec("Tally", "ops:Tally", 8, ("key",), b"", {})
        deploy(cluster, spec, dict.fromkeys(range(8), "gw-0"))
        assert verify(cluster, "first", found(DAMAGED)).sweeps.damaged() == [DAMAGED]
        yield cluster


def test_what_is_damaged_is_known_however_many_verifications_of_others_come(verified: Written) -> None:
    at_us = verified.sweeps.whole_us[Chore.VERIFY]
    for number in range(KEPT + 2):
        verify(verified, f"v{number}", Outcome("", {"Tally": [0]}), site="edge")
    assert "first" not in verified.sweeps.there
    assert verified.sweeps.damaged() == [DAMAGED]
    assert verified.sweeps.whole_us == {Chore.VERIFY: at_us}
    assert verify(verified, "well", found()).sweeps.damaged() == []


def test_what_could_not_be_read_is_not_damaged_nor_mended(verified: Written) -> None:
    """A partition that could not be read is neither damaged nor mended, for any reason of the failure."""
    away = [PartitionFault("Tally", n, "gw-0", "transfer_corrupt: it is away", undone=True) for n in (3, 4)]
    assert verify(verified, "away", Outcome("away", {}, {}, tuple(away))).sweeps.damaged() == [DAMAGED]
    assert verified.sweeps.report("away").faults() == away


#: as release 0.1.0 wrote it: partition 3 was read, and 4 was not
OF_0_1_0 = (
    '{"error": "Tally/3 at gw-0: state_damaged: a block is; and 1 more", "partitions": 1, "bytes_read": 7, '
    '"done": {"Tally": "3"}, "faults": ['
    '{"operator": "Tally", "partition": 3, "replica": "gw-0", "error": "state_damaged: a block is"}, '
    '{"operator": "Tally", "partition": 4, "replica": "gw-0", "error": "unavailable: it is away"}]}'
)


def test_a_result_is_read_as_release_0_1_0_wrote_it_and_written_as_that_reads_it() -> None:
    """Results keep the form of release 0.1.0.

    That release takes every other key of a result for a count, and reads no other key of a fault.
    """
    outcome = Outcome.of_json(OF_0_1_0)
    assert outcome.faults == (DAMAGED, PartitionFault("Tally", 4, "gw-0", "unavailable: it is away", undone=True))
    assert outcome.counts == {"partitions": 1, "bytes_read": 7}
    assert outcome.to_json() == OF_0_1_0


def test_what_is_undeployed_is_damaged_no_more(verified: Written) -> None:
    write(verified, steps.undeploy, "Tally", verified.newest_epoch("Tally"))
    assert verified.sweeps.damaged() == Written.read(verified.ledger).sweeps.damaged() == []


def test_what_is_restored_is_damaged_no_more(verified: Written) -> None:
    restore = PlannedRestore("r", PartitionId("Tally", 3), "gw-0", "gw-0", 2)
    write(verified, steps.plan_restores, [restore])
    write(verified, steps.restore_owned, restore, 2, {})
    assert verified.sweeps.damaged() == Written.read(verified.ledger).sweeps.damaged() == []


def test_restarts_that_an_earlier_version_recorded_are_read_and_gone_on_with(tmp_path: Path) -> None:
    """Restarts that an earlier version recorded, when there was no other chore, are read and continued."""
    schema, columns = Kind.ENTITY.payload_schema, {"bid": "roll/old", "status": "WAITING"}
    named = {"name": "edge", "command": "restart", "owner": APP.name, "status": "NEW"}
    started = {"status": "IN_PROGRESS", "listed": 1, "started_us": 1, "worked_us": 0, "resumed_us": 1}
    new = entry("roll/old", S.NEW, None, {"site": "edge", "limit": 1, "set": named}, Kind.BATCH.payload_schema)
    going = entry("roll/old", S.PROCESSING, new, {"set": started}, Kind.BATCH.payload_schema)
    nodes = [
        entry(f"rolled/old/{node}", S.NEW, None, {"set": {**columns, "entity": node}}, schema) for node in NODES[:3]
    ]
    begun = [entry(each.item_id, S.PROCESSING, each, {"set": {"status": "IN_PROGRESS"}}, schema) for each in nodes[:2]]
    result = {"status": "COMPLETED", "ms": 7, "result": "{}"}
    done = entry(nodes[0].item_id, S.PROCESSED, begun[0], {"set": result}, schema)
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=ManualClock(1)) as ledger:
        ledger.append([new, going, *nodes, *begun, done])
        cluster = Written.read(ledger)
        report = cluster.sweeps.rolling("old")
        assert [(each.node, each.status, each.ms) for each in report.nodes] == [
            ("gw-0", "COMPLETED", 7),
            ("gw-1", "IN_PROGRESS", 0),
            ("gw-2", "WAITING", 0),
        ]
        write(cluster, steps.end_swept, "old", "gw-1", Outcome("it died"), 5)
        assert [each.status for each in cluster.sweeps.rolling("old").nodes] == ["COMPLETED", "FAILED", "CANCELLED"]
        entities = Board(ledger).entities("roll/old")
        assert json.loads(entities[1]["result"]) == {"error": "it died"}
        assert Board(ledger).batch("roll/old")["status"] == "FAILED"
