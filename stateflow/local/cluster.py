"""Clusters of real processes on this machine.

:class:`LocalCluster` starts controllers and replicas, deploys operators, and causes faults: it kills, freezes, restarts
and replaces processes. :class:`Certificates` issues certificates to the processes and the users of such a cluster.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from stateflow.client import Cluster, Migration, StreamClient
from stateflow.clock import SYSTEM_CLOCK
from stateflow.code.loading import check_outside
from stateflow.durable import listed, write_durably
from stateflow.errors import InvalidArgument, NameTaken, StateflowError, Unavailable
from stateflow.local.process import START_TIMEOUT_S, Process
from stateflow.node.workers import WORKERS, nobody_in
from stateflow.operator.operator import Operator, check_class
from stateflow.partitioner import check_partitions
from stateflow.security.plain import CRL, OWN_CERT, environment, host_of, variables_of
from stateflow.security.roles import Identity
from stateflow.settings import ReplicaSettings
from stateflow.types import WORKERS_MAX, check_name, worker_name


class Certificates:
    """A certificate authority and its certificates, in ``directory``. Each certificate has a folder of its own."""

    def __init__(self, directory: Path) -> None:
        from stateflow.security.authority import Authority

        self._directory = directory
        self.authority = Authority.open_or_init(directory / "authority", "local")
        self._own = ExitStack()

    def issue(self, name: str, role: str, host: str = "", operators: tuple[str, ...] = ()) -> Mapping[str, str]:
        """Issues a certificate, unless this name and role already have one.

        Returns the environment variables that name the certificate's files.
        """
        out = self._directory / f"{role}-{name}"
        if not (out / OWN_CERT).exists():
            self.authority.issue(Identity.of(role, name, operators), [host] if host else [], out)
        return variables_of(out)

    def renew(self) -> None:
        """Renews all certificates, with new keys."""
        for out in self._issued():
            self.authority.renew(out)

    def revoke(self, who: str) -> None:
        """Revokes the certificate of ``who``, and gives all identities the new revocation list."""
        self.authority.revoke(who)
        for out in self._issued():
            write_durably(out / CRL, self.authority.crl.read_bytes(), 0o644)

    def _issued(self) -> list[Path]:
        return [path for path in listed(self._directory) if (path / OWN_CERT).exists()]

    def begin(self) -> None:
        """Makes this process use an administrator's certificate until :meth:`end`."""
        self.end()
        self._own.enter_context(environment(self.issue("local", "admin")))

    def end(self) -> None:
        self._own.close()


log = logging.getLogger(__name__)
CONTROLLERS_MAX = 9
INTERVAL_MAX_S = 1e9
#: arguments with empty addresses; those in the settings file or the environment would apply to all processes
_NOWHERE = ("--advertise", "", "--metrics", "")


def _checked_sites(sites: object) -> dict[str, int]:
    """Returns ``sites`` as site → number of replicas. Raises InvalidArgument if it is not valid."""
    if not isinstance(sites, Mapping):
        raise InvalidArgument(
            f"sites={sites!r} does not map sites to replica counts", remedy="pass sites={'cloud': 1, …}"
        )
    for site, count in sites.items():
        if not isinstance(site, str):
            raise InvalidArgument(f"{site!r} is not a valid site name", remedy="pass sites={'cloud': 1, …}")
        check_name("site", site)
        if not isinstance(count, int) or count < 1:
            raise InvalidArgument(
                f"invalid number of replicas: {count!r} at {site}", remedy="use 1 or more for each site"
            )
    if not sites:
        raise InvalidArgument("no site given", remedy="pass sites={'cloud': 1, …}")
    return dict(sites)


def _checked_count(what: str, count: object, most: int) -> int:
    if not isinstance(count, int) or not 1 <= count <= most:
        raise InvalidArgument(f"invalid number of {what}: {count!r}", remedy=f"use 1 to {most}")
    return count


def _checked_target(deploy_to: object, sites: Mapping[str, int]) -> tuple[str, ...]:
    """Returns ``deploy_to`` as a tuple. Raises InvalidArgument unless all of it are ``sites``."""
    given = tuple(deploy_to) if isinstance(deploy_to, Iterable) and not isinstance(deploy_to, str) else (deploy_to,)
    if isinstance(deploy_to, str) or not set(given) <= set(sites):
        raise InvalidArgument(
            f"deploy_to={deploy_to!r} are not sites of this cluster", remedy=f"use some of ({', '.join(sites)},)"
        )
    return given


def _make(directory: Path) -> None:
    """Creates the data directory if there is none. Raises InvalidArgument if it cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        why = "" if os.access(directory, os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:  # a null character
        why = str(error)
    if why:
        raise InvalidArgument(
            f"the data directory cannot be used: {why}", remedy="pass a writable data_dir", path=directory
        )


class LocalCluster:
    """A context manager that runs controllers, and replicas with deployed operators, as processes of this machine.

    The replicas are named ``<site>-0``, ``<site>-1``, …. The processes inherit this process's environment, so
    ``STATEFLOW_REPLICA_*`` settings apply.

    Args:
        operators: operator classes to deploy (one, several, or none).
        sites: site → number of replicas; None: one replica at the site ``local``.
        partitions: number of partitions of each operator.
        data_dir: data directory, which is kept; None: a temporary directory that ``stop`` removes.
        deploy_to: sites at which the partitions are created; they may move to all sites later; empty: all sites.
        checkpoint_interval_s: seconds between two rounds of checkpoints.
        workers: number of worker processes of each replica.
        controllers: number of controllers, named ``controller``, ``controller-1``, …. The first one leads; if it ends,
            another one takes over.
        tls: True gives the cluster its own certificate authority, and certificates to its processes. This process has
            an administrator's certificate while the cluster runs.

    Raises InvalidArgument for invalid arguments, inside a replica, and while an operator's code is being loaded.

    Example: ``with LocalCluster(Count, sites={"cloud": 1, "edge-1": 1}) as cluster: print(cluster.address)``
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
        controllers: int = 1,
        tls: bool = False,
    ) -> None:
        check_outside("a cluster")
        for operator in operators:
            check_class(operator)
        self._operators = operators
        self._sites = _checked_sites({"local": 1} if sites is None else sites)
        self._partitions = check_partitions(partitions)
        self._temporary = data_dir is None
        self._deploy_to = _checked_target(deploy_to, self._sites)
        if not isinstance(checkpoint_interval_s, int | float) or not 0 <= checkpoint_interval_s <= INTERVAL_MAX_S:
            raise InvalidArgument(
                f"invalid checkpoint_interval_s: {checkpoint_interval_s!r}", remedy="use seconds; 0: no checkpoints"
            )
        self._interval_s, self._workers = checkpoint_interval_s, _checked_count("workers", workers, WORKERS_MAX)
        _checked_count("controllers", controllers, CONTROLLERS_MAX)
        if data_dir == "" or not isinstance(data_dir, str | os.PathLike | None):
            raise InvalidArgument(f"data_dir={data_dir!r} is not a path", remedy="pass a directory, or None")
        self.controllers = ("controller", *(f"controller-{number}" for number in range(1, controllers)))
        if taken := sorted({*self.controllers} & {*self._replicas()}):
            raise InvalidArgument(
                f"a replica and a controller would both be named {taken[0]}", remedy="give the site another name"
            )
        self._pid = os.getpid()
        self.data_dir = Path(tempfile.mkdtemp(prefix="stateflow-") if data_dir is None else data_dir)
        self.processes: dict[str, Process] = {}
        self.address = ""  # addresses of all controllers
        if tls:
            _make(self.data_dir)
        #: certificates of the cluster; None: the cluster uses plain text
        self.certificates = Certificates(self.data_dir / "certificates") if tls else None

    @property
    def ledger(self) -> str:
        """The URL of the cluster's ledger."""
        from stateflow.ledger.database import sqlite_url

        return sqlite_url(self.data_dir / "ledger.db")

    # -- life ---------------------------------------------------------------------------------------------

    def start(self) -> LocalCluster:
        if any(process.running for process in self.processes.values()):
            raise InvalidArgument("this cluster has been started already", remedy="use it, or stop it first")
        _make(self.data_dir)
        try:
            if self.certificates is not None:
                place = self.data_dir / "certificates"
                if not place.exists():  # the last stop has removed them
                    self.certificates = Certificates(place)
                self.certificates.begin()
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        self.address = ",".join(map(self._start_controller, self.controllers))
        names = self._replicas()
        for name in names:
            self._process(name, self._replica_arguments(name)).start()
        for name in names:
            self.processes[name].wait_ready()
            if self._workers == 1:  # with several workers, their consecutive ports may be in use at a restart
                self._stay(name)
        self._wait_for_members({worker_name(name, number) for name in names for number in range(self._workers)})
        for operator in self._operators:
            self.cluster.deploy(operator, self._partitions, sites=self._deploy_to)
            if self._deploy_to:  # only the creation is confined: the partitions may move to all sites afterwards
                self.cluster.deploy(operator, self._partitions, sites=())

    def _replicas(self) -> list[str]:
        return [f"{site}-{number}" for site, count in self._sites.items() for number in range(count)]

    def _start_controller(self, name: str) -> str:
        arguments = ["controller", "--listen", self._listen(name), "--ledger", self.ledger, *_NOWHERE]
        self._process(name, arguments).start()
        self.processes[name].wait_ready()
        return self._stay(name)

    def _stay(self, name: str) -> str:
        """Makes a process listen at its present address again after a restart. Returns this address."""
        process = self.processes[name]
        process._arguments[process._arguments.index(self._listen(name))] = process.address
        return process.address

    def _process(self, name: str, arguments: list[str]) -> Process:
        python_path = [str(Path.cwd()), *filter(None, sys.path)]  # the process can import what this one can import
        environment: Mapping[str, str] = {}
        if self.certificates is not None:
            role = "controller" if name in self.controllers else "node"
            environment = self.certificates.issue(name, role, host_of(self._listen(name)))
        process = Process(name, arguments, self.data_dir / f"{name}.log", python_path, self._within(name), environment)
        self.processes[name] = process
        return process

    def _listen(self, name: str) -> str:
        """Returns the ``--listen`` address for a process. Subclasses may use another network than loopback."""
        return "127.0.0.1:0"

    def _within(self, name: str) -> Sequence[str]:
        """Returns a prefix for the command of a process, such as ``ip netns exec NAME``; empty: no prefix. Subclasses
        may override this method."""
        return ()

    def _replica_arguments(self, name: str) -> list[str]:
        return [
            "replica",
            *("--name", name),
            *("--site", name.rpartition("-")[0]),
            *("--controller", self.address),
            *("--listen", self._listen(name)),
            *("--data-dir", str(self.data_dir / name)),
            *("--checkpoints", str(self.data_dir.absolute() / "checkpoints")),  # a leading @ would name a file
            *("--checkpoint-interval", str(self._interval_s)),
            *("--workers", str(self._workers)),
            *_NOWHERE,
        ]

    def _wait_for_members(self, names: set[str]) -> None:
        deadline = SYSTEM_CLOCK.monotonic() + START_TIMEOUT_S
        with contextlib.suppress(Unavailable):
            while SYSTEM_CLOCK.monotonic() < deadline:
                missing = names - {r.name for r in self.cluster.status().replicas if r.alive}
                if not missing:
                    return
                time.sleep(0.05)
        raise Unavailable(
            f"some replicas did not start within {START_TIMEOUT_S:.0f} s",
            remedy=f"find the cause in the logs in {self.data_dir}",
        )

    def stop(self) -> None:
        """Ends the processes, and removes a temporary data directory. Does nothing in a forked process, because the
        cluster belongs to the process that made it."""
        if os.getpid() != self._pid:
            return
        replicas = [process for name, process in self.processes.items() if name not in self.controllers]
        for process in replicas:
            process.ask_to_stop()
        for process in reversed(self.processes.values()):
            process.stop()
        if self.certificates is not None:
            self.certificates.end()
        try:
            for process in replicas:  # workers of a killed replica may still be ending
                if (self.data_dir / process.name / WORKERS).is_dir():
                    with self._nobody_in(process.name):
                        pass
        except StateflowError as error:  # only logged, so that it does not hide an error that the caller is raising
            log.warning("data directory %s is kept: %s", self.data_dir, error)
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
        """Kills a controller or a replica with SIGKILL."""
        self._named(name).kill()

    def restart(self, name: str) -> None:
        """Starts a killed process again on the same data, and at the same address unless it has several workers."""
        process = self._named(name)
        if process.running:
            raise InvalidArgument(f"{name} is running", remedy="kill it first")
        process.start()
        process.wait_ready()

    def replace(self, name: str) -> None:
        """Starts a killed replica again with an empty data directory, and makes the cluster accept it.

        The former replica's state is lost. Raises DataDirLocked, before anything is lost, if workers of the former
        replica do not end.
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
                except (InvalidArgument, NameTaken):  # not registered yet, or the former worker's lease still runs
                    if SYSTEM_CLOCK.monotonic() > deadline:
                        raise
                time.sleep(0.05)
        self._wait_for_members(set(workers))  # each worker asks for its name again after a while

    def _is_in(self, name: str) -> bool:
        """Tells whether a new worker was admitted without :meth:`Cluster.replace`.

        That happens if its predecessor had no partitions.
        """
        if self._workers == 1:
            return False
        status = self.cluster.status()
        refused = any(each.name == name for each in status.refused)
        return not refused and any(each.name == name and each.alive for each in status.replicas)

    def freeze(self, name: str) -> None:
        """Freezes a process with SIGSTOP. The process does nothing until :meth:`thaw`, and does not notice the
        pause."""
        os.kill(self._named(name).pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Continues a frozen process, with SIGCONT."""
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
        """Moves partitions, see :meth:`~stateflow.client.Cluster.migrate`."""
        return self.cluster.migrate(operator, partitions, to, **options)
