"""A controller and replicas as real processes on this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from stateflow.agent.local import LocalLauncher
from stateflow.client import Cluster, Migration, StreamClient
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import InvalidArgument, NameTaken, StateflowError, Unavailable, from_wire
from stateflow.launching import Command, Launcher, Started
from stateflow.launching import Process as Child
from stateflow.node.workers import WORKERS, nobody_in
from stateflow.runtime.code import check_outside
from stateflow.runtime.operator import Operator, check_class
from stateflow.settings import ReplicaSettings
from stateflow.testing.fork_server import ForkLauncher, readable
from stateflow.types import check_name, worker_name

log = logging.getLogger(__name__)
START_TIMEOUT_S = 60.0


class Process:
    """One stateflow process. Its log goes to a file; its first line of output says where it listens.

    Args:
        within: a command that starts it, such as ``ip netns exec NAME``.
    """

    def __init__(
        self, name: str, arguments: list[str], log: Path, python_path: list[str], within: Sequence[str] = ()
    ) -> None:
        self.name = name
        self._within = within
        self._arguments = arguments
        self._log = log
        self._python_path = python_path
        self.address = ""
        self._launcher: Launcher[Command, Started] = (
            ForkLauncher() if sys.platform == "linux" and not within else LocalLauncher(rotates=False)
        )
        self._started: Started | None = None

    @property
    def _child(self) -> Child | None:
        return None if self._started is None else self._started.process

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        """Without waiting; call :meth:`wait_ready`."""
        arguments = [*self._arguments, "--json", "--stop-with-parent"]
        paths = [*self._python_path, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
        self._started = self._launcher.start(Command(self.name, arguments, environment, self._log, self._within))

    def wait_ready(self) -> str:
        """The address it listens on. Raises what it ended with."""
        assert self._child is not None
        assert self._child.stdout is not None
        out = self._child.stdout
        line = out.readline() if readable([out.fileno()], START_TIMEOUT_S) else ""
        try:
            said = json.loads(line)
        except ValueError:
            said = {}
        if "address" in said:
            self.address = said["address"]
            return self.address
        self.stop()
        if "error" in said:
            raise from_wire(said["error"])
        raise Unavailable(f"{self.name} did not start: {self._tail()}", remedy="see its log", log=self._log)

    def _tail(self) -> str:
        lines = self._log.read_text().strip().splitlines()
        return lines[-1] if lines else "no output"

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nobody is told."""
        if self._started is not None:
            self._launcher.kill(self._started)
        self._wait_for_end(None)

    def ask_to_stop(self) -> None:
        """Without waiting; call :meth:`stop`."""
        if self._started is not None:
            self._launcher.stop(self._started)

    def stop(self) -> None:
        self.ask_to_stop()
        try:
            self._wait_for_end(15.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def _wait_for_end(self, timeout_s: float | None) -> None:
        if self._child is not None:
            self._child.wait(timeout_s)
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()

    @property
    def running(self) -> bool:
        return self._started is not None and self._launcher.is_running(self._started)


def _checked_sites(sites: object) -> dict[str, int]:
    """Raises InvalidArgument."""
    if not isinstance(sites, Mapping):
        raise InvalidArgument(f"sites={sites!r} does not say how many replicas", remedy="write sites={'cloud': 1, …}")
    for site, count in sites.items():
        check_name("site", site)
        if not isinstance(count, int) or count < 1:
            raise InvalidArgument(f"{count!r} replicas at {site} are not possible", remedy="give each site 1 or more")
    if not sites:
        raise InvalidArgument("no site has a replica", remedy="write sites={'cloud': 1, …}")
    return dict(sites)


class LocalCluster:
    """A context manager: controller ``controller``, replicas ``<site>-0``, ``<site>-1``, …, operators deployed.

    Args:
        operators: operator classes to deploy (one, several, or none).
        sites: site → number of replicas.
        partitions: of each operator.
        data_dir: kept when given; else a temporary directory that ``stop`` removes.
        deploy_to: sites that get the partitions at first; all by default.
        workers: processes of each replica.
        environment of the processes is this process's; ``STATEFLOW_REPLICA_*`` settings apply.

    Raises InvalidArgument inside a replica, and where code of an operator is being loaded.
    """

    def __init__(
        self,
        *operators: type[Operator],
        sites: Mapping[str, int] | None = None,
        partitions: int = 16,
        data_dir: str | Path | None = None,
        deploy_to: tuple[str, ...] = (),
        checkpoint_interval_s: float = 60.0,
        workers: int = 1,
    ) -> None:
        check_outside("a cluster")
        for operator in operators:
            check_class(operator)
        self._operators = operators
        self._sites = _checked_sites({"local": 1} if sites is None else sites)
        self._partitions = partitions
        self._temporary = data_dir is None
        self.data_dir = Path(data_dir or tempfile.mkdtemp(prefix="stateflow-"))
        self._deploy_to = deploy_to
        self._interval_s, self._workers = checkpoint_interval_s, workers
        self.processes: dict[str, Process] = {}
        self.address = ""

    # -- life ---------------------------------------------------------------------------------------------

    def start(self) -> LocalCluster:
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        ledger = f"sqlite:///{self.data_dir / 'ledger.db'}"
        controller = self._process(
            "controller", ["controller", "--listen", self._listen("controller"), "--ledger", ledger]
        )
        controller.start()
        self.address = controller.wait_ready()
        # a restarted controller must come back where its replicas look for it
        controller._arguments[controller._arguments.index(self._listen("controller"))] = self.address
        names = [f"{site}-{number}" for site, count in self._sites.items() for number in range(count)]
        for name in names:
            self._process(name, self._replica_arguments(name)).start()
        for name in names:
            address = self.processes[name].wait_ready()
            if self._workers == 1:  # behind it others may be taken by then
                arguments = self.processes[name]._arguments
                arguments[arguments.index(self._listen(name))] = address
        self._wait_for_members({worker_name(name, number) for name in names for number in range(self._workers)})
        for operator in self._operators:
            self.cluster.deploy(operator, self._partitions, sites=self._deploy_to)
            if self._deploy_to:  # at first only: they may go anywhere
                self.cluster.deploy(operator, self._partitions, sites=())

    def _process(self, name: str, arguments: list[str]) -> Process:
        python_path = [str(Path.cwd()), *filter(None, sys.path)]  # what can be imported here can be there
        process = Process(name, arguments, self.data_dir / f"{name}.log", python_path, self._within(name))
        self.processes[name] = process
        return process

    def _listen(self, name: str) -> str:
        """Where a process is to listen; on other networks than loopback a subclass says."""
        return "127.0.0.1:0"

    def _within(self, name: str) -> Sequence[str]:
        """The command that starts a process, nothing by default."""
        return ()

    def _replica_arguments(self, name: str) -> list[str]:
        return [
            "replica",
            *("--name", name),
            *("--site", name.rpartition("-")[0]),
            *("--controller", self.address),
            *("--listen", self._listen(name)),
            *("--data-dir", str(self.data_dir / name)),
            *("--checkpoints", str(self.data_dir / "checkpoints")),
            *("--checkpoint-interval", str(self._interval_s)),
            *("--workers", str(self._workers)),
        ]

    def _wait_for_members(self, names: set[str]) -> None:
        deadline = SYSTEM_CLOCK.monotonic() + START_TIMEOUT_S
        with contextlib.suppress(Unavailable):
            while SYSTEM_CLOCK.monotonic() < deadline:
                missing = names - {r.name for r in self.cluster.status().replicas if r.alive}
                if not missing:
                    return
                time.sleep(0.05)
        raise Unavailable(f"not every replica came up within {START_TIMEOUT_S:.0f} s", remedy=f"see {self.data_dir}")

    def stop(self) -> None:
        replicas = [process for name, process in self.processes.items() if name != "controller"]
        for process in replicas:
            process.ask_to_stop()
        for process in reversed(self.processes.values()):
            process.stop()
        try:
            for process in replicas:  # workers of one that was killed may be ending
                if (self.data_dir / process.name / WORKERS).is_dir():
                    with self._nobody_in(process.name):
                        pass
        except StateflowError as error:  # no reason to hide what the caller fails with
            log.warning("%s stays: %s", self.data_dir, error)
            return
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def _nobody_in(self, name: str) -> AbstractContextManager[None]:
        return nobody_in(self.data_dir / name, ReplicaSettings().stop_timeout_s)

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- faults -------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """SIGKILL to ``controller`` or a replica."""
        self._named(name).kill()

    def restart(self, name: str) -> None:
        """Start a killed process again, on the same data, and at the same address where it has no workers."""
        process = self._named(name)
        if process.running:
            raise InvalidArgument(f"{name} is running", remedy="kill it first")
        process.start()
        process.wait_ready()

    def replace(self, name: str) -> None:
        """Start a killed replica again with an empty data directory, and have it accepted as what it is now: what the
        former one had is lost.

        Raises DataDirLocked, with nothing lost, when workers of the former one do not end.
        """
        process = self._named(name)
        if process.running:
            raise InvalidArgument(f"{name} is running", remedy="kill it first")
        with self._nobody_in(name):
            shutil.rmtree(self.data_dir / name)
        self.restart(name)
        deadline = SYSTEM_CLOCK.monotonic() + START_TIMEOUT_S
        workers = [worker_name(name, number) for number in range(self._workers)]
        for worker in workers:
            while not self._is_in(worker):
                try:
                    self.cluster.replace(worker)
                    break
                except (InvalidArgument, NameTaken):  # it has not asked yet, or the lease of the former one still runs
                    if SYSTEM_CLOCK.monotonic() > deadline:
                        raise
                time.sleep(0.05)
        self._wait_for_members(set(workers))  # it asks again now and then

    def _is_in(self, name: str) -> bool:
        """A worker whose predecessor had nothing is let in unasked."""
        if self._workers == 1:
            return False
        status = self.cluster.status()
        refused = any(each.name == name for each in status.refused)
        return not refused and any(each.name == name and each.alive for each in status.replicas)

    def freeze(self, name: str) -> None:
        """SIGSTOP: the process does nothing, and does not know it."""
        os.kill(self._named(name).pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT to what was frozen."""
        os.kill(self._named(name).pid, signal.SIGCONT)

    def _named(self, name: str) -> Process:
        try:
            return self.processes[name]
        except KeyError:
            raise InvalidArgument(
                f"there is no process {name!r}", remedy=f"use one of {', '.join(self.processes)}"
            ) from None

    # -- use ----------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.address)

    def stream(self, operator: str, source: str, **options: Any) -> StreamClient:
        return self.cluster.stream(operator, source, **options)

    def migrate(self, operator: str, partitions: list[int], to: str, **options: Any) -> Migration:
        """As :meth:`~stateflow.client.Cluster.migrate`."""
        return self.cluster.migrate(operator, partitions, to, **options)
