"""Brings tasks' reports to the driver, and ``query_metrics``.

Spark adds an accumulator's update when a task succeeds, before the job that waits for the task goes on: when a
micro-batch is done, all its reports are there. A client of Spark Connect reads the reports from the query's progress,
see :mod:`stateflow.spark.observed`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stateflow.errors import InvalidArgument, NoMetrics
from stateflow.spark.connect import is_connect
from stateflow.spark.metrics import QueryMetrics, Seconds, Tally, TaskReport, Trigger
from stateflow.spark.observed import reports_at, reports_of

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

#: the tally of this driver, for all its Spark sessions
TALLY = Tally()
_ACCUMULATORS: weakref.WeakKeyDictionary[Any, Accumulator[Any]] = weakref.WeakKeyDictionary()  # by SparkContext
#: sessions of Spark Connect
_SESSIONS: weakref.WeakSet[SparkSession] = weakref.WeakSet()
#: frame → query that its tasks report as, and over Spark Connect its Observation
_FRAMES: weakref.WeakKeyDictionary[DataFrame, tuple[str, Any]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class _Reports:
    """Spark's AccumulatorParam: a list of reports in the tasks, the tally at the driver."""

    def zero(self, value: Any) -> list[TaskReport]:
        return []

    def addInPlace(self, value: Any, reports: list[TaskReport]) -> Any:  # noqa: N802 - Spark's name
        if not isinstance(value, Tally):
            return [*value, *reports]
        value.report(reports)
        return value


def reports_to(spark: SparkSession) -> Accumulator[Any] | None:
    """Returns the accumulator for tasks' reports, one for each Spark context, as Spark never forgets an accumulator.

    Returns None for sessions of Spark Connect, whose queries are found by name from now on.
    """
    if is_connect(spark):
        _SESSIONS.add(spark)
        return None
    context = spark.sparkContext
    with _LOCK:
        if context not in _ACCUMULATORS:
            _ACCUMULATORS[context] = context.accumulator(TALLY, _Reports())
        return _ACCUMULATORS[context]


def remember(frame: DataFrame, query: str, observation: Any = None) -> None:
    """Remembers a batch DataFrame of ``apply_operator`` and the query that its tasks report as.

    ``observation``: holds the reports over Spark Connect; None: they come by accumulator.
    """
    _FRAMES[frame] = query, observation


def query_metrics(query: StreamingQuery | DataFrame | str) -> QueryMetrics:
    """Returns what the operators of a query did so far: rows, micro-batches, and time by where it went.

    The metrics are complete up to the last micro-batch that has ended, and include what is known of one under way. This
    driver's process keeps them for its 100 newest queries; a query that goes on in another driver begins anew. Over
    Spark Connect, they cover the micro-batches that Spark still reported at the time of a call (the newest 100), and
    none under way; those of a batch DataFrame are of its newest evaluation, and found by the DataFrame only.

    Args:
        query: a streaming query, running or ended; its id or name; or a batch DataFrame as ``apply_operator`` returned
            it, or the ``source`` it was given. Spark's own figures of an ended query can be read from the query object
            only; by name or id, those read earlier are returned.

    Returns metrics without batches for a query that has not finished its first. Raises NoMetrics when the query is not
    known, or finished a micro-batch without any operator, and InvalidArgument for a streaming DataFrame.

    Example: ``query_metrics(query).seconds.to_dict()``
    """
    if isinstance(query, str):
        running = _running(query)
        if running is None:
            return _known(query)
        query = running
    if hasattr(query, "isStreaming"):
        if query.isStreaming:
            raise InvalidArgument("a streaming DataFrame has no metrics", remedy="pass the query that start() returned")
        if query not in _FRAMES:
            raise NoMetrics(
                "this DataFrame was not returned by apply_operator",
                remedy="pass the returned one, not one derived from it",
            )
        named, observation = _FRAMES[query]
        tally = TALLY
        if observation is not None:
            tally = Tally()
            tally.report(reports_at(observation))
        return tally.query(named) or _none_yet(named, None)
    identity, ran = str(query.id), note(query.recentProgress)
    return (_known(identity) if ran else TALLY.query(identity)) or _none_yet(identity, query.name)


def note(progresses: Sequence[Any]) -> bool:
    """Adds what Spark says of micro-batches to the tally, oldest first. Tells whether there was a batch with rows."""
    done = [each for each in progresses if "addBatch" in each["durationMs"]]  # otherwise Spark found no rows
    for each in done:
        TALLY.observed(str(each["runId"]), int(each["batchId"]), reports_of(each["observedMetrics"] or {}))
    triggers = [
        Trigger(
            str(each["id"]),
            each["name"],
            str(each["runId"]),
            int(each["batchId"]),
            _input_rows(each),
            each["durationMs"].get("triggerExecution", 0) / 1e3,
        )
        for each in done
    ]
    TALLY.triggered(triggers)
    return bool(triggers)


def _input_rows(progress: Any) -> int:
    """Returns the rows that came from all sources; over Spark Connect only the sources have the figure."""
    rows = progress["numInputRows"]
    return int(sum(source["numInputRows"] for source in progress["sources"]) if rows is None else rows)


def _running(named: str) -> StreamingQuery | None:
    from pyspark.sql import SparkSession

    own = SparkSession.getActiveSession() or SparkSession._instantiatedSession  # a thread may have no active one
    sessions = [*([] if own is None else [own]), *_SESSIONS]
    active = (query for spark in sessions for query in spark.streams.active)
    return next((query for query in active if named in (str(query.id), query.name)), None)


def _known(query: str) -> QueryMetrics:
    known = TALLY.query(query)
    if known is None:
        raise NoMetrics(
            "no task of a stateflow operator has reported for this query",
            remedy="apply an operator in it, or pass a StreamingQuery, id or name of this driver",
            query=query,
        )
    return known


def _none_yet(query: str, name: str | None) -> QueryMetrics:
    return QueryMetrics(query, name, (), 0, Seconds(), ())
