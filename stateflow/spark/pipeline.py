"""A declared pipeline run by Spark: source → operators → sink."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stateflow.errors import InvalidArgument, PipelineFailed, StateflowError, from_wire
from stateflow.operator.operator import load
from stateflow.spark.apply import apply_operator
from stateflow.spark.metrics import TALLY, BatchMetrics, OperatorMetrics, note, query_metrics
from stateflow.spark.pipeline_file import PipelineConfig, PipelineFile, Reading, Secrets, Sink, Step
from stateflow.spark.rewind import take_out_left
from stateflow.spark.session import JETSTREAM, local_session, raised_in, register_jetstream, require
from stateflow.spark.stage_recorder import End, record_queries, run_stage, spark_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from stateflow.ledger import StateManager


log = logging.getLogger(__name__)
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Progress:
    """One micro-batch, and totals of this run up to it. ``metrics``: None without operators."""

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
    """Result of a run.

    ``stopped``: the run was told to stop before its end. ``rows`` and ``batches``: None for a batch pipeline.
    ``done_before``: according to the ledger, an earlier run completed the pipeline, so nothing ran.

    ``operators``: metrics of this run, in the order in which the operators first reported.
    """

    stopped: bool
    rows: int | None = None
    batches: int | None = None
    operators: tuple[OperatorMetrics, ...] = ()
    done_before: bool = False


def run_pipeline(
    file: PipelineFile,
    *,
    once: bool,
    stop: threading.Event,
    tell: Callable[[Progress], None],
    started: Callable[[], None],
) -> Outcome:
    """Runs a pipeline until its end, until it fails, or until ``stop`` is set; then ends Spark.

    A pipeline has an end with ``once``, or with a batch source.

    Args:
        tell: called after each micro-batch.
        started: called when Spark is up, before anything runs.

    Raises StateflowErrors only, without a secret in them.
    """
    config = file.config
    try:
        for step in config.operators:
            load(step.operator)  # errors of operators and of the ledger are raised before Spark starts
        _check_jetstream(config)
        manager = file.state_manager()
        settings = {"spark.log.level": "FATAL", **config.spark.settings}  # a failure is reported once, by its error
        named: dict[str, Any] = {key.replace(".", "__"): str(value) for key, value in settings.items()}
        if once and config.real_time is not None:
            raise InvalidArgument("a real-time pipeline has no end", remedy="run it without --once")
        spark = local_session(config.name, config.spark.master, real_time=config.real_time is not None, **named)
        try:
            started()
            return _run(spark, file, manager, once=once, stop=stop, tell=tell)
        finally:
            spark.stop()  # delivers what its listeners have not seen yet
            if manager is not None:
                manager.ledger.close()
    except StateflowError as error:
        raise _masked(error, file.secrets) from None
    except spark_errors() as error:
        raise _masked(failure_of(error), file.secrets) from None


def _run(
    spark: SparkSession,
    file: PipelineFile,
    manager: StateManager | None,
    *,
    once: bool,
    stop: threading.Event,
    tell: Callable[[Progress], None],
) -> Outcome:
    config = file.config
    if not config.source.streaming:
        return _run_batch(spark, file, manager)
    rows, _ = _apply_all(spark, config, _source(spark, config))
    if manager is not None:
        source, sink = end_of(config, config.source), end_of(config, config.sink)
        record_queries(spark, manager, job_id=config.name, source=source, sink=sink, manifest=file.name)
    return _follow(_start(rows, config, once=once), stop, tell)


def _run_batch(spark: SparkSession, file: PipelineFile, manager: StateManager | None) -> Outcome:
    """Runs a batch pipeline. With a state manager, it is one stage, which is done only once."""
    config = file.config
    applied: list[DataFrame] = []
    pushed = False

    def push(frame: DataFrame) -> None:
        nonlocal pushed
        rows, frames = _apply_all(spark, config, frame)
        _save(rows, config)
        applied.extend(frames)
        pushed = True

    if manager is None:
        push(_source(spark, config))
    else:
        run_stage(
            manager,
            config.name,
            source=end_of(config, config.source),
            sink=end_of(config, config.sink),
            pull=lambda _: _source(spark, config),
            push=push,
            record=config.source.record,
            manifest=file.name,
        )
    operators = {(each.operator, each.source): each for frame in applied for each in query_metrics(frame).operators}
    return Outcome(stopped=False, operators=tuple(operators.values()), done_before=not pushed)


def end_of(config: PipelineConfig, end: Reading | Sink) -> End:
    """Describes a source or a sink for its stages.

    The name is the connection, or else the format; the entity is the table or path there; the filter is the
    ``where`` condition of a source.
    """
    options = config.options(end)
    named = (options[each] for each in ("dbtable", "query", "table", "stream", "topic", "subscribe") if each in options)
    entity = end.path or next(map(str, named), None)
    return End(end.connection or end.format, end.format, entity, end.where if isinstance(end, Reading) else None)


def _check_jetstream(config: PipelineConfig) -> None:
    """Reports errors of a stream in one line, before Spark starts."""
    if config.source.format != "jetstream":
        return
    try:
        require(JETSTREAM)
        from stateflow.spark.jetstream import Connection, JetStreamOptions
    except ImportError:
        return  # local_session or register_jetstream reports it
    options = JetStreamOptions.of({key: str(value) for key, value in config.options(config.source).items()})
    with Connection(options.place) as connection:
        connection.facts()


def _source(spark: SparkSession, config: PipelineConfig) -> DataFrame:
    if config.source.format == "jetstream":
        register_jetstream(spark)
    return _read(spark, config, config.source, streaming=config.source.streaming)


def _apply_all(spark: SparkSession, config: PipelineConfig, rows: DataFrame) -> tuple[DataFrame, list[DataFrame]]:
    """Returns (rows for the sink, outputs of each operator)."""
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
        cluster=(cluster := step.cluster or config.cluster),
        directory=config.directory if cluster is None else None,
        order_by=step.order_by,
        watermark=step.watermark,
        allowed_lateness=timedelta(seconds=step.allowed_lateness),
        name=step.name,
        source=step.source,
        site=step.site,
        tasks=step.tasks,
        initial_state=None if initial is None else _read(spark, config, initial, streaming=False),
        unavailable_timeout=step.unavailable_timeout,
        real_time=config.real_time is not None,
        position=step.position,
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


def _save(rows: DataFrame, config: PipelineConfig) -> None:
    sink = config.sink
    writer = rows.write.format(sink.format).mode(sink.mode).options(**config.options(sink))
    writer.save(sink.path) if sink.path is not None else writer.save()


def _start(rows: DataFrame, config: PipelineConfig, *, once: bool) -> StreamingQuery:
    sink = config.sink
    if sink.checkpoint is not None and (left := take_out_left(sink.checkpoint)):
        log.warning("%s: moved aside files left by a killed Spark: %s", sink.checkpoint, ", ".join(left))
    writer = rows.writeStream.queryName(config.name).option("checkpointLocation", sink.checkpoint)
    if config.real_time is not None:
        writer = writer.trigger(realTime=config.real_time)
    else:
        writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=config.trigger)
    if sink.each_batch if sink.each_batch is not None else sink.format == "jdbc":

        def save(batch: DataFrame, _: int) -> None:
            _save(batch, config)

        return writer.foreachBatch(save).start()
    mode = sink.mode if config.real_time is None else "update"
    writer = writer.format(sink.format).outputMode(mode).options(**config.options(sink))
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
                tell(Progress(last, progress["numInputRows"], took, rows, batches, TALLY.batch(identity, last)))

    try:
        while query.isActive and not stop.is_set():
            query.awaitTermination(POLL_S)
            look()
        stopped = query.isActive
        if not stopped:
            query.awaitTermination()  # raises the query's error
    finally:
        query.stop()  # the next run repeats an interrupted batch, once
        look()
    metrics = TALLY.query(identity)
    return Outcome(stopped, rows, batches, () if metrics is None else metrics.operators)


def failure_of(error: BaseException) -> StateflowError:
    """Converts an exception of Spark to the error that a task raised, if it contains one."""
    text = str(error)
    line, code, _ = raised_in(text) or (text.partition("\n")[0], text.partition(":")[0], "")
    if code in StateflowError.registry and line.startswith(f"{code}: "):
        return from_wire({"code": code, "what": line.removeprefix(f"{code}: "), "remedy": "", "where": {}})
    lines = [line for line in text.splitlines() if line.strip()]
    return PipelineFailed(
        lines[0][:500] if lines else type(error).__name__, remedy="set spark.log.level to ERROR to see Spark's own log"
    )


def _masked(error: StateflowError, secrets: Secrets) -> StateflowError:
    wire = error.to_wire()
    where = {key: secrets.masked(value) for key, value in wire["where"].items()}
    return from_wire(
        {**wire, "what": secrets.masked(wire["what"]), "remedy": secrets.masked(wire["remedy"]), "where": where}
    )
