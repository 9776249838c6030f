"""A restore whose target dies after the present owner has stopped: it goes on, and says so when it cannot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from stateflow.reports import RestoredPartition
from tests.crash_matrix.matrix import ProxiedCluster, matrix
from tests.crash_matrix.proxy import Trap
from tests.crash_matrix.steps import Moment
from tests.integration.support import Model, check_owners, eventually, outputs, rows_of, wait_alive

pytestmark = pytest.mark.processes


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxiedCluster]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "8")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_RESTORE_PATIENCE_S", "12")
    with matrix() as cluster:
        yield cluster


OWNER, TARGET = "cloud-0", "edge-0"


def prepared(local: ProxiedCluster) -> Model:
    """Gives the owner all partitions, rows and a checkpoint of each, and returns the model of the rows."""
    there = [number for number, name in enumerate(local.cluster.status().operators[0].owners) if name != OWNER]
    assert local.migrate("Tally", there, OWNER).wait().state == "COMPLETED"
    model = Model()
    model.apply(rows_of("a-", 0))
    local.stream("Tally", source="s").send(rows_of("a-", 0))
    local.cluster.checkpoint("Tally")
    return model


def restore_with_the_target_killed(local: ProxiedCluster, *, restart: bool) -> RestoredPartition:
    """Restores partition 0 at a target that is killed once the owner has answered that it stopped."""
    struck = threading.Event()

    def strike() -> None:
        local.kill(TARGET)
        struck.set()

    local.proxies[OWNER].reset()
    local.proxies[OWNER].trap = Trap("Surrender", Moment.ANSWERED, strike)
    with ThreadPoolExecutor(1) as pool:
        restoring = pool.submit(local.cluster.restore, "Tally", [0], to=TARGET)
        assert struck.wait(30), "the owner was never asked to stop"
        if restart:
            local.restart(TARGET)
        (report,) = restoring.result(120)
    return report


def test_a_target_that_comes_back_fetches_again_and_owns(local: ProxiedCluster) -> None:
    model = prepared(local)
    report = restore_with_the_target_killed(local, restart=True)
    assert (report.error, report.replica) == ("", TARGET)
    eventually(lambda: local.cluster.status().operators[0].owners[0] == TARGET, "it is on record")
    check_owners(local)
    stream = local.stream("Tally", source="s")
    assert outputs(stream.send(rows_of("a-", 1), sequence=1)) == model.apply(rows_of("a-", 1))
    model.check(local.cluster)


def test_when_the_target_stays_away_the_owner_serves_again_what_it_had(local: ProxiedCluster) -> None:
    model = prepared(local)
    stream = local.stream("Tally", source="s")
    assert outputs(stream.send(rows_of("a-", 1), sequence=1)) == model.apply(rows_of("a-", 1))  # behind the checkpoint
    report = restore_with_the_target_killed(local, restart=False)
    assert report.error is not None
    assert f"target {TARGET} is gone" in report.error
    assert outputs(stream.send(rows_of("a-", 2))) == model.apply(rows_of("a-", 2))
    local.restart(TARGET)
    wait_alive(local, TARGET)
    eventually(lambda: check_owners(local) is None, "it can be reached, and owns what it should")
    model.check(local.cluster)
