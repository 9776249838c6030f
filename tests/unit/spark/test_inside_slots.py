"""Slots and retries that replicas inside a Spark application need, before anything starts."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from threading import Event, Thread, current_thread
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stateflow.agent import processes
from stateflow.errors import DataDirLocked, InvalidArgument, Unavailable
from stateflow.spark import checks, inside, start_cluster
from stateflow.spark.credentials import Credentials
from stateflow.status import ClusterStatus, ReplicaStatus

#: the class itself: the tests below replace it
CLUSTER = inside.SparkCluster
#: seconds after which a job that nobody cancels ends by itself, so that no thread stays
ENDED_S = 90


class Spark:
    """A classic session, its context and the JVM's, as far as checks look at them.

    ``defaultParallelism`` is what Spark gives with ``spark.default.parallelism=200``.

    Args:
        slots: tasks that run at once, look by look: executors register one by one.
    """

    defaultParallelism = 200

    def __init__(self, master: str, *slots: int, **settings: str) -> None:
        self.master, self._slots, self._settings = master, list(slots), settings
        self.sparkContext = self.conf = self._jsc = self

    def get(self, name: str, default: str = "") -> str:
        return self._settings.get(name.replace(".", "_"), default)

    def sc(self) -> Spark:
        return self

    resourceProfileManager = defaultResourceProfile = getConf = sc

    def isStopped(self) -> bool:
        return False

    def maxNumConcurrentTasks(self, profile: object) -> int:
        return self._slots.pop(0) if len(self._slots) > 1 else self._slots[0]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Clusters that passed the checks; none of them starts a process."""
    passed: list[Any] = []

    class Started:
        def __init__(self, *arguments: Any) -> None:
            passed.append(arguments)

        def wait(self) -> Started:
            return self

    monkeypatch.setattr(inside, "SparkCluster", Started)
    monkeypatch.setattr(checks, "EXECUTORS_S", 0.05)
    monkeypatch.setattr(checks, "_LOOK_S", 0.001)
    monkeypatch.setattr(inside, "_LOOK_S", 0.001)
    return passed


@pytest.mark.parametrize(
    ("master", "slots", "replicas"),
    [("local[2,10]", 2, 2), ("spark://m:7077", 0, 1), ("yarn", 1, 1), ("k8s://m", 4, 5)],
)
def test_replicas_that_leave_no_slot_are_refused(master: str, slots: int, replicas: int, started: list[Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        start_cluster(Spark(master, slots), replicas, insecure=True)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"invalid_argument: {replicas} replicas leave no slot for queries: Spark has {slots}: "
        "use more executors or cores, or fewer replicas"
    )
    assert not started


def test_executors_may_register_one_by_one(started: list[Any]) -> None:
    start_cluster(Spark("spark://m:7077", 0, 0, 2, 4), 3, insecure=True)  # type: ignore[arg-type]
    assert len(started) == 1


@pytest.mark.parametrize(
    ("master", "failures", "warned"),
    [("spark://m:7077", "4", True), ("yarn", "99", True), ("yarn", "100", False), ("local[4,10]", "4", False)],
)
def test_few_retries_on_a_cluster_are_warned_of(
    master: str, failures: str, warned: bool, started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    start_cluster(Spark(master, 4, spark_task_maxFailures=failures), 1, insecure=True)  # type: ignore[arg-type]
    assert [f"spark.task.maxFailures={failures}: " in each.message for each in caplog.records] == [True] * warned
    assert len(started) == 1


@pytest.mark.parametrize(
    ("master", "speculation", "threshold", "warned"),
    [
        ("yarn", "true", "10min", True),
        ("yarn", "true", "", False),  # Spark waits for a first success
        ("yarn", "false", "10min", False),
        ("local[4,10]", "true", "10min", False),
    ],
)
def test_second_attempts_of_replicas_are_warned_of(
    master: str, speculation: str, threshold: str, warned: bool, started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"spark_speculation": speculation, "spark_speculation_task_duration_threshold": threshold}
    start_cluster(Spark(master, 4, spark_task_maxFailures="100", **settings), 1, insecure=True)  # type: ignore[arg-type]
    said = [each.message for each in caplog.records]
    assert [each.startswith("spark.speculation.task.duration.threshold=10min: ") for each in said] == [True] * warned
    assert len(started) == 1


def unstarted(spark: Spark) -> inside.SparkCluster:
    """A cluster whose parts have not started."""
    cluster = object.__new__(CLUSTER)
    cluster._stopping, cluster._ended, cluster._replicas, cluster._group = Event(), [], 2, "stateflow-abc123"
    cluster._task = inside.ReplicaTask("h:1", "app", "abc123", "", insecure=True)
    cluster._spark, cluster._threads = spark, []  # type: ignore[assignment]
    cluster._controller, cluster._credentials, cluster._temporary = None, None, False
    cluster._lock = io.StringIO()
    return cluster


def test_when_a_job_of_replicas_has_ended_another_one_follows_with_other_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One task that fails too often ends all replicas; on an executor without their data the next ones are others."""
    tasks: list[inside.ReplicaTask] = []
    cluster = unstarted(Spark("yarn", 4))

    class Job(Spark):
        """A session whose jobs end as soon as they have begun; the cluster is stopped during the third."""

        def setJobGroup(self, group: str, *_: object, **__: object) -> None:
            assert group == "stateflow-abc123"

        def range(self, *of: int) -> Job:
            assert of == (0, 2, 1, 2), "a task for each replica"
            return self

        def mapInArrow(self, task: inside.ReplicaTask, columns: str) -> Job:
            tasks.append(task)
            return self

        def format(self, name: str) -> Job:
            return self

        mode = format

        def save(self) -> None:
            if len(tasks) == 3:
                cluster._stopping.set()
            raise RuntimeError("Task 1 in stage 0.0 failed 4 times\nmore")

    cluster._spark = Job("yarn", 4)  # type: ignore[assignment]
    cluster._spark.write = cluster._spark  # type: ignore[misc,assignment]
    monkeypatch.setattr(inside, "AGAIN_S", 0.0)
    cluster._run()
    assert [each.again for each in tasks] == [False, True, True]
    assert cluster._ended == ["Task 1 in stage 0.0 failed 4 times"] * 3
    assert tasks[1].name(tmp_path, 1, 17) == "spark-abc123-1-17"


def test_a_job_that_begins_while_the_cluster_stops_is_cancelled_too() -> None:
    """Spark ignores a cancellation that comes before the job: the replicas would run on for ever."""
    begun, cancelled = Event(), Event()

    class Job(Spark):
        """A session whose job begins once a first cancellation has found nothing."""

        def cancelJobGroup(self, group: str) -> None:
            (cancelled if begun.is_set() else begun).set()

    def run() -> None:
        begun.wait()
        cancelled.wait(ENDED_S)

    cluster = unstarted(Job("yarn", 4))
    cluster._threads.append(Thread(target=run, daemon=True))
    cluster._threads[0].start()
    cluster.stop()
    assert cancelled.is_set()
    assert not cluster._threads[0].is_alive()


def test_no_job_of_replicas_follows_when_spark_was_stopped(caplog: pytest.LogCaptureFixture) -> None:
    jobs: list[object] = []
    cluster = unstarted(Spark("yarn", 4))

    class Job(Spark):
        """A session that somebody stops during its first job."""

        def setJobGroup(self, *_: object, **__: object) -> None: ...

        def range(self, *_: int) -> Job:
            return self

        mapInArrow = range

        @property
        def write(self) -> Any:
            jobs.append(self)
            if len(jobs) == 3:
                cluster._stopping.set()
            self._jsc = None  # type: ignore[assignment]
            raise RuntimeError("cannot call methods on a stopped SparkContext")

    cluster._spark = Job("yarn", 4)  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as its:
        its.setattr(inside, "AGAIN_S", 0.0)
        cluster._run()
    assert len(jobs) == 1
    cluster._jobs = Thread()  # which has ended
    with pytest.raises(Unavailable, match="not all 2 replicas came up: cannot call methods on a stopped"):
        cluster.wait()
    assert [each.message for each in caplog.records] == ["replicas of job group stateflow-abc123 ended with Spark"]


@pytest.mark.parametrize("error", [RuntimeError(), RuntimeError(" \n")])
def test_a_job_of_replicas_that_ends_without_a_text_is_followed_by_another(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = unstarted(Spark("yarn", 4))
    jobs: list[object] = []

    class Job(Spark):
        """A session whose jobs end at once; the cluster is stopped during the second."""

        def setJobGroup(self, *_: object, **__: object) -> None: ...

        def range(self, *_: int) -> Job:
            return self

        mapInArrow = range

        @property
        def write(self) -> Any:
            jobs.append(self)
            if len(jobs) == 2:
                cluster._stopping.set()
            raise error

    cluster._spark = Job("yarn", 4)  # type: ignore[assignment]
    monkeypatch.setattr(inside, "AGAIN_S", 0.0)
    cluster._run()
    assert cluster._ended == ["RuntimeError"] * 2


#: of the two replicas of a cluster
NAMES = ("spark-abc123-0", "spark-abc123-1-7")


class Asked:
    """A client of a cluster of two replicas. They are alive from an attempt on."""

    def __init__(self, from_attempt: int, ends: list[str], *, names: tuple[str, ...] = NAMES) -> None:
        self._from_attempt, self._ends, self.asked = from_attempt, ends, 0
        self._names = names

    def status(self) -> ClusterStatus:
        self.asked += 1
        alive = self.asked >= self._from_attempt
        if not alive:
            self._ends.append(f"end {len(self._ends)}")
        replicas = [ReplicaStatus(name, "spark", "h:1", 1, alive, 0.1, 0) for name in self._names]
        return ClusterStatus(tuple(replicas), (), ())


def test_jobs_that_ended_before_do_not_keep_a_program_from_waiting() -> None:
    """A cluster that runs for months has had many jobs of replicas."""
    cluster = unstarted(Spark("yarn", 4))
    cluster._ended += ["end"] * inside.ATTEMPTS
    cluster._jobs = current_thread()
    cluster.cluster = Asked(1, cluster._ended)  # type: ignore[assignment]
    assert cluster.wait() is cluster
    cluster.cluster = Asked(inside.ATTEMPTS, cluster._ended)  # type: ignore[assignment]
    assert cluster.wait() is cluster, "fewer jobs have ended since"
    cluster.cluster = asked = Asked(99, cluster._ended)  # type: ignore[assignment]
    before = len(cluster._ended)
    with pytest.raises(Unavailable, match=f"not all 2 replicas came up: end {before}:"):
        cluster.wait()
    assert asked.asked <= inside.ATTEMPTS + 1


@pytest.mark.parametrize("stopped", [True, False])
def test_what_a_program_does_not_stop_ends_with_it(
    stopped: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The directory of a cluster that nobody stopped, with the keys of its authority, is removed when Python ends."""
    registered: list[tuple[Any, ...]] = []
    ended: list[str] = []

    class Controller:
        def start(self) -> None: ...

        def wait_ready(self) -> str:
            return "127.0.0.1:1"

        def stop(self) -> None:
            ended.append("controller")

    class Atexit:
        def register(self, *call: Any) -> None:
            registered.append(call)

        def unregister(self, function: Any) -> None:
            registered[:] = [call for call in registered if call[0] != function]

    monkeypatch.setattr(inside, "atexit", Atexit(), raising=False)
    monkeypatch.setattr(CLUSTER, "_process", lambda _: Controller())
    monkeypatch.setattr(CLUSTER, "_begin", lambda _: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spark = Spark("yarn", 4, spark_driver_host="127.0.0.1")
    spark.applicationId = "app"  # type: ignore[attr-defined]
    cluster = CLUSTER(spark, 2, 0, "", None, False, True)  # type: ignore[arg-type]
    (directory,) = tmp_path.iterdir()
    if stopped:
        with pytest.raises(InvalidArgument, match="is not a valid savepoint name"):
            cluster.stop(savepoint=".")
        assert not ended, "it goes on, because its state is not saved"
        cluster.stop()
    for call, *arguments in [*registered]:
        call(*arguments)
    assert ended == ["controller"]
    assert not directory.exists()
    assert not registered


@pytest.mark.parametrize("insecure", [True, False])
def test_a_second_cluster_is_refused_while_this_process_is_the_administrator_of_another_one(
    insecure: bool, started: list[Any], tmp_path: Path
) -> None:
    """The process talks to one cluster at a time: it would lose the first one, with its savepoint."""
    first = Credentials(tmp_path, "127.0.0.1", "spark-abc123", 1)
    spark = Spark("yarn", 4, spark_driver_host="127.0.0.1")
    first.begin()
    try:
        with pytest.raises(InvalidArgument, match="administrator of another cluster inside Spark: stop that cluster"):
            start_cluster(spark, 1, insecure=insecure)  # type: ignore[arg-type]
    finally:
        first.end()
    assert not started
    start_cluster(spark, 1, insecure=insecure)  # type: ignore[arg-type]
    assert len(started) == 1


def test_a_directory_is_used_by_one_cluster_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second controller would follow the first one, and have its replicas and operators."""
    controllers: list[str] = []

    class Controller:
        def start(self) -> None:
            controllers.append("controller")

        def wait_ready(self) -> str:
            return "127.0.0.1:1"

        def stop(self) -> None: ...

    monkeypatch.setattr(CLUSTER, "_process", lambda _: Controller())
    monkeypatch.setattr(CLUSTER, "_begin", lambda _: None)
    spark = Spark("yarn", 4, spark_driver_host="127.0.0.1")
    spark.applicationId = "app"  # type: ignore[attr-defined]

    def start() -> inside.SparkCluster:
        return CLUSTER(spark, 2, 0, "", tmp_path, False, True)  # type: ignore[arg-type]

    first = start()
    with pytest.raises(DataDirLocked, match="another cluster inside Spark uses this directory "):
        start()
    assert len(controllers) == 1
    first.stop()
    start().stop()
    assert len(controllers) == 2


def test_workers_of_one_replica_count_once() -> None:
    cluster = unstarted(Spark("yarn", 4))
    cluster._jobs = current_thread()
    cluster.cluster = Asked(1, [], names=("spark-abc123-0", "spark-abc123-0~1"))  # type: ignore[assignment]
    with pytest.raises(Unavailable, match="not all 2 replicas came up: timed out"):
        cluster.wait(0.0)


def test_replicas_of_a_former_cluster_in_the_directory_do_not_count() -> None:
    """Leases of replicas may last longer than the replicas."""
    cluster = unstarted(Spark("yarn", 4))
    cluster._jobs = current_thread()
    cluster.cluster = Asked(1, [], names=("spark-123abc-0", "spark-123abc-1-7"))  # type: ignore[assignment]
    with pytest.raises(Unavailable, match="not all 2 replicas came up: timed out"):
        cluster.wait(0.05)


def test_an_address_of_the_driver_that_replicas_cannot_use_is_named(started: list[Any]) -> None:
    said = r"spark.driver.host=\[::1\] has no IPv4 address: .*: set spark.driver.host"
    with pytest.raises(InvalidArgument, match=said):
        start_cluster(Spark("local[4,10]", 4, spark_driver_host="[::1]"), 1)  # type: ignore[arg-type]
    assert not started


@pytest.mark.parametrize(("master", "failures"), [("yarn", "1"), ("local[4]", "4")])
def test_a_master_without_retries_is_refused(master: str, failures: str, started: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="does not retry failed tasks"):
        start_cluster(Spark(master, 4, spark_task_maxFailures=failures), 1)  # type: ignore[arg-type]
    assert not started


def test_the_password_of_a_store_does_not_show() -> None:
    task = inside.ReplicaTask("h:1", "app", "abc123", "s3://user:pw-4f2d@host/x", insecure=False)
    assert "pw-4f2d" not in repr(task)
    assert task.checkpoints == "s3://user:pw-4f2d@host/x"


def test_a_replica_has_the_environment_of_its_task_without_the_secrets_of_spark() -> None:
    task = inside.ReplicaTask("h:1", "app", "abc123", "s3://bucket/x", insecure=False)
    given = {"HOME": "/h", "_SPARK_AUTH_SECRET": "a", "PYTHON_WORKER_FACTORY_SECRET": "b", "STATEFLOW_X": "y"}
    found = task.environment(given)
    assert found.pop("PYTHONPATH")
    assert found == {"HOME": "/h", "STATEFLOW_X": "y", "STATEFLOW_CHECKPOINTS": "s3://bucket/x"}


def test_the_log_of_a_replica_is_rotated_and_its_last_line_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A replica may run for months in one task."""
    said = f"for at in range(20): os.write(2, b'.' * {processes.FILE_BYTES // 8})"
    command = [sys.executable, "-c", f"import os\n{said}\nos.write(2, b'\\nthe reason\\n'); os._exit(3)"]
    monkeypatch.setattr(inside.ReplicaTask, "_command", lambda self, folder, name: command)
    monkeypatch.setattr(inside.ReplicaTask, "_folder", lambda self, number: tmp_path)
    context = SimpleNamespace(partitionId=lambda: 0, attemptNumber=lambda: 0)
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: context)
    with pytest.raises(Unavailable, match="spark-abc123-0 exited with status 3: the reason"):
        list(inside.ReplicaTask("h:1", "app", "abc123", "", insecure=True)(iter([pa.RecordBatch.from_pydict({})])))
    sizes = [path.stat().st_size for path in tmp_path.glob("replica.log*")]
    assert len(sizes) == 3
    assert max(sizes) <= processes.FILE_BYTES


def test_a_session_of_spark_connect_is_refused(started: list[Any]) -> None:
    remote = type("SparkSession", (Spark,), {"__module__": "pyspark.sql.connect.session"})("yarn", 4)
    with pytest.raises(InvalidArgument, match="over Spark Connect this process is not the driver"):
        start_cluster(remote, 1)
    assert not started
