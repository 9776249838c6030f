"""Micro-batches of which a ``foreachBatch`` evaluates a part, or nothing: the driver sees to the rest.

Spark runs the tasks that an action needs: one of four for ``batch.take(5)``, none where there is no action. All other
sinks read everything. ``DataStreamWriter.foreachBatch`` is where a function gets hold of a query's batches, and Spark
offers nothing that is called before such a batch counts as done; so it is replaced there, for frames that have an
operator in their plan.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from stateflow.errors import BatchIncomplete
from stateflow.router import Asked, Router
from stateflow.spark.task import OperatorTask, no_query
from stateflow.spark.task_reports import TALLY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    Function = Callable[[DataFrame, int], None]

_NAME = re.compile(r"stateflow_.+?_([0-9a-f]{32})\(")
#: applications to streaming frames in this driver, by run
_TASKS: dict[str, OperatorTask] = {}


def complete_batches(task: OperatorTask) -> None:
    """From now on a micro-batch of a query that applies ``task`` is not done before every partition has it."""
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    _TASKS[task.run] = task
    original = DataStreamWriter.foreachBatch
    if hasattr(original, "completes_batches"):
        return

    @functools.wraps(original)
    def foreach_batch(self: DataStreamWriter, func: Function) -> DataStreamWriter:
        tasks = _tasks_of(self._df)
        return original(self, functools.partial(_whole, func, tasks) if tasks else func)

    foreach_batch.completes_batches = True  # type: ignore[attr-defined]
    DataStreamWriter.foreachBatch = foreach_batch


def _tasks_of(frame: DataFrame) -> list[OperatorTask]:
    plan = frame._jdf.queryExecution().analyzed().toString()
    return [_TASKS[run] for run in dict.fromkeys(_NAME.findall(plan)) if run in _TASKS]


def _whole(function: Function, tasks: list[OperatorTask], batch: DataFrame, number: int) -> None:
    """The user's function, and the rest of the batch behind it.

    What failed in the operator and was swallowed is met again here, and fails the query.
    """
    function(batch, number)
    context = batch.sparkSession.sparkContext
    query, run = context.getLocalProperty("sql.streaming.queryId"), context.getLocalProperty("spark.jobGroup.id")
    if query is None:
        raise no_query(tasks[0].operator)
    unread = [
        task for task in tasks if not TALLY.is_whole(query, run, number, task.operator, task.source, task.partitions)
    ]
    # tasks whose outputs were not read to their end have done their work, and do not report
    if all(_contained(task, query, number) for task in unread):
        return
    batch.write.format("noop").mode("overwrite").save()
    for task in unread:
        if not _contained(task, query, number):
            raise BatchIncomplete(
                f"batch {number} does not come to the operator: by Spark's plan nobody can want a row of its output",
                remedy="take out what leaves no row, such as limit(0), behind the operator; nothing is lost, the query "
                "goes on with this batch",
                operator=task.operator,
                source=task.query_source(query),
            )


def _contained(task: OperatorTask, query: str, number: int) -> bool:
    """By every partition."""
    router = Router(task.controller, task.operator)
    reached = Asked(router, task.query_source(query), number + 1, task.unavailable_timeout_s).answers()
    return len(reached) == task.partitions and all(each.batch >= number for each in reached.values())
