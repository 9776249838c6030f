"""Repeated looks at a made-up cluster."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.clock import ManualClock
from stateflow.dashboard import watching
from stateflow.dashboard.watching import Looking, Watching
from stateflow.errors import NotAllowed, Unavailable
from stateflow.reports import MoveReport, Reconfiguration, ReplicaStatistics
from stateflow.status import ClusterStatus, ReplicaStatus


class FakeCluster:
    def __init__(self, replicas: int) -> None:
        self.replicas = tuple(
            ReplicaStatus(f"r{number}", "edge", f"127.0.0.1:{number + 1}", 1, True, 0.0, 0)
            for number in range(replicas)
        )
        self.reconfigurations_now: tuple[Reconfiguration, ...] = ()
        self.asked: list[str] = []
        self.sized: list[str] = []
        self.histories = 0
        self.away: str | None = None
        self.ledger_away = False
        self.history_away = False

    def status(self, *, measured: bool = False) -> ClusterStatus:
        if self.away:
            raise Unavailable(self.away, remedy="see whether it runs")
        return ClusterStatus(self.replicas, (), self.reconfigurations_now)

    def replica_stats(self, address: str, after: int = 0, *, sizes: bool, **_: Any) -> ReplicaStatistics:
        self.asked.append(address)
        self.sized += [address] * sizes
        if address.endswith(":1"):
            raise Unavailable("no answer")
        return ReplicaStatistics((), (), 10 * len(self.asked), 0)

    def reconfigurations(self, limit: int) -> list[Reconfiguration]:
        self.histories += 1
        if self.history_away:
            raise Unavailable("no answer", remedy="see whether it runs")
        return []

    def jobs(self) -> list[Any]:
        if self.ledger_away:
            raise Unavailable("the ledger does not answer", remedy="see to its database")
        return []

    def autopilot_orders(self) -> Any:
        raise NotAllowed("only who operates is told")


def looking(cluster: FakeCluster, clock: ManualClock) -> Looking:
    return Looking(cluster, None, clock)  # type: ignore[arg-type]


def test_of_many_replicas_some_are_asked_in_turn() -> None:
    cluster, clock = FakeCluster(100), ManualClock()
    made = looking(cluster, clock)
    for look in range(5):
        found = made.look()
        assert len(cluster.asked) == watching.ASKED * (look + 1)
        clock.advance(1.0)
    assert set(cluster.asked[:120]) == {each.address for each in cluster.replicas}
    assert sorted(cluster.sized) == sorted(each.address for each in cluster.replicas), "files are looked at seldom"
    assert found["autopilot"] is None, "it may not be asked, and that is no error"
    assert found["replicas"][1]["rows_per_s"] is not None
    assert found["replicas"][0]["rows_per_s"] is None, "it does not answer, and the others are told of"
    made.close()


def test_two_looks_close_together_make_one_point() -> None:
    cluster, clock = FakeCluster(2), ManualClock()
    made = looking(cluster, clock)
    assert len(made.look()["points"]["at"]) == 1
    clock.advance(watching.APART_S / 2)
    assert made.look()["points"]["at"] == []
    clock.advance(watching.APART_S)
    assert len(made.look()["points"]["at"]) == 1
    made.close()


def test_history_is_asked_for_when_something_has_ended() -> None:
    cluster, clock = FakeCluster(1), ManualClock()
    made = looking(cluster, clock)
    cluster.reconfigurations_now = (Reconfiguration("r", "Op", "RUNNING", (), 0.0),)
    made.look()
    clock.advance(1.0)
    made.look()
    assert cluster.histories == 1
    cluster.reconfigurations_now = ()
    clock.advance(1.0)
    made.look()
    assert cluster.histories == 2
    made.close()


def test_history_that_was_refused_when_something_had_ended_is_asked_for_at_the_next_look() -> None:
    cluster, clock = FakeCluster(1), ManualClock()
    made = looking(cluster, clock)
    cluster.reconfigurations_now = (Reconfiguration("r", "Op", "RUNNING", (), 0.0),)
    made.look()
    cluster.reconfigurations_now, cluster.history_away = (), True
    clock.advance(1.0)
    assert [each["what"] for each in made.look()["missing"]] == ["history"]
    cluster.history_away = False
    clock.advance(1.0)
    assert made.look()["missing"] == []
    clock.advance(1.0)
    made.look()
    assert cluster.histories == 3, "and not more often"
    made.close()


def test_what_one_source_does_not_say_is_said_to_be_old_and_the_rest_is_new() -> None:
    cluster, clock = FakeCluster(1), ManualClock()
    made = looking(cluster, clock)
    cluster.ledger_away = True
    found = made.look()
    assert found["totals"]["replicas"] == 1
    (missing,) = found["missing"]
    assert (missing["what"], missing["error"].partition(":")[0]) == ("jobs", "unavailable")
    cluster.ledger_away = False
    clock.advance(watching.JOBS_S)
    assert made.look()["missing"] == []
    made.close()


def test_a_ledger_that_does_not_answer_does_not_stop_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    unlocked, asked = threading.Event(), []

    def batches() -> list[dict[str, Any]]:
        asked.append(threading.current_thread())
        unlocked.wait()
        return []

    monkeypatch.setattr(watching, "ANSWER_S", 0.001)
    clock, records = ManualClock(), SimpleNamespace(batches=batches)
    made = Looking(FakeCluster(1), records, clock)  # type: ignore[arg-type]
    for _ in range(3):
        found = made.look()
        assert found["totals"]["replicas"] == 1
        assert [each["what"] for each in found["missing"]] == ["batches"]
        assert found["batches"] is None
        clock.advance(1.0)
    unlocked.set()
    (thread,) = asked
    thread.join()
    found = made.look()
    assert found["missing"] == []
    assert found["batches"] == []
    made.close()


def test_a_pause_without_end_is_told_of_and_ends_nothing() -> None:
    """An infinite predicted pause is shown: changes come faster than they can cross."""
    cluster = FakeCluster(1)
    move = MoveReport("m", 0, "r0", "r1", "WARMING", "warm-up", predicted_pause_ms=math.inf)
    cluster.reconfigurations_now = (Reconfiguration("r", "Op", "RUNNING", (move,), 0.0),)

    async def run() -> dict[str, Any]:
        made = Watching(lambda: looking(cluster, ManualClock()), "127.0.0.1:7070")
        made.start()
        changes = made.changes()
        found = [await anext(changes), await anext(changes)]
        made.close()
        return dict(json.loads(found[1][1]))

    found = asyncio.run(run())
    assert found["error"] is None
    assert [each["predicted_pause_ms"] for each in found["moves"]] == [None]


def test_a_cluster_that_is_away_is_looked_at_again() -> None:
    cluster = FakeCluster(1)
    cluster.away = "no answer from 127.0.0.1:7070"

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        made = Watching(lambda: looking(cluster, ManualClock()), "127.0.0.1:7070")
        made.start()
        changes = made.changes()
        assert await anext(changes) == ("lines", '{"at":[],"rows_per_s":[],"p50_ms":[],"p99_ms":[]}')
        away = json.loads((await anext(changes))[1])
        cluster.away = None
        back = away
        while back["error"]:
            made.look_now()
            back = json.loads((await anext(changes))[1])
        made.close()
        assert [each async for each in changes] == [], "it ends when this is closed"
        return away, back

    away, back = asyncio.run(run())
    assert away["error"]["line"] == "unavailable: no answer from 127.0.0.1:7070: see whether it runs"
    assert (back["error"], back["controller"], len(back["replicas"])) == (None, "127.0.0.1:7070", 1)
