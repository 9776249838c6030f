"""A controller's name that cannot be looked up, or has a wrong address.

The replica waits for the controller, says so, and goes on with what it has while it serves.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.netns import HOST, SUBNET, CannotShape, Link, SpacedCluster, network
from tests.integration.operators import Tally
from tests.integration.support import Model, eventually, outputs, rows_of

pytestmark = pytest.mark.processes
NAME = "ctl.fleet.test"
NOBODY = f"{SUBNET}.222"


class Named(SpacedCluster):
    """A cluster whose replica knows the controller by name."""

    def _replica_arguments(self, name: str) -> list[str]:
        arguments = super()._replica_arguments(name)
        at = arguments.index(self.address)
        arguments[at] = f"{NAME}:{self.address.rpartition(':')[2]}"
        return arguments


class Hosts:
    """``/etc/hosts`` of a network namespace. It is changed in place, as the namespace has this very file mounted."""

    def __init__(self, space: str) -> None:
        self.directory = Path("/etc/netns") / space
        self.directory.mkdir(parents=True)
        (self.directory / "resolv.conf").write_text("")  # no name server is asked
        (self.directory / "nsswitch.conf").write_text("hosts: files\n")
        self.says()

    def says(self, address: str = "") -> None:
        known = f"{address} {NAME}\n" if address else ""
        (self.directory / "hosts").write_text(f"127.0.0.1 localhost\n{known}")


@pytest.fixture
def edge() -> Iterator[tuple[dict[str, tuple[str, str]], Hosts]]:
    with contextlib.ExitStack() as undo:
        try:
            spaces = undo.enter_context(network(["edge"], Link()))
        except CannotShape as error:
            pytest.skip(f"no network of its own: {error}")
        hosts = Hosts(spaces["edge"][0])
        undo.callback(shutil.rmtree, hosts.directory)
        yield spaces, hosts


def test_a_name_that_cannot_be_looked_up_is_waited_for(edge: Any, tmp_path: Path) -> None:
    spaces, hosts = edge
    local = Named(Tally, spaces=spaces, partitions=4, data_dir=tmp_path / "cluster", checkpoint_interval_s=0)
    log = tmp_path / "cluster" / "edge-0.log"
    seen: dict[str, bool] = {}

    def mend() -> None:
        """Mends the name from a thread, as ``start`` waits for the replica meanwhile."""
        said = f"no answer from {NAME}"
        eventually(lambda: log.exists() and said in log.read_text(), "it says whom it does not find")
        seen["waits"] = "unavailable" in log.read_text()
        hosts.says(NOBODY)
        time.sleep(2)
        seen["still"] = "registered as edge-0" not in log.read_text()
        hosts.says(HOST)

    mending = threading.Thread(target=mend)
    mending.start()
    with local:
        mending.join()
        assert seen == {"waits": True, "still": True}
        model = Model()
        with local.stream("Tally", source="s") as stream:
            assert outputs(stream.send(rows_of("s", 0))) == model.apply(rows_of("s", 0))
            hosts.says()  # the name is gone, the connection stays
            for number in range(1, 40):
                assert outputs(stream.send(rows_of("s", number))) == model.apply(rows_of("s", number))
                time.sleep(0.1)
            assert all(each.alive for each in local.cluster.status().replicas)
            local.kill("controller")
            local.restart("controller")
            time.sleep(1)
            hosts.says(HOST)
            eventually(lambda: all(each.alive for each in local.cluster.status().replicas), "it finds it again")
            assert outputs(stream.send(rows_of("s", 40))) == model.apply(rows_of("s", 40))
        model.check(local.cluster)
    assert "Traceback" not in log.read_text()
