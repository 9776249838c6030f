"""Operators on a Spark cluster whose executors are on other machines, and have another Python.

A standalone master, two workers, a driver and the replicas are each in a network namespace of their own, with TLS and a
token of the driver's. Where the kernel has no namespaces for us, they are at loopback addresses, and tests skip what
those cannot show.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from stateflow.security.authority import write_private
from stateflow.security.roles import Identity
from stateflow.spark.session import write_package
from tests.integration.processes import gone
from tests.integration.spark_operators import Tally
from tests.integration.standalone import (
    DRIVER,
    PATIENCE_S,
    ROOT,
    SPARK_HOME,
    WORKERS,
    Fleet,
    Job,
    Machine,
    Machines,
    Spark,
    Work,
    bare_python,
    found_in,
    machines,
    packed_environment,
)
from tests.integration.support import eventually, read
from tests.integration.test_spark_kills import Expected

pytestmark = [pytest.mark.spark, pytest.mark.processes]
#: deployments of Tally, one for each test
OPERATORS = ("Refused", "Sent", "Packed", "Dynamic", "Connected")
PARTITIONS = 8


@dataclass(frozen=True)
class Site:
    """Clusters and files that the tests share."""

    at: Machines
    folder: Path
    spark: Spark
    fleet: Fleet
    bare: Path
    token: Path

    def job(
        self, name: str, what: str, operator: str, work: Path, machine: Machine | None = None, **more: object
    ) -> Job:
        program = str(DRIVER), what, self.fleet.address, operator, str(work)
        given: Any = {"python": str(self.bare), "program": program, **more}
        return Job(machine or self.at.here, self.folder / name, token=self.token, **given)

    @property
    def hosts(self) -> set[str]:
        return {self.at[name].address for name in WORKERS}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("standalone")
    bare = bare_python(folder / "bare")
    with (
        machines(*WORKERS, "cloud", "edge", "away") as at,
        Spark(at, folder / "spark") as spark,
        Fleet(at, folder / "fleet") as fleet,
    ):
        for name in OPERATORS:
            fleet.cluster.deploy(Tally, PARTITIONS, name=name, sites=("cloud", "edge"))
        fleet.cluster.deploy(Tally, PARTITIONS, name="Hidden", sites=("hidden",))
        assert fleet.certificates is not None
        who = Identity.of("data", "jobs", (*OPERATORS, "Hidden"))
        text, _ = fleet.certificates.authority.token(who, timedelta(hours=8))
        token = folder / "jobs.token"
        write_private(token, text.encode())
        yield Site(at, folder, spark, fleet, bare, token)


@pytest.fixture(scope="module")
def sent(site: Site) -> tuple[str, ...]:
    """Options of ``spark-submit`` that send stateflow along."""
    return "--py-files", str(write_package(site.folder / "stateflow.zip").file)


@pytest.fixture
def running() -> Iterator[list[Job]]:
    """Jobs that do not outlive a test."""
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.end()


def test_executors_without_the_package_are_refused_in_one_line(site: Site, running: list[Job]) -> None:
    job = site.spark.submit(site.job("refused", "refused", "Refused", site.folder))
    running.append(job)
    found = job.result()
    assert found["code"] == "operator_not_importable"
    assert found["said"].startswith(
        "operator_not_importable: the executors' Python lacks what the operator's tasks need: ModuleNotFoundError: "
        "No module named 'stateflow'"
    )
    assert "spark-submit --py-files with a zip of `stateflow spark package`" in found["said"]
    assert len(found["said"].splitlines()) == 1
    assert read(site.fleet.cluster, "Refused", "n") == {}


def test_the_package_is_sent_along(site: Site, sent: tuple[str, ...], running: list[Job]) -> None:
    """The package is sent along, and a replica whose address is of use on its own machine only is refused."""
    work = Work(site.folder / "sent-work")
    work.feed(4)
    work.enough()
    job = site.spark.submit(site.job("sent", "both", "Sent", work.folder, options=sent))
    running.append(job)
    found = job.result()
    Expected(work.folder / "input").check(site.fleet, "Sent", work.folder / "output")
    assert job.hosts() == site.hosts, "each worker had tasks"
    if site.at.why:
        pytest.skip(f"every address is reached from everywhere: {site.at.why}")
    hidden = next(each.address for each in site.fleet.cluster.status().replicas if each.name == "hidden-0")
    assert hidden.startswith("127.0.0.1:")
    assert found["code"] == "unavailable"
    assert found["said"].startswith("unavailable: executors on ")
    name = socket.gethostname()
    wanted = {f"executors on {name} ({host}) cannot reach hidden-0 at {hidden}, but" for host in site.hosts}
    assert any(each in found["said"] for each in wanted), found["said"]
    assert found["said"].endswith("and open its port to them")
    assert len(found["said"].splitlines()) == 1
    assert read(site.fleet.cluster, "Hidden", "n") == {}


def test_a_packed_environment_and_a_driver_that_is_started_again_elsewhere(site: Site, running: list[Job]) -> None:
    archive = packed_environment(site.folder / "env", site.bare)
    work = Work(site.folder / "packed-work")
    work.feed(6)

    def submitted(name: str, machine: Machine) -> Job:
        options = "--archives", f"{archive}#env"
        packed = site.job(name, "flow", "Packed", work.folder, machine, options=options, python="./env/bin/python")
        running.append(packed)
        return site.spark.submit(packed)

    first = submitted("packed", site.at.here)
    work.flows(first, 2)
    work.is_amid(first)
    first.kill()
    assert work.committed() < work.files
    work.feed(2)
    work.enough()
    second = submitted("packed-again", site.at["away"])
    second.result()
    assert work.committed() == work.files
    Expected(work.folder / "input").check(site.fleet, "Packed", work.folder / "output")
    assert second.hosts() == site.hosts


def test_executors_come_and_go_and_are_killed(site: Site, sent: tuple[str, ...], running: list[Job]) -> None:
    work = Work(site.folder / "dynamic-work")
    settings = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.timeout": "2s",
        "spark.dynamicAllocation.initialExecutors": "2",
        "spark.dynamicAllocation.maxExecutors": "2",
        "spark.dynamicAllocation.executorIdleTimeout": "2s",
        "spark.dynamicAllocation.cachedExecutorIdleTimeout": "2s",
        "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
    }
    work.feed(6)
    job = site.spark.submit(site.job("dynamic", "flow", "Dynamic", work.folder, options=sent, settings=settings))
    running.append(job)
    work.flows(job, 2)
    work.is_amid(job)
    victim = site.spark.executors()[0]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: gone(victim), "it is killed", PATIENCE_S)
    work.flows(job, work.files - work.committed())
    eventually(lambda: not site.spark.executors(), "who has nothing to do goes", PATIENCE_S)
    job.check()
    work.feed(3)
    work.enough()
    job.result()
    Expected(work.folder / "input").check(site.fleet, "Dynamic", work.folder / "output")
    added = {event["Executor ID"] for event in job.events("ExecutorAdded")}
    removed = [event["Removed Reason"] for event in job.events("ExecutorRemoved")]
    assert len(added) >= 3, "others came when there was something to do again"
    assert any("exit" in reason.lower() or "lost" in reason.lower() for reason in removed), removed


def test_a_client_of_spark_connect_sends_the_package_itself(
    site: Site, sent: tuple[str, ...], running: list[Job]
) -> None:
    """A client sends the package to executors of a server that lack it."""
    work = Work(site.folder / "connected-work")
    work.feed(2)
    shutil.copy(sent[1], work.folder / "stateflow.zip")
    with socket.create_server((site.at.here.address, 0)) as free:
        port = free.getsockname()[1]
    server = site.job(
        "server",
        "",
        "",
        work.folder,
        program=("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"),
        settings={
            "spark.connect.grpc.binding.address": site.at.here.address,
            "spark.connect.grpc.binding.port": str(port),
        },
    )
    running.append(site.spark.submit(server))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "SPARK_REMOTE": f"sc://{site.at.here.address}:{port}",
        "STATEFLOW_TOKEN_FILE": str(site.token),
    }
    for name in ("CA", "CERT", "KEY", "CRL"):
        environment.pop(f"STATEFLOW_TLS_{name}", None)
    command = [sys.executable, str(DRIVER), "sends", site.fleet.address, "Connected", str(work.folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    assert done.returncode == 0, f"{done.stderr[-4000:]}\n{server.told()}"
    found = found_in(done.stdout)
    assert found["code"] == "operator_not_importable"
    expected = Expected(work.folder / "input")
    assert found["rows"] == sorted(map(list, expected.outputs))
    assert read(site.fleet.cluster, "Connected", "n") == {(key, None): n for key, n in expected.n.items()}


def test_standalone_takes_no_python_job_in_cluster_mode(site: Site) -> None:
    """Spark itself takes no Python job in cluster mode here, as docs/howto/run-on-a-spark-cluster.md says."""
    command = [SPARK_HOME / "bin" / "spark-submit", "--master", site.spark.url, "--deploy-mode", "cluster", DRIVER]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode != 0
    assert (
        "Cluster deploy mode is currently not supported for python applications on standalone clusters" in done.stderr
    )
