"""Batches and jobs of real processes on each database: their controller dies, and the board counts each entity once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.client import Reconfiguration
from stateflow.errors import InvalidArgument, MoveConflict
from stateflow.ledger import Board, Ledger
from stateflow.local.process import Process
from stateflow.testing import LocalCluster
from tests.contract.databases import fresh_database
from tests.integration.operators import Tally
from tests.integration.support import Model, check_owners, eventually, outputs, rows_of, wait_alive

pytestmark = pytest.mark.processes
PARTITIONS = 6


class OnDatabase(LocalCluster):
    """A cluster whose ledger is at ``url``."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(Tally, sites={"cloud": 1, "edge": 1}, partitions=PARTITIONS, data_dir=folder)
        self.url = url

    def _process(self, name: str, arguments: list[str]) -> Process:
        if name == "controller":
            arguments[arguments.index("--ledger") + 1] = self.url
        return super()._process(name, arguments)

    def board(self, bid: str) -> dict[str, object]:
        with Ledger(self.url) as ledger:
            assert ledger.verify() == []
            return Board(ledger).batch(bid)

    def counts(self, reconfiguration: str) -> dict[str, int]:
        found = self.cluster.reconfiguration(reconfiguration).counts()
        return {name: count for name, count in found.items() if count}


@pytest.fixture(params=["postgresql", "mariadb"])
def local(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnDatabase]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HEARTBEAT_INTERVAL_S", "0.3")
    with fresh_database(request.param, tmp_path) as url, OnDatabase(url, tmp_path / "cluster") as local:
        yield local


def lead_again(local: OnDatabase) -> None:
    local.kill("controller")
    local.restart("controller")
    wait_alive(local, "cloud-0", "edge-0")


def test_a_batch_goes_on_at_its_stage_is_counted_once_and_retried_as_allowed(local: OnDatabase) -> None:
    cluster, model = local.cluster, Model()
    rows = rows_of("s", 0)
    with local.stream("Tally", source="s") as stream:
        assert outputs(stream.send(rows)) == model.apply(rows)
        # the pause budget is out of reach: what has begun stays in progress
        move = local.migrate("Tally", list(range(PARTITIONS)), "edge", max_pause_ms=1e-6, patience_s=600.0, limit=1)
        there = len(move.report.moves)
        eventually(lambda: local.counts(move.id) == {"waiting": there - 1, "in_progress": 1}, "one at a time")
        cluster.edit(move.id, limit=2)
        cluster.pause(move.id)
        lead_again(local)
        paused = cluster.reconfiguration(move.id)
        assert (paused.state, paused.limit, local.counts(move.id)) == ("PAUSED", 2, {"waiting": there})
        assert local.board(f"reconfiguration/{move.id}")["status"] == "PAUSED"
        cluster.resume(move.id)
        eventually(lambda: local.counts(move.id).get("in_progress") == min(2, there), "it goes on, two at a time")
        cluster.cancel(move.id)
        lead_again(local)
        assert ended(local, move.id).state == "CANCELLED", "whoever leads"
        with pytest.raises((InvalidArgument, MoveConflict)):
            cluster.retry(move.id)
        again = cluster.retry(move.id, cancelled=True)
        eventually(lambda: local.counts(again.id).get("in_progress", 0) > 0, "they begin again")
        cluster.cancel(again.id)
        again.wait()
        # a move that completes, though its controller is killed in the middle
        through = local.migrate("Tally", list(range(PARTITIONS)), "edge", limit=1)
        eventually(lambda: local.counts(through.id).get("completed", 0) >= 1, "the first has completed")
        lead_again(local)
        assert ended(local, through.id).state == "COMPLETED"
        found = local.board(f"reconfiguration/{through.id}")
        assert (found["status"], found["total_entities"], found["succeeded"]) == ("DONE", there, there)
        rows = rows_of("s", 1)
        assert outputs(stream.send(rows)) == model.apply(rows)
    model.check(cluster)
    check_owners(local)


def ended(local: OnDatabase, reconfiguration: str) -> Reconfiguration:
    over = eventually(
        lambda: found if (found := local.cluster.reconfiguration(reconfiguration)).over else None,
        "it has ended",
        60,
    )
    assert over is not None
    return over


def test_a_schedule_goes_on_and_each_time_is_run_for_once(local: OnDatabase) -> None:
    cluster = local.cluster
    cluster.create_job("often", "every 0.3", "checkpoint", operator="Tally")
    for count in (2, 4):
        eventually(lambda count=count: len(cluster.job("often").runs) >= count, f"it has run {count} times")  # type: ignore[misc]
        lead_again(local)
    cluster.change_job("often", "pause")
    eventually(lambda: all(run.ended_us for run in cluster.job("often").runs), "the last has ended")
    runs = cluster.job("often").runs
    assert {run.state for run in runs} == {"PROCESSED"}
    assert len({run.at_us for run in runs}) == len(runs)
