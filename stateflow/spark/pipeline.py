"""Reads ``pipeline.yml``, which declares a pipeline (source → operators → sink), and runs the pipeline in Spark.

Reading the file does not start Spark. An example::

    name: tallies
    cluster: localhost:7070                # default: a cluster of its own, in stateflow-data/
    parameters: {day: "2024-01-01"}        # --set day=2024-01-02; parameters without a default must be set
    connections:
      warehouse: {url: "jdbc:postgresql://db/flights", user: "${env.DB_USER}", password: "${env.DB_PASSWORD}"}
    source: {format: parquet, path: "flights/${param.day}", schema: "k string, v long"}
    operators:
      - {operator: "myapp.ops:Tally", order_by: v}
    sink: {format: jdbc, connection: warehouse, options: {dbtable: tallies}, checkpoint: "checkpoints/tallies"}

``${env.NAME}``, ``${ENV:NAME}`` and ``${NAME}`` are environment variables. They count as secrets: the configuration and
errors show them as ``***``.
"""

from __future__ import annotations

import difflib
import logging
import re
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_jsonable_python

from stateflow.documents import Place, parse, place_of, read_document
from stateflow.errors import InvalidArgument, PipelineFailed, StateflowError, from_wire
from stateflow.ledger.manager import StateManager, ledger_url, state_manager_from_yaml
from stateflow.operator.operator import load
from stateflow.private import MASK, masked, names_a_secret
from stateflow.settings.base import FRACTION_MAX
from stateflow.spark.apply import apply_operator
from stateflow.spark.metrics import TALLY, BatchMetrics, OperatorMetrics, note, query_metrics
from stateflow.spark.rewind import take_out_left
from stateflow.spark.session import JETSTREAM, local_session, raised_in, register_jetstream, require
from stateflow.spark.stage_recorder import End, record_queries, run_stage, spark_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

log = logging.getLogger(__name__)
POLL_S = 0.25

_REFERENCE = re.compile(r"\$\{(ENV:|env\.|param\.|)([A-Za-z_][A-Za-z0-9_]*)\}")
#: text that was probably meant as a reference
_LIKE_A_REFERENCE = re.compile(r"\$\{\s*(?:env|param)s?\s*[.:][^}]*\}", re.IGNORECASE)
Option = str | int | float | bool
#: sections in which values may have any type that Spark accepts
_FREE = frozenset({"options", "settings", "parameters", "connections"})
#: fields of other sections that are not text
_TYPED = frozenset({"streaming", "each_batch", "tasks", "allowed_lateness", "unavailable_timeout"})


_INTERVAL = r"^\d+ (millisecond|second|minute|hour)s?$"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Reading(_Section):
    """Rows to read, as a source or as initial state, in any format that Spark can read."""

    format: str
    path: str | None = None
    schema_: str | None = Field(default=None, alias="schema", description="columns, as Spark DDL")
    connection: str | None = Field(default=None, description="connection profile, overridden by options")
    options: dict[str, Option] = {}
    where: str | None = Field(default=None, description="SQL condition of the rows to keep")
    select: list[str] | None = Field(default=None, description="SQL expressions of the columns")


class Source(Reading):
    streaming: bool = True
    record: str | None = Field(default=None, description="column that orders records, for the stage of a batch run")


class Step(_Section):
    """One operator, with arguments of ``apply_operator``."""

    operator: str = Field(description="package.module:Class or file.py:Class")
    cluster: str | None = Field(default=None, description="host:port of the controller; default: the pipeline's")
    name: str | None = None
    source: str | None = None
    site: str | None = None
    order_by: str | None = None
    watermark: str | None = None
    allowed_lateness: float = Field(default=0.0, ge=0, le=FRACTION_MAX, description="seconds")
    tasks: int | None = Field(default=None, ge=1)
    unavailable_timeout: float = Field(default=60.0, ge=0, le=FRACTION_MAX, description="seconds")
    position: list[str] | None = Field(default=None, description="in real time: source partition and offset columns")
    initial_state: Reading | None = None
    where: str | None = None
    select: list[str] | None = None


class Sink(_Section):
    format: str
    path: str | None = None
    connection: str | None = None
    options: dict[str, Option] = {}
    mode: str = Field(default="append", pattern="^(append|overwrite|complete|update|ignore|errorifexists)$")
    checkpoint: str | None = Field(default=None, description="checkpoint directory; required for a streaming pipeline")
    each_batch: bool | None = Field(default=None, description="write each micro-batch as a batch; default for jdbc")


class Engine(_Section):
    master: str = "local[*]"
    settings: dict[str, Option] = {}


class PipelineConfig(_Section):
    name: str = Field(min_length=1)
    cluster: str | None = Field(default=None, description="host:port of the controller; default: a cluster of its own")
    directory: str | None = Field(default=None, description="directory of that cluster; default: stateflow-data")
    parameters: dict[str, Option | None] = {}
    connections: dict[str, dict[str, Any]] = {}
    spark: Engine = Engine()
    source: Source
    operators: list[Step] = []
    sink: Sink
    trigger: str = Field(default="0 seconds", pattern=_INTERVAL)
    real_time: str | None = Field(default=None, pattern=_INTERVAL, description="epoch length in Spark's real-time mode")
    state_manager: dict[str, Any] | None = None

    def options(self, end: Reading | Sink) -> dict[str, Option]:
        """Returns the options of the connection profile, overridden by the source's or sink's own."""
        return {**(self.connections[end.connection] if end.connection else {}), **end.options}


@dataclass(frozen=True)
class Secrets:
    values: tuple[str, ...]

    def masked(self, text: str) -> str:
        for value in sorted(self.values, key=len, reverse=True):
            text = text.replace(value, MASK)
        return text


@dataclass(frozen=True)
class PipelineFile:
    """A loaded pipeline file.

    Attributes:
        name: file name.
        config: the effective configuration, with secrets.
        shown: the effective configuration, with masked secrets.
        state_manager: opens the ledger, which must exist; returns None if the file declares none.
    """

    name: str
    config: PipelineConfig
    shown: dict[str, Any]
    secrets: Secrets
    state_manager: Callable[[], StateManager | None]


def load_pipeline(file: Path, settings: Mapping[str, str], environment: Mapping[str, str]) -> PipelineFile:
    """Loads a pipeline file. Raises InvalidArgument, which names the YAML path, if the file is not valid.

    Args:
        settings: values of parameters, as given by ``--set``.
        environment: environment variables for references.
    """
    document = _read(file)
    secrets: list[str] = []

    def secret(name: str, at: str) -> str:
        if name not in environment:
            raise InvalidArgument(f"{name} is not set in the environment", remedy="set it", at=at)
        secrets.append(environment[name])
        return environment[name]

    real = _filled(document, settings, secret)
    hidden = _filled(document, settings, lambda name, at: MASK)
    config = _validated(real)
    _check(config)
    shown = to_jsonable_python(_without_secrets(_hidden(config.model_dump(by_alias=True, exclude_none=True), hidden)))
    for_ledger = _filled(document, settings, lambda name, at: f"${{{name}}}")

    if config.state_manager is not None:
        ledger_url(for_ledger, environment)  # raises the ledger's errors now

    def state_manager() -> StateManager | None:
        if config.state_manager is None:
            return None
        return state_manager_from_yaml(for_ledger, environment, create=False)

    return PipelineFile(file.name, config, shown, Secrets(tuple(filter(None, secrets))), state_manager)


def _read(file: Path) -> dict[str, Any]:
    document = read_document(file, _may_be_text)
    if not isinstance(document, dict):
        raise InvalidArgument(f"{file} declares no pipeline", remedy="add name:, source:, operators: and sink:")
    return document


def _may_be_text(place: Place) -> bool:
    """Tells whether the value at ``place`` may be text. Fields outside the sections ``_FREE`` have known types."""
    return not _FREE.isdisjoint(place) or (bool(place) and place[-1] not in _TYPED)


# -- parameters and secrets -----------------------------------------------------------------------------------


def _filled(
    document: Mapping[str, Any], settings: Mapping[str, str], secret: Callable[[str, str], str]
) -> dict[str, Any]:
    """Returns the document with every reference replaced, and with the values of its parameters."""
    parameters = _parameters(document, settings, secret)
    rest = {key: value for key, value in document.items() if key != "parameters"}
    return {**_resolved(rest, parameters, secret), "parameters": parameters}


def _parameters(
    document: Mapping[str, Any], settings: Mapping[str, str], secret: Callable[[str, str], str]
) -> dict[str, Any]:
    """Returns the parameters. Values from ``settings`` are literal; defaults may contain references to the environment
    only."""
    declared = document.get("parameters") or {}
    if not isinstance(declared, Mapping):
        raise InvalidArgument("parameters must map names to defaults", remedy="write name: default", at="parameters")
    for name in settings:
        if name not in declared:
            raise InvalidArgument(f"there is no parameter {name!r}", remedy=_hint(name, list(declared), "declare it"))
    values = {
        str(name): _typed(str(name), settings[name], default)
        if name in settings
        else _resolved(default, {}, secret, f"parameters.{name}")
        for name, default in declared.items()
    }
    unset = [name for name, value in values.items() if value is None]
    if unset:
        raise InvalidArgument(f"the parameter {unset[0]!r} has no value", remedy=f"pass --set {unset[0]}=…")
    return values


def _typed(name: str, text: str, default: Any) -> Any:
    """Converts text to the type of the default. If the default is not a bool or a number, returns the text."""
    if not isinstance(default, (bool, int, float)):
        return text
    try:
        value = parse(text)
    except (yaml.YAMLError, ValueError):
        value = None
    value = float(value) if isinstance(default, float) and type(value) is int else value
    if type(value) is not type(default):
        raise InvalidArgument(
            f"{text!r} is not a valid value of {name}", remedy=f"use a value of type {type(default).__name__}"
        )
    return value


def _resolved(value: Any, parameters: Mapping[str, Any], secret: Callable[[str, str], str], at: str = "") -> Any:
    """Returns ``value`` with every reference replaced.

    A text that consists of one reference to a parameter becomes the parameter's value, with its type.
    """
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, str) and _REFERENCE.search(key):
                raise InvalidArgument(f"the key {key!r} cannot contain a reference", remedy="write it out", at=at)
        return {key: _resolved(each, parameters, secret, f"{at}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(each, parameters, secret, f"{at}[{number}]") for number, each in enumerate(value)]
    if not isinstance(value, str):
        return value
    for match in _LIKE_A_REFERENCE.finditer(value):
        if _REFERENCE.fullmatch(match[0]) is None:
            raise InvalidArgument(
                f"{match[0]} is not a valid reference",
                remedy="write ${env.NAME} or ${param.name}, with letters, digits and _",
                at=at,
            )

    def look_up(match: re.Match[str]) -> Any:
        kind, name = match.groups()
        if kind != "param.":
            return secret(name, at)
        if at.startswith("parameters."):
            raise InvalidArgument(
                f"a default cannot refer to the parameter {name!r}", remedy="write its value out", at=at
            )
        if name not in parameters:
            raise InvalidArgument(
                f"there is no parameter {name!r}",
                remedy=_hint(name, list(parameters), f"declare it: parameters: {{{name}: default}}"),
                at=at,
            )
        return parameters[name]

    whole = _REFERENCE.fullmatch(value)
    return look_up(whole) if whole else _REFERENCE.sub(lambda match: str(look_up(match)), value)


def _hidden(value: Any, hidden: Any) -> Any:
    """Returns ``value`` with the texts of ``hidden`` that contain a mask; ``hidden`` may lack fields with defaults."""
    if isinstance(value, dict) and isinstance(hidden, Mapping):
        return {name: _hidden(each, hidden.get(name)) for name, each in value.items()}
    if isinstance(value, list) and isinstance(hidden, list):
        return [_hidden(*each) for each in zip(value, hidden, strict=True)]
    return hidden if isinstance(hidden, str) and MASK in hidden else value


def _without_secrets(value: Any, key: str = "") -> Any:
    """Masks secrets that are written in the file: values under keys that name a secret, and passwords in URLs."""
    if isinstance(value, dict):
        return {name: _without_secrets(each, str(name)) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each, key) for each in value]
    if names_a_secret(key):
        return MASK
    return masked(value) if isinstance(value, str) else value


# -- faults ------------------------------------------------------------------------------------


def _validated(document: Mapping[str, Any]) -> PipelineConfig:
    try:
        return PipelineConfig.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        at, last = place_of(first["loc"]), str(first["loc"][-1])
        fields = _fields(first["loc"][:-1])
        if first["type"] == "extra_forbidden":
            what, remedy = f"{at} is unknown", _hint(last, fields, "leave it out")
        elif first["type"] == "missing":
            what, remedy = f"{at} is missing", "add it"
        else:
            what, remedy = f"{at} is invalid: {first['msg']}", "correct it"
        raise InvalidArgument(what, remedy=remedy) from None


def _fields(loc: Sequence[int | str]) -> list[str]:
    """Returns the field names that are possible in the section at ``loc``."""
    section: type[BaseModel] = PipelineConfig
    for part in loc:
        if isinstance(part, str):
            inner = _section_in(section.model_fields[part].annotation) if part in section.model_fields else None
            if inner is None:
                return []
            section = inner
    return [field.alias or name for name, field in section.model_fields.items()]


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


def _hint(name: str, known: list[str], otherwise: str) -> str:
    close = difflib.get_close_matches(name, known, 1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"{otherwise}; known: {', '.join(known)}" if known else otherwise


def _check(config: PipelineConfig) -> None:
    ends: list[tuple[str, Reading | Sink]] = [("source", config.source), ("sink", config.sink)]
    for number, step in enumerate(config.operators):
        if step.initial_state is not None:
            ends.append((f"operators[{number}].initial_state", step.initial_state))
    for at, end in ends:
        if end.connection is not None and end.connection not in config.connections:
            known = list(config.connections)
            raise InvalidArgument(
                f"{at}.connection: there is no connection profile {end.connection!r}",
                remedy=_hint(end.connection, known, "add it under connections:"),
            )
    if config.source.streaming and not config.sink.checkpoint:
        raise InvalidArgument(
            "sink.checkpoint is missing: a streaming pipeline could not resume where it stopped",
            remedy="add checkpoint: with a persistent directory of its own, or source: {streaming: false}",
        )
    _check_real_time(config)
    if config.source.record is not None and (config.source.streaming or config.state_manager is None):
        raise InvalidArgument(
            "source.record is only for a batch pipeline that records a stage in a ledger",
            remedy="leave source.record out, or add source: {streaming: false} and state_manager:",
        )


def _check_real_time(config: PipelineConfig) -> None:
    placed = [number for number, step in enumerate(config.operators) if step.position is not None]
    if config.real_time is None:
        if placed:
            raise InvalidArgument(
                f"operators[{placed[0]}].position applies to real-time mode only",
                remedy="add real_time:, or leave it out",
            )
        return
    for at, is_wrong, why in (
        ("source.streaming", not config.source.streaming, "a batch pipeline cannot run in real-time mode"),
        ("trigger", "trigger" in config.model_fields_set, "real_time sets the length of an epoch"),
        ("sink.each_batch", bool(config.sink.each_batch), "there are no micro-batches in real-time mode"),
        ("sink.format", config.sink.format == "jdbc", "jdbc is written in micro-batches"),
        ("sink.mode", config.sink.model_dump(exclude_unset=True).get("mode", "update") != "update", "use mode update"),
    ):
        if is_wrong:
            raise InvalidArgument(f"{at} conflicts with real_time: {why}", remedy="change it, or remove real_time")


# -- The run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """One micro-batch, and the totals of this run up to that micro-batch.

    ``metrics`` is None if no operator has reported for the micro-batch.
    """

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

    Attributes:
        stopped: True if ``stop`` ended the run before its end.
        rows: input rows; None for a batch pipeline.
        batches: micro-batches with rows; None for a batch pipeline.
        operators: metrics of this run, in the order in which the operators first reported.
        done_before: True if the ledger says that an earlier run completed the pipeline, so nothing ran.
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
    """Runs a pipeline until its end, until it fails, or until ``stop`` is set, and then ends Spark.

    A streaming pipeline has an end only with ``once``; a batch pipeline always has one.

    Args:
        once: True makes a streaming pipeline process the rows that are available now, and then end.
        tell: called after each micro-batch.
        started: called when Spark has started, before the pipeline runs.

    Raises only StateflowErrors, with secrets masked.
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
            spark.stop()  # delivers the events that its listeners have not received yet
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
    """Runs a batch pipeline. With a state manager, the run is one stage, which is not repeated once it is done."""
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
    """Describes a source or a sink for the records of stages.

    The name is the connection, or the format if there is no connection. The entity is the table or path. The filter is
    the ``where`` condition of a source.
    """
    options = config.options(end)
    named = (options[each] for each in ("dbtable", "query", "table", "stream", "topic", "subscribe") if each in options)
    entity = end.path or next(map(str, named), None)
    return End(end.connection or end.format, end.format, entity, end.where if isinstance(end, Reading) else None)


def _check_jetstream(config: PipelineConfig) -> None:
    """Checks the options and the stream of a JetStream source before Spark starts, so that errors take one line."""
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
    return _frame(spark, config, config.source, streaming=config.source.streaming)


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
        initial_state=None if initial is None else _frame(spark, config, initial, streaming=False),
        unavailable_timeout=step.unavailable_timeout,
        real_time=config.real_time is not None,
        position=step.position,
    )


def _frame(spark: SparkSession, config: PipelineConfig, end: Reading, *, streaming: bool) -> DataFrame:
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
        log.warning("checkpoint %s: moved aside files left by a killed Spark: %s", sink.checkpoint, ", ".join(left))
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
        query.stop()  # the next run repeats an interrupted batch, whose rows are still applied only once
        look()
    metrics = TALLY.query(identity)
    return Outcome(stopped, rows, batches, () if metrics is None else metrics.operators)


def failure_of(error: BaseException) -> StateflowError:
    """Converts an exception of Spark to the error that a task raised, or to PipelineFailed if no task did."""
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
