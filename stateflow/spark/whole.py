"""Micro-batches of which a ``foreachBatch`` evaluates a part, or nothing: the driver sees to the rest.

Spark runs the tasks that an action needs: one of four for ``batch.take(5)``, none where there is no action. All other
sinks read everything. ``DataStreamWriter.foreachBatch`` is where a function gets hold of a query's batches, and Spark
offers nothing that is called before such a batch counts as done; so it is replaced there, for frames that have an
operator in their plan.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stateflow.errors import BatchIncomplete, InvalidArgument, OperatorUsedTwice
from stateflow.router import Asked, Router
from stateflow.spark.connect import is_here
from stateflow.spark.rewind import take_out_left
from stateflow.spark.task import OperatorTask, no_query
from stateflow.spark.task_reports import TALLY
from stateflow.spark.versions import REAL_TIME, require

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    Function = Callable[[DataFrame, int], None]

#: of an application to a streaming frame; others are no concern here
_NAME = re.compile(r"stateflow_[^~]+?~([0-9a-f]{32})\(")
#: as a plan on its way to a server has it
_NAMED = re.compile(rb"stateflow_.+?[_~][0-9a-f]{32}", re.DOTALL)
#: applications to streaming frames in this driver, by run; those that were used last are kept
_TASKS: dict[str, OperatorTask] = {}
#: those in real-time mode
_REAL_TIME: dict[str, OperatorTask] = {}
#: of each. A driver that starts a query anew for years applies its operator again each time; a query that runs holds
#: what it needs itself
KEPT = 1000


def complete_batches(task: OperatorTask) -> None:
    """From now on a micro-batch of a query that applies ``task`` is not done before every partition has it. Real-time
    mode is refused it."""
    _remember(_TASKS, task)
    _watch_writers()


def refuse_batches(task: OperatorTask) -> None:
    """Of a frame that applies it in real-time mode: a function for ``foreachBatch`` may leave rows out, which would be
    lost."""
    _remember(_REAL_TIME, task)
    _watch_writers()


def _remember(table: dict[str, OperatorTask], task: OperatorTask) -> None:
    table.pop(task.run, None)
    table[task.run] = task
    while len(table) > KEPT:
        del table[next(iter(table))]


def _watch_writers() -> None:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    original = DataStreamWriter.foreachBatch
    if hasattr(original, "completes_batches"):
        return
    trigger = DataStreamWriter.trigger

    @functools.wraps(original)
    def foreach_batch(self: DataStreamWriter, func: Function) -> DataStreamWriter:
        if _REAL_TIME.keys() & _runs_of(self._df).keys():
            raise InvalidArgument(
                "an operator in real-time mode does not give its outputs to foreachBatch",
                remedy="use foreach, or a sink that takes rows in real-time mode; or leave real_time= out",
            )
        tasks = _tasks_of(self._df)
        return original(self, functools.partial(_whole, func, tasks) if tasks else func)

    @functools.wraps(trigger)
    def triggered(self: DataStreamWriter, **said: Any) -> DataStreamWriter:
        if said.get("realTime") is not None and _TASKS.keys() & _runs_of(self._df).keys():
            require(REAL_TIME, self._df.sparkSession)
            raise InvalidArgument(
                "the operator is applied to micro-batches, and this query is in real-time mode",
                remedy="apply_operator(…, real_time=True)",
            )
        self._stateflow_real_time = said.get("realTime") is not None
        return trigger(self, **said)

    foreach_batch.completes_batches = True  # type: ignore[attr-defined]
    DataStreamWriter.foreachBatch, DataStreamWriter.trigger = foreach_batch, triggered
    _start_beside_what_was_left(DataStreamWriter)


def _start_beside_what_was_left(writer: type[DataStreamWriter]) -> None:
    """Queries with operators start where Spark was killed in their first batch, see :mod:`stateflow.spark.rewind`: in
    real-time mode that batch has been applied, and a query of another checkpoint would apply it again."""
    option, options, start, to_table = writer.option, writer.options, writer.start, writer.toTable

    def noted(self: Any, said: Mapping[str, Any]) -> None:
        for key, value in said.items():
            if key.lower() == "checkpointlocation":
                self._stateflow_checkpoint = value

    @functools.wraps(option)
    def with_option(self: Any, key: str, value: Any) -> Any:
        noted(self, {key: value})
        return option(self, key, value)

    @functools.wraps(options)
    def with_options(self: Any, **said: Any) -> Any:
        noted(self, said)
        return options(self, **said)

    def starting(begin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(begin)
        def begun(self: Any, *arguments: Any, **said: Any) -> Any:
            noted(self, said)
            runs, checkpoint = _runs_of(self._df), getattr(self, "_stateflow_checkpoint", None)
            if _REAL_TIME.keys() & runs.keys() and not getattr(self, "_stateflow_real_time", False):
                raise InvalidArgument(
                    "the operator is applied in real-time mode, and this query runs in micro-batches",
                    remedy="trigger(realTime=…), or leave real_time= out",
                )
            _check_apart([(_TASKS | _REAL_TIME)[run] for run in runs if run in _TASKS or run in _REAL_TIME])
            if checkpoint is not None and runs:
                _put_aside(checkpoint)
            return begin(self, *arguments, **said)

        return begun

    writer.option, writer.options = with_option, with_options
    writer.start, writer.toTable = starting(start), starting(to_table)


def _check_apart(tasks: list[OperatorTask]) -> None:
    """Raises OperatorUsedTwice for applications of one query that would claim the same batches. Partitions see it too,
    of micro-batches; in real time they take one for another attempt of the other."""
    uses: dict[tuple[str, str, str | None], str] = {}
    for task in tasks:
        if uses.setdefault((task.controller, task.operator, task.source), task.run) != task.run:
            raise OperatorUsedTwice(
                "the operator is applied twice in one query",
                remedy="pass a different source= to each apply_operator",
                operator=task.operator,
            )


def _put_aside(checkpoint: str) -> None:
    if left := take_out_left(checkpoint):
        log.warning("%s: put aside what a killed Spark left: %s", checkpoint, ", ".join(left))


def watch_connect() -> None:
    """Over Spark Connect, from now on, of a frame that has an operator in its plan: ``foreachBatch`` is refused, as its
    function runs in the server, where its batch says neither of which query it is nor which one; and its queries start
    where a server of this machine was killed in their first batch."""
    from pyspark.sql.connect.streaming.readwriter import DataStreamWriter

    original = DataStreamWriter.foreachBatch
    if hasattr(original, "refuses_operators"):
        return

    @functools.wraps(original)
    def foreach_batch(self: Any, func: Function) -> Any:
        if _is_named(self):
            raise InvalidArgument(
                "over Spark Connect an operator's outputs cannot be given to foreachBatch: a batch that its function "
                "does not evaluate would be lost to the operator",
                remedy="write them to a sink, or apply the operator within the function: apply_operator(batch, …, "
                "source=f'{the query}-{number}')",
            )
        return original(self, func)

    def starting(begin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(begin)
        def begun(self: Any, *arguments: Any, **said: Any) -> Any:
            options = {key.lower(): value for key, value in {**self._write_proto.options, **said}.items()}
            checkpoint = options.get("checkpointlocation")
            if checkpoint is not None and is_here(self._session) and _is_named(self):
                _put_aside(checkpoint)
            return begin(self, *arguments, **said)

        return begun

    foreach_batch.refuses_operators = True  # type: ignore[attr-defined]
    DataStreamWriter.foreachBatch = foreach_batch
    DataStreamWriter.start = starting(DataStreamWriter.start)
    DataStreamWriter.toTable = starting(DataStreamWriter.toTable)


def _is_named(writer: Any) -> bool:
    """Over Spark Connect: has its frame an operator in its plan?"""
    plan = writer._write_stream._child.to_proto(writer._session.client)
    return _NAMED.search(plan.SerializeToString()) is not None


def _tasks_of(frame: DataFrame) -> list[OperatorTask]:
    return [_TASKS[run] for run in _runs_of(frame) if run in _TASKS]


def _runs_of(frame: DataFrame) -> dict[str, None]:
    """Returns the runs of the operators in a frame's plan, and notes that they are used. Raises InvalidArgument for a
    run that is no longer remembered: its batches could not be seen to."""
    runs = dict.fromkeys(_NAME.findall(frame._jdf.queryExecution().analyzed().toString()))
    for run in runs:
        table = _TASKS if run in _TASKS else _REAL_TIME
        if run not in table:
            raise InvalidArgument(
                f"the operator was applied to this frame before the last {KEPT} others in this driver",
                remedy="call apply_operator again, and use the frame that it gives",
            )
        _remember(table, table[run])
    return runs


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
