"""Moves partitions away from executors that Spark decommissions, then ends the replicas' tasks there.

Such an executor waits for its tasks to end. Spark starts them again elsewhere, as other replicas.

Spark tells a task nothing of the decommissioning. It tells the driver, which this module asks by
``TaskScheduler.getExecutorDecommissionState``, as Spark has no listener event for it.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stateflow.client import Cluster
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import AlreadyThere, StateflowError, Unavailable
from stateflow.reports import ClusterStatus, ReplicaStatus

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)
LOOK_S = 1.0
#: seconds until a replica that still owns partitions is asked again to give them away
AGAIN_S = 10.0
#: seconds for which a replica that ends gets no partitions: by then it is gone
MAINTENANCE_S = 3600.0
_TASKS_MAX = 1 << 20
WHY = "its executor is decommissioned, and its replica owns no partitions"


@dataclass(frozen=True, slots=True)
class Leaving:
    """A task on an executor that is decommissioned.

    ``task``: its id, unique in the application. ``number``: number of its Spark partition.
    """

    task: int
    number: int


@dataclass(frozen=True, slots=True)
class Steps:
    """Next steps for tasks that leave.

    ``empty``: replicas that are to give away their partitions. ``end``: tasks whose replicas own nothing.
    """

    empty: tuple[str, ...] = ()
    end: tuple[int, ...] = ()


class Departures:
    """Decides, look by look, what to do for tasks that leave.

    Args:
        base: prefix of replica names; a task's number follows, and for a replacement another number.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._asked: dict[str, float] = {}

    def look(
        self, leaving: Collection[Leaving], replicas: Sequence[ReplicaStatus], moving: Collection[str], now: float
    ) -> Steps:
        """Returns the steps for the tasks that leave.

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
            empty += [name for name in owners if now - self._asked.get(name, now - AGAIN_S) >= AGAIN_S]
        self._asked |= dict.fromkeys(empty, now)
        return Steps(tuple(empty), tuple(end))

    def _of(self, number: int, replicas: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
        """Returns the replicas of a task's number that answer.

        If none answers, returns all that this number ever had, as a replica may be silent for a moment.
        """
        named = re.compile(rf"{re.escape(self._base)}-{number}(-\d+)?")
        known = [replica for replica in replicas if named.fullmatch(replica.name)]
        return [replica for replica in known if replica.alive] or known


class Decommissioning(threading.Thread):
    """Thread that looks for decommissioned executors until ``over`` is set.

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
            except StateflowError as error:  # e.g. the controller is away
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
            log.warning("%s: executor decommissioned, moving its partitions away", name)
            try:
                self._empty(name)
            except StateflowError as error:
                self._say_once(name, "%s: partitions not moved away, will retry: %s", name, error)
        for task in steps.end:
            self._context._jsc.sc().killTaskAttempt(task, True, WHY)

    def _empty(self, name: str) -> None:
        """Moves all partitions of a replica away. Raises StateflowError where no other replica could take them."""
        try:
            self._cluster.maintain(name, for_s=MAINTENANCE_S)
        except Unavailable:  # also if a standby would lose its place; this replica ends anyway
            try:
                self._cluster.drain(name)
            except AlreadyThere:
                pass

    def _say_once(self, what: str, said: str, *of: object) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning(said, *of)


def sources_of(status: ClusterStatus) -> set[str]:
    """Returns the replicas from which a partition moves away, or is to move."""
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
