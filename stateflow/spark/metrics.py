"""Aggregates reports of Spark tasks to the metrics of queries: counts of rows, and time by activity.

Each pass of a task over its rows makes a :class:`TaskReport`. Reports reach the driver in one of two ways:

* By an accumulator. Spark adds a task's update when the task succeeds, before the job that waits for the task
  continues. So when a micro-batch is done, all its reports have arrived.
* As Spark's observed metrics over Spark Connect, which has no accumulators. A task's last row contains only its report,
  in a separate column. Spark collects that column as an observed metric, which the client reads in the progress of a
  micro-batch or the answer to a batch query. The row itself is filtered out.

:class:`Tally` aggregates reports and Spark's own figures of micro-batches, without I/O. :func:`query_metrics` returns
the result.
"""

from __future__ import annotations

import json
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
from stateflow.operator.arrow import parse_ddl
from stateflow.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


#: number of newest micro-batches of each query that are kept in detail; the totals include all micro-batches
BATCHES_KEPT = 100
#: number of queries whose metrics are kept; these are the queries that reported last
QUERIES_KEPT = 100
#: most spans kept of one micro-batch; if a frame is evaluated many times and has more spans, earlier ones are added up
SPANS_KEPT = 4096
REPORT_COLUMN = "__stateflow_report"
_NAMED, _REPORTS = "stateflow:", "reports"


# -- Metrics ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time spent on each activity, in seconds.

    Attributes:
        spark: time for which tasks waited for their rows; in a micro-batch also all of Spark's other work.
        routing: sorting, slicing and encoding rows in the tasks, and decoding outputs.
        rpc: round trips to replicas, without ``operator`` and ``commit``: network, queues, moves, standbys.
        operator: time in the operator, including timers and watermarks.
        commit: collecting and writing the changed state.

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
        """Returns the times in milliseconds, under the names that the command line shows."""
        return {
            "spark_ms": round(self.spark * 1e3, 3),
            "routing_ms": round(self.routing * 1e3, 3),
            "rpc_ms": round(self.rpc * 1e3, 3),
            "operator_ms": round(self.operator * 1e3, 3),
            "commit_ms": round(self.commit * 1e3, 3),
        }


@dataclass(frozen=True, slots=True)
class OperatorMetrics:
    """Metrics of one operator of a query, in one micro-batch or in all micro-batches.

    ``rows``, ``tasks`` and ``visits`` do not rise when Spark runs a task or a micro-batch again; ``repeated`` counts
    such tasks. ``replayed`` and ``seconds`` include repeated tasks.

    Attributes:
        source: the argument ``source`` of ``apply_operator``.
        rows: number of input rows.
        tasks: number of Spark tasks.
        visits: number of partitions to which the tasks sent the batch, with or without rows.
        repeated: number of tasks that ran again.
        replayed: number of visits that were answered with the stored output.
        seconds: sum over all tasks, so two tasks that run in parallel for one second count as two. A task's seconds add
            up to its duration until its first output. As replicas work in parallel, ``operator`` and ``commit`` are
            those of the task's slowest replica.

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
    """Metrics of one micro-batch.

    Attributes:
        input_rows: number of rows that Spark read from the query's sources; None if Spark has not reported it yet, or
            has dropped its report.
        trigger_s: seconds from trigger to commit, as Spark reports them; None whenever ``input_rows`` is None.
        seconds: elapsed time by activity, in the newest run of the micro-batch. The elapsed time in which operators'
            tasks ran is divided among the activities in proportion to the times that the tasks measured. All other time
            until ``trigger_s`` is added to ``spark``, so that the activities add up to ``trigger_s``. If ``trigger_s``
            is None, only the time in which the tasks ran is included.
        operators: metrics of the operators, in the order in which they first reported.

    Example: ``query_metrics(query).batches[-1].seconds.operator``
    """

    number: int
    input_rows: int | None
    trigger_s: float | None
    seconds: Seconds
    operators: tuple[OperatorMetrics, ...]

    @property
    def rows(self) -> int:
        """Input rows of all operators. A row that passes two operators counts twice."""
        return sum(operator.rows for operator in self.operators)

    @property
    def tasks(self) -> int:
        return sum(operator.tasks for operator in self.operators)


@dataclass(frozen=True, slots=True)
class QueryMetrics:
    """Metrics of one query, since this driver started.

    ``batches_total``, ``seconds`` and ``operators`` cover all micro-batches.
    ``id`` is Spark's query id; for a batch DataFrame it is the ``source`` of ``apply_operator``, or a generated id.
    ``batches`` contains the newest 100 micro-batches, oldest first.

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
        """Input rows of all operators. A row that passes two operators counts twice."""
        return sum(operator.rows for operator in self.operators)

    @property
    def tasks(self) -> int:
        return sum(operator.tasks for operator in self.operators)


# -- Reports of tasks and of Spark -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Report about one pass of one task over its rows.

    Attributes:
        run: the run of a streaming query, in which each task number is unique; empty for a batch DataFrame.
        use: the call of ``apply_operator``, in which task numbers of a batch DataFrame are unique.
        began_us: beginning of the pass by the wall clock of the task's machine; ``seconds.total`` counts from then on.
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
    """Figures of one operator in one batch.

    ``of`` is the newest call of ``apply_operator``. ``tasks``: a task of the newest run and call → (rows, visits).
    """

    of: str = ""
    tasks: dict[int, tuple[int, int]] = field(default_factory=dict)
    passes: int = 0
    replayed: int = 0
    seconds: Seconds = Seconds()


@dataclass(slots=True)
class _Batch:
    """Figures of one batch. All attributes except ``uses`` are those of the newest run."""

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
    """Figures of one query. ``dropped``, ``dropped_seconds`` and ``totals`` cover batches that are no longer kept."""

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
    """Aggregates reports of tasks to metrics, in bounded memory. Thread-safe."""

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
        """Adds the reports of a micro-batch. Batches of a run arrive in order; one that arrives again is ignored."""
        with self._lock:
            if self._observed.get(run, -1) >= batch:
                return
            self._observed[run] = batch
            self._observed.move_to_end(run)
            if len(self._observed) > self._queries_kept:
                self._observed.popitem(last=False)
        self.report(reports)

    def triggered(self, triggers: Iterable[Trigger]) -> None:
        """Adds Spark's figures of batches. Unknown batches, and batches of other runs than the newest, are ignored."""
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
        """Returns the metrics of a query by its id or name, or None if none of its tasks has reported.

        If several queries have the name, returns the metrics of the query that reported last.
        """
        with self._lock:
            if named in self._queries:
                return self._queries[named].metrics(named)
            for identity, query in reversed(self._queries.items()):
                if query.name == named:
                    return query.metrics(identity)
            return None

    def batch(self, query: str, number: int) -> BatchMetrics | None:
        """Returns the metrics of one batch, or None if the batch is unknown or no longer kept."""
        with self._lock:
            known = self._queries.get(query)
            batch = None if known is None else known.batches.get(number)
            return None if batch is None else batch.metrics(number)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the number of seconds that at least one of the (begin, end) spans covers."""
    seconds, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds


def elapsed(running_s: float, spent: Seconds, trigger_s: float | None) -> Seconds:
    """Converts the summed time of overlapping tasks to elapsed time.

    The result adds up to ``trigger_s``, or to ``running_s`` if ``trigger_s`` is None.

    Args:
        running_s: time in which at least one task ran, by the clocks of the tasks' machines; it may exceed
            ``trigger_s``, because the clocks differ.
        spent: sum of the tasks' times.
        trigger_s: duration of the micro-batch, as measured by Spark.
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
    """Returns the schema, which is DDL or a StructType, as a StructType with the report column added.

    All columns become nullable, because a row with a report has nulls in all other columns.
    """
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StringType, StructField, StructType

    if isinstance(schema, str):
        schema = from_arrow_schema(parse_ddl(schema), prefer_timestamp_ntz=True)
    given = [StructField(each.name, each.dataType, True, each.metadata) for each in schema]
    return StructType([*given, StructField(REPORT_COLUMN, StringType())])


def with_report(
    outputs: Iterable[pa.RecordBatch], schema: pa.Schema, reports: list[TaskReport]
) -> Iterator[pa.RecordBatch]:
    """Yields the outputs, then a batch with ``reports``, read at the end because the task adds its report there.

    Args:
        schema: schema of the outputs, used if there are none.
    """
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

    Args:
        use: the call of ``apply_operator``. It makes the observation's name unique, because Spark refuses two
            observations of one name in a query.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.connect.observation import Observation

    observation: Any = f"{_NAMED}{use}" if frame.isStreaming else Observation(f"{_NAMED}{use}")
    reports = F.collect_list(REPORT_COLUMN).alias(_REPORTS)
    seen = frame.observe(observation, reports)
    rows = seen.where(F.col(REPORT_COLUMN).isNull()).drop(REPORT_COLUMN)
    return rows, None if frame.isStreaming else observation


def reports_of(metrics: dict[str, Any]) -> list[TaskReport]:
    """Returns the task reports in a micro-batch's observed metrics, from all metrics with the prefix ``stateflow:``."""
    return [
        decoded(text)
        for name, row in metrics.items()
        if name.startswith(_NAMED)
        for text in _said(row).get(_REPORTS) or ()  # a query without tasks has no reports
    ]


def _said(row: Any) -> dict[str, Any]:
    """Returns the row as a dict. Over Spark Connect the row consists of the fields ``values`` and ``schema``."""
    said: dict[str, Any] = row.asDict()
    if said.keys() != {"values", "schema"}:
        return said
    return dict(zip((field["name"] for field in said["schema"]["fields"]), said["values"], strict=True))


def reports_at(observation: Any) -> list[TaskReport]:
    """Returns the reports of the newest evaluation of a batch DataFrame. The list is empty before the first one."""
    return [decoded(text) for text in observation.get.get(_REPORTS) or ()]


def encoded(report: TaskReport) -> str:
    """Returns the report as short JSON, because the progress of each micro-batch contains one for each task."""
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
#: frame → (name of the query in its tasks' reports, its Observation over Spark Connect)
_FRAMES: weakref.WeakKeyDictionary[DataFrame, tuple[str, Any]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class _Reports:
    """Spark's AccumulatorParam for reports. The value is a list of reports in a task, and the tally at the driver."""

    def zero(self, value: Any) -> list[TaskReport]:
        return []

    def addInPlace(self, value: Any, reports: list[TaskReport]) -> Any:  # noqa: N802 - Spark's name
        if not isinstance(value, Tally):
            return [*value, *reports]
        value.report(reports)
        return value


def reports_to(spark: SparkSession) -> Accumulator[Any] | None:
    """Returns the accumulator for tasks' reports. All queries of a Spark context share one, because Spark never drops
    an accumulator.

    For a session of Spark Connect, returns None and remembers the session, so that its queries can be found by name.
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

    Args:
        observation: contains the reports over Spark Connect; None if the reports arrive by accumulator.
    """
    _FRAMES[frame] = query, observation


def query_metrics(query: StreamingQuery | DataFrame | str) -> QueryMetrics:
    """Returns the metrics of a query's operators so far: rows, micro-batches, and time by activity.

    The metrics are complete up to the last finished micro-batch, and include the known figures of a running one. Before
    the first micro-batch has finished, ``batches`` may be empty. This driver's process keeps metrics of the 100 queries
    that reported last; a query that continues in another driver starts at zero.

    Over Spark Connect, the metrics cover only finished micro-batches that were among the newest 100 at the time of a
    call. Metrics of a batch DataFrame are those of its newest evaluation, and must be requested with the DataFrame.

    Args:
        query: a streaming query (running or ended), its id or its name; or the batch DataFrame that ``apply_operator``
            returned, or its ``source`` argument. For an ended query pass the query itself. If only its id or name is
            given, figures of Spark that were not read while the query ran are missing.

    Raises NoMetrics if the query is not known, or has finished a micro-batch without any operator. Raises
    InvalidArgument for a streaming DataFrame.

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
                remedy="pass the DataFrame that apply_operator returned, not one derived from it",
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
    """Adds Spark's figures of micro-batches, oldest first, to the tally. Returns whether any micro-batch had rows."""
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
    """Returns the number of rows from all sources. Over Spark Connect there is no total, so the sources are summed."""
    rows = progress["numInputRows"]
    return int(sum(source["numInputRows"] for source in progress["sources"]) if rows is None else rows)


def _running(named: str) -> StreamingQuery | None:
    from pyspark.sql import SparkSession

    own = SparkSession.getActiveSession() or SparkSession._instantiatedSession  # a thread may have no active session
    sessions = [*([] if own is None else [own]), *(spark for spark in _SESSIONS if not spark.is_stopped)]
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
