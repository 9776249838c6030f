"""A declared pipeline run by Spark: source → operators → sink."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stateflow.errors import PipelineFailed, StateflowError, from_wire
from stateflow.runtime.operator import load
from stateflow.spark.apply import apply_operator
from stateflow.spark.metrics import BatchMetrics, OperatorMetrics
from stateflow.spark.pipeline_file import PipelineConfig, PipelineFile, Reading, Secrets, Step
from stateflow.spark.recording import record_queries
from stateflow.spark.reporting import BOOK, note, query_metrics
from stateflow.spark.session import local_session, register_jetstream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

POLL_S = 0.25
_RAISED = re.compile(r"stateflow\.errors\.\w+: (\w+): (.+)")


@dataclass(frozen=True, slots=True)
class Progress:
    """One micro-batch, and all of this run up to it. ``metrics``: None without operators."""

    batch: int
    rows: int
    duration_ms: float
    rows_total: int
    batches_total: int
    metrics: BatchMetrics | None = None

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.duration_ms * 1000 if self.duration_ms else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """``stopped``: before its end, because it was told to. ``rows`` and ``batches`` of a batch pipeline are unknown.

    ``operators``: what they did in this run, in the order in which they first reported.
    """

    stopped: bool
    rows: int | None = None
    batches: int | None = None
    operators: tuple[OperatorMetrics, ...] = ()


def run_pipeline(
    file: PipelineFile,
    *,
    once: bool,
    stop: threading.Event,
    tell: Callable[[Progress], None],
    started: Callable[[], None],
) -> Outcome:
    """Until its end (``once``, or a batch source), until it fails, or until ``stop`` is set; Spark ends with it.

    Args:
        started: called when Spark is up and before anything runs.

    Raises StateflowErrors only, without a secret in them.
    """
    config = file.config
    try:
        _check_jetstream(config)
        settings = {"spark.log.level": "FATAL", **config.spark.settings}  # what fails is told once, by its error
        named = {key.replace(".", "__"): str(value) for key, value in settings.items()}
        spark = local_session(config.name, config.spark.master, **named)
        try:
            started()
            return _run(spark, file, once=once, stop=stop, tell=tell)
        finally:
            spark.stop()  # which delivers what its listeners have not seen yet
    except StateflowError as error:
        raise _masked(error, file.secrets) from None
    except _spark_errors() as error:
        raise _masked(failure_of(error), file.secrets) from None


def _run(
    spark: SparkSession, file: PipelineFile, *, once: bool, stop: threading.Event, tell: Callable[[Progress], None]
) -> Outcome:
    config = file.config
    rows, applied = _build(spark, config)
    if not config.source.streaming:
        _save(rows, config)
        operators = [each for frame in applied for each in query_metrics(frame).operators]
        return Outcome(stopped=False, operators=tuple(operators))
    manager = file.state_manager()
    if manager is not None:
        record_queries(spark, manager, job_id=config.name)
    return _follow(_start(rows, config, once=once), stop, tell)


def _check_jetstream(config: PipelineConfig) -> None:
    """What is wrong with a stream is said in one line, before Spark is started."""
    if config.source.format != "jetstream":
        return
    try:
        from stateflow.spark.jetstream import JetStreamOptions
        from stateflow.spark.jetstream_client import Connection
    except ImportError:
        return  # said by register_jetstream
    options = JetStreamOptions.of({key: str(value) for key, value in config.options(config.source).items()})
    with Connection(options.place) as connection:
        connection.facts()


def _build(spark: SparkSession, config: PipelineConfig) -> tuple[DataFrame, list[DataFrame]]:
    """(what the sink gets, what each operator puts out)."""
    if config.source.format == "jetstream":
        register_jetstream(spark)
    rows = _read(spark, config, config.source, streaming=config.source.streaming)
    applied: list[DataFrame] = []
    for step in config.operators:
        applied.append(_applied(spark, config, step, rows))
        rows = _shaped(applied[-1], step)
    return rows, applied


def _applied(spark: SparkSession, config: PipelineConfig, step: Step, rows: DataFrame) -> DataFrame:
    initial = step.initial_state
    return apply_operator(
        rows,
        load(step.operator),
        cluster=step.cluster or config.cluster or "",
        order_by=step.order_by,
        watermark=step.watermark,
        allowed_lateness=timedelta(seconds=step.allowed_lateness),
        name=step.name,
        source=step.source,
        tasks=step.tasks,
        initial_state=None if initial is None else _read(spark, config, initial, streaming=False),
        unavailable_timeout=step.unavailable_timeout,
    )


def _read(spark: SparkSession, config: PipelineConfig, end: Reading, *, streaming: bool) -> DataFrame:
    reader: Any = (spark.readStream if streaming else spark.read).format(end.format)
    reader = reader.options(**config.options(end))
    if end.schema_ is not None:
        reader = reader.schema(end.schema_)
    return _shaped(reader.load(end.path) if end.path is not None else reader.load(), end)


def _shaped(rows: DataFrame, part: Reading | Step) -> DataFrame:
    rows = rows if part.where is None else rows.where(part.where)
    return rows if part.select is None else rows.selectExpr(*part.select)


def _save(rows: DataFrame, config: PipelineConfig, mode: str | None = None) -> None:
    sink = config.sink
    writer = rows.write.format(sink.format).mode(mode or sink.mode).options(**config.options(sink))
    writer.save(sink.path) if sink.path is not None else writer.save()


def _start(rows: DataFrame, config: PipelineConfig, *, once: bool) -> StreamingQuery:
    sink = config.sink
    writer = rows.writeStream.queryName(config.name).option("checkpointLocation", sink.checkpoint)
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=config.trigger)
    if sink.each_batch if sink.each_batch is not None else sink.format == "jdbc":

        def save(batch: DataFrame, _: int) -> None:
            _save(batch, config)

        return writer.foreachBatch(save).start()
    writer = writer.format(sink.format).outputMode(sink.mode).options(**config.options(sink))
    return writer.start(sink.path) if sink.path is not None else writer.start()


def _follow(query: StreamingQuery, stop: threading.Event, tell: Callable[[Progress], None]) -> Outcome:
    rows = batches = 0
    last = -1
    identity = str(query.id)

    def look() -> None:
        nonlocal rows, batches, last
        recent = query.recentProgress
        note(recent)
        for progress in recent:
            if progress["numInputRows"] and progress["batchId"] > last:
                last, batches, rows = progress["batchId"], batches + 1, rows + progress["numInputRows"]
                took = float(progress["durationMs"].get("triggerExecution", 0))
                tell(Progress(last, progress["numInputRows"], took, rows, batches, BOOK.batch(identity, last)))

    try:
        while query.isActive and not stop.is_set():
            query.awaitTermination(POLL_S)
            look()
        stopped = query.isActive
        if not stopped:
            query.awaitTermination()  # raises what it failed with
    finally:
        query.stop()  # a batch that is cut short is done again, once, by the next run
        look()
    metrics = BOOK.query(identity)
    return Outcome(stopped, rows, batches, () if metrics is None else metrics.operators)


def _spark_errors() -> tuple[type[Exception], ...]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return PySparkException, Py4JError


def failure_of(error: BaseException) -> StateflowError:
    """What an exception of Spark is about: the error that a task raised, if there is one in it."""
    text = str(error)
    raised = _RAISED.findall(text)
    if raised and raised[-1][0] in StateflowError.registry:
        code, what = raised[-1]
        return from_wire({"code": code, "what": what, "remedy": "", "where": {}})
    lines = [line for line in text.splitlines() if line.strip()]
    return PipelineFailed(
        lines[0][:500] if lines else type(error).__name__, remedy="set spark.log.level to ERROR for Spark's own log"
    )


def _masked(error: StateflowError, secrets: Secrets) -> StateflowError:
    wire = error.to_wire()
    where = {key: secrets.masked(value) for key, value in wire["where"].items()}
    return from_wire(
        {**wire, "what": secrets.masked(wire["what"]), "remedy": secrets.masked(wire["remedy"]), "where": where}
    )
