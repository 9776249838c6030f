"""Three controllers of one ledger on real processes, their clocks and those of replicas hours apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stateflow.client import Cluster
from stateflow.ledger import Ledger
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import Streaming, check_owners, eventually, wait_alive

pytestmark = pytest.mark.processes
CLOCKS = Path(__file__).parent / "clocks"
OFF_S = {"controller": 0, "second": 3600, "third": -3600, "cloud-0": -5400, "edge-0": 5400}
CONTROLLERS = ("controller", "second", "third")


class Trio(LocalCluster):
    """Every process has a clock of its own."""

    def _within(self, name: str) -> Sequence[str]:
        return ["env", f"STATEFLOW_TEST_CLOCK_OFF_S={OFF_S[name]}"]

    def _replica_arguments(self, name: str) -> list[str]:
        for other in CONTROLLERS[1:]:
            if other not in self.processes:
                ledger = f"sqlite:///{self.data_dir / 'ledger.db'}"
                process = self._process(other, ["controller", "--listen", "127.0.0.1:0", "--ledger", ledger])
                process.start()
                address = process.wait_ready()
                process._arguments[process._arguments.index("127.0.0.1:0")] = address
                self.address += f",{address}"
        return super()._replica_arguments(name)

    def leader(self) -> str:
        with Ledger(f"sqlite:///{self.data_dir / 'ledger.db'}") as ledger:
            address = ledger.hold().holder.address
        return next(name for name in CONTROLLERS if self.processes[name].address == address)


@pytest.fixture
def trio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trio]:
    monkeypatch.setenv("PYTHONPATH", str(CLOCKS))
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HOLD_S", "2")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_NOTICE_GONE", "false")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.3")
    with Trio(Tally, sites={"cloud": 1, "edge": 1}, partitions=4, data_dir=tmp_path / "c") as trio:
        yield trio


def test_each_leads_in_turn_whatever_its_clock_says(trio: Trio) -> None:
    cluster, led = Cluster(trio.address), []
    with Streaming(cluster.stream("Tally", source="s"), "k") as streaming:
        for site in ("edge", "cloud", "edge", "cloud"):
            streaming.more(2)
            leader = trio.leader()
            led.append(leader)
            trio.kill(leader)
            eventually(lambda leader=leader: trio.leader() != leader, "another one leads", 60)  # type: ignore[misc]
            wait_alive(trio, "cloud-0", "edge-0")
            trio.restart(leader)
            report = cluster.migrate("Tally", range(4), site).wait()
            assert report.state == "COMPLETED", report
        streaming.more(2)
    streaming.model.check(cluster)
    check_owners(trio)
    assert len(set(led)) > 1
    assert not [each for each in cluster.reconfigurations() if each.kind == "failover"], "no lease has lapsed"
    times = [each.created_us for each in cluster.reconfigurations()]
    assert max(times) - min(times) > 1800e6, "their clocks are apart"
