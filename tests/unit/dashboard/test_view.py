"""The page's view of a cluster, made from reports."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from stateflow.dashboard import view
from stateflow.dashboard.view import Point, Rates, Seen, error_view, lines, plan_view, snapshot
from stateflow.errors import MoveAborted, Unavailable
from stateflow.reports import (
    JobReport,
    JobRun,
    MoveReport,
    PartitionReport,
    Placement,
    ProposedMove,
    Reconfiguration,
    ReplicaStatistics,
)
from stateflow.status import (
    ClusterStatus,
    MaintenanceReport,
    OperatorStatus,
    ReplicaStatus,
    StandbyReport,
    UnservedPartitions,
)
from stateflow.types import worker_name


def replica(name: str, site: str = "cloud", alive: bool | None = True, **more: Any) -> ReplicaStatus:
    return ReplicaStatus(name, site, "127.0.0.1:1", 1, alive, 0.5, 2, **more)


def operator(*owners: str, name: str = "Op", **more: Any) -> OperatorStatus:
    return OperatorStatus(name, "m:Op", len(owners), 1, owners, (1,) * len(owners), **more)


def move(number: int, state: str, **more: Any) -> MoveReport:
    return MoveReport(f"m{number}", number, "a", "b", state, "warm-up", **more)


def told(status: ClusterStatus, **more: Any) -> dict[str, Any]:
    found = snapshot(Seen(status, **more), Rates(), 0.0)
    json.dumps(found, allow_nan=False)
    return found


def test_owners_are_numbers_of_replicas() -> None:
    found = told(ClusterStatus((replica("a"), replica("b", "edge")), (operator("b", "a", "gone"),), ()))
    assert found["operators"][0]["owners"] == [1, 0, -1]
    assert [(each["name"], each["replicas"]) for each in found["sites"]] == [("cloud", 1), ("edge", 1)]
    assert found["totals"] == {
        "sites": 2,
        "replicas": 2,
        "alive": 2,
        "partitions": 3,
        "unserved": 0,
        "rows_per_s": None,
        "p50_ms": None,
        "p99_ms": None,
        "moving": 0,
        "waiting": 0,
    }


def test_entries_are_of_an_operator_and_of_who_owns_its_partitions() -> None:
    rates = Rates()
    here = tuple(
        PartitionReport("Op", number, "OWNED", 1, 1, "", 0.0, entries=entries)
        for number, entries in ((0, 5), (1, 7), (2, None))
    )
    rates.add("a", 0.0, ReplicaStatistics((), here, 0, 0), sizes=True)
    some = ClusterStatus((replica("a"), replica("b"), replica("c")), (operator("a", "b"),), ())
    found = snapshot(Seen(some), rates, 0.0)
    assert [(each["stored"], each["entries"]) for each in found["operators"]] == [([5, 7], 12)]
    assert [each["entries"] for each in found["replicas"]] == [5, 7, 0]
    found = snapshot(Seen(replace(some, operators=(operator("a", "b", "b"),))), rates, 0.0)
    assert [(each["stored"], each["entries"]) for each in found["operators"]] == [([5, 7, None], None)]
    assert [each["entries"] for each in found["replicas"]] == [5, None, 0]


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (replica("a"), "alive"),
        (replica("a", opening=True), "opening"),
        (replica("a", alive=False), "silent"),
        (replica("a", alive=False, stopped=True), "stopped"),
        (replica("a", alive=None), "unknown"),
    ],
)
def test_how_a_replica_is(status: ReplicaStatus, state: str) -> None:
    assert told(ClusterStatus((status,), (), ()))["replicas"][0]["state"] == state


def test_a_node_in_maintenance_is_so_with_all_its_workers() -> None:
    status = ClusterStatus(
        (replica("a"), replica(worker_name("a", 1)), replica("b")), (), (), maintenance=(MaintenanceReport("a"),)
    )
    resting = [each["resting"] for each in told(status)["replicas"]]
    assert resting == [True, True, False]


def test_copies_and_what_nobody_serves_are_with_their_operator() -> None:
    fault = Unavailable("its owner is away", remedy="wait")
    status = ClusterStatus(
        (replica("a"), replica("b")),
        (operator("a", "a", unserved=(UnservedPartitions("Op", (1,), "a", fault),)),),
        (),
        (StandbyReport("Op", 0, "b", "CATCHING_UP", 7), StandbyReport("Op", 1, "gone", "WARMING", 9)),
    )
    found = told(status)["operators"][0]
    assert found["copies"] == [(0, 1, True), (1, -1, False)]
    assert (found["standbys"], found["standbys_behind"], found["standby_lag_bytes"]) == (2, 1, 9)
    assert found["unserved"] == [{"partitions": [1], "error": "unavailable: its owner is away: wait"}]


def test_moves_under_way_come_from_the_status_and_those_that_ended_from_history_too() -> None:
    older = Reconfiguration("r1", "Op", "RUNNING", (move(1, "WARMING"),), 0.0, created_us=1)
    newer = Reconfiguration("r1", "Op", "RUNNING", (move(1, "FENCED", bytes_warm=5, base_bytes=10),), 0.0, created_us=1)
    past = Reconfiguration(
        "r0", "Op", "FAILED", (move(2, "COMPLETED", pause_ms=3.0), move(3, "ABORTED", fault=MoveAborted("no"))), 0.0
    )
    waiting = Reconfiguration("r2", "Op", "PAUSED", (move(4, "WAITING"),), 0.0, created_us=9)
    found = told(ClusterStatus((replica("a"),), (operator("a"),), (newer, waiting)), history=(past, older))
    assert [(each["id"], each["state"], each["progress"]) for each in found["moves"]] == [("m1", "FENCED", 0.5)]
    assert {each["id"]: each["stands"] for each in found["ended"]} == {"m2": "completed", "m3": "failed"}
    assert [each["id"] for each in found["reconfigurations"]] == ["r2", "r1", "r0"], "those under way first"
    assert (found["totals"]["moving"], found["totals"]["waiting"]) == (1, 1)
    assert found["ended"][1]["error"] == "move_aborted: no"


def test_marks_are_moves_of_a_second_together() -> None:
    ends = tuple(move(n, "COMPLETED", fenced_us=us, pause_ms=float(n)) for n, us in ((1, 5_100_000), (2, 5_900_000)))
    other = move(3, "COMPLETED", fenced_us=7_000_000), move(4, "ABORTED", fenced_us=7_000_000)
    of = Reconfiguration("r", "Op", "COMPLETED", (*ends, *other), 0.0)
    found = view.marks([(of, each) for each in of.moves], 0)
    assert [(each["moves"], each["pause_ms"]) for each in found] == [(2, 2.0), (1, 0.0)]
    assert view.marks([(of, each) for each in of.moves], 6_000_000) == found[1:]


def test_of_many_moves_some_are_sent_and_how_many_there_are_is_said() -> None:
    moves = tuple(move(number, "WARMING") for number in range(5000))
    of = Reconfiguration("r", "Op", "RUNNING", moves, 0.0)
    found = told(ClusterStatus((replica("a"),), (operator("a"),), (of,)))
    assert len(found["moves"]) == view.MOVES_MAX
    assert found["totals"]["moving"] == 5000


def test_a_large_fleet_is_told_in_few_bytes() -> None:
    replicas = tuple(replica(f"site-{number // 10}-{number}", f"site-{number // 10}") for number in range(400))
    owners = tuple(replicas[number % 400].name for number in range(1024))
    found = told(ClusterStatus(replicas, (operator(*owners),), ()))
    assert len(found["sites"]) == 40
    assert len(json.dumps(found, separators=(",", ":"))) < 200_000


def test_what_it_may_not_ask_for_is_none_and_of_a_job_the_last_run_is_told() -> None:
    empty = ClusterStatus((), (), ())
    found = told(empty, jobs=None)
    assert (found["jobs"], found["batches"], found["autopilot"]) == (None, None, None)
    runs = tuple(JobRun(at, at, at, "PROCESSED", (), f"n{at}") for at in range(9))
    job = JobReport("nightly", "every 60", "checkpoint", "", (), (), "", False, 5, runs)
    assert [each["note"] for each in told(empty, jobs=(job,))["jobs"][0]["runs"]] == ["n8"]


def test_time_lines_are_columns() -> None:
    found = lines([Point(1_500_000, 2.0, None, None), Point(2_500_000, 3.0, 1.0, 4.0)])
    assert found == {"at": [1.5, 2.5], "rows_per_s": [2.0, 3.0], "p50_ms": [None, 1.0], "p99_ms": [None, 4.0]}
    assert lines([]) == {"at": [], "rows_per_s": [], "p50_ms": [], "p99_ms": []}


def test_a_plan_has_no_number_without_bound() -> None:
    moves = tuple(ProposedMove("Op", number, "a", "b", "load", 10) for number in range(300))
    found = plan_view(Placement(moves, 1.0, 1.0, 1.0, 1.0, 5.0, float("inf")))
    assert (found["count"], found["bytes"], found["pause_ms"], found["pause_ms_at_most"]) == (300, 3000, 5.0, None)
    assert len(found["moves"]) == view.PLANNED_MAX


def test_an_error_says_what_to_do_and_shows_no_traceback() -> None:
    found = error_view(Unavailable("no answer", remedy="see whether it runs", replica="a", traceback="secret"))
    assert (found["code"], found["what"], found["remedy"]) == ("unavailable", "no answer", "see whether it runs")
    assert "secret" not in json.dumps(found)
