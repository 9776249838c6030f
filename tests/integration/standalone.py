"""A standalone Spark cluster and a stateflow cluster beside it, whose machines are network namespaces.

The machines share a file system, as in such clusters, and nothing else. Executors have an environment and a Python of
their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyspark

from benchmarks.netns import HOST, CannotShape, Link, network
from stateflow.testing import LocalCluster
from tests.integration.processes import children, command, gone
from tests.integration.support import eventually
from tests.kills.files import some_rows, write_file

ROOT = Path(__file__).resolve().parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
DRIVER = Path(__file__).with_name("standalone_driver.py")
PATIENCE_S = 300.0
SITES = ("cloud", "edge", "hidden")
WORKERS = ("worker-a", "worker-b")
#: these JVMs live for seconds
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: variables that started processes inherit: neither this Python's path nor any of stateflow's
_KEPT = ("PATH", "HOME", "JAVA_HOME", "LANG", "TMPDIR")
_CORES = 1
_JOB = {
    "spark.cores.max": str(_CORES * len(WORKERS)),
    "spark.executor.cores": str(_CORES),
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": _QUICK,
    "spark.driver.memory": "512m",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.locality.wait": "0s",
    # both executors are there before the first task
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


# -- machines -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine. ``space``: its network namespace; empty: the one of this process."""

    space: str
    address: str

    def inside(self, *command: object) -> list[str]:
        within = ["ip", "netns", "exec", self.space] if self.space else []
        return [*within, *map(str, command)]


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines of a test. ``why``: why all are loopback addresses of one machine; empty: each has its own namespace."""

    here: Machine
    others: Mapping[str, Machine]
    why: str = ""

    def __getitem__(self, name: str) -> Machine:
        return self.others[name]


@contextlib.contextmanager
def machines(*names: str) -> Iterator[Machines]:
    with contextlib.ExitStack() as undo:
        try:
            spaces = undo.enter_context(network(names, Link()))
        except CannotShape as error:
            loopback = {name: Machine("", f"127.0.0.{number}") for number, name in enumerate(names, 10)}
            found = Machines(Machine("", "127.0.0.1"), loopback, str(error))
        else:
            found = Machines(Machine("", HOST), {name: Machine(*where) for name, where in spaces.items()})
        yield found


def _environment(address: str, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": address, **more}


def _started(words: list[str], out: Path, err: Path, environment: Mapping[str, str], folder: Path) -> Any:
    """Starts a process that does not outlive this one, however this one ends."""
    with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    with out.open("ab") as stdout, err.open("ab") as stderr:
        return subprocess.Popen(
            [*with_us, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        )


# -- stateflow ------------------------------------------------------------------------------------------------


class Fleet(LocalCluster):
    """A controller here, and a replica at each site, which listens at all addresses of its machine and advertises one.

    The replica at ``hidden`` advertises a loopback address, which no other machine reaches.
    """

    def __init__(self, at: Machines, folder: Path) -> None:
        super().__init__(sites=dict.fromkeys(SITES, 1), data_dir=folder, checkpoint_interval_s=0, tls=True)
        self._machines = at

    def _at(self, name: str) -> Machine:
        if name in self.controllers:
            return self._machines.here
        site = name.removesuffix("-0")
        return Machine("", "127.0.0.1") if site == "hidden" else self._machines[site]

    def _listen(self, name: str) -> str:
        return f"{self._at(name).address}:0"

    def _within(self, name: str) -> list[str]:
        return self._at(name).inside()

    def _replica_arguments(self, name: str) -> list[str]:
        arguments = super()._replica_arguments(name)
        arguments[arguments.index("--listen") + 1] = "0.0.0.0:0"
        arguments[arguments.index("--advertise") + 1] = self._listen(name)
        return arguments

    def _stay(self, name: str) -> str:
        return super()._stay(name) if name in self.controllers else self.processes[name].address


# -- Spark ----------------------------------------------------------------------------------------------------


class Spark:
    """A master here, and a worker on each of two machines."""

    def __init__(self, at: Machines, folder: Path) -> None:
        self._at, self._folder = at, folder
        self._daemons: dict[str, Any] = {}
        self.url = ""

    def __enter__(self) -> Spark:
        self._folder.mkdir()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in reversed(self._daemons.values()):
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self) -> None:
        here = self._at.here
        where = ["--host", here.address, "--port", "0", "--webui-port", "0"]
        self._daemon("master", here, "org.apache.spark.deploy.master.Master", *where)
        self.url = self._said("master", r"Starting Spark master at (spark://\S+)")
        for name in WORKERS:
            self.start_worker(name)
        for name in WORKERS:
            self._said(name, "(Successfully registered) with master")

    def start_worker(self, name: str) -> None:
        machine = self._at[name]
        where = ["--host", machine.address, "--port", "0", "--webui-port", "0"]
        size = ["--cores", str(_CORES), "--memory", "2g", "--work-dir", str(self._folder / name)]
        self._daemon(name, machine, "org.apache.spark.deploy.worker.Worker", *where, *size, self.url)

    def kill_worker(self, name: str) -> None:
        """Kills a worker, whose executors notice that and end."""
        self._daemons[name].kill()
        self._daemons[name].wait()

    def check(self) -> None:
        """Checks that the master and all workers run. Raises AssertionError."""
        for name, daemon in self._daemons.items():
            assert daemon.poll() is None, f"{name}: {(self._folder / f'{name}.log').read_text()[-3000:]}"

    def _daemon(self, name: str, machine: Machine, *words: str) -> None:
        options = f"{_QUICK} -Dspark.master.rest.enabled=false"
        environment = _environment(machine.address, SPARK_DAEMON_MEMORY="256m", SPARK_DAEMON_JAVA_OPTS=options)
        start = machine.inside(SPARK_HOME / "bin" / "spark-class", *words)
        log = self._folder / f"{name}.log"
        self._daemons[name] = _started(start, log, log, environment, self._folder)

    def _said(self, name: str, pattern: str) -> str:
        log = self._folder / f"{name}.log"

        def found() -> str | None:
            assert self._daemons[name].poll() is None, log.read_text()[-3000:]
            match = re.search(pattern, log.read_text())
            return None if match is None else match[1]

        return str(eventually(found, f"{name}: {pattern}", PATIENCE_S))

    def executors(self) -> list[int]:
        """JVMs on the workers' machines that run tasks."""
        found = [child for daemon in self._daemons.values() for child in children(daemon.pid)]
        return [pid for pid in found if "CoarseGrainedExecutorBackend" in command(pid)]

    def submit(self, job: Job) -> Job:
        job.start(self.url)
        return job


@dataclass
class Job:
    """A job that ``spark-submit`` submits on a machine.

    Args:
        python: path of Python on the executors.
        token: token file of the driver.
        program: the submitted program, and its arguments.
        options: options of ``spark-submit``.
        settings: settings of Spark.
    """

    at: Machine
    folder: Path
    python: str
    token: Path
    program: tuple[str, ...]
    options: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    popen: Any = None

    def start(self, master: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "events").mkdir(exist_ok=True)
        own = {
            "spark.driver.host": self.at.address,
            "spark.driver.bindAddress": self.at.address,
            "spark.eventLog.dir": (self.folder / "events").as_uri(),
        }
        settings = {**_JOB, **own, **self.settings}
        conf = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
        submit = self.at.inside(SPARK_HOME / "bin" / "spark-submit", "--master", master, *conf, *self.options)
        environment = _environment(
            self.at.address,
            PYSPARK_PYTHON=self.python,
            PYSPARK_DRIVER_PYTHON=sys.executable,
            PYTHONPATH=str(ROOT),  # for the driver
            SPARK_SUBMIT_OPTS=_QUICK,
            STATEFLOW_TOKEN_FILE=str(self.token),
        )
        words = [*submit, *self.program]
        self.popen = _started(words, self.folder / "out", self.folder / "err", environment, self.folder)

    def check(self) -> None:
        assert self.popen.poll() is None, f"the driver ended by itself: {self.told()}"

    def told(self) -> str:
        return "\n".join((self.folder / name).read_text(errors="replace")[-4000:] for name in ("out", "err"))

    def result(self) -> Any:
        """Waits for the driver to end and returns what it found."""
        assert self.popen.wait(PATIENCE_S) == 0, self.told()
        return found_in((self.folder / "out").read_text())

    def kill(self) -> None:
        """Kills the JVM and Python at once, so that neither shuts down in order."""
        both = [*children(self.popen.pid), self.popen.pid]
        for pid in both:
            os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        eventually(lambda: all(map(gone, both)), "they are gone")

    def end(self) -> None:
        if self.popen is not None and self.popen.poll() is None:
            self.kill()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Returns the events of one kind from Spark's event log, once the job has ended."""
        lines = [line for file in self.folder.rglob("events_*") for line in file.read_text().splitlines()]
        return [event for event in map(json.loads, lines) if event["Event"] == f"SparkListener{name}"]

    def hosts(self) -> set[str]:
        """Hosts on which tasks succeeded."""
        ended = [event["Task Info"] for event in self.events("TaskEnd")]
        return {info["Host"] for info in ended if not info["Failed"] and not info["Killed"]}


def found_in(out: str) -> Any:
    """Returns what ``standalone_driver.py`` prints at its end."""
    return json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("{")))


# -- what a query reads, and how far it is ----------------------------------------------------------------------


class Work:
    """Input, checkpoint and output of a query, on storage that all machines share."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, 0
        (folder / "input").mkdir(parents=True)

    def feed(self, files: int) -> None:
        for _ in range(files):
            write_file(self.folder / "input", self.files, some_rows(self.files, 200))
            self.files += 1

    def enough(self) -> None:
        (self.folder / "counted").write_text(str(self.files))
        (self.folder / "counted").rename(self.folder / "enough")

    def begun(self) -> int:
        return self._newest("offsets")

    def committed(self) -> int:
        return self._newest("commits")

    def _newest(self, what: str) -> int:
        """Counts batches by the newest file's number, not by files: Spark removes old ones."""
        log = self.folder / "checkpoint" / what
        numbers = [int(path.name) for path in log.iterdir() if path.name.isdigit()] if log.is_dir() else []
        return max(numbers, default=-1) + 1

    def flows(self, job: Job, batches: int) -> None:
        """Waits until the query has committed so many more batches."""
        goal = self.committed() + batches
        self._waits(job, lambda: self.committed() >= goal)

    def is_amid(self, job: Job) -> None:
        """Waits until a batch is under way."""
        self._waits(job, lambda: self.begun() > self.committed())

    def _waits(self, job: Job, is_so: Callable[[], bool]) -> None:
        def there() -> bool:
            job.check()
            return is_so()

        eventually(there, "the query goes on", PATIENCE_S)


# -- Pythons --------------------------------------------------------------------------------------------------


def bare_python(folder: Path) -> Path:
    """Makes a Python with this one's packages except stateflow and PySpark: executors get PySpark from Spark itself."""
    site = _environment_in(folder, symlinks=True)
    for path in Path(pyspark.__file__).parents[1].iterdir():
        if not re.match(r"stateflow|__editable__|_*pycache__|pyspark|py4j", path.name) and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


def packed_environment(folder: Path, bare: Path) -> Path:
    """Packs an environment that can be unpacked anywhere.

    The tar has an interpreter, stateflow, and a file that says where all other packages are: to pack these would take
    long and test nothing more.
    """
    site = _environment_in(folder, symlinks=False)
    others = next((bare.parents[1] / "lib").glob("python3*/site-packages"))
    (site / "others.pth").write_text(f"{others}\n")
    for package in ("stateflow", "reconfig"):
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__", "static"))
    file = folder.with_suffix(".tar.gz")
    with tarfile.open(file, "w:gz", compresslevel=1) as archive:
        archive.add(folder, ".")
    return file


def _environment_in(folder: Path, *, symlinks: bool) -> Path:
    venv.EnvBuilder(symlinks=symlinks, with_pip=False).create(folder)
    return next((folder / "lib").glob("python3*/site-packages"))
