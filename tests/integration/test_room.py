"""Round trips that replicas measure, and disks that have no room, on real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.demo.follow.run import Links
from stateflow.errors import NoRoom
from stateflow.partitioner import partition_of
from stateflow.testing import LocalCluster
from tests.integration.operators import Blob, Tally
from tests.integration.slow_link import SlowLink
from tests.integration.support import command, eventually
from tests.integration.test_placing import flowing, keys_of

pytestmark = pytest.mark.processes
RTT_S = 0.04
ROOM_BYTES = 1 << 20


class Apart(LocalCluster):
    """A cluster whose ``cloud-0`` is behind a link that delays; the others are near each other.

    ``small-0`` may hold little.
    """

    def __init__(self, folder: Path) -> None:
        sites = {"cloud": 1, "near": 1, "edge": 1, "small": 1}
        super().__init__(Tally, Blob, sites=sites, partitions=8, data_dir=folder, deploy_to=("cloud",))
        self._behind = SlowLink(lambda: self.processes["cloud-0"].address)
        self.links = Links([self._behind.address], RTT_S).__enter__()

    def _replica_arguments(self, name: str) -> list[str]:
        arguments = super()._replica_arguments(name)
        far = self.links.addresses[self._behind.address]
        return [*arguments, "--advertise", far] if name == "cloud-0" else arguments

    def stop(self) -> None:
        super().stop()
        self.links.__exit__()
        self._behind.close()

    def _within(self, name: str) -> tuple[str, ...]:
        return ("env", f"STATEFLOW_REPLICA_ROOM_BYTES={ROOM_BYTES}") if name == "small-0" else ()


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with Apart(tmp_path_factory.mktemp("room")) as started:
        yield started


def owners(local: LocalCluster, operator: str) -> tuple[str, ...]:
    return next(each.owners for each in local.cluster.status().operators if each.name == operator)


def nodes(local: LocalCluster) -> dict[str, list[dict[str, object]]]:
    said = command("nodes", "--json", "--controller", local.address)
    assert said.exit_code == 0, said.output
    return dict(json.loads(said.stdout))


def test_rows_go_to_the_nearer_of_two_sites_as_measured(apart: Apart) -> None:
    """Partitions go to the nearer of two sites, as measured, where the site of their rows may not have the state."""
    apart.cluster.deploy(Tally, partitions=8, sites=["cloud", "near"])
    with flowing((apart.stream("Tally", "from-edge", site="edge"), keys_of({0, 1, 2}))):
        proposed = apart.cluster.propose("locality", operator="Tally")
        assert {move.partition for move in proposed.moves} == {0, 1, 2}
        for move in proposed.moves:
            assert (move.source, move.target) == ("cloud-0", "near-0")
            assert move.reason.startswith("near is nearer to its rows: ")
        for begun in apart.cluster.place("locality", operator="Tally"):
            assert begun.wait().state == "COMPLETED"
        assert apart.cluster.propose("locality", operator="Tally").moves == (), "it does not go back"
    links = {frozenset((str(each["source"]), str(each["target"]))): each for each in nodes(apart)["links"]}
    far, near = links[frozenset(("edge", "cloud"))]["rtt_ms"], links[frozenset(("edge", "near"))]["rtt_ms"]
    assert isinstance(far, float)
    assert isinstance(near, float)
    assert near < RTT_S * 1e3 <= far


def test_what_has_no_room_is_refused_before_anything_starts_and_never_wished(apart: Apart) -> None:
    cluster = apart.cluster
    cluster.deploy(Blob, partitions=8, sites=())
    keys = keys_of({0, 1})
    apart.stream("Blob", "filling").send([{"k": key, "size": -700_000} for key in keys])
    for begun in [cluster.migrate("Blob", [0, 1], to="near")]:
        assert begun.wait().state == "COMPLETED"  # what moved is in files then, and has a size
    (room,) = (each["room_bytes"] for each in nodes(apart)["nodes"] if each["name"] == "small-0")
    assert room == ROOM_BYTES
    before = len(cluster.reconfigurations())
    with pytest.raises(NoRoom, match=r"small-0: 1.0 MiB free for state, 1.3 MiB needed"):
        cluster.migrate("Blob", [0, 1], to="small")
    told = eventually(lambda: cluster.would_migrate("Blob", [0, 1], to="small").lacking, "it is measured anew")
    assert [(each.replicas, each.free_bytes) for each in told] == [(("small-0",), ROOM_BYTES)]
    assert len(cluster.reconfigurations()) == before
    assert cluster.migrate("Blob", [0], to="small").wait().state == "COMPLETED", "one of them fits"

    def rate() -> float | None:
        rates = {(each["source"], each["target"]): each["bytes_per_s"] for each in nodes(apart)["links"]}
        return rates.get(("near", "small"))

    assert eventually(rate, "as the move has shown")
    with pytest.raises(NoRoom):
        cluster.migrate("Blob", [1], to="small")
    others = [f"k{n}" for n in range(1000, 1400) if partition_of(f"k{n}", 8) == 1]
    with flowing((apart.stream("Blob", "from-small", site="small"), others), size=1):

        def left() -> dict[int, str]:
            return {each.partition: each.reason for each in cluster.propose("locality", operator="Blob").left}

        # until enough rows have come to make a move worth it, another reason is given
        eventually(lambda: left() == {1: "small has no room for it"}, "rows are seen")
        assert cluster.place("locality", operator="Blob") == []
    assert cluster.migrate("Blob", [0], to="near").wait().state == "COMPLETED"
    assert cluster.migrate("Blob", [0], to="small").wait().state == "COMPLETED", "its files are there from before"
    for begun in cluster.drain("near-0"):
        assert begun.wait().state == "COMPLETED", "what small has no room for goes elsewhere"
