"""Links that carry one direction only: requests arrive and answers do not, or the reverse.

Nothing is lost, and no client waits for a replica that cannot serve.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.crash_matrix.matrix import ProxiedCluster, matrix
from tests.integration.support import Model, check_owners, eventually, outputs, rows_of

pytestmark = pytest.mark.processes
EDGE, CLOUD = "edge-0", "cloud-0"
LEASE_S = 3.0
#: lease, margin and a takeover, on a busy machine; a call that no process answers is waited for far longer
WAITED_S = 30.0


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxiedCluster]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", str(LEASE_S))
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HEARTBEAT_INTERVAL_S", "0.3")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.3")
    with matrix() as cluster:
        cluster.cluster.standby("Tally", 1)
        eventually(
            lambda: {each.phase for each in cluster.cluster.status().standbys} == {"CATCHING_UP"}, "copies follow"
        )
        yield cluster


@pytest.mark.parametrize("from_replica", [True, False], ids=["nothing from the replica", "nothing to the replica"])
def test_between_a_replica_and_the_controller(local: ProxiedCluster, from_replica: bool) -> None:
    """A replica's lease lapses, whichever direction is cut, and its partitions are served elsewhere."""
    model = Model()
    with local.stream("Tally", source="s") as stream:

        def send(number: int) -> float:
            began = time.monotonic()
            assert outputs(stream.send(rows_of("s", number))) == model.apply(rows_of("s", number))
            return time.monotonic() - began

        send(0)
        edge, controller = (frozenset({local.processes[name].pid}) for name in (EDGE, "controller"))
        local.proxies["controller"].hold(edge, from_replica)  # one direction of the calls that the replica makes …
        local.proxies[EDGE].hold(controller, not from_replica)  # … and the same one of the calls that it answers
        longest = max(send(number) for number in range(1, 40) if not time.sleep(0.2))
        owners = set(next(iter(local.cluster.status().operators)).owners)
        local.heal()
        assert owners == {CLOUD}, f"batches took up to {longest:.1f} s"
        assert longest < WAITED_S, "who cannot serve is not waited for"
        for number in range(40, 60):
            send(number)
        eventually(
            lambda: {each.name for each in local.cluster.status().replicas if each.alive} == {EDGE, CLOUD}, "back"
        )
    model.check(local.cluster)
    check_owners(local)
