"""Executors that Spark decommissions: what their replicas have moves away while they still run, and then their tasks
are ended, for which such an executor waits. Spark starts them again elsewhere, as other replicas.

A task is told nothing of it. The driver is, by an executor or by whoever decommissions it; it is asked here, by
``TaskScheduler.getExecutorDecommissionState``, as no listener is told.
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
#: until what has not left is asked to again
AGAIN_S = 10.0
#: a node that ends is given nothing for so long: it is gone by then
MAINTENANCE_S = 3600.0
_TASKS_MAX = 1 << 20
WHY = "its executor is decommissioned, and its replica has nothing any more"


@dataclass(frozen=True, slots=True)
class Leaving:
    """A task on an executor that is decommissioned. ``task``: its id, which no other one has. ``number``: of its
    partition."""

    task: int
    number: int


@dataclass(frozen=True, slots=True)
class Steps:
    """``empty``: replicas that are to give away what they have. ``end``: tasks whose replicas have nothing."""

    empty: tuple[str, ...] = ()
    end: tuple[int, ...] = ()


class Departures:
    """What is to be done of tasks that leave, look by look. Args: base: names are this and a task's number, and maybe
    another one behind it."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._asked: dict[str, float] = {}

    def look(
        self, leaving: Collection[Leaving], replicas: Sequence[ReplicaStatus], moving: Collection[str], now: float
    ) -> Steps:
        """Args: moving: from whom something is on its way."""
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
        """Those that answer; or all that a task of this number ever had, where none does: it may be silent for a
        moment."""
        named = re.compile(rf"{re.escape(self._base)}-{number}(-\d+)?")
        known = [replica for replica in replicas if named.fullmatch(replica.name)]
        return [replica for replica in known if replica.alive] or known


class Decommissioning(threading.Thread):
    """Looks until ``over`` is set. Args: group: of the replicas' jobs."""

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
            except StateflowError as error:  # the controller is away, for example
                self._say_once(str(error), "executors that are decommissioned are looked at later: %s", error)
            except Py4JError as error:
                if not self._over.is_set():
                    log.warning("this Spark does not say which executors it decommissions: %s", error)
                return

    def _look(self) -> None:
        leaving = leaving_of(self._context, self._group)
        if not leaving:
            return
        status = self._cluster.status()
        steps = self._departures.look(leaving, status.replicas, sources_of(status), SYSTEM_CLOCK.monotonic())
        for name in steps.empty:
            log.warning("the executor of %s is decommissioned: what it has moves away", name)
            try:
                self._empty(name)
            except StateflowError as error:
                self._say_once(name, "%s stays for now with what it has: %s", name, error)
        for task in steps.end:
            self._context._jsc.sc().killTaskAttempt(task, True, WHY)

    def _empty(self, name: str) -> None:
        """Raises StateflowError where nobody else could have it."""
        try:
            self._cluster.maintain(name, for_s=MAINTENANCE_S)
        except Unavailable:  # also where a standby would have no place then: where it is now ends anyway
            try:
                self._cluster.drain(name)
            except AlreadyThere:
                pass

    def _say_once(self, what: str, said: str, *of: object) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning(said, *of)


def sources_of(status: ClusterStatus) -> set[str]:
    """From whom something moves away, or is to."""
    under_way = [move for each in status.reconfigurations if not each.over for move in each.moves]
    return {move.source for move in under_way if move.stands in ("waiting", "in_progress")}


def leaving_of(spark: SparkContext, group: str) -> list[Leaving]:
    """Tasks of a group of jobs that run on executors which Spark decommissions. Raises Py4JError."""
    if spark._jsc is None:  # it was stopped
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
    """Of a Scala Seq."""
    return [sequence.apply(number) for number in range(sequence.size())]


def _stages(spark: SparkContext, group: str) -> list[tuple[int, int]]:
    """With their attempts, of jobs that run."""
    tracker = spark.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    numbers = [stage for job in jobs if job is not None and job.status == "RUNNING" for stage in job.stageIds]
    stages = [tracker.getStageInfo(stage) for stage in numbers]
    return [(stage.stageId, stage.currentAttemptId) for stage in stages if stage is not None]
