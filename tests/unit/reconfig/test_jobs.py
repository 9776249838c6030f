"""What is due, and what a run has left to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from reconfig.affinity import Affinity
from reconfig.controller.cluster_state import ClusterState
from reconfig.jobs import Do, Job, Run, RunState, Stage, due, next_at_us, next_us
from stateflow.errors import InvalidArgument
from stateflow.ledger import Ledger
from stateflow.schedule import Schedule

S = 1_000_000
EVERY = Job("nightly", Schedule.parse("every 60"), Do.CHECKPOINT)


def ran(at_us: int, ended_us: int, state: RunState = RunState.PROCESSED) -> Run:
    return Run("nightly", at_us, at_us, state, ended_us)


def test_a_clock_that_is_behind_runs_for_no_time_again() -> None:
    runs = [ran(1000 * S, 1001 * S)]
    assert due(EVERY, runs, 1030 * S) is None
    assert due(EVERY, runs, 1061 * S) is not None
    assert due(EVERY, [*runs, ran(2000 * S, 0, RunState.IN_PROCESS)], 3000 * S) is None
    assert next_at_us([], 5) == 5
    assert next_at_us(runs, 7) == 1000 * S + 1, "by hand, under a controller whose clock is behind"
    assert next_us(EVERY, runs, 1002 * S) == 1061 * S


def test_whoever_leads_next_goes_on_behind_the_last_stage(tmp_path: Path) -> None:
    """Before, what had not begun when its controller died was left for the next time."""
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        cluster = ClusterState(ledger)
        job = Job(
            *("nightly", Schedule.parse("every 60"), Do.REBALANCE),
            coordinator=Affinity.parse("soft:5 site cloud"),
            workers=Affinity.parse("label disk=ssd:2-4"),
        )
        cluster.define_job("nightly", job)
        run = cluster.begin_run("nightly", 7, ["A", "B", "C"])
        cluster.end_stage(run, Stage("A", ("r1",)))
        cluster.end_stage(run, Stage("B", error="no room"))
        again = ClusterState.read(ledger)
        found = again.jobs.run("nightly/7")
        assert found.left(["A", "B", "C", "later"]) == ["C"], "of those that there were when it began"
        assert found.stages == (Stage("A", ("r1",)), Stage("B", error="no room"))
        assert (again.jobs.there["nightly"].coordinator, again.jobs.there["nightly"].workers) == (
            job.coordinator,
            job.workers,
        )
        again.end_run(found, RunState.FAILED, ["r1"], "failed: B: no room")
        assert ClusterState.read(ledger).jobs.run("nightly/7").state is RunState.FAILED
        with pytest.raises(InvalidArgument, match="there is no run"):
            again.jobs.run("nightly/8")


def test_a_run_of_an_earlier_version_has_a_stage_for_whatever_is_deployed() -> None:
    assert Run("j", 1, 1).left(["A", "B"]) == ["A", "B"]


def test_one_controller_coordinates() -> None:
    with pytest.raises(InvalidArgument, match="one controller coordinates"):
        Job("j", Schedule.parse("every 60"), Do.CHECKPOINT, coordinator=Affinity.parse("site cloud:2")).check()
