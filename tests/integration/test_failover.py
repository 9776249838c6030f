"""Failover of real processes that die, or freeze and go on: partitions get new owners, every loss is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from stateflow.errors import PositionGap
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import Model, Streaming, check_owners, eventually, outputs, rows_of, wait_alive

pytestmark = pytest.mark.processes
PARTITIONS = 4
ALL = list(range(PARTITIONS))
LEASE_S = "3"
Start = Callable[..., AbstractContextManager[LocalCluster]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a cluster with short leases; the operator begins at ``cloud-0``."""
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", LEASE_S)
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.3")

    @contextmanager
    def begin(sites: dict[str, int], acknowledge: str = "wal") -> Iterator[LocalCluster]:
        monkeypatch.setenv("STATEFLOW_REPLICA_ACKNOWLEDGE", acknowledge)
        local = LocalCluster(
            Tally,
            sites=sites,
            partitions=PARTITIONS,
            data_dir=tmp_path / "cluster",
            deploy_to=("cloud",),
            checkpoint_interval_s=0,
        )
        with local:
            yield local

    return begin


def with_standbys(local: LocalCluster) -> None:
    local.cluster.standby("Tally", 1)
    eventually(lambda: followed(local), "every partition has a standby that follows")


def followed(local: LocalCluster) -> bool:
    """Tells whether each partition's standby follows on another replica than its owner."""
    status = local.cluster.status()
    (tally,) = status.operators
    ready = {view.partition: view.replica for view in status.standbys if view.phase == "CATCHING_UP"}
    return set(ready) == set(ALL) and all(tally.owners[p] != replica for p, replica in ready.items())


def owners(local: LocalCluster) -> set[str]:
    (tally,) = local.cluster.status().operators
    return set(tally.owners)


def failovers(local: LocalCluster) -> list[Any]:
    return [each for each in local.cluster.reconfigurations() if each.kind == "failover"]


def test_a_standby_takes_over_and_every_acknowledged_batch_is_there(start: Start) -> None:
    with start({"cloud": 1, "edge": 2}, acknowledge="standby") as local:
        with_standbys(local)
        stream = local.stream("Tally", source="s")
        with Streaming(stream, "k") as streaming:
            streaming.more(3)
            local.kill("cloud-0")
            eventually(lambda: "cloud-0" not in owners(local), "its partitions went elsewhere")
            streaming.more(3)
            eventually(lambda: followed(local), "standbys of the new owners")
            local.restart("cloud-0")
            wait_alive(local, "cloud-0")
            streaming.more(2)
        streaming.model.check(local.cluster)
        eventually(lambda: owned_once(local), "one owner each, as the controller says")
        assert {move.note.partition(" ")[0] for each in failovers(local) for move in each.moves} == {"the"}
        assert all("the copy of" in move.note for each in failovers(local) for move in each.moves)


def test_standbys_follow_an_owner_that_is_restarted_at_another_address(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies go on at the owner's present address; they tried the former one for ever, and batches waited."""
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "60")
    with start({"cloud": 1, "edge": 1}, acknowledge="standby") as local:
        with_standbys(local)
        with Streaming(local.stream("Tally", source="s"), "k") as streaming:
            streaming.more(3)
            local.kill("cloud-0")
            arguments, former = local.processes["cloud-0"]._arguments, local.processes["cloud-0"].address
            arguments[arguments.index(former)] = "127.0.0.1:0"  # as agents start replicas
            local.restart("cloud-0")
            assert local.processes["cloud-0"].address != former
            streaming.more(3)
        streaming.model.check(local.cluster)
        assert owners(local) == {"cloud-0"}
        assert not failovers(local)


def test_moves_hold_no_batch_for_the_standby_that_the_former_owner_had(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves to the standby's replica, past it and back hold no batch, nor does a rebalance.

    A batch that waited for the former owner's standby would wait for ever. A restore ends the standbys, and they begin
    anew.
    """
    monkeypatch.setenv("STATEFLOW_REPLICA_HOLD_TIMEOUT_S", "600")
    with start({"cloud": 1, "edge": 2}, acknowledge="standby") as local:
        with_standbys(local)
        with Streaming(local.stream("Tally", source="s"), "k") as streaming:
            streaming.more(3)
            (at,) = {view.replica for view in local.cluster.status().standbys if view.partition == 0}
            past = ({"edge-0", "edge-1"} - {at}).pop()
            for to in (at, past, "cloud-0"):
                done = local.migrate("Tally", [0], to, max_pause_ms=500).wait()
                assert [(move.state, move.error) for move in done.moves] == [("COMPLETED", "")]
                streaming.more(3)
            for begun in local.cluster.rebalance("Tally"):
                assert begun.wait().state == "COMPLETED"
            streaming.more(3)
        eventually(lambda: followed(local), "standbys of the new owners")
        streaming.model.check(local.cluster)
        local.cluster.checkpoint("Tally")
        report = local.cluster.restore("Tally", [0, 1])
        assert [each.error for each in report] == ["", ""]
        eventually(lambda: followed(local), "standbys of what was restored")
        streaming.model.check(local.cluster)
        rows = rows_of("k", streaming.batches)
        assert outputs(streaming.stream.send(rows)) == streaming.model.apply(rows)
        to = next(view.replica for view in local.cluster.status().standbys if view.partition == 2)
        report = local.cluster.restore("Tally", [2], to=to)
        assert [(each.error, each.replica) for each in report] == [("", to)]
        eventually(lambda: followed(local), "standbys of what was restored")


def test_an_owner_that_was_stopped_and_goes_on_does_no_harm(start: Start) -> None:
    with start({"cloud": 1, "edge": 2}, acknowledge="standby") as local:
        with_standbys(local)
        stream = local.stream("Tally", source="s")
        model = Model()
        for batch in range(3):
            assert outputs(stream.send(rows_of("k", batch))) == model.apply(rows_of("k", batch))
        local.freeze("cloud-0")
        eventually(lambda: "cloud-0" not in owners(local), "its partitions went elsewhere")
        assert outputs(stream.send(rows_of("k", 3))) == model.apply(rows_of("k", 3))
        local.thaw("cloud-0")
        wait_alive(local, "cloud-0")
        for batch in range(4, 8):
            assert outputs(stream.send(rows_of("k", batch))) == model.apply(rows_of("k", batch))
        model.check(local.cluster)
        eventually(lambda: owned_once(local), "the old owner has sealed what it lost")


def owned_once(local: LocalCluster) -> bool:
    try:
        check_owners(local)
    except AssertionError:
        return False
    return True


def test_what_a_checkpoint_lacks_is_asked_for_again(start: Start) -> None:
    with start({"cloud": 1, "edge": 1}) as local:
        stream = local.stream("Tally", source="s")
        model = Model()
        for batch in range(6):
            assert outputs(stream.send(rows_of("k", batch))) == model.apply(rows_of("k", batch))
            if batch == 2:
                local.cluster.checkpoint("Tally")
        local.kill("cloud-0")
        eventually(lambda: owners(local) == {"edge-0"}, "its partitions went elsewhere")
        forgetful = local.cluster.stream("Tally", "s", acknowledged=5)
        with pytest.raises(PositionGap) as caught:
            forgetful.send(rows_of("k", 6))
        assert caught.value.where["expected"] == 3
        notes = [move.note for each in failovers(local) for move in each.moves if each.state == "COMPLETED"]
        assert len(notes) == PARTITIONS
        assert all("it contains s up to 2; later batches are lost" in note for note in notes)
        for batch in range(3, 6):
            forgetful.send(rows_of("k", batch), sequence=batch, rewind=True)
        assert outputs(forgetful.send(rows_of("k", 6), sequence=6)) == model.apply(rows_of("k", 6))
        model.check(local.cluster)
        local.restart("cloud-0")
        wait_alive(local, "cloud-0")
        eventually(lambda: owned_once(local), "one owner each, as the controller says")


def test_without_standby_and_checkpoint_a_partition_waits_for_its_owner(start: Start) -> None:
    with start({"cloud": 1, "edge": 1}) as local:
        stream = local.stream("Tally", source="s")
        model = Model()
        assert outputs(stream.send(rows_of("k", 0))) == model.apply(rows_of("k", 0))
        local.kill("cloud-0")
        failed = eventually(lambda: [e for e in failovers(local) if e.state == "FAILED"], "a takeover was tried")
        assert "state_missing: the partition has no checkpoint" in failed[0].moves[0].error
        local.restart("cloud-0")
        wait_alive(local, "cloud-0")
        assert outputs(stream.send(rows_of("k", 1))) == model.apply(rows_of("k", 1))
        model.check(local.cluster)
        eventually(lambda: owned_once(local), "it serves what it has")
