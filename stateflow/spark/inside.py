"""Runs a cluster inside a Spark application, with a controller in the driver and replicas in long-running tasks.

All tasks belong to one job. They are not a barrier stage, because Spark restarts all tasks of a barrier stage when one
fails. Each task runs a replica in a separate process, which ends with the task. Spark retries a failed task. If the
retry runs on the same executor, the replica finds its data and resumes with all its partitions. On another executor the
task starts a new replica without partitions. The partitions of the former replica go to a standby, or are restored from
the newest checkpoint.

An executor that Spark decommissions waits for its tasks to end, but Spark does not notify the tasks. The driver polls
``TaskScheduler.getExecutorDecommissionState``, because Spark has no listener event for decommissioning. Each poll takes
the next step for each task on such an executor, see :class:`Departures`:

1. If the task's replica owns partitions, the driver asks the cluster to move them away, and asks again after
   :data:`EMPTY_AGAIN_S`.
2. While a partition is moving away, or waits to move, the driver waits.
3. Once the replica owns nothing, the driver kills the task. Spark starts the task elsewhere, as another replica.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import pyarrow as pa

from stateflow.agent.processes import last_line, pump
from stateflow.client import Cluster
from stateflow.client.packing import comes_along, pack
from stateflow.clock import SYSTEM_CLOCK
from stateflow.durable import write_durably
from stateflow.errors import AlreadyThere, BadCertificate, DataDirLocked, InvalidArgument, StateflowError, Unavailable
from stateflow.local.process import Process
from stateflow.node.workers import nobody_in
from stateflow.operator.operator import Operator
from stateflow.partition.environment import claim
from stateflow.security.plain import NO_TOKEN_VARIABLES, is_loopback, tls_files, variables_of
from stateflow.settings import ReplicaSettings
from stateflow.spark.checks import check_master, check_running
from stateflow.spark.credentials import RENEW_S, Credentials, Enrolment, check_no_other
from stateflow.spark.session import LOCAL, driver_host, is_connect, is_stopped
from stateflow.status import ClusterStatus, ReplicaStatus
from stateflow.types import check_name, node_of

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)
SITE = "spark"
#: file in a replica's directory with the replica's name
_NAME = "REPLICA"
#: file in a replica's directory with the replica's log; older parts are rotated
_LOG = "replica.log"
#: seconds to wait for the last lines of an ended replica's log, whose pipe a process of the replica may hold open
LOGGED_S = 5.0
#: environment variables with secrets for calling Spark's executors and the daemon that starts Python workers
_SECRETS_OF_SPARK = frozenset({"_SPARK_AUTH_SECRET", "PYTHON_WORKER_FACTORY_SECRET"})


def base_of(group: str) -> str:
    """Returns the prefix of the replica names of a job group."""
    return f"{SITE}-{group}"


@dataclass(frozen=True, slots=True)
class ReplicaTask:
    """Function for ``mapInArrow`` that runs a replica.

    It yields no rows, runs until it is killed, and raises Unavailable if its replica ends.

    Attributes:
        controller: address of the controller.
        application: Spark's id of the application.
        group: random id of the cluster, which is part of replica names.
        checkpoints: URL of the checkpoint store; empty if there is none.
        insecure: True allows plain text between machines.
        enrolment: access to certificates; None if the replica uses plain text.
        again: True if a task of an earlier job may have used this task's replica name.
    """

    controller: str
    application: str
    group: str
    checkpoints: str = field(repr=False)  # a URL, which may contain a password
    insecure: bool
    enrolment: Enrolment | None = None
    again: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            self._run()
        yield from ()

    def _run(self) -> NoReturn:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        number, attempt = context.partitionId(), context.attemptNumber()
        folder = self._folder(number)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = self.name(folder, number, context.taskAttemptId() if attempt or self.again else None)
        _wait_for_former(folder / "state")
        replica, logged = self._start(folder, name)
        try:
            status = self._ended(replica, folder, name)
        finally:
            replica.kill()
        logged.join(LOGGED_S)
        raise Unavailable(
            f"the replica {name} exited with status {status}: {last_line(folder / _LOG)}",
            remedy=f"Spark retries the task; {_LOG} in this directory on the executor has the whole error",
            log=folder,
        )

    def _start(self, folder: Path, name: str) -> tuple[subprocess.Popen[bytes], threading.Thread]:
        """Starts the replica. Returns its process, and the thread that writes its log until the process has ended."""
        environment = {**self.environment(os.environ), **self._enrolled(folder, name)}
        reads, writes = os.pipe()
        try:
            replica = subprocess.Popen(
                self._command(folder, name),
                stdin=subprocess.PIPE,  # closes when this process ends, and the replica ends with it
                stdout=subprocess.DEVNULL,
                stderr=writes,
                pass_fds=(reads,),  # if this process dies first, the replica can still write, as with LocalLauncher
                env=environment,
            )
        except BaseException:
            os.close(reads)
            raise
        finally:
            os.close(writes)
        return replica, pump(os.fdopen(reads, "rb", buffering=0), folder / _LOG, name)

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment variables of a replica, made from those of a Python worker.

        The variables of the replica's identity are not included. Spark's own secrets are left out, because the code of
        operators could read them.
        """
        found = {name: value for name, value in given.items() if name not in _SECRETS_OF_SPARK}
        found["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        return found | ({"STATEFLOW_CHECKPOINTS": self.checkpoints} if self.checkpoints else {})

    def _folder(self, number: int) -> Path:
        """Returns the task's directory on this executor's local disk, which Spark deletes with the executor."""
        local = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or tempfile.gettempdir()
        return Path(local) / f"stateflow-{self.application}-{self.group}" / str(number)

    def name(self, folder: Path, number: int, attempt: int | None) -> str:
        """Returns the name that is recorded in the replica's directory. In a new directory, chooses and records a name.

        Args:
            folder: the replica's directory.
            number: number of the task's Spark partition.
            attempt: number of the attempt, unique in the application; None for the first attempt.
        """
        file = folder / _NAME
        if not file.exists() or not file.stat().st_size:
            write_durably(file, f"{base_of(self.group)}-{number}" + ("" if attempt is None else f"-{attempt}"))
        return file.read_text()

    def _enrolled(self, folder: Path, name: str) -> Mapping[str, str]:
        """Enrols the replica, and returns the environment variables of its identity.

        Raises NotAllowed, Unavailable, OSError.
        """
        if self.enrolment is None:
            return {}
        self.enrolment.enrol(name, folder / "tls")
        # no revocation list reaches the task
        return variables_of(folder / "tls") | NO_TOKEN_VARIABLES | {"STATEFLOW_TLS_CRL": ""}

    def _ended(self, replica: subprocess.Popen[bytes], folder: Path, name: str) -> int:
        """Waits for the replica to end, and returns its exit status. Renews its certificate while it runs.

        The replica rereads the renewed files by itself.
        """
        while True:
            try:
                return replica.wait(None if self.enrolment is None else RENEW_S)
            except subprocess.TimeoutExpired:
                try:
                    self._enrolled(folder, name)
                except (StateflowError, OSError) as error:
                    log.warning("certificate of replica %s not renewed, will retry: %s", name, error)

    def _command(self, folder: Path, name: str) -> list[str]:
        command = [sys.executable, "-m", "stateflow", "replica", "--name", name, "--site", SITE]
        command += [
            "--controller",
            self.controller,
            "--listen",
            f"{_host_towards(self.controller)}:0",
            "--data-dir",
            str(folder / "state"),
        ]
        command += ["--insecure"] if self.insecure else []
        return [*command, "--json", "--stop-with-parent"]


def _host_towards(controller: str) -> str:
    """Returns this machine's address on the route to the controller."""
    host, _, port = controller.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:  # nothing is sent
        way.connect((host, int(port)))
        return str(way.getsockname()[0])


def _wait_for_former(state: Path) -> None:
    """Waits until no replica uses the directory ``state``, because a replica's process may outlive its killed task.

    Raises DataDirLocked if a replica still uses the directory after the stop timeout.
    """
    if state.is_dir():
        with nobody_in(state, ReplicaSettings().stop_timeout_s):
            pass


LOOK_S = 1.0
#: seconds after which the driver asks again for partitions to be moved away from a replica
EMPTY_AGAIN_S = 10.0
#: seconds for which a replica on a decommissioned executor receives no partitions; it ends before they are over
MAINTENANCE_S = 3600.0
_TASKS_MAX = 1 << 20
WHY = "its executor is decommissioned, and its replica owns no partitions"
#: seconds between a job of replicas that ended because a task failed too often, and the next job
AGAIN_S = 5.0
#: seconds to wait for all replicas, long enough for executors and their Python to start
START_S = 180.0
#: seconds to wait for the job of replicas and the other threads to end
END_S = 60.0
#: most jobs that may end while the driver waits for replicas
ATTEMPTS = 3
_LOOK_S = 0.5


# -- Decommissioned executors ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaving:
    """A task on an executor that is decommissioned.

    Attributes:
        task: id of the task, unique in the application.
        number: number of the task's Spark partition.
    """

    task: int
    number: int


@dataclass(frozen=True, slots=True)
class Steps:
    """Next steps for tasks on decommissioned executors.

    Attributes:
        empty: replicas from which all partitions must be moved away.
        end: tasks to kill, because their replicas own nothing.
    """

    empty: tuple[str, ...] = ()
    end: tuple[int, ...] = ()


class Departures:
    """Decides at each poll what to do for tasks on decommissioned executors.

    Args:
        base: prefix of replica names. The replica of a task is called ``{base}-{number}``, and its replacement
            ``{base}-{number}-{attempt}``.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._asked: dict[str, float] = {}

    def look(
        self, leaving: Collection[Leaving], replicas: Sequence[ReplicaStatus], moving: Collection[str], now: float
    ) -> Steps:
        """Returns the next steps for the tasks on decommissioned executors.

        Args:
            leaving: tasks on decommissioned executors.
            replicas: status of all replicas.
            moving: replicas that partitions are moving away from.
            now: monotonic seconds.
        """
        empty: list[str] = []
        end: list[int] = []
        for each in leaving:
            found = self._of(each.number, replicas)
            if any(replica.name in moving for replica in found):
                continue
            owners = [replica.name for replica in found if replica.partitions]
            if not owners:
                end.append(each.task)
            empty += [name for name in owners if now - self._asked.get(name, now - EMPTY_AGAIN_S) >= EMPTY_AGAIN_S]
        self._asked |= dict.fromkeys(empty, now)
        return Steps(tuple(empty), tuple(end))

    def _of(self, number: int, replicas: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
        """Returns the live replicas of the task number ``number``.

        If none is alive, returns all known replicas of that number, because a replica may be silent for a moment.
        """
        named = re.compile(rf"{re.escape(self._base)}-{number}(-\d+)?")
        known = [replica for replica in replicas if named.fullmatch(replica.name)]
        return [replica for replica in known if replica.alive] or known


class Decommissioning(threading.Thread):
    """Thread that polls for decommissioned executors until ``over`` is set.

    Args:
        group: Spark's job group of the replicas.
        base: see :class:`Departures`.
    """

    def __init__(self, spark: SparkContext, group: str, base: str, cluster: Cluster, over: threading.Event) -> None:
        super().__init__(name="stateflow decommissioning", daemon=True)
        self._context, self._group, self._cluster, self._over = spark, group, cluster, over
        self._departures = Departures(base)
        self._said: set[str] = set()

    def run(self) -> None:
        from py4j.protocol import Py4JError

        while not self._over.wait(LOOK_S):
            try:
                self._look()
            except StateflowError as error:  # e.g. the controller does not answer
                self._say_once(str(error), "decommissioned executors not checked, will retry: %s", error)
            except Py4JError as error:
                if not self._over.is_set():
                    log.warning("decommissioned executors no longer watched, Spark does not report them: %s", error)
                return

    def _look(self) -> None:
        leaving = leaving_of(self._context, self._group)
        if not leaving:
            return
        status = self._cluster.status()
        steps = self._departures.look(leaving, status.replicas, sources_of(status), SYSTEM_CLOCK.monotonic())
        for name in steps.empty:
            log.warning("replica %s: executor decommissioned, moving its partitions away", name)
            try:
                self._empty(name)
            except StateflowError as error:
                self._say_once(name, "replica %s: partitions not moved away, will retry: %s", name, error)
        for task in steps.end:
            self._context._jsc.sc().killTaskAttempt(task, True, WHY)

    def _empty(self, name: str) -> None:
        """Moves all partitions of a replica away. Raises StateflowError if no other replica can receive them."""
        try:
            self._cluster.maintain(name, for_s=MAINTENANCE_S)
        except Unavailable:  # for example if a standby would be lost, but this replica ends in any case
            try:
                self._cluster.drain(name)
            except AlreadyThere:
                pass

    def _say_once(self, what: str, said: str, *of: object) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning(said, *of)


def sources_of(status: ClusterStatus) -> set[str]:
    """Returns the replicas from which partitions are moving away, or wait to move."""
    under_way = [move for each in status.reconfigurations if not each.over for move in each.moves]
    return {move.source for move in under_way if move.stands in ("waiting", "in_progress")}


def leaving_of(spark: SparkContext, group: str) -> list[Leaving]:
    """Returns the tasks of a job group that run on executors which Spark decommissions. Raises Py4JError."""
    if spark._jsc is None:  # the context was stopped
        return []
    context = spark._jsc.sc()
    scheduler, store = context.taskScheduler(), context.statusStore()
    known = [each.id() for each in _each(store.executorList(True))]
    ending = {name for name in known if scheduler.getExecutorDecommissionState(name).isDefined()}
    if not ending:
        return []
    return [
        Leaving(task.taskId(), task.index())
        for stage, attempt in _stages(spark, group)
        for task in _each(store.taskList(stage, attempt, _TASKS_MAX))
        if task.status() == "RUNNING" and task.executorId() in ending
    ]


def _each(sequence: Any) -> list[Any]:
    """Returns the elements of a Scala Seq."""
    return [sequence.apply(number) for number in range(sequence.size())]


def _stages(spark: SparkContext, group: str) -> list[tuple[int, int]]:
    """Returns (stage, attempt) of the running jobs of a group."""
    tracker = spark.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    numbers = [stage for job in jobs if job is not None and job.status == "RUNNING" for stage in job.stageIds]
    stages = [tracker.getStageInfo(stage) for stage in numbers]
    return [(stage.stageId, stage.currentAttemptId) for stage in stages if stage is not None]


# -- The cluster -----------------------------------------------------------------------------------------------------


class SparkCluster:
    """A running cluster, made by :func:`start_cluster`.

    Attributes:
        address: address of the controller.
        cluster: client of the cluster.

    Example: ``cluster.stop(savepoint="before-the-upgrade")``
    """

    def __init__(
        self,
        spark: SparkSession,
        replicas: int,
        standbys: int,
        checkpoints: str,
        directory: Path | None,
        tls: bool,
        insecure: bool,
    ) -> None:
        self._spark, self._replicas, self._standbys = spark, replicas, standbys
        self._host, self._insecure = driver_host(spark), insecure
        self._temporary = directory is None
        self._directory = directory or Path(tempfile.mkdtemp(prefix="stateflow-spark-"))
        self._lock = _claimed(self._directory)
        group = uuid.uuid4().hex[:6]
        self._group = f"stateflow-{group}"
        self._ended: list[str] = []
        self._stopping = threading.Event()
        self._jobs: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._credentials: Credentials | None = None
        self._controller: Process | None = None
        # otherwise a program that does not stop its cluster would leave the keys of the authority on disk
        atexit.register(self._end, os.getpid())
        try:
            if tls:
                self._credentials = Credentials(self._directory / "certificates", self._host, base_of(group), replicas)
            self._controller = self._process()
            self._controller.start()
            self.address = self._controller.wait_ready()
            if self._credentials is not None:
                self._credentials.begin()
            self.cluster = Cluster(self.address)
            enrolment = None if self._credentials is None else self._credentials.enrolment
            application = spark.sparkContext.applicationId
            self._task = ReplicaTask(self.address, application, group, checkpoints, insecure, enrolment)
            self._begin()
        except BaseException:
            self._end()
            raise

    def _process(self) -> Process:
        from stateflow.ledger.database import sqlite_url

        ledger = sqlite_url(self._directory / "ledger.db")
        arguments = ["controller", "--listen", f"{self._host}:0", "--ledger", ledger]
        arguments += ["--insecure"] if self._insecure else []
        environment = {} if self._credentials is None else dict(self._credentials.of_controller)
        # the replicas of a former application ended with it, and their names do not come again
        environment["STATEFLOW_CONTROLLER_COLD_START_WAIT_S"] = "0"
        paths = list(filter(None, sys.path))
        return Process("controller", arguments, self._directory / "controller.log", paths, environment=environment)

    def _begin(self) -> None:
        from pyspark import InheritableThread

        self._jobs = InheritableThread(target=self._run, name="stateflow replicas", daemon=True)
        self._threads.append(self._jobs)
        if self._credentials is not None:
            self._threads.append(threading.Thread(target=self._renew, name="stateflow certificates", daemon=True))
        context, base = self._spark.sparkContext, base_of(self._task.group)
        if not LOCAL.match(context.master):  # a local master decommissions nothing
            self._threads.append(Decommissioning(context, self._group, base, self.cluster, self._stopping))
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        """Runs jobs of replicas, one after another."""
        context = self._spark.sparkContext
        context.setJobGroup(self._group, "stateflow replicas", interruptOnCancel=True)
        rows, task = self._spark.range(0, self._replicas, 1, self._replicas), self._task
        while not self._stopping.is_set():
            try:
                rows.mapInArrow(task, "id long").write.format("noop").mode("overwrite").save()
            except Exception as error:  # noqa: BLE001 - one task has failed too often, or Spark has stopped
                self._ended.append((str(error).strip() or type(error).__name__).splitlines()[0])
            if not self._stopping.is_set() and is_stopped(context):
                log.warning("replicas of job group %s ended with Spark", self._group)
                return
            if not self._stopping.wait(AGAIN_S):
                why = self._ended[-1] if self._ended else "its job ended"
                log.warning("restarting all replicas of job group %s: %s", self._group, why)
            task = replace(task, again=True)

    def _renew(self) -> None:
        assert self._credentials is not None
        while not self._stopping.wait(RENEW_S):
            try:
                self._credentials.renew()
            except (BadCertificate, OSError) as error:
                log.warning("certificates of the controller and the driver not renewed, will retry: %s", error)

    @property
    def token_file(self) -> Path | None:
        """File with an administrator's token, which commands on this machine read if ``STATEFLOW_TOKEN_FILE`` names it.

        None if the cluster uses plain text, and so needs no token.
        """
        return None if self._credentials is None else self._credentials.token_file

    def wait(self, timeout_s: float = START_S) -> SparkCluster:
        """Waits until all requested replicas are alive.

        Raises Unavailable after ``timeout_s``, or when the job of the replicas has failed several times meanwhile.
        """
        base = f"{base_of(self._task.group)}-"  # a former cluster with this ledger had others
        deadline, before = SYSTEM_CLOCK.monotonic() + timeout_s, len(self._ended)
        why = self._ended[-1] if self._ended else "its job ended"
        while self._jobs is not None and self._jobs.is_alive():  # otherwise Spark was stopped
            with contextlib.suppress(Unavailable):
                alive = [each.name for each in self.cluster.status().replicas if each.alive]
                # a replica may have several workers
                if len({node_of(name) for name in alive if name.startswith(base)}) >= self._replicas:
                    return self
            ended = self._ended[before:]  # not those before: a cluster that runs for months has had many
            why = ended[0] if ended else f"timed out after {timeout_s:.0f} s"
            if len(ended) >= ATTEMPTS or SYSTEM_CLOCK.monotonic() >= deadline:
                break
            time.sleep(_LOOK_S)
        raise Unavailable(
            f"not all {self._replicas} replicas came up: {why}",
            remedy="check that Spark has a slot for each replica besides those of queries, and see the executors' logs",
        )

    def deploy(
        self, operator: type[Operator], partitions: int = 16, *, installed: bool = False, **options: Any
    ) -> None:
        """Deploys an operator as :meth:`~stateflow.client.Cluster.deploy` does, with this cluster's number of standbys.

        The package of a class in a module is sent to the executors, see :func:`~stateflow.client.packing.pack`, unless
        ``installed`` says that the executors already have it.
        """
        if (
            not installed
            and "bundle" not in options
            and operator.__module__ != "__main__"
            and not comes_along(operator)
        ):
            options["bundle"] = pack(operator)
        self.cluster.deploy(operator, partitions, **options)
        if self._standbys:
            self.cluster.standby(options.get("name") or operator.__name__, self._standbys)

    def stop(self, savepoint: str = "") -> None:
        """Ends the replicas and the controller.

        Args:
            savepoint: name of a savepoint to take first; empty takes none. Raises InvalidArgument for an invalid name,
                and ends nothing.
        """
        if savepoint:
            check_name("savepoint", savepoint)
        try:
            if savepoint:
                self.cluster.savepoint(savepoint)
        finally:
            self._end()

    def _end(self, pid: int | None = None) -> None:
        """Ends the threads, the controller and what they use.

        Args:
            pid: process that may end them; None: any. A forked process that exits must not end its parent's cluster.
        """
        if pid is not None and pid != os.getpid():
            return
        atexit.unregister(self._end)
        self._stopping.set()
        until = SYSTEM_CLOCK.monotonic() + END_S
        self._cancel()
        for thread in self._threads:
            while thread.is_alive() and SYSTEM_CLOCK.monotonic() < until:
                thread.join(_LOOK_S)
                self._cancel()  # Spark ignores a cancellation that comes before the job
        if self._controller is not None:
            self._controller.stop()
        if self._credentials is not None:
            self._credentials.end()
        self._lock.close()
        if self._temporary:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _cancel(self) -> None:
        with contextlib.suppress(Exception):  # Spark may have been stopped, and the tasks with it
            self._spark.sparkContext.cancelJobGroup(self._group)

    def __enter__(self) -> SparkCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_cluster(
    spark: SparkSession,
    replicas: int,
    *,
    standbys: int = 0,
    checkpoints: str = "",
    directory: str | Path | None = None,
    tls: bool | None = None,
    insecure: bool = False,
) -> SparkCluster:
    """Starts a cluster inside a Spark application.

    The controller runs on the driver's machine, and the replicas run in tasks of one long job.

    Args:
        replicas: number of replicas. Each occupies an executor slot as long as the cluster runs; queries need further
            slots.
        standbys: number of standbys of each partition, for operators that :meth:`SparkCluster.deploy` deploys.
        checkpoints: URL of a store that all executors can reach. Without a store, the loss of an executor loses the
            state of its partitions that have no standby.
        directory: directory of the controller's ledger, on the driver's machine; one cluster uses it at a time. None
            makes a temporary directory.
        tls: True makes an authority for the cluster, which issues a certificate to each replica and tokens to the tasks
            of queries. While the cluster runs, this process is its administrator and cannot call other clusters. None
            means True if other machines can reach the driver's address or this process has certificates; with
            ``insecure``, None means False.
        insecure: True allows plain text between machines, as ``--insecure`` does.

    Raises InvalidArgument for a session of Spark Connect, if this process is the administrator of another cluster, or
    if the master does not retry failed tasks or has too few slots. Raises DataDirLocked if another cluster uses the
    directory, and Unavailable if the replicas do not start.

    Example: ``cluster = start_cluster(spark, replicas=2, standbys=1, checkpoints="s3://bucket/checkpoints")``
    """
    if tls and insecure:
        raise InvalidArgument("tls=True and insecure=True exclude each other", remedy="pass only one of them")
    if is_connect(spark):
        raise InvalidArgument(
            "over Spark Connect this process is not the driver, so it cannot start a controller there",
            remedy="start the cluster in the server's driver, or start a controller and replicas outside of Spark",
        )
    check_running(spark)
    check_no_other()
    check_master(spark, replicas, standbys)
    if tls is None:
        tls = not insecure and (not is_loopback(f"{driver_host(spark)}:0") or tls_files() is not None)
    if directory is not None:
        directory = Path(directory)
    started = SparkCluster(spark, replicas, standbys, checkpoints, directory, tls, insecure)
    try:
        return started.wait()
    except BaseException:
        started.stop()
        raise


def _claimed(directory: Path) -> TextIO:
    """Claims the directory of a cluster. Raises DataDirLocked if another cluster uses it, or InvalidArgument."""
    try:
        return claim(directory, "SPARK")
    except DataDirLocked as error:
        raise DataDirLocked(
            "another cluster inside Spark uses this directory",
            remedy="stop it, or use another directory",
            **error.where,
        ) from None
