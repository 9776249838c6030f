"""Partitions that follow their rows and their load, on real processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stateflow.client import StreamClient
from stateflow.errors import InvalidArgument, OperatorNotDeployed
from stateflow.partitioner import partition_of
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import eventually

pytestmark = pytest.mark.processes

PARTITIONS = 8


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("placing")
    sites = {"edge": 1, "cloud": 1}
    with LocalCluster(Tally, sites=sites, partitions=PARTITIONS, data_dir=directory, deploy_to=("cloud",)) as started:
        yield started


def keys_of(partitions: set[int]) -> list[str]:
    """Returns one key of each partition."""
    found: dict[int, str] = {}
    for number in range(10_000):
        partition = partition_of(f"k{number}", PARTITIONS)
        if partition in partitions:
            found.setdefault(partition, f"k{number}")
    assert found.keys() == partitions
    return list(found.values())


@contextmanager
def flowing(*streams: tuple[StreamClient, list[str]], **values: int) -> Iterator[list[int]]:
    """Sends batches all the while, and yields how many were answered.

    Args:
        values: columns of each row beside its key; none: ``v=1``.
    """
    stop, sent, errors = threading.Event(), [0], list[BaseException]()

    def send() -> None:
        try:
            while not stop.wait(0.02):
                for stream, keys in streams:
                    stream.send([{"k": key, **(values or {"v": 1})} for key in keys])
                sent[0] += 1
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join()
    assert not errors, errors


def owners(local: LocalCluster) -> tuple[str, ...]:
    (tally,) = local.cluster.status().operators
    return tally.owners


def test_a_dry_run_says_what_would_move_and_why_and_moves_nothing(local: LocalCluster) -> None:
    keys = keys_of({0, 1, 2})
    with flowing((local.stream("Tally", "dry", site="edge"), keys)):
        proposed = local.cluster.propose("locality")
    assert {move.partition for move in proposed.moves} == {0, 1, 2}
    for move in proposed.moves:
        assert (move.source, move.target) == ("cloud-0", "edge-0")
        assert "come from edge" in move.reason
    assert proposed.pause_ms_at_most >= proposed.pause_ms > 0
    assert set(owners(local)) == {"cloud-0"}


def test_load_is_evened_out_and_nothing_is_lost(local: LocalCluster) -> None:
    keys = keys_of(set(range(PARTITIONS)))
    stream = local.stream("Tally", "load")
    before = {row["key"]: row["value"] for row in local.cluster.read_state("Tally", "n").to_pylist()}
    with flowing((stream, keys)) as sent:
        # what is measured may still be from before these rows
        eventually(lambda: len(local.cluster.propose("load").moves) == PARTITIONS / 2, "all are seen to have rows")
        for move in local.cluster.place("load"):
            assert move.wait().state == "COMPLETED"
        after = local.cluster.propose("load")
        assert after.moves == ()
        assert after.uneven_rows <= 1.2
    counts = {row["key"]: row["value"] for row in local.cluster.read_state("Tally", "n").to_pylist()}
    assert {key: counts[key] - before.get(key, 0) for key in keys} == dict.fromkeys(keys, sent[0])


def test_an_autopilot_brings_state_to_where_its_rows_come_from_and_says_why(local: LocalCluster) -> None:
    edge = {number for number, owner in enumerate(owners(local)) if owner == "cloud-0"}
    cloud = set(range(PARTITIONS)) - edge
    assert edge
    assert cloud
    streams = [
        (local.stream("Tally", "from-edge", site="edge"), keys_of(edge)),
        (local.stream("Tally", "from-cloud", site="cloud"), keys_of(cloud)),
    ]
    told = local.cluster.autopilot("locality", max_pause_ms=500.0, cool_down_s=4.0, moves_per_minute=600)
    assert told.policies == ("locality",)
    wanted = tuple("edge-0" if number in edge else "cloud-0" for number in range(PARTITIONS))
    with flowing(*streams):
        eventually(lambda: owners(local) == wanted, "every partition is where its rows come from")
        local.kill("controller")
        local.restart("controller")
        assert local.cluster.autopilot_orders() == told, "it is what it was told, started again"
    assert local.cluster.autopilot().policies == ()
    moved = [each for each in local.cluster.reconfigurations() if each.kind == "autopilot"]
    assert moved
    assert all("come from" in move.reason for each in moved for move in each.moves)


def test_what_cannot_be_asked(local: LocalCluster) -> None:
    cluster = local.cluster
    with pytest.raises(InvalidArgument, match="no policy 'speed'"):
        cluster.propose("speed")
    with pytest.raises(InvalidArgument, match="no policy"):
        cluster.propose()
    with pytest.raises(OperatorNotDeployed):
        cluster.propose("load", operator="Nobody")
    with pytest.raises(InvalidArgument, match="cool_down_s"):
        cluster.autopilot("load", cool_down_s=0.0)
    with pytest.raises(InvalidArgument):
        local.stream("Tally", "x", site="no site, surely")
