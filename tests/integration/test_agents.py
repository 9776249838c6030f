"""Agents as real processes: they start, stop and restart replicas as the ledger says."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import Result

from stateflow.agent.processes import OVERHEAD_BYTES
from stateflow.client import AgentReport, ChildReport, Cluster
from stateflow.errors import InvalidArgument, NameTaken, PartitionsLive
from stateflow.local.process import Process
from stateflow.testing import LocalCluster
from tests.integration.operators import Prints, Tally
from tests.integration.support import Model, command, eventually, outputs, rows_of

pytestmark = pytest.mark.processes
PARTITIONS = 8


class Fleet:
    """A controller, a replica ``cloud-0`` that was started by hand, and an agent ``gw`` at ``edge``."""

    def __init__(self, local: LocalCluster) -> None:
        self.local, self.cluster = local, local.cluster
        self.agent = self.another("gw", "gw", "--label", "disk=ssd")
        self.agent.start()
        self.agent.wait_ready()
        eventually(lambda: any(each.alive for each in self.cluster.agents()), "the agent registers")
        self.model, self.batches = Model(), 0

    def another(self, name: str, directory: str, *more: str) -> Process:
        arguments = [
            *("agent", "--site", "edge", "--name", name, "--controller", self.local.address, "--cores", "4"),
            *("--data-dir", str(self.local.data_dir / directory), *more),
        ]
        return self.local._process(f"agent-{directory}", arguments)

    def report(self) -> AgentReport:
        (agent,) = self.cluster.agents()
        return agent

    def children(self) -> dict[str, ChildReport]:
        return {each.replica: each for each in self.report().replicas}

    def pids(self) -> dict[str, int]:
        """Process ids by replica."""
        found = {}
        for child in psutil.Process(self.agent.pid).children():
            line = child.cmdline()
            if "--name" in line:
                found[line[line.index("--name") + 1]] = child.pid
        return found

    def send(self) -> None:
        rows = rows_of("s", self.batches)
        self.batches += 1
        with self.local.stream("Tally", source=f"s{self.batches}") as stream:
            assert outputs(stream.send(rows)) == self.model.apply(rows)

    def check(self) -> None:
        self.model.check(self.cluster)

    def owners(self) -> set[str]:
        (operator,) = self.cluster.status().operators
        return set(operator.owners)

    def command(self, *words: str) -> Result:
        return command(*words, "--controller", self.local.address)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_SPAWN_DISK_BYTES", str(1 << 20))
    with LocalCluster(sites={"cloud": 1}, data_dir=tmp_path / "cluster", checkpoint_interval_s=0) as local:
        yield Fleet(local)


def spawned(fleet: Fleet, count: int = 3) -> list[str]:
    """Spawns replicas at the edge, which then own all partitions of ``Tally``."""
    done = fleet.command("spawn", "edge", "--count", str(count), "--memory", "512MB", "--json")
    assert done.exit_code == 0, done.stderr
    names = [each["replica"] for each in json.loads(done.stdout)["replicas"]]
    fleet.cluster.deploy(Tally, PARTITIONS, sites=["edge"])
    fleet.cluster.deploy(Tally, PARTITIONS, sites=())
    fleet.send()
    return names


def test_replicas_of_one_command_serve_and_one_that_is_killed_serves_again(fleet: Fleet) -> None:
    names = spawned(fleet)
    assert names == ["gw-0", "gw-1", "gw-2"]
    assert fleet.owners() == set(names)
    pid = fleet.pids()["gw-1"]
    os.kill(pid, signal.SIGKILL)
    fleet.send()  # it waits for the replica
    assert fleet.pids()["gw-1"] != pid
    assert fleet.owners() == set(names)
    fleet.check()
    limit = psutil.Process(fleet.pids()["gw-1"]).rlimit(psutil.RLIMIT_DATA)[0]
    assert limit == 512_000_000 + OVERHEAD_BYTES
    shown = fleet.command("agent", "list").stdout
    missing = [w for w in ("gw", "disk=ssd", "3 of 4", "rlimit", "alive", "gw-1", "running") if w not in shown]
    assert not missing, shown
    child = fleet.children()["gw-1"]
    assert (child.wanted, child.state, child.deaths) == ("running", "RUNNING", 1)
    assert "killed by signal 9" in child.error


def test_an_agent_that_is_killed_has_its_replicas_again_with_a_controller_or_without(fleet: Fleet) -> None:
    names = spawned(fleet)
    before = fleet.pids()
    fleet.local.kill("controller")
    fleet.agent.kill()
    eventually(lambda: not any(map(psutil.pid_exists, before.values())), "its replicas end with it")
    fleet.agent.start()
    fleet.agent.wait_ready()
    eventually(lambda: set(fleet.pids()) == set(names), "they are there again though nobody commands it")
    fleet.local.restart("controller")
    fleet.send()
    fleet.check()
    assert fleet.owners() == set(names)
    eventually(lambda: {each.state for each in fleet.children().values()} == {"RUNNING"}, "the controller knows")


def test_a_replica_is_looked_into_stopped_and_restarted_and_its_agents_name_is_one_directorys(fleet: Fleet) -> None:
    spawned(fleet, 2)
    second = fleet.another("gw", "second")
    second.start()
    second.wait_ready()
    log = fleet.local.data_dir / "agent-second.log"
    eventually(
        lambda: "name_taken: an agent of this name may still be running with another data directory" in log.read_text(),
        "no",
    )
    second.stop()
    assert "registered as gw-0" in b"".join(fleet.cluster.logs("gw-0")).decode()
    assert fleet.command("logs", "gw-0", "--lines", "1").stdout.count("\n") == 1
    refused = fleet.command("stop", "gw-0")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("partitions_live: ")
    with pytest.raises(PartitionsLive, match="drain=True"):
        fleet.cluster.stop_replica("gw-0")
    pids = fleet.pids()
    assert fleet.cluster.stop_replica("gw-0", drain=True).wait() == ["gw-0"]
    assert fleet.owners() == {"gw-1"}
    assert not psutil.pid_exists(pids["gw-0"])
    fleet.send()
    following: Any = fleet.cluster.logs("gw-0", lines=0, follow=True)
    begun = fleet.cluster.restart_replica("gw-0")
    found = b""
    while b"registered as gw-0" not in found:
        found += next(following)
    following.close()
    assert begun.wait() == ["gw-0"]
    assert fleet.cluster.restart_replica("gw-1").wait() == ["gw-1"]
    assert fleet.pids()["gw-1"] != pids["gw-1"]
    fleet.send()
    fleet.check()
    with pytest.raises(NameTaken, match="stop it first"):
        fleet.cluster.forget("gw-0")
    with pytest.raises(InvalidArgument, match="was not started by an agent"):
        fleet.cluster.stop_replica("cloud-0")
    with pytest.raises(InvalidArgument, match="there is no replica 'gw-9'"):
        list(fleet.cluster.logs("gw-9"))
    fleet.cluster.stop_replica("gw-1", force=True).wait()
    assert fleet.children()["gw-1"].wanted == "stopped"


def test_what_an_operator_prints_is_no_failure_of_it_when_its_agent_is_killed(fleet: Fleet) -> None:
    fleet.cluster.spawn("edge").wait()
    fleet.cluster.deploy(Prints, 1, sites=["edge"])
    rows = [{"k": f"k{number}"} for number in range(200)]
    errors: list[BaseException] = []
    sent = threading.Event()
    stop = threading.Event()

    def send() -> None:
        try:
            with fleet.local.stream("Prints", source="p") as stream:
                while not stop.is_set():
                    assert len(stream.send(rows)) == len(rows)
                    sent.set()
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    for _ in range(3):
        sent.clear()
        eventually(lambda: sent.is_set() or errors, "rows are committed")
        fleet.agent.kill()
        fleet.agent.start()
        fleet.agent.wait_ready()
    sent.clear()
    eventually(lambda: sent.is_set() or errors, "rows are committed")
    stop.set()
    thread.join(90)
    assert errors == []
    assert b"x" * 1000 in b"".join(fleet.cluster.logs("gw-0"))


def test_replicas_of_several_workers_at_another_name_end_with_an_agent_that_is_stopped(fleet: Fleet) -> None:
    fleet.agent.stop()
    fleet.agent = fleet.another("gw", "gw", "--advertise", "localhost")
    fleet.agent.start()
    fleet.agent.wait_ready()
    eventually(lambda: fleet.report().alive and fleet.report().address.startswith("localhost:"), "it registers again")
    (name,) = fleet.cluster.spawn("gw", workers=2).wait()
    workers = {each.name: each.address for each in fleet.cluster.status().replicas if each.site == "edge"}
    assert set(workers) <= {name, f"{name}~1"}
    assert all(address.startswith("localhost:") for address in workers.values())
    assert len(set(workers.values())) == len(workers)
    assert fleet.children()[name].address == workers[name]
    pids = [child.pid for child in psutil.Process(fleet.agent.pid).children(recursive=True)]
    assert len(pids) == 3, "the node and its workers"
    fleet.agent.stop()
    assert not any(map(psutil.pid_exists, pids))


def test_a_replica_that_dies_at_every_start_says_why(fleet: Fleet) -> None:
    directory = fleet.local.data_dir / "gw" / "replicas"
    directory.mkdir()
    (directory / "gw-0").write_text("no directory")
    begun = fleet.cluster.spawn("gw")
    with pytest.raises(InvalidArgument, match="the data directory cannot be used"):
        begun.wait(deaths_max=2)
    assert "invalid_argument" in fleet.command("agent", "list", "--json").stdout
    (directory / "gw-0").unlink()
    begun.wait()
    fleet.cluster.stop_replica("gw-0").wait()
    (stopped,) = (each for each in fleet.cluster.status().replicas if each.name == "gw-0")
    assert stopped.stopped


def test_another_controller_commands_when_the_first_is_gone(fleet: Fleet) -> None:
    fleet.agent.stop()
    arguments = ["controller", "--listen", "127.0.0.1:0", "--ledger", fleet.local.ledger]
    second = fleet.local._process("second", arguments)
    second.start()
    both = f"{fleet.local.address},{second.wait_ready()}"
    fleet.agent = fleet.another("gw", "gw")
    arguments = fleet.agent._arguments
    arguments[arguments.index("--controller") + 1] = both
    fleet.agent.start()
    fleet.agent.wait_ready()
    cluster = Cluster(both)
    eventually(lambda: any(each.alive for each in cluster.agents()), "it registers again")
    assert cluster.spawn("gw").wait() == ["gw-0"]
    pids = fleet.pids()
    fleet.local.kill("controller")
    eventually(lambda: any(each.alive for each in cluster.agents()), "the other one is obeyed")
    assert cluster.spawn("gw").wait() == ["gw-1"]
    assert fleet.pids()["gw-0"] == pids["gw-0"], "what runs is left alone"
