"""Completes micro-batches of which a ``foreachBatch`` function evaluates only a part, or nothing.

Spark runs only the tasks that an action needs: one of four for ``batch.take(5)``, none if there is no action. All sinks
other than ``foreachBatch`` read everything. Spark has no hook between the function's return and the commit of its
batch. So this module replaces ``DataStreamWriter.foreachBatch``, for frames with an operator in their plan.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stateflow.client.stream import positions
from stateflow.errors import BatchIncomplete, InvalidArgument, OperatorUsedTwice, StaleBatch
from stateflow.router import Asked, Router
from stateflow.spark.metrics import TALLY
from stateflow.spark.rewind import last_planned, ran_in_micro_batches, take_out_left
from stateflow.spark.session import REAL_TIME, analyzed_plan, is_here, require
from stateflow.spark.task import OperatorTask, no_query, run_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    Function = Callable[[DataFrame, int], None]


log = logging.getLogger(__name__)


#: name by which a plan shows the application of an operator to a streaming frame, with the run; the names of
#: applications to batch frames differ
_NAME = re.compile(r"stateflow_[^~]+?~([0-9a-f]{32})\(")
#: name of any application in an encoded plan, as a client sends it to a Spark Connect server
_NAMED = re.compile(rb"stateflow_.+?[_~][0-9a-f]{32}", re.DOTALL)
#: run → application to a streaming frame in this driver; those that were used last are kept
_TASKS: dict[str, OperatorTask] = {}
#: run → application in real-time mode
_REAL_TIME: dict[str, OperatorTask] = {}
#: setting that allows real-time mode to write checkpoint files in the format of micro-batches
_OLD_FORMAT_ALLOWED = "spark.sql.streaming.realTimeMode.dangerouslyAllowCheckpointV1.enabled"
#: setting with the folder for checkpoints of queries that name no checkpoint; each has one there with the query's name
_CHECKPOINTS = "spark.sql.streaming.checkpointLocation"
#: options of a writer that decide where the checkpoint is, in lower case
_OF_CHECKPOINT = ("checkpointlocation", "queryname")
#: place of the query's name among the arguments of a writer's ``start`` and ``toTable``
_NAME_AT = 4
#: most entries of ``_TASKS`` and of ``_REAL_TIME``, because a driver may restart a query for years and apply its
#: operator each time. Running queries do not need the tables.
KEPT = 1000


def complete_batches(task: OperatorTask) -> None:
    """Makes queries that apply ``task`` finish a micro-batch only when every partition contains the micro-batch.

    A real-time trigger is refused for such queries.
    """
    _remember(_TASKS, task)
    _watch_writers()


def refuse_batches(task: OperatorTask) -> None:
    """Refuses ``foreachBatch`` for a frame that applies ``task`` in real-time mode.

    A ``foreachBatch`` function may leave rows unevaluated, and these rows would be lost.
    """
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
                "outputs of an operator in real-time mode cannot go to foreachBatch",
                remedy="use foreach or a sink that supports real-time mode, or omit real_time=",
            )
        tasks = _tasks_of(self._df)
        return original(self, functools.partial(_whole, func, tasks) if tasks else func)

    @functools.wraps(trigger)
    def triggered(self: DataStreamWriter, **said: Any) -> DataStreamWriter:
        if said.get("realTime") is not None and _TASKS.keys() & _runs_of(self._df).keys():
            require(REAL_TIME, self._df.sparkSession)
            raise _not_in_real_time()
        self._stateflow_real_time = said.get("realTime") is not None
        return trigger(self, **said)

    foreach_batch.completes_batches = True  # type: ignore[attr-defined]
    DataStreamWriter.foreachBatch, DataStreamWriter.trigger = foreach_batch, triggered
    _start_beside_what_was_left(DataStreamWriter)


def _start_beside_what_was_left(writer: type[DataStreamWriter]) -> None:
    """Replaces methods of the writer, so that a query can start again if Spark was killed in the query's first batch.

    See :mod:`stateflow.spark.rewind`. In real-time mode that batch may have been applied, and a query with another
    checkpoint would apply it again.
    """
    option, options, start, to_table = writer.option, writer.options, writer.start, writer.toTable
    query_name = writer.queryName

    def noted(self: Any, said: Mapping[str, Any]) -> dict[str, Any]:
        """Notes options, and returns all that were noted, by their names in lower case."""
        found = {key.lower(): value for key, value in said.items() if value is not None}
        noticed: dict[str, Any] = {**getattr(self, "_stateflow_options", {})}
        noticed |= {key: found[key] for key in _OF_CHECKPOINT if key in found}
        self._stateflow_options = noticed
        return noticed

    @functools.wraps(option)
    def with_option(self: Any, key: str, value: Any) -> Any:
        noted(self, {key: value})
        return option(self, key, value)

    @functools.wraps(options)
    def with_options(self: Any, **said: Any) -> Any:
        noted(self, said)
        return options(self, **said)

    @functools.wraps(query_name)
    def with_name(self: Any, queryName: str) -> Any:  # noqa: N803 - as in Spark
        noted(self, {"queryName": queryName})
        return query_name(self, queryName)

    def starting(begin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(begin)
        def begun(self: Any, *arguments: Any, **said: Any) -> Any:
            runs, noticed = _runs_of(self._df), noted(self, _named(arguments) | said)
            if _REAL_TIME.keys() & runs.keys() and not getattr(self, "_stateflow_real_time", False):
                raise _not_in_micro_batches()
            _check_apart([(_TASKS | _REAL_TIME)[run] for run in runs if run in _TASKS or run in _REAL_TIME])
            if runs:
                _prepare_checkpoint(noticed, runs, self._df.sparkSession)
            return begin(self, *arguments, **said)

        return begun

    writer.option, writer.options, writer.queryName = with_option, with_options, with_name
    writer.start, writer.toTable = starting(start), starting(to_table)


def _not_in_real_time() -> InvalidArgument:
    return InvalidArgument(
        "the operator is applied to micro-batches, but this query runs in real-time mode",
        remedy="use apply_operator(…, real_time=True)",
    )


def _not_in_micro_batches() -> InvalidArgument:
    return InvalidArgument(
        "the operator is applied in real-time mode, but this query runs in micro-batches",
        remedy="use trigger(realTime=…), or omit real_time=",
    )


def _check_apart(tasks: list[OperatorTask]) -> None:
    """Checks that no two applications in one query send batches of the same source. Raises OperatorUsedTwice.

    For micro-batches, partitions detect this, too. In real-time mode they cannot distinguish the two applications from
    two attempts of one task.
    """
    uses: dict[tuple[str, str, str | None], str] = {}
    for task in tasks:
        if uses.setdefault((task.controller, task.operator, task.source or None), task.run) != task.run:
            raise OperatorUsedTwice(
                "the operator is applied twice in one query, with the same source=",
                remedy="pass a different source= to each apply_operator",
                operator=task.operator,
            )


def _check_ran_in_real_time(checkpoint: str, spark: Any) -> None:
    """Checks that a checkpoint on this machine is not one of a query in micro-batches. Raises InvalidArgument.

    Tasks check this, too, but Spark would raise an error about the format of its files before it starts them.
    """
    if ran_in_micro_batches(checkpoint) and spark.conf.get(_OLD_FORMAT_ALLOWED, "false").lower() != "true":
        raise InvalidArgument(
            "this query has run in micro-batches and cannot switch to real-time mode",
            remedy="continue without real_time=, or start with a new checkpointLocation",
            checkpoint=checkpoint,
        )


def _named(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the option for the query's name, if it is among the arguments of ``start`` or ``toTable``."""
    return {"queryName": arguments[_NAME_AT]} if len(arguments) > _NAME_AT else {}


def _prepare_checkpoint(options: Mapping[str, Any], runs: Mapping[str, None], spark: Any) -> None:
    """Checks a query's checkpoint, and moves aside files with which Spark would not start the query.

    Args:
        options: the writer's options, with their names in lower case.
        runs: runs of the operators that the query applies.

    Raises InvalidArgument if the query has run in another mode, and StaleBatch if the state is newer.
    """
    checkpoint, name = map(options.get, _OF_CHECKPOINT)
    if checkpoint is None:
        folder = spark.conf.get(_CHECKPOINTS, None)
        if not folder or not name:  # Spark makes a new checkpoint
            return
        checkpoint = f"{folder.rstrip('/')}/{name}"
    if _REAL_TIME.keys() & runs.keys():
        _check_ran_in_real_time(checkpoint, spark)
    if left := take_out_left(checkpoint):
        log.warning("checkpoint %s: moved aside files left by a killed Spark: %s", checkpoint, ", ".join(left))
    for run in runs:
        if (task := _TASKS.get(run)) is not None:
            _check_planned(checkpoint, task)


def _check_planned(checkpoint: str, task: OperatorTask) -> None:
    """Checks that a checkpoint on this machine has planned every batch that partitions contain. Raises StaleBatch.

    Spark plans a batch before it runs it. If the checkpoint has lost the plan, as an older copy has, Spark plans other
    rows under the batch's number. Partitions would take fewer rows for a replay, and get the others once more in the
    next batch.
    """
    if (found := last_planned(checkpoint)) is None:
        return
    (query, _), router = found, Router(task.controller, task.operator)
    newest = max(positions(router, task.query_source(query)).values(), default=-1)
    # read afterwards: a driver that is still ending may have planned and run another batch meanwhile
    planned = (last_planned(checkpoint) or found)[1]
    if newest > planned:
        raise StaleBatch(
            f"the state contains batch {newest}, but the query's checkpoint has planned no batch after {planned}, and "
            "would plan other rows under that number",
            remedy="put the newest copy of the query's checkpoint back, or restore the state to a batch that it has "
            "(stateflow checkpoint restore)",
            operator=task.operator,
            source=task.query_source(query),
            checkpoint=checkpoint,
        )


def watch_connect(task: OperatorTask, *, real_time: bool) -> None:
    """Replaces methods of Spark Connect's writers, for frames with an operator in their plan.

    ``foreachBatch`` is refused, because its function runs in the server, where a batch does not name its query or its
    number. A query can start although a server on this machine was killed in the query's first batch. Queries with a
    trigger that does not fit ``real_time`` are refused.
    """
    _remember(_REAL_TIME if real_time else _TASKS, task)
    from pyspark.sql.connect.streaming.readwriter import DataStreamWriter

    original = DataStreamWriter.foreachBatch
    if hasattr(original, "refuses_operators"):
        return

    @functools.wraps(original)
    def foreach_batch(self: Any, func: Function) -> Any:
        if _is_named(self):
            raise InvalidArgument(
                "over Spark Connect an operator's outputs cannot go to foreachBatch: a batch that its function "
                "does not evaluate would never reach the operator",
                remedy="write them to a sink, or apply the operator within the function: apply_operator(batch, …, "
                "source=f'{the query}-{number}')",
            )
        return original(self, func)

    def starting(begin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(begin)
        def begun(self: Any, *arguments: Any, **said: Any) -> Any:
            runs = _check_started_over_connect(self)
            if is_here(self._session) and runs:
                _prepare_checkpoint(_options_over_connect(self._write_proto, arguments, said), runs, self._session)
            return begin(self, *arguments, **said)

        return begun

    foreach_batch.refuses_operators = True  # type: ignore[attr-defined]
    DataStreamWriter.foreachBatch = foreach_batch
    DataStreamWriter.start = starting(DataStreamWriter.start)
    DataStreamWriter.toTable = starting(DataStreamWriter.toTable)


def _check_started_over_connect(writer: Any) -> dict[str, None]:
    """Checks that the trigger fits the operators in the plan of a writer's frame, and returns their runs.

    The plan is that of the server, because the client's plan does not show the contents of views.
    """
    text = analyzed_plan(writer._session, _plan_of(writer))
    if writer._write_proto.WhichOneof("trigger") == "real_time_batch_duration":
        runs = _used(text)
        if _TASKS.keys() & runs.keys():
            raise _not_in_real_time()
    else:
        runs = _runs_in(text)  # another client may have applied an operator to micro-batches
        if _REAL_TIME.keys() & runs.keys():
            raise _not_in_micro_batches()
    _check_apart([(_TASKS | _REAL_TIME)[run] for run in runs if run in _TASKS or run in _REAL_TIME])
    return runs


def _options_over_connect(proto: Any, arguments: tuple[Any, ...], said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a writer of Spark Connect that ``start`` or ``toTable`` is called for, in lower case."""
    name = {"queryName": proto.query_name} if proto.query_name else {}
    options = {**proto.options, **name}
    for more in (_named(arguments), said):
        options |= {key: value for key, value in more.items() if value is not None}
    return {key.lower(): value for key, value in options.items()}


def _plan_of(writer: Any) -> Any:
    return writer._write_stream._child.to_proto(writer._session.client)


def _is_named(writer: Any) -> bool:
    """Tells whether a Spark Connect writer's frame has an operator in its plan, also within a view."""
    plan = _plan_of(writer)
    return bool(_NAMED.search(plan.SerializeToString()) or _runs_in(analyzed_plan(writer._session, plan)))


def _tasks_of(frame: DataFrame) -> list[OperatorTask]:
    return [_TASKS[run] for run in _runs_of(frame) if run in _TASKS]


def _runs_of(frame: DataFrame) -> dict[str, None]:
    """Returns the runs of the operators in a frame's plan, and marks them as used.

    Raises InvalidArgument if a run is no longer remembered, because batches of that run could not be completed.
    """
    return _used(frame._jdf.queryExecution().analyzed().toString())


def _used(plan: str) -> dict[str, None]:
    """Returns the runs of the operators in the text of a plan, as :func:`_runs_of` does for a frame."""
    runs = _runs_in(plan)
    for run in runs:
        table = _TASKS if run in _TASKS else _REAL_TIME
        if run not in table:
            raise InvalidArgument(
                f"the driver no longer knows the operator of this frame: at least {KEPT} others were applied since",
                remedy="call apply_operator again, and use the frame that it returns",
            )
        _remember(table, table[run])
    return runs


def _runs_in(plan: str) -> dict[str, None]:
    return dict.fromkeys(_NAME.findall(plan))


def _whole(function: Function, tasks: list[OperatorTask], batch: DataFrame, number: int) -> None:
    """Calls the user's function, then evaluates the rest of the batch.

    If the function suppressed an error of the operator, the error occurs again in this evaluation and fails the query.
    """
    function(batch, number)
    context = batch.sparkSession.sparkContext
    query = context.getLocalProperty("sql.streaming.queryId")
    run = run_of(context.getLocalProperty("spark.jobGroup.id"))
    if query is None:
        raise no_query(tasks[0].operator)
    unread = [
        task
        for task in tasks
        if not run or not TALLY.is_whole(query, run, number, task.operator, task.source, task.partitions)
    ]
    # a task with outputs that were not read to the end has done its work, but has reported nothing
    if all(_contained(task, query, number) for task in unread):
        return
    batch.write.format("noop").mode("overwrite").save()
    for task in unread:
        if _contained(task, query, number):
            continue
        task.kept_router().refresh()  # the answer may be from a former owner that does not know its successor
        if not _contained(task, query, number):
            raise BatchIncomplete(
                f"batch {number} does not reach the operator: Spark's plan discards all of its output",
                remedy="remove the step after the operator that drops all rows, such as limit(0); nothing is lost, the "
                "query resumes with this batch",
                operator=task.operator,
                source=task.query_source(query),
            )


def _contained(task: OperatorTask, query: str, number: int) -> bool:
    """Tells whether every partition contains the batch."""
    router = task.kept_router()
    reached = Asked(router, task.query_source(query), number + 1, task.unavailable_timeout_s).answers()
    return len(reached) == task.partitions and all(each.batch >= number for each in reached.values())
