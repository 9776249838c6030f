"""Records what streaming queries and batch pipelines do as stages of a ledger.

``record_queries(spark, manager)`` records each micro-batch of each streaming query of a session as one stage. The
stage's ``state_id`` consists of the ids of query and batch. So if a query replays a batch after a restart from its
checkpoint, the batch does not get a second stage.

Spark reports a batch after committing it, and only to listeners in its own process. So a committed batch may have no
stage if the driver was killed or the ledger was unavailable. Each run of a query looks once for such batches in the
query's checkpoint. The rows of such a batch are counted again if the source still knows them. A file source does,
because it records the names of each batch's files.

``run_stage`` runs one batch pipeline from a source to a sink, and records the stage before and after each step. It does
not run a completed stage again. After a crash, the next call runs the stage again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from stateflow.errors import InvalidArgument, LedgerReadOnly, LedgerReplaced, StateflowError, Unavailable
from stateflow.ledger import StateManager, rules
from stateflow.ledger.rules import Action, Status, is_done, stage_answer
from stateflow.spark.session import is_connect, metadata_of, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryListener


log = logging.getLogger(__name__)
TEXT_MAX = 255
#: most stages that are kept in memory while the ledger is unavailable
WAITING_MAX = 10_000
#: session → ledgers in which :func:`record_once` has its queries recorded
_RECORDED: weakref.WeakKeyDictionary[SparkSession, weakref.WeakSet[StateManager]] = weakref.WeakKeyDictionary()
#: plan nodes that pass on all rows of their child
_HANDED_ON = frozenset({"Project", "SubqueryAlias", "EventTimeWatermark", "View"})
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


# -- Filters that a query's plan applies to its source ---------------------------------------------------------------


def filter_of(execution: Any) -> str | None:
    """Returns the conditions applied directly to the only source of a query, as SQL.

    Returns None if there are no conditions, or several sources.

    Args:
        execution: the query's execution object in the JVM.
    """
    above: list[Any] = []  # from the sink down to the source
    node = execution.analyzedPlan()
    while node.children().size() == 1:
        above.append(node)
        node = node.children().apply(0)
    conditions: list[str] = []
    if node.children().size() == 0:
        for each in reversed(above):
            name = str(each.nodeName())
            if name == "Filter":
                conditions.append(str(each.condition().sql()))
            elif name not in _HANDED_ON:
                break
    return " AND ".join(conditions) or None


# -- Batches that are committed and have no stage --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Swallowed:
    """A committed batch without a stage.

    Attributes:
        batch: Spark's number of the batch.
        planned_ms: when Spark planned the batch, in milliseconds since 1970.
        rows: number of rows; None if the sources no longer know it.
        first: offset at which the batch starts, for each source, as JSON or None.
        last: offset at which the batch ends, for each source, as JSON or None.
        sources: Spark's descriptions of the sources.
    """

    batch: int
    planned_ms: int
    rows: int | None
    first: tuple[str | None, ...]
    last: tuple[str | None, ...]
    sources: tuple[str, ...]
    sink: str | None = None


def execution_of(spark: SparkSession, query: str) -> Any:
    """Returns the JVM's object of a running query, or None if the query is not running. The object outlives the
    query."""
    found = spark.streams.get(query)
    return None if found is None else found._jsq.streamingQuery()


def committed(execution: Any, before: int | None) -> list[int]:
    """Returns the committed batches that Spark retains in the checkpoint, newest first.

    Args:
        before: returns only batches with smaller numbers; None returns all.
    """
    newest = execution.commitLog().getLatestBatchId()
    number = int(newest.get()) if newest.isDefined() else -1
    if before is not None:
        number = min(number, before - 1)
    found = []
    while number >= 0 and execution.commitLog().get(number).isDefined():
        found.append(number)
        number -= 1
    return found


def swallowed(spark: SparkSession, execution: Any, batches: Collection[int]) -> Iterator[Swallowed]:
    """Yields those of ``batches`` in which the offset of a source advanced, oldest first."""
    for batch in sorted(batches):
        planned = execution.offsetLog().get(batch)
        if not planned.isDefined():
            continue
        offsets = _offsets(planned.get())
        before = execution.offsetLog().get(batch - 1) if batch else None
        starts = _offsets(before.get()) if before is not None and before.isDefined() else [_none(spark)] * len(offsets)
        first, last = tuple(map(_json, starts)), tuple(map(_json, offsets))
        if first == last:
            continue
        sources = [execution.sources().apply(place) for place in range(execution.sources().size())]
        counts = [_rows(spark, *each) for each in zip(sources, starts, offsets, strict=False)]
        rows = None if None in counts or len(counts) != len(offsets) else sum(filter(None, counts))
        if rows is None:
            log.warning("stage of batch %d recorded without its row count, which its source no longer knows", batch)
        names = tuple(str(source.toString()) for source in sources)
        yield Swallowed(
            batch, int(metadata_of(planned.get(), spark.version).batchTimestampMs()), rows, first, last, names
        )


def _offsets(planned: Any) -> list[Any]:
    return [planned.offsets().apply(place) for place in range(planned.offsets().size())]


def _none(spark: SparkSession) -> Any:
    assert spark._jvm is not None
    return spark._jvm.scala.Option.empty()


def _json(offset: Any) -> str | None:
    return str(offset.get().json()) if offset.isDefined() else None


def _rows(spark: SparkSession, source: Any, start: Any, end: Any) -> int | None:
    """Counts the rows of a file source's batch by reading its files again. Returns None for other sources."""
    from py4j.protocol import Py4JError

    if _json(start) == _json(end):
        return 0
    try:
        relation = source.getBatch(start, end.get()).queryExecution().analyzed().relation()
        return int(spark._jsparkSession.baseRelationToDataFrame(relation).count())
    except Py4JError as error:
        log.debug("rows of a batch cannot be recounted: %s", error)
        return None


# -- Sources and sinks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class End:
    """A source or a sink of a stage.

    >>> End("warehouse", "parquet", entity="flights").entity
    'flights'
    """

    name: str
    type: str | None = None
    entity: str | None = None
    filter: str | None = None

    def columns(self, end: Literal["source", "sink"]) -> dict[str, str | None]:
        """Returns the columns of a stage for this source or sink."""
        named = {"name": self.name, "type": self.type, "entity": self.entity, "filter": self.filter}
        return {f"{end}_{name}": value for name, value in named.items()}


# -- Streaming queries -----------------------------------------------------------------------------------------------


def record_queries(
    spark: SparkSession,
    manager: StateManager,
    *,
    job_id: str | None = None,
    source: End | None = None,
    sink: End | None = None,
    manifest: str | None = None,
) -> StreamingQueryListener:
    """Records each micro-batch with rows, and each failure, of the session's queries as a stage.

    Recording begins when this function is called. An unavailable ledger never stops a query. A stage that could not be
    recorded is recorded together with the next stage. The next run of a query also records batches that a killed driver
    left without a stage, see :func:`swallowed`. Calling this function twice does no harm, because existing stages are
    not changed.

    Over Spark Connect, this client records as long as it runs. Batches that the server commits without this client have
    no stage, and filters of sources are not recorded.

    Args:
        job_id: job of every query; by default the query's name, or its id if it has no name.
        source: source of the queries; by default Spark's description of it.
        sink: sink of the queries; by default Spark's description of it.
        manifest: name of the file that declares the pipeline.

    Returns the listener, for ``spark.streams.removeListener``.

    Example: ``record_queries(spark, StateManager(ledger), job_id="tallies")``
    """
    from pyspark.sql.streaming.listener import StreamingQueryListener

    recorder = _Recorder(spark, manager, job_id, source, sink, manifest)

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
            recorder.started(event)

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            recorder.progressed(event.progress)

        def onQueryIdle(self, event: Any) -> None:  # noqa: N802
            pass

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            recorder.terminated(event)

    listener = Listener()
    spark.streams.addListener(listener)
    if is_connect(spark):
        _heard_at_exit(spark, listener)
    return listener


def record_once(spark: SparkSession, manager: StateManager) -> None:
    """Records the session's queries as :func:`record_queries` does, unless an earlier call of this function does.

    A program that starts its query again and again applies the operator each time. Spark never drops a listener.
    """
    managers = _RECORDED.setdefault(spark, weakref.WeakSet())
    if manager not in managers:
        record_queries(spark, manager)
        managers.add(manager)


def _heard_at_exit(spark: SparkSession, listener: StreamingQueryListener) -> None:
    """Removes the listener when the program ends, after all events received by then have been recorded.

    Over Spark Connect a thread listens for events. A process that ends waits for this thread. Without this function the
    thread would end only if the session was stopped.
    """

    def end() -> None:
        with contextlib.suppress(Exception):  # the session was stopped
            spark.streams.removeListener(listener)

    # functions of atexit run too late: after that wait, and after the end of the thread pools that Spark's client needs
    threading._register_atexit(end)  # type: ignore[attr-defined]


@dataclass(slots=True)
class _Run:
    """One run of a query.

    Attributes:
        job: job of the query.
        filter: conditions on the query's source.
        execution: the JVM's object of the query; None once the recorder has looked for unrecorded batches of earlier
            runs.
    """

    job: str
    filter: str | None
    execution: Any


class _Recorder:
    """Records stages. Only the thread of Spark's listeners calls it."""

    def __init__(
        self,
        spark: SparkSession,
        manager: StateManager,
        job_id: str | None,
        source: End | None,
        sink: End | None,
        manifest: str | None,
    ) -> None:
        self._spark, self._manager, self._job_id = spark, manager, job_id
        self._source, self._sink, self._manifest = source, sink, manifest
        self._runs: dict[str, _Run] = {}  # by run id
        self._newest: dict[str, str] = {}  # run id, by query id
        self._waiting: deque[dict[str, Any]] = deque(maxlen=WAITING_MAX)  # stages to record

    def started(self, event: Any) -> None:
        job = self._job_id or event.name or str(event.id)
        execution, left_out = None, None
        try:
            execution = None if is_connect(self._spark) else execution_of(self._spark, str(event.id))
            left_out = None if execution is None else filter_of(execution)
        except spark_errors() as error:
            log.warning("source filter of query %s not recorded: %s", event.name or event.id, error)
        self._runs[str(event.runId)] = _Run(job[:TEXT_MAX], left_out, execution)
        self._newest[str(event.id)] = str(event.runId)

    def progressed(self, progress: Any) -> None:
        run = self._runs.get(str(progress.runId))
        if run is not None:
            self._look_back(str(progress.id), run, progress.batchId)
        if progress.numInputRows:
            job = (self._job_id or progress.name or str(progress.id))[:TEXT_MAX]
            self._record(stage_of(progress) | self._declared(run) | {"job_id": job})

    def terminated(self, event: Any) -> None:
        query, run = str(event.id), self._runs.pop(str(event.runId), None)
        # a newer run may have committed batches that it has not reported yet; that run looks for unrecorded batches
        # itself
        if run is not None and self._newest[query] == str(event.runId):
            self._look_back(query, run, None)
            del self._newest[query]
        if event.exception:
            self._record(
                self._declared(run)
                | {
                    "state_id": f"query/{query}/failure of {event.runId}",
                    "run_id": str(event.runId),
                    "job_id": (run.job if run else self._job_id or query)[:TEXT_MAX],
                    "action": Action.PRE_PUSH,
                    "status": Status.FAILURE,
                    "error": str(event.exception),
                }
            )

    def _declared(self, run: _Run | None) -> dict[str, Any]:
        """Returns the columns known from the query, overridden by those that the caller of ``record_queries`` declared.

        Declared columns with the value None are ignored.
        """
        given: dict[str, Any] = {"manifest_name": self._manifest, "source_filter": run.filter if run else None}
        given |= {} if self._source is None else self._source.columns("source")
        given |= {} if self._sink is None else self._sink.columns("sink")
        return {name: value for name, value in given.items() if value is not None}

    def _record(self, *stages: dict[str, Any]) -> None:
        """Records the waiting stages, then ``stages``, each once. While the ledger is unavailable, stages wait."""
        self._waiting.extend(stages)
        try:
            while self._waiting:
                stage = self._waiting[0]
                if self._manager.ledger.item(stage["state_id"]) is None:  # otherwise a replay
                    self._insert(stage)
                self._waiting.popleft()
        except (Unavailable, LedgerReadOnly, LedgerReplaced) as error:
            log.error("%d stages wait to be recorded in the ledger: %s", len(self._waiting), error)
        except StateflowError as error:
            log.error("stage %s not recorded: %s", self._waiting[0]["state_id"], error)
            self._waiting.popleft()

    def _insert(self, stage: dict[str, Any]) -> None:
        columns = {name: value for name, value in stage.items() if name != "before"}
        if "before" in stage and self._manager.ledger.item(stage["before"]) is not None:
            columns["correlation_id_in"] = stage["before"]
        self._manager.insert_state(**columns)

    def _look_back(self, query: str, run: _Run, before: int | None) -> None:
        """Records committed batches without a stage, once in each run of a query.

        Batches before the first recorded batch are left out, because they were committed before the recording began.
        """
        execution = run.execution
        if execution is None:
            return
        failures = spark_errors()
        try:
            done = {batch_state_id(query, number): number for number in committed(execution, before)}
            known = {item.item_id for item in self._manager.ledger.items(done)}
            oldest = min((done[name] for name in known), default=-1)
            missing = [number for name, number in done.items() if name not in known and number > oldest]
            found = list(swallowed(self._spark, execution, missing)) if missing else []
        except StateflowError as error:
            log.error("unrecorded batches of job %s not searched until the ledger answers: %s", run.job, error)
            return
        except failures as error:
            log.error("unrecorded batches of job %s not recorded: %s", run.job, error)
            found = []
        run.execution = None
        self._record(*(stage_of_swallowed(query, each) | self._declared(run) | {"job_id": run.job} for each in found))


def batch_state_id(query_id: str, batch_id: int) -> str:
    return f"query/{query_id}/{batch_id}"


def end_of(description: str) -> End:
    """Parses Spark's description of a source or a sink, such as ``FileSink[file:/tmp/out]``."""
    match = re.fullmatch(r"([\w.$]+)\[(.*)\]", description, re.DOTALL)
    kind = (match[1] if match else description).partition("@")[0].rpartition(".")[2].rstrip("$")
    entity = match[2] if match and rules.is_item_id(match[2]) else None
    return End(description, kind or None, entity)


def _ends(descriptions: Iterable[str]) -> End:
    """Returns one end for all sources of a stage, from Spark's descriptions of them. Several names and types are joined
    with commas."""
    ends = [end_of(each) for each in descriptions]
    if len(ends) == 1:
        return ends[0]
    return End(", ".join(end.name for end in ends), ", ".join(end.type or "" for end in ends) or None)


def stage_of(progress: Any) -> dict[str, Any]:
    """Returns the columns of a micro-batch's stage, and as ``before`` the id of the preceding batch's stage."""
    query, batch = str(progress.id), progress.batchId
    started = datetime.fromisoformat(progress.timestamp.replace("Z", "+00:00"))
    took = progress.durationMs
    pulled = started + timedelta(milliseconds=took.get("latestOffset", 0) + took.get("getBatch", 0))
    return {
        **_batch(query, batch),
        "run_id": str(progress.runId),
        **_ends(source.description for source in progress.sources).columns("source"),
        **end_of(progress.sink.description).columns("sink"),
        "first_record_pulled": _joined(source.startOffset for source in progress.sources),
        "last_record_pulled": _joined(source.endOffset for source in progress.sources),
        "sourcing_start_time": started,
        "sourcing_end_time": pulled,
        "sinking_start_time": pulled,
        "sinking_end_time": started + timedelta(milliseconds=took.get("triggerExecution", 0)),
        "record_count": int(progress.numInputRows),
    }


def stage_of_swallowed(query: str, found: Swallowed) -> dict[str, Any]:
    return {
        **_batch(query, found.batch),
        **_ends(found.sources).columns("source"),
        "first_record_pulled": _joined(found.first),
        "last_record_pulled": _joined(found.last),
        "sourcing_start_time": found.planned_ms * 1000,
        "record_count": found.rows,
    }


def _batch(query: str, batch: int) -> dict[str, Any]:
    name = batch_state_id(query, batch)
    return {
        "state_id": name,
        "before": batch_state_id(query, batch - 1),
        "correlation_id_out": name,
        "action": Action.POST_PUSH,
        "status": Status.SUCCESS,
    }


def _joined(offsets: Iterable[Any]) -> str | None:
    return ", ".join(str(offset) for offset in offsets if offset is not None) or None


def spark_errors() -> tuple[type[Exception], ...]:
    """Returns the types of exceptions that failed calls of Spark raise."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return Py4JError, PySparkException


# -- Batch pipelines -------------------------------------------------------------------------------------------------


def run_stage(
    manager: StateManager,
    job_id: str,
    *,
    source: End,
    sink: End,
    pull: Callable[[dict[str, Any] | None], DataFrame],
    push: Callable[[DataFrame], int | None],
    record: str | None = None,
    manifest: str | None = None,
) -> dict[str, Any]:
    """Pulls rows from a source and pushes them to a sink, once for each job, source and sink.

    If the stage is already complete, ``run_stage`` only returns it.

    Args:
        pull: called with the last stage that successfully pushed rows of this entity, or None; returns a DataFrame.
        push: writes the DataFrame; may return the row count. After a crash between the write and its record, the next
            run pushes again, so a repeated write must do no harm (``mode("overwrite")``, a merge).
        record: column that orders records, such as an id or a time. Its least and greatest values are recorded as the
            first and last record pulled, from which a later ``pull`` may continue. Rows with greater values, which have
            arrived since, are not pushed; rows with null are pushed. Needs an additional pass over the pulled rows.
        manifest: name of the file that declares the pipeline.

    Returns the stage. An exception of ``pull`` or ``push`` is recorded as a failure, and raised again.

    Example: ``run_stage(manager, "load", source=End("raw"), sink=End("clean"), pull=read, push=write)``
    """
    named = "\0".join(str(part) for part in (job_id, source, sink))
    state_id = f"run/{hashlib.sha256(named.encode()).hexdigest()}"
    known = manager.get_state(state_id)
    if known is not None and is_done(known):
        return stage_answer(known)
    if known is not None:
        manager.update_state(
            state_id,
            run_id=manager.ledger.run_id or None,
            action=Action.PRE_PULL,
            status=Status.IN_PROGRESS,
            sourcing_start_time=_now(),
            manifest_name=manifest,
            first_record_pulled="",  # those of the former attempt, whose rows may not have been pushed
            last_record_pulled="",
        )
    else:
        manager.insert_state(
            state_id=state_id,
            job_id=job_id,
            **source.columns("source"),
            **sink.columns("sink"),
            sourcing_start_time=_now(),
            manifest_name=manifest,
        )
    try:
        frame = pull(manager.get_last_stage(source.entity) if source.entity else None)
        pulled = Pulled() if record is None else measured(frame, record)
        if record is not None:
            column = frame[quoted(record)]
            unordered = column.isNull()
            frame = frame.where(unordered if pulled.last is None else unordered | (column <= _literal(pulled.last)))
    except BaseException as error:
        _failed(manager, state_id, error, action=Action.POST_PULL, sourcing_end_time=_now())
        raise
    manager.update_state(
        state_id,
        action=Action.POST_PULL,
        status=Status.SUCCESS,
        sourcing_end_time=_now(),
        first_record_pulled=as_text(pulled.first),
        last_record_pulled=as_text(pulled.last),
        record_count=pulled.rows,
    )
    manager.update_state(state_id, action=Action.PRE_PUSH, status=Status.IN_PROGRESS, sinking_start_time=_now())
    try:
        count = push(frame)
    except BaseException as error:
        _failed(manager, state_id, error, action=Action.POST_PUSH, sinking_end_time=_now())
        raise
    return manager.update_state(
        state_id, action=Action.POST_PUSH, status=Status.SUCCESS, sinking_end_time=_now(), record_count=count
    )


def _failed(manager: StateManager, state_id: str, error: BaseException, **columns: Any) -> None:
    try:
        manager.update_state(state_id, status=Status.FAILURE, error=error, **columns)
    except StateflowError as second:
        error.add_note(f"and the stage's failure could not be recorded: {second}")


@dataclass(frozen=True, slots=True)
class Pulled:
    """Least and greatest value of the column that orders records, and the number of rows.

    Values are None if there is no such column or no value in it.
    """

    first: Any = None
    last: Any = None
    rows: int | None = None


def measured(frame: DataFrame, record: str) -> Pulled:
    """Finds the least and greatest value of a column, and counts the rows. Raises InvalidArgument if the column is
    missing."""
    from pyspark.sql import functions as F  # noqa: N812

    if record not in frame.columns:
        raise InvalidArgument(
            f"there is no column {record!r} to order records by", remedy=f"use one of {', '.join(frame.columns)}"
        )
    column = frame[quoted(record)]
    least, greatest = F.min(column), F.max(column)
    timed = frame.schema[record].dataType.typeName() == "timestamp"
    if timed:  # as numbers, because PySpark gives times in this process's zone, in which an hour may occur twice
        least, greatest = F.unix_micros(least), F.unix_micros(greatest)
    row = frame.agg(least, greatest, F.count(F.lit(1))).first()
    assert row is not None
    first, last, rows = row
    if timed and first is not None:
        first, last = (_EPOCH + timedelta(microseconds=micros) for micros in (first, last))
    return Pulled(first, last, rows)


def _literal(value: Any) -> Any:
    """Returns the value for a comparison with a column.

    A datetime becomes text that Spark casts, because PySpark would convert it in this process's zone, and by the
    calendar before 1582.
    """
    from pyspark.sql import functions as F  # noqa: N812

    if not isinstance(value, datetime):
        return value
    return F.lit(value.isoformat(sep=" ")).cast("timestamp" if value.tzinfo else "timestamp_ntz")


def as_text(value: Any) -> str | None:
    """Returns the value as text for the ledger, with dates and times in ISO format."""
    return value.isoformat() if isinstance(value, date) else None if value is None else str(value)


def _now() -> datetime:
    return datetime.now(UTC)
