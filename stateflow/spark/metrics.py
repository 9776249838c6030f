"""Metrics of the operators of queries: counts and times, aggregated from their tasks' reports.

Each pass of a task over its rows gives a :class:`TaskReport`. Reports reach the driver in one of two ways:

* By an accumulator. Spark adds its update when a task succeeds, before the job that waits for the task goes on: when a
  micro-batch is done, all its reports have arrived.
* Over Spark Connect, which has no accumulators, as Spark's observed metrics. A task's last row has its report in a
  column of its own and nothing else. Spark collects that column as an observed metric, part of a micro-batch's progress
  or of a batch's answer, from where the client reads it. The row itself is filtered out.

:class:`Tally` aggregates reports, and Spark's own figures of micro-batches, without I/O. :func:`query_metrics` gives
the result.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stateflow.errors import InvalidArgument, NoMetrics
from stateflow.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


#: newest micro-batches of each query that are kept in detail; the totals include all
BATCHES_KEPT = 100
#: queries that are kept: those that reported last
QUERIES_KEPT = 100
#: most spans kept of one micro-batch; where a frame is evaluated again and again there are more, and the first are
#: added up
SPANS_KEPT = 4096
REPORT_COLUMN = "__stateflow_report"
_NAMED, _REPORTS = "stateflow:", "reports"
_NOT_NULL = re.compile(r"\s+not\s+null\b", re.IGNORECASE)


# -- Metrics ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time spent, by activity, in seconds.

    ``spark``: tasks waited for their rows; for a micro-batch also all of Spark's other work. ``routing``: sorting,
    slicing and encoding rows in the tasks, and decoding outputs. ``rpc``: round trips to replicas, less their time in
    the next two: network, queues, moves, standbys. ``operator``: time in the operator, including timers and watermark.
    ``commit``: collecting the changed state, and writing it.

    >>> Seconds(operator=0.25).operator
    0.25
    """

    spark: float = 0.0
    routing: float = 0.0
    rpc: float = 0.0
    operator: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        return self.spark + self.routing + self.rpc + self.operator + self.commit

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.spark + other.spark,
            self.routing + other.routing,
            self.rpc + other.rpc,
            self.operator + other.operator,
            self.commit + other.commit,
        )

    def scaled(self, factor: float) -> Seconds:
        return Seconds(
            self.spark * factor,
            self.routing * factor,
            self.rpc * factor,
            self.operator * factor,
            self.commit * factor,
        )

    def to_dict(self) -> dict[str, float]:
        """Returns milliseconds, as the command line shows them."""
        return {
            "spark_ms": round(self.spark * 1e3, 3),
            "routing_ms": round(self.routing * 1e3, 3),
            "rpc_ms": round(self.rpc * 1e3, 3),
            "operator_ms": round(self.operator * 1e3, 3),
            "commit_ms": round(self.commit * 1e3, 3),
        }


@dataclass(frozen=True, slots=True)
class OperatorMetrics:
    """Metrics of one operator of a query, in one micro-batch or in all. ``source``: as given to ``apply_operator``.

    ``rows``: input rows. ``tasks``: Spark tasks. ``visits``: partitions that those tasks sent to, with rows or without.
    These three do not rise when Spark runs a task or a micro-batch again; such tasks are counted as ``repeated``.
    ``replayed``: visits that were answered with the stored output, of all tasks including repeated ones. ``seconds``:
    sum over all tasks, including repeated ones, so two tasks in parallel spend two seconds in one. A task's seconds add
    up to its duration until its first output; their ``operator`` and ``commit`` are those of the slowest replica of the
    task, because replicas work in parallel.

    Example: ``[(each.operator, each.rows) for each in query_metrics(query).operators]``
    """

    operator: str
    source: str | None
    batches: int
    rows: int
    tasks: int
    visits: int
    repeated: int
    replayed: int
    seconds: Seconds

    def __add__(self, other: OperatorMetrics) -> OperatorMetrics:
        """Adds the metrics of the same operator."""
        return OperatorMetrics(
            self.operator,
            self.source,
            self.batches + other.batches,
            self.rows + other.rows,
            self.tasks + other.tasks,
            self.visits + other.visits,
            self.repeated + other.repeated,
            self.replayed + other.replayed,
            self.seconds + other.seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the metrics as values for JSON."""
        return {
            "operator": self.operator,
            "source": self.source,
            "batches": self.batches,
            "rows": self.rows,
            "tasks": self.tasks,
            "visits": self.visits,
            "repeated": self.repeated,
            "replayed": self.replayed,
            **self.seconds.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class BatchMetrics:
    """Metrics of one micro-batch. ``operators``: in the order in which they first reported.

    ``input_rows``: rows of the query's sources. ``trigger_s``: seconds from trigger to commit. Both are Spark's
    figures, and None until Spark reports them, or when it has forgotten them.

    ``seconds``: the time by activity, which adds up to ``trigger_s``. The time in which the operators' tasks ran is
    divided among the activities in proportion to what the tasks measured; the rest counts as Spark's. If ``trigger_s``
    is None, that rest is missing. For a micro-batch that ran again, ``seconds`` are of the newest run.

    Example: ``query_metrics(query).batches[-1].seconds.operator``
    """

    number: int
    input_rows: int | None
    trigger_s: float | None
    seconds: Seconds
    operators: tuple[OperatorMetrics, ...]

    @property
    def rows(self) -> int:
        """Sum over all operators: a row that passes two operators counts twice."""
        return sum(operator.rows for operator in self.operators)

    @property
    def tasks(self) -> int:
        return sum(operator.tasks for operator in self.operators)


@dataclass(frozen=True, slots=True)
class QueryMetrics:
    """Metrics of one query, since this driver started.

    ``id``: Spark's query id; for a batch DataFrame the ``source`` of ``apply_operator``, or a generated id.
    ``batches``: the newest 100, oldest first. ``batches_total``, ``operators`` and ``seconds`` cover all batches.

    Example: ``query_metrics(query).batches_total``
    """

    id: str
    name: str | None
    batches: tuple[BatchMetrics, ...]
    batches_total: int
    seconds: Seconds
    operators: tuple[OperatorMetrics, ...]

    @property
    def rows(self) -> int:
        """Sum over all operators: a row that passes two operators counts twice."""
        return sum(operator.rows for operator in self.operators)

    @property
    def tasks(self) -> int:
        return sum(operator.tasks for operator in self.operators)


# -- Reports of tasks and of Spark -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One pass of one task over its rows.

    ``run``: the run of the query, in which each task number is unique. Empty for a batch DataFrame, whose task numbers
    are unique in ``use``, one call of ``apply_operator``.

    ``began_us``: its begin by its machine's wall clock; ``seconds.total`` counts from then on.
    """

    query: str
    run: str
    batch: int
    operator: str
    source: str | None
    task: int
    rows: int
    visits: int
    replayed: int
    began_us: int
    seconds: Seconds
    use: str = ""


@dataclass(frozen=True, slots=True)
class Trigger:
    """Spark's report of a micro-batch that it has finished."""

    query: str
    name: str | None
    run: str
    batch: int
    input_rows: int
    seconds: float


# -- The tally -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Use:
    """One operator in one batch. ``of``: newest call. ``tasks``: task → (rows, visits), of the newest run and call."""

    of: str = ""
    tasks: dict[int, tuple[int, int]] = field(default_factory=dict)
    passes: int = 0
    replayed: int = 0
    seconds: Seconds = Seconds()


@dataclass(slots=True)
class _Batch:
    """One batch. ``covered``, ``spans`` and ``spent``, like the trigger, are of the newest run."""

    run: str
    uses: dict[tuple[str, str | None], _Use] = field(default_factory=dict)
    covered: float = 0.0  # seconds covered by spans that are not kept
    spans: list[tuple[float, float]] = field(default_factory=list)
    spent: Seconds = Seconds()
    input_rows: int | None = None
    trigger_s: float | None = None

    def report(self, report: TaskReport) -> None:
        if report.run != self.run:
            self.run, self.covered, self.spans, self.spent = report.run, 0.0, [], Seconds()
            self.input_rows = self.trigger_s = None
            for use in self.uses.values():
                use.tasks = {}  # the new run may have fewer tasks, with other rows
        use = self.uses.setdefault((report.operator, report.source), _Use())
        if report.use != use.of:
            use.of, use.tasks = report.use, {}
        use.tasks[report.task] = report.rows, report.visits
        use.passes += 1
        use.replayed += report.replayed
        use.seconds += report.seconds
        if len(self.spans) == SPANS_KEPT:
            self.covered, self.spans = self.covered + covered(self.spans), []
        began = report.began_us / 1e6
        self.spans.append((began, began + report.seconds.total))
        self.spent += report.seconds

    def operators(self) -> Iterable[OperatorMetrics]:
        for (operator, source), use in self.uses.items():
            yield OperatorMetrics(
                operator,
                source,
                1,
                sum(rows for rows, _ in use.tasks.values()),
                len(use.tasks),
                sum(visits for _, visits in use.tasks.values()),
                use.passes - len(use.tasks),
                use.replayed,
                use.seconds,
            )

    def metrics(self, number: int) -> BatchMetrics:
        seconds = elapsed(self.covered + covered(self.spans), self.spent, self.trigger_s)
        return BatchMetrics(number, self.input_rows, self.trigger_s, seconds, tuple(self.operators()))


@dataclass(slots=True)
class _Query:
    """One query. ``dropped``, ``dropped_seconds`` and ``totals`` cover batches that are no longer kept."""

    name: str | None = None
    batches: OrderedDict[int, _Batch] = field(default_factory=OrderedDict)
    dropped: int = 0
    dropped_seconds: Seconds = Seconds()
    totals: dict[tuple[str, str | None], OperatorMetrics] = field(default_factory=dict)

    def drop_oldest(self) -> None:
        number, batch = self.batches.popitem(last=False)
        self.dropped += 1
        self.dropped_seconds += batch.metrics(number).seconds
        _add_up(self.totals, batch.operators())

    def metrics(self, query: str) -> QueryMetrics:
        batches = tuple(batch.metrics(number) for number, batch in self.batches.items())
        totals = dict(self.totals)
        for batch in batches:
            _add_up(totals, batch.operators)
        seconds = reduce(add, (batch.seconds for batch in batches), self.dropped_seconds)
        return QueryMetrics(query, self.name, batches, self.dropped + len(batches), seconds, tuple(totals.values()))


class Tally:
    """Aggregates reports of tasks to metrics; of bounded size. Thread-safe."""

    def __init__(self, batches_kept: int = BATCHES_KEPT, queries_kept: int = QUERIES_KEPT) -> None:
        self._batches_kept = batches_kept
        self._queries_kept = queries_kept
        self._queries: OrderedDict[str, _Query] = OrderedDict()
        self._observed: OrderedDict[str, int] = OrderedDict()  # run → its newest batch with observed reports
        self._lock = threading.Lock()

    def report(self, reports: Iterable[TaskReport]) -> None:
        with self._lock:
            for each in reports:
                query = self._queries.setdefault(each.query, _Query())
                self._queries.move_to_end(each.query)
                query.batches.setdefault(each.batch, _Batch(each.run)).report(each)
                if len(query.batches) > self._batches_kept:
                    query.drop_oldest()
                if len(self._queries) > self._queries_kept:
                    self._queries.popitem(last=False)

    def observed(self, run: str, batch: int, reports: Iterable[TaskReport]) -> None:
        """Adds the reports of a run's micro-batch, but only once: batches of a run arrive in order, and may arrive
        again."""
        with self._lock:
            if self._observed.get(run, -1) >= batch:
                return
            self._observed[run] = batch
            self._observed.move_to_end(run)
            if len(self._observed) > self._queries_kept:
                self._observed.popitem(last=False)
        self.report(reports)

    def triggered(self, triggers: Iterable[Trigger]) -> None:
        """Adds Spark's figures of batches. Unknown batches, and those of other runs, are ignored."""
        with self._lock:
            for each in triggers:
                query = self._queries.get(each.query)
                if query is None:
                    continue
                query.name = each.name
                batch = query.batches.get(each.batch)
                if batch is not None and batch.run == each.run:
                    batch.input_rows, batch.trigger_s = each.input_rows, each.seconds

    def is_whole(self, query: str, run: str, number: int, operator: str, source: str | None, partitions: int) -> bool:
        """Tells whether tasks of this run have reported for all of the operator's partitions.

        Some tasks report nothing, so False does not mean that the batch is incomplete.
        """
        with self._lock:
            known = self._queries.get(query)
            batch = None if known is None else known.batches.get(number)
            use = None if batch is None or batch.run != run else batch.uses.get((operator, source))
            return use is not None and sum(visits for _, visits in use.tasks.values()) == partitions

    def query(self, named: str) -> QueryMetrics | None:
        """Returns the metrics of a query by its id or name. None: no task has reported.

        By name, the query of that name that reported last.
        """
        with self._lock:
            if named in self._queries:
                return self._queries[named].metrics(named)
            for identity, query in reversed(self._queries.items()):
                if query.name == named:
                    return query.metrics(identity)
            return None

    def batch(self, query: str, number: int) -> BatchMetrics | None:
        """Returns the metrics of one batch; None: it is not, or no longer, known."""
        with self._lock:
            known = self._queries.get(query)
            batch = None if known is None else known.batches.get(number)
            return None if batch is None else batch.metrics(number)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the seconds in which at least one of the (begin, end) spans was under way."""
    seconds, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds


def elapsed(running_s: float, spent: Seconds, trigger_s: float | None) -> Seconds:
    """Converts the summed time of overlapping tasks to elapsed time.

    The result adds up to ``trigger_s``; if that is None, to ``running_s``, the time in which any of the tasks ran.
    Tasks use their machines' clocks, so ``running_s`` may seem longer than ``trigger_s``.
    """
    if trigger_s is not None:
        running_s = min(running_s, trigger_s)
    split = spent.scaled(running_s / spent.total) if spent.total else Seconds()
    return split if trigger_s is None else replace(split, spark=split.spark + trigger_s - split.total)


def _add_up(totals: dict[tuple[str, str | None], OperatorMetrics], operators: Iterable[OperatorMetrics]) -> None:
    for each in operators:
        key = each.operator, each.source
        totals[key] = totals[key] + each if key in totals else each


# -- Reports over Spark Connect --------------------------------------------------------------------------------------

_FIELDS = [field.name for field in fields(TaskReport)]


def with_report_column(schema: Any) -> Any:
    """Returns the schema of the tasks' output, in DDL or as a StructType.

    All columns may be null, because those of a report row are.
    """
    if isinstance(schema, str):
        return f"{_NOT_NULL.sub('', schema)}, {REPORT_COLUMN} string"
    from pyspark.sql.types import StringType, StructField, StructType

    given = [StructField(each.name, each.dataType, True, each.metadata) for each in schema]
    return StructType([*given, StructField(REPORT_COLUMN, StringType())])


def with_report(
    outputs: Iterable[pa.RecordBatch], schema: pa.Schema, reports: list[TaskReport]
) -> Iterator[pa.RecordBatch]:
    """Yields the outputs, then the content of ``reports`` at that time. ``schema``: used if there are no outputs."""
    for batch in outputs:
        schema = batch.schema
        yield _joined(batch.columns, schema, pa.nulls(batch.num_rows, pa.string()))
    texts = pa.array(map(encoded, reports), pa.string())
    yield _joined([pa.nulls(len(texts), field.type) for field in schema], schema, texts)


def _joined(columns: list[pa.Array], schema: pa.Schema, reports: pa.Array) -> pa.RecordBatch:
    given = [field.with_nullable(True) for field in schema]
    return pa.RecordBatch.from_arrays(
        [*columns, reports], schema=pa.schema([*given, pa.field(REPORT_COLUMN, pa.string())])
    )


def observed(frame: DataFrame, use: str) -> tuple[DataFrame, Any]:
    """Returns the tasks' outputs without reports, and for a batch DataFrame the Observation with the reports.

    ``use``: name of this application, because Spark refuses two observations of one name in a query.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.connect.observation import Observation

    observation: Any = f"{_NAMED}{use}" if frame.isStreaming else Observation(f"{_NAMED}{use}")
    reports = F.collect_list(REPORT_COLUMN).alias(_REPORTS)
    seen = frame.observe(observation, reports)
    rows = seen.where(F.col(REPORT_COLUMN).isNull()).drop(REPORT_COLUMN)
    return rows, None if frame.isStreaming else observation


def reports_of(metrics: dict[str, Any]) -> list[TaskReport]:
    """Returns the task reports in the observed metrics of a micro-batch, found by the prefix of the metrics' names."""
    return [
        decoded(text)
        for name, row in metrics.items()
        if name.startswith(_NAMED)
        for text in _said(row).get(_REPORTS) or ()  # a query without tasks has no reports
    ]


def _said(row: Any) -> dict[str, Any]:
    """Returns the row as a dict. Over Spark Connect the row is in Java's form, with its values and its schema."""
    said: dict[str, Any] = row.asDict()
    if said.keys() != {"values", "schema"}:
        return said
    return dict(zip((field["name"] for field in said["schema"]["fields"]), said["values"], strict=True))


def reports_at(observation: Any) -> list[TaskReport]:
    """Returns the reports of the newest evaluation of a batch DataFrame; none before the first."""
    return [decoded(text) for text in observation.get.get(_REPORTS) or ()]


def encoded(report: TaskReport) -> str:
    """Returns the report as short JSON: the progress of each micro-batch has one for each task."""
    return json.dumps(astuple(report), separators=(",", ":"))


def decoded(text: str) -> TaskReport:
    values = json.loads(text)
    return TaskReport(
        **dict(zip(_FIELDS, values, strict=True)) | {"seconds": Seconds(*values[_FIELDS.index("seconds")])}
    )


# -- Reports at the driver, and ``query_metrics`` --------------------------------------------------------------------

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
    """Returns the accumulator for tasks' reports, one for each Spark context, because Spark never forgets an
    accumulator.

    Returns None for sessions of Spark Connect, whose queries can be found by name from now on.
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
    """Remembers a batch DataFrame of ``apply_operator`` and the query name in its tasks' reports.

    ``observation``: holds the reports over Spark Connect; None: they arrive by accumulator.
    """
    _FRAMES[frame] = query, observation


def query_metrics(query: StreamingQuery | DataFrame | str) -> QueryMetrics:
    """Returns the metrics of a query's operators so far: rows, micro-batches, and time by activity.

    They are complete up to the last micro-batch that has ended, and include the known figures of one under way. This
    driver's process keeps them for its 100 newest queries; a query that continues in another driver begins anew. Over
    Spark Connect, they cover the micro-batches that Spark still reported at the time of a call (the newest 100), and
    none under way; those of a batch DataFrame are of its newest evaluation, and found by the DataFrame only.

    Args:
        query: a streaming query, running or ended; its id or name; or the batch DataFrame that ``apply_operator``
            returned, or its ``source`` argument. Spark's own figures of an ended query can be read from the query
            object only; by name or id, those read earlier are returned.

    Returns metrics without batches for a query that has not finished its first. Raises NoMetrics if the query is not
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
    """Adds Spark's figures of micro-batches to the tally, oldest first. Returns whether there was a batch with rows."""
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
    """Returns the number of rows from all sources. Over Spark Connect it sums the sources: there is no total."""
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
