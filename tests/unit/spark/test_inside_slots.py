"""Slots and retries that replicas inside a Spark application need, before anything starts."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest

from stateflow.errors import InvalidArgument
from stateflow.spark import inside, start_cluster

#: the class itself: the tests below replace it
CLUSTER = inside.SparkCluster


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
    monkeypatch.setattr(inside, "EXECUTORS_S", 0.05)
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


def test_when_a_job_of_replicas_has_ended_another_one_follows_with_other_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One task that fails too often ends all replicas; on an executor without their data the next ones are others."""
    tasks: list[inside.ReplicaTask] = []
    cluster = object.__new__(CLUSTER)
    cluster._stopping, cluster._ended, cluster._replicas, cluster._group = Event(), [], 2, "stateflow-abc123"
    cluster._task = inside.ReplicaTask("h:1", "app", "abc123", "", insecure=True)

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


def test_a_session_of_spark_connect_is_refused(started: list[Any]) -> None:
    remote = type("SparkSession", (Spark,), {"__module__": "pyspark.sql.connect.session"})("yarn", 4)
    with pytest.raises(InvalidArgument, match="over Spark Connect this process is not the driver"):
        start_cluster(remote, 1)
    assert not started
