"""Vehicles depend on the seed alone, a region is a partition, and the operator agrees with a separate computation."""

from __future__ import annotations

import random

import pytest

from benchmarks import netns
from benchmarks.edge import REGIONS, REPORTING, Size, Truth, _reporter
from benchmarks.netns import Link
from benchmarks.vehicles import Fleet, Vehicles
from stateflow.partitioner import partition_of
from stateflow.testing import OperatorHarness

SIZE = Size(vehicles=50, message=100, seconds=1.0)


def drive(seed: int, steps: int) -> Fleet:
    fleet = Fleet(seed, REGIONS, SIZE.vehicles, speedup=200.0)
    for _ in range(steps):
        fleet.drive()
    return fleet


def test_the_same_seed_drives_the_same_way() -> None:
    one, same, other = drive(1, 50), drive(1, 50), drive(2, 50)
    assert one.regions == same.regions
    assert one.regions != other.regions


def test_a_region_is_a_partition_and_visits_several_sites() -> None:
    fleet = drive(1, 0)
    assert [partition_of(region.key, REGIONS) for region in fleet.regions] == list(range(REGIONS))
    assert fleet.nearest(fleet.regions[0]) == 0
    visited = set()
    for _ in range(100):
        fleet.drive()
        visited.add(fleet.nearest(fleet.regions[0]))
    assert len(visited) > 1


def test_the_operator_agrees_with_a_computation_beside_it_and_faults_are_found() -> None:
    fleet, truth, rng = drive(3, 0), Truth(), random.Random(3)
    harness = OperatorHarness(Vehicles, partitions=REGIONS)
    pick = _reporter(fleet, 2, SIZE)
    for step in range(20):
        fleet.drive()
        rows = pick(rng)
        assert len(rows) == REPORTING
        outputs = harness.send(rows)
        if step == 7:
            outputs = outputs[1:] + outputs[-1:]
        truth.apply(rows, outputs)
    assert (truth.lost, truth.duplicated) == (1, 1)
    state = harness.state(fleet.regions[2].key)
    assert dict(state.last) == truth.last
    assert {v: n for v, (n, _) in state.mileage.items()} == {v: n for v, (n, _) in truth.mileage.items()}
    assert all(len(message) == SIZE.message for message in state.message.values())


def test_a_machine_that_cannot_shape_links_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000)
    assert netns.probe(Link(10, 100)) == "network namespaces need root"
    monkeypatch.setattr(netns.os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: None)
    assert netns.probe(Link()) == "there is no ip command: apt-get install iproute2"


def test_what_was_made_is_undone_when_the_link_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, ...]] = []

    def run(*command: str) -> None:
        done.append(command)
        if "netem" in command:
            raise netns.CannotShape("no netem in this kernel")

    monkeypatch.setattr(netns, "_run", run)
    monkeypatch.setattr(netns, "_quietly", run)
    monkeypatch.setattr(netns.os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: tool)
    assert "no netem" in netns.probe(Link(10, 100))
    made = {command[:3] for command in done if "add" in command[:3]}
    assert made == {("ip", "link", "add"), ("ip", "addr", "add"), ("ip", "netns", "add")}
    gone = [command[1:3] for command in done[-3:]]
    assert gone == [("link", "del"), ("netns", "del"), ("link", "del")]
