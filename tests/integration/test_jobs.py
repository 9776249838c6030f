"""Jobs on real processes: each scheduled time runs once, whichever controller leads."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from stateflow.errors import InvalidArgument, OperatorNotDeployed, UnknownSite
from stateflow.ledger import Ledger
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import eventually

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("jobs")
    with LocalCluster(Tally, sites={"edge": 1, "cloud": 1}, partitions=4, data_dir=directory) as started:
        yield started


def owners(local: LocalCluster) -> set[str]:
    (tally,) = local.cluster.status().operators
    return set(tally.owners)


def test_a_job_moves_partitions_when_it_is_time_and_once(local: LocalCluster) -> None:
    at = datetime.now(UTC) + timedelta(seconds=2)
    made = local.cluster.create_job(
        "move",
        f"once {at.isoformat()}",
        "migrate",
        operator="Tally",
        partitions=[0, 1, 2, 3],
        to="edge",
        max_pause_ms=500,
    )
    assert made.next_us == round(at.timestamp() * 1e6)
    assert made.runs == ()
    eventually(lambda: local.cluster.job("move").runs and local.cluster.job("move").runs[0].ended_us, "it has run")
    (run,) = local.cluster.job("move").runs
    assert (run.state, run.at_us, run.note) == (
        "PROCESSED",
        made.next_us,
        f"{len(local.cluster.reconfiguration(run.reconfigurations[0]).moves)} moves",
    )
    assert owners(local) == {"edge-0"}
    assert local.cluster.job("move").next_us == 0
    reasons = {move.reason for move in local.cluster.reconfiguration(run.reconfigurations[0]).moves}
    assert reasons == {f"job move, run {run.at_us}"}


def test_a_job_that_has_nothing_to_do_has_done_it_and_one_that_cannot_says_why(local: LocalCluster) -> None:
    done = local.cluster.create_job("there", "every 3000", "migrate", operator="Tally", partitions=[0], to="edge")
    assert done.next_us
    local.cluster.change_job("there", "run")
    run = eventually(lambda: [each for each in local.cluster.job("there").runs if each.ended_us], "it has run")[0]
    assert (run.state, run.reconfigurations) == ("PROCESSED", ())
    assert run.note == "nothing to do"
    with pytest.raises(UnknownSite, match="mars"):
        local.cluster.create_job("nowhere", "every 3000", "migrate", operator="Tally", partitions=[0], to="mars")
    local.cluster.deploy(Tally, 2, name="Gone")
    local.cluster.create_job("gone", "every 3000", "migrate", operator="Gone", partitions=[0], to="edge")
    local.cluster.undeploy("Gone", delete_state=True)
    local.cluster.change_job("gone", "run")
    run = eventually(lambda: [each for each in local.cluster.job("gone").runs if each.ended_us], "it has run")[0]
    assert run.state == "FAILED"
    assert "Gone" in run.note


def test_a_schedule_goes_on_through_controllers_and_no_time_is_run_for_twice(local: LocalCluster) -> None:
    local.cluster.create_job("often", "every 0.3", "checkpoint", operator="Tally")
    for count in (2, 5, 8):
        eventually(lambda count=count: len(local.cluster.job("often").runs) >= count, f"it has run {count} times")
        local.kill("controller")
        local.restart("controller")
    eventually(lambda: len(local.cluster.job("often").runs) >= 10, "it goes on")
    paused = local.cluster.change_job("often", "pause")
    assert paused.paused
    assert paused.next_us == 0
    eventually(lambda: all(run.ended_us for run in local.cluster.job("often").runs), "what was under way has ended")
    runs = local.cluster.job("often").runs
    times = [run.at_us for run in runs]
    assert times == sorted(set(times))
    assert {run.state for run in runs} == {"PROCESSED"}, [run.note for run in runs]
    assert all(after.at_us >= before.ended_us for before, after in pairwise(runs))
    local.cluster.change_job("often", "delete")
    with pytest.raises(InvalidArgument, match="no job 'often'"):
        local.cluster.job("often")
    ledger = Ledger(local.ledger)
    items = [record.item_id for record in ledger.records() if record.item_id.startswith("run/often/")]
    ledger.close()
    assert len(set(items)) == len(times)
    assert len(items) == 3 * len(times), "begun, in hand, ended: each once"


def test_a_run_waits_for_its_controller_and_its_nodes_or_does_without(local: LocalCluster) -> None:
    create, there = local.cluster.create_job, {"operator": "Tally", "partitions": [0, 1]}
    with pytest.raises(InvalidArgument, match=r"none of the nodes matches site mars .*: use one of cloud, edge"):
        create("x", "every 3000", "migrate", to="edge", workers="site mars", **there)
    with pytest.raises(InvalidArgument, match="is not an affinity"):
        create("x", "every 3000", "checkpoint", workers="4-2")
    create("pinned", "every 3000", "checkpoint", coordinator="hard site moon")
    run = local.cluster.run_job("pinned")
    said = "waits: 0 of at least 1 controllers that match site moon and take jobs answer"
    eventually(lambda: local.cluster.job_run(run.id).note == said, "it says why it waits")
    create("loose", "every 3000", "checkpoint", coordinator="soft:0.5 site moon")
    done = local.cluster.job_run(local.cluster.run_job("loose").id, wait=True)
    assert done.state == "PROCESSED"
    assert "ran without its affinity" in done.note
    local.kill("controller")
    local.restart("controller")
    eventually(lambda: local.cluster.job_run(run.id).note == said, "it waits under the next controller, too")
    create("cloudwards", "every 3000", "rebalance", workers="hard node cloud-0", operator="Tally", policies=["load"])
    done = local.cluster.job_run(local.cluster.run_job("cloudwards").id, wait=True)
    assert done.state == "PROCESSED", done
    assert [stage.operator for stage in done.stages] == ["Tally"]
    for each in done.reconfigurations:
        assert {move.target for move in local.cluster.reconfiguration(each).moves} == {"cloud-0"}
    with pytest.raises(InvalidArgument, match="there is no run"):
        local.cluster.job_run("pinned/7")


def test_what_is_no_job(local: LocalCluster) -> None:
    create = local.cluster.create_job
    with pytest.raises(InvalidArgument, match="is not a schedule"):
        create("x", "daily", "checkpoint")
    with pytest.raises(InvalidArgument, match="a job cannot do"):
        create("x", "every 5", "dance")
    with pytest.raises(InvalidArgument, match="must name operator"):
        create("x", "every 5", "migrate", to="edge")
    with pytest.raises(InvalidArgument, match="must name the replica"):
        create("x", "every 5", "drain")
    with pytest.raises(OperatorNotDeployed):
        create("x", "every 5", "checkpoint", operator="Nobody")
    with pytest.raises(InvalidArgument, match="has passed"):
        create("x", "once 2020-01-01T00:00:00Z", "checkpoint")
    with pytest.raises(InvalidArgument, match="no policy"):
        create("x", "every 5", "rebalance", policies=["speed"])
    create("twice", "every 3000", "checkpoint")
    with pytest.raises(InvalidArgument, match="of that name"):
        create("twice", "every 3000", "checkpoint")
    with pytest.raises(InvalidArgument, match="a job has no command"):
        local.cluster.change_job("twice", "sing")
    assert [job.name for job in local.cluster.jobs() if job.name == "x"] == []
