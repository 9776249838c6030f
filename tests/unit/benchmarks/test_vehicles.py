"""Vehicles depend on the seed alone, a region is a partition, and the operator agrees with a separate computation."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from pathlib import Path

import pytest

from benchmarks import netns
from benchmarks.edge import REGIONS, REPORTING, Size, Truth, _reporter
from benchmarks.netns import Link, Wire, carry, report_of
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

    monkeypatch.setattr(netns, "_run", run)
    monkeypatch.setattr(netns, "_quietly", run)
    monkeypatch.setattr(netns, "_TUN", Path("/nonexistent/tun"))
    monkeypatch.setattr(netns.os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: tool)
    assert netns.probe(Link(10, 100)) == "/nonexistent/tun cannot be opened: No such file or directory"
    made = [command[1:3] for command in done if "add" in command[:3]]
    assert made == [("link", "add"), ("addr", "add"), ("netns", "add")]
    assert [command[1:3] for command in done[-2:]] == [("netns", "del"), ("link", "del")]


def test_a_frame_arrives_after_its_turn_and_its_way() -> None:
    wire = Wire(delay_s=0.050, mbit=8.0)  # a microsecond for each byte
    wire.take(b"a" * 1_000, 0.0)
    wire.take(b"b" * 2_000, 0.0)  # waits for the first
    wire.take(b"c" * 1_000, 0.010)
    assert [len(frame) for frame in wire.arrived(0.0505)] == []
    assert [frame[:1] for frame in wire.arrived(0.0535)] == [b"a", b"b"]
    assert [frame[:1] for frame in wire.arrived(1.0)] == [b"c"]
    report = report_of([wire])
    assert (report["frames"], report["dropped"]) == (3, 0)
    assert report["late_ms"] == {"p50": 2.5, "p99": 2.5, "p100": 939.0}


def test_a_link_without_a_rate_only_delays_and_a_full_one_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "_WAITING", 2)
    wire = Wire(delay_s=1.0, mbit=0.0)
    for number in range(3):
        wire.take(bytes([number]), 0.0)
    assert list(wire.arrived(1.0)) == [b"\0", b"\1"]
    assert report_of([wire])["dropped"] == 1


def test_frames_are_carried_both_ways_until_the_input_ends() -> None:
    """Datagram sockets stand in for the TAP devices: they keep frames apart, too."""
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        (inner, site), (outer, host) = pairs
        for end in (inner, site, outer, host):
            stack.enter_context(end)
            end.setblocking(end in (site, host))
        reading, writing = os.pipe()
        wire = Wire(delay_s=0.001, mbit=1_000.0)
        carrying = threading.Thread(target=carry, args=([wire], [inner.fileno()], [outer.fileno()], reading))
        carrying.start()
        site.send(b"from the site")
        site.send(b"another")
        host.send(b"to the site")
        assert [host.recv(100), host.recv(100)] == [b"from the site", b"another"]
        assert site.recv(100) == b"to the site"
        os.close(writing)
        carrying.join()
        os.close(reading)
    assert report_of([wire])["frames"] == 2
