"""Applies operators to DataFrames on the driver, puts rows in order, and separates main rows from side outputs.

``apply_operator`` checks its arguments, the cluster and the executors before the first row is read. It adds to each row
the number of the partition to which the row belongs. All rows of one partition go to one task, by a shuffle if there
are several tasks, and an :class:`~stateflow.spark.task.OperatorTask` sends them. In real-time mode the tasks that read
the rows send them.

A task of a batch DataFrame cuts its rows into pieces, so each attempt needs the rows in the same order. After a
shuffle, rows arrive in another order each time. So Spark sorts the rows by ``order_by`` and a hash of their contents
(:func:`row_hash`), unless their order is always the same (:func:`comes_in_order`).

Spark's ``mapInArrow`` returns one DataFrame, so ``apply_operator`` returns main rows and the rows of every side output
together. A row of a side output fills the struct column named after the output's tag, and leaves all other columns
null. :func:`main_output` and :func:`side_output` separate the outputs again.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stateflow.client.stream import positions
from stateflow.errors import (
    InvalidArgument,
    KeyColumnMissing,
    OperatorNotDeployed,
    SchemaMismatch,
    UnsupportedKeyType,
)
from stateflow.ledger import StateManager
from stateflow.local.embedded import embedded
from stateflow.operator.arrow import read_schema
from stateflow.operator.operator import (
    Operator,
    check_class,
    check_initial_columns,
    check_outputs,
    key_columns,
    output_schema,
)
from stateflow.partition.positions import INITIAL
from stateflow.router import Router
from stateflow.rpc.clients import ControllerClient
from stateflow.security.plain import task_token
from stateflow.settings import ClientSettings
from stateflow.settings.base import FRACTION_MAX
from stateflow.spark.checks import (
    RESERVED_COLUMNS,
    check_columns,
    check_executors,
    check_frame,
    check_initial_keys,
    check_key,
    check_once,
    check_order,
    check_real_time,
    site_column,
)
from stateflow.spark.metrics import observed, remember, reports_to, with_report_column
from stateflow.spark.real_time import TICK_COLUMN, RealTimeTask, hears_time
from stateflow.spark.session import (
    default_parallelism,
    in_micro_batch,
    is_connect,
    local_slots,
    master_of,
    quoted,
    tell_briefly,
)
from stateflow.spark.stage_recorder import record_once
from stateflow.spark.task import HASH_COLUMN, PARTITION_COLUMN, PIECE_BYTES, OperatorTask, with_side_columns
from stateflow.spark.whole import complete_batches, refuse_batches, watch_connect
from stateflow.types import OperatorSpec

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


log = logging.getLogger(__name__)
#: metadata that marks the columns of side outputs; Spark keeps it in the frames that ``foreachBatch`` receives
MARK = "stateflow.side"
#: plan nodes that keep the order of their rows
_KEEPING = ("Project", "Filter", "SubqueryAlias", "View", "Generate", "LocalLimit")
#: plan nodes that make rows in a fixed order. Reads of files are not among them, because the way in which Spark splits
#: files depends on the session and its number of cores.
_MAKING = ("LocalRelation", "Range", "OneRowRelation")


# -- Order of a batch DataFrame's rows -------------------------------------------------------------------------------


def comes_in_order(df: DataFrame) -> bool:
    """Tells whether Spark's plan guarantees each task the same order of rows every time the DataFrame is read."""
    if is_connect(df):
        return False  # the server makes the plan
    left = [df._jdf.queryExecution().analyzed()]
    while left:
        node = left.pop()
        name = node.nodeName()
        if name == "LogicalRDD":
            if node.rdd().outputDeterministicLevel().toString() != "DETERMINATE":
                return False
        elif name not in _MAKING + _KEEPING or node.subqueries().nonEmpty():  # subqueries may become joins
            return False
        children = node.children()
        left += [children.apply(number) for number in range(children.size())]
    return True


def row_hash(df: DataFrame) -> Column:
    """Returns a column with a 64-bit hash of each row, for a frame whose column names contain no dot or backtick.

    Two different rows have the same hash with a probability of 1 in 2 ** 64. Such rows could change places between two
    attempts, and a piece that ends between them would then contain the wrong row. Equal rows have the same hash,
    whether their columns are nullable or not.

    Spark's own hash ignores nulls, and does not distinguish a list from its elements or -0.0 from 0.0; this hash
    distinguishes them.
    """
    from pyspark.sql import functions as F  # noqa: N812

    parts: list[Column] = []
    for name, field in zip(df.columns, df.schema, strict=True):
        parts += _parts(F.col(name), field.dataType)
    return F.xxhash64(*parts)


def _parts(value: Column, kind: Any) -> list[Column]:
    """Returns the parts of one value, as columns that are hashed.

    Different values have different parts, and no value's parts are a prefix of another value's parts.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql import types as t

    is_null = value.isNull()
    if isinstance(kind, t.NullType):
        return [is_null]
    if isinstance(kind, t.StringType):
        return [is_null, value.cast(t.StringType())]  # without the collation, for which different texts may be equal
    if isinstance(kind, (t.FloatType, t.DoubleType)):
        return [is_null, value, F.when(value == 0, value.cast("string"))]  # the text has the sign
    if isinstance(kind, t.StructType):
        # by place: Spark could not tell apart fields called a and A
        placed = t.StructType([t.StructField(f"_{number}", field.dataType) for number, field in enumerate(kind)])
        value = value.cast(placed)
        return [is_null, *(part for field in placed for part in _parts(value.getField(field.name), field.dataType))]
    if isinstance(kind, t.MapType):
        entry = t.StructType().add("key", kind.keyType).add("value", kind.valueType)
        value, kind = F.map_entries(value), t.ArrayType(entry)
    if isinstance(kind, t.ArrayType):
        element = kind.elementType
        return [is_null, F.array_size(value), F.transform(value, lambda each: F.xxhash64(*_parts(each, element)))]
    return [is_null, value]


# -- Main rows and side outputs --------------------------------------------------------------------------------------


def marked(schema: Any, tags: tuple[str, ...]) -> Any:
    """Returns a copy of the StructType in which metadata marks the columns named in ``tags`` as side outputs."""
    from pyspark.sql.types import StructField, StructType

    fields = [StructField(f.name, f.dataType, f.nullable, {MARK: True} if f.name in tags else None) for f in schema]
    return StructType(fields)


def side_output(frame: DataFrame, tag: str) -> DataFrame:
    """Returns the rows of one side output, with its columns and no others.

    Args:
        frame: the frame that :func:`apply_operator` returned for a batch, or that ``foreachBatch`` receives.

    Raises InvalidArgument if the operator has no such tag, or if ``frame`` is a streaming DataFrame: the query of each
    output would send all rows to the operator again.

    Example: ``side_output(applied, "late").show()``
    """
    from pyspark.sql import functions as F  # noqa: N812

    tags = _tags(frame)
    if tag not in tags:
        raise InvalidArgument(
            f"there is no side output {tag!r}", remedy=f"use a declared one: {', '.join(tags) or 'there are none'}"
        )
    return frame.where(F.col(quoted(tag)).isNotNull()).select(f"{quoted(tag)}.*")


def main_output(frame: DataFrame) -> DataFrame:
    """Returns the main rows, without the columns of the side outputs.

    Args:
        frame: the frame that :func:`apply_operator` returned for a batch, or that ``foreachBatch`` receives.

    Raises InvalidArgument if ``frame`` is a streaming DataFrame.

    Example: ``main_output(applied).show()``
    """
    from pyspark.sql import functions as F  # noqa: N812

    tags = _tags(frame)
    for tag in tags:
        frame = frame.where(F.col(quoted(tag)).isNull())
    return frame.drop(*tags)


def with_outputs(frame: DataFrame) -> DataFrame:
    """Adds the methods ``side(tag)`` and ``main()`` to a frame, and returns the frame."""
    frame.side, frame.main = partial(side_output, frame), partial(main_output, frame)
    return frame


def _tags(frame: DataFrame) -> list[str]:
    if frame.isStreaming:
        raise InvalidArgument(
            "a streaming DataFrame cannot be split into its outputs: each query would send all rows to the operator",
            remedy="use main_output(batch) and side_output(batch, tag) in writeStream.foreachBatch(…)",
        )
    return [field.name for field in frame.schema if field.metadata.get(MARK)]


# -- ``apply_operator`` ----------------------------------------------------------------------------------------------


class HasAddress(Protocol):
    address: str


def address_of(cluster: str | HasAddress) -> str:
    """Returns the address of a cluster's controller. Raises InvalidArgument if ``cluster`` has no address."""
    address = cluster if isinstance(cluster, str) else getattr(cluster, "address", None)
    if not isinstance(address, str) or not address:
        raise InvalidArgument(
            f"{cluster!r} is not a running cluster", remedy="pass the controller's host:port, or a started LocalCluster"
        )
    return address


def _own(df: DataFrame, operator: type[Operator], name: str | None, directory: str | Path | None) -> str:
    """Starts this program's own cluster, deploys the operator and returns the cluster's address.

    Raises InvalidArgument if Spark's tasks run on other machines, and the errors of ``embedded`` and ``deploy``.
    """
    master = master_of(df.sparkSession)
    if not master.startswith("local"):
        raise InvalidArgument(
            f"this program's own cluster runs on this machine, but Spark's tasks do not (master {master})",
            remedy="start a controller and replicas that Spark's executors can reach, and pass cluster=",
        )
    started = embedded(directory)
    _SESSIONS.add(df.sparkSession)
    # atexit runs the last registered function first, so queries end before all clusters, also one that has just started
    atexit.unregister(_end_queries)
    atexit.register(_end_queries)
    started.cluster.deploy(operator, name=name)
    return started.address


#: sessions whose queries may use the program's clusters
_SESSIONS: set[SparkSession] = set()


def _end_queries() -> None:
    """Stops the sessions' queries. Queries that outlive the program's clusters would fail, with stack traces."""
    for spark in _SESSIONS:
        with contextlib.suppress(Exception):  # the session may have been stopped
            for query in spark.streams.active:
                query.stop()


def apply_operator(
    df: DataFrame,
    operator: type[Operator],
    *,
    cluster: str | HasAddress | None = None,
    directory: str | Path | None = None,
    order_by: str | None = None,
    watermark: str | None = None,
    allowed_lateness: timedelta = timedelta(),
    name: str | None = None,
    source: str | None = None,
    site: str | None = None,
    tasks: int | None = None,
    initial_state: DataFrame | None = None,
    unavailable_timeout: float = 60.0,
    state_manager: StateManager | None = None,
    real_time: bool = False,
    position: Sequence[str] | None = None,
) -> DataFrame:
    """Runs a deployed operator over a DataFrame, streaming or batch; returns its output rows.

    An operator with ``side_outputs`` adds one struct column for each tag. A row of a side output fills its tag's column
    and leaves all others null; a main row leaves the tags' columns null. ``out.main()`` and ``out.side("late")``
    separate the outputs of a batch. In ``foreachBatch``, :func:`main_output` and :func:`side_output` separate those of
    the frame that the function receives.

    A streaming query applies each micro-batch exactly once, identified by (query id, batch id). Retried tasks,
    speculative attempts and replayed batches get the stored output. If a Python ``foreachBatch`` evaluates only part of
    a batch, the driver evaluates the rest when the function has returned, see :mod:`stateflow.spark.whole`.

    A batch DataFrame is applied once, however often it is evaluated. A second call of ``apply_operator`` applies its
    rows again, unless both calls have the same ``source``. A batch DataFrame may be of any length, because its rows are
    applied in pieces, see docs/decisions/backfill.md.

    Args:
        cluster: ``host:port`` of the controller, ``a:7070,b:7070`` of several, or a Cluster or LocalCluster, where the
            operator is deployed. ``None`` uses this program's own cluster, see
            :func:`~stateflow.local.embedded.embedded`, and deploys the class there as it is now.
        directory: directory of this program's own cluster; by default ``./stateflow-data``.
        order_by: column by which the rows of one partition and micro-batch, or of a batch DataFrame, are ordered before
            the operator processes them. With ``None``, a micro-batch's rows are processed in the order in which Spark's
            shuffle delivers them, and a batch DataFrame's rows in an order that is the same each time.
        watermark: a timestamp column. The operator's watermark after a micro-batch is the newest time that this column
            had in all earlier micro-batches, less ``allowed_lateness``. Rows are not expected to be older than the
            watermark. In a batch query every timer fires when all rows have been processed, or up to the watermark of
            another source if there is one; event time then goes on from the newest row, less ``allowed_lateness``.
        allowed_lateness: how far the watermark stays behind the newest time; ``timedelta.max`` for a watermark that no
            row is behind. Needs ``watermark``.
        name: name of the deployment, if it differs from the name of the class.
        source: a name that distinguishes two uses of one operator in one query, or makes a batch run repeatable.
        site: a string column with the site that each row comes from, so that ``autopilot`` may move the rows' state
            there. Null, and text that is not a site's name, mean no site.
        tasks: Spark tasks per micro-batch; by default Spark's parallelism, at most one for each partition. The number
            may change at any time. A single task needs no shuffle, and also runs the stages before it, up to their last
            shuffle.
        initial_state: a batch DataFrame with the key columns. :meth:`Operator.init_state` receives its rows before
            ``apply_operator`` returns. The rows are ignored if all partitions have loaded their initial state before.
        unavailable_timeout: seconds for which a task waits for a replica that does not answer, before the task fails. A
            Spark worker that uses the operator for the first time waits as long for a controller.
        state_manager: ledger in which each micro-batch of the session's streaming queries is recorded as a stage from
            now on.
        real_time: True for a query with ``trigger(realTime=…)``, in a session with the settings of
            :func:`~stateflow.spark.session.real_time_settings`. Rows are applied as they arrive. Experimental, see
            docs/real-time.md.
        position: in real-time mode, the columns that name a row's source partition, followed by the column with its
            offset in that partition; by default ``topic``, ``partition`` and ``offset``, as in Kafka's source. Rows are
            identified by their position, so offsets of a partition must rise, and each must always name the same row.

    Raises:
        KeyColumnMissing: the input lacks a key column, or has several columns of that name.
        UnsupportedKeyType: Python cannot hash a key column as Spark does.
        OperatorNotDeployed: the cluster does not have the operator.
        SchemaMismatch: the class has another key or output than the deployed operator.
        OperatorNotImportable: executors lack this package.
        InvalidArgument: an argument or a combination of arguments is wrong.
        InsecureRefused: the cluster refuses calls of executors.
        Unavailable: no controller answers, or executors cannot reach an address that this program reaches.

    These errors are raised before the query runs. If a replica refuses rows later, the Spark task fails with the
    replica's error in its message.

    Example: ``apply_operator(flights, DelayByAircraft, cluster="ctl:7070").writeStream.format("console").start()``
    """
    from pyspark.sql import functions as F  # noqa: N812

    check_frame(df)
    check_class(operator)
    _check_seconds(unavailable_timeout)
    tell_briefly()
    address = _own(df, operator, name, directory) if cluster is None else address_of(cluster)
    if cluster is not None and directory is not None:
        raise InvalidArgument("directory= does not apply to a running cluster", remedy="pass cluster= or directory=")
    deployment = ControllerClient(address, connect_timeout_s=ClientSettings().connect_timeout_s)
    operator_name = name or operator.__name__
    try:
        deployed = deployment.deployment(operator_name)
    except OperatorNotDeployed as error:
        error.remedy = f"deploy it first: Cluster({address!r}).deploy({operator.__name__})"
        raise
    spec, token = deployed.spec, task_token(operator_name)
    key = key_columns(operator)
    schema = output_schema(operator)
    check_outputs(operator)
    if spec.key != key or not read_schema(spec.output_schema).equals(schema):
        raise SchemaMismatch(
            "this class has another key or output than the deployed operator",
            remedy="deploy this class under another name and pass name=",
            operator=operator_name,
            deployed=spec.target,
        )
    count = min(spec.partitions, default_parallelism(df.sparkSession) if tasks is None else tasks)
    if count < 1:
        raise InvalidArgument(f"tasks cannot be {tasks}", remedy="use 1 or more")
    if allowed_lateness and watermark is None:
        raise InvalidArgument(
            "allowed_lateness needs a watermark", remedy="name its column with watermark=, or leave it out"
        )
    if state_manager is not None and not df.isStreaming:
        raise InvalidArgument(
            "state_manager records streaming queries, but this is a batch DataFrame",
            remedy="use readStream, or run_stage for a batch pipeline",
            operator=operator_name,
        )
    within = in_micro_batch(df)
    check_order(df, order_by, by_arrow=df.isStreaming or within)
    if within and is_connect(df) and source is None:
        raise InvalidArgument(
            "over Spark Connect a batch in foreachBatch does not say which query and batch number it belongs to",
            remedy="pass source=f'{the query}-{number}', so that the batch is applied once, however often it runs",
            operator=operator_name,
        )
    if real_time:
        if order_by is not None or tasks is not None:
            raise InvalidArgument(
                "real-time mode applies rows as they arrive, in the tasks that read them",
                remedy="leave order_by= and tasks= out",
            )
        position = check_real_time(df, position)
    elif position is not None:
        raise InvalidArgument(
            "position= applies to real-time mode only", remedy="pass real_time=True too, or leave it out"
        )
    task = OperatorTask(
        controller=address,
        operator=operator_name,
        key=key,
        partitions=spec.partitions,
        tasks=count,
        output_schema=spec.output_schema,
        side_schemas=spec.side_schemas,
        order_by=order_by,
        source=source,
        run=uuid.uuid4().hex,
        unavailable_timeout_s=unavailable_timeout,
        watermark=_time_column(df, watermark),
        lateness_us=_micros(allowed_lateness),
        reports=reports_to(df.sparkSession),
        observed=is_connect(df) and not within,
        streaming=df.isStreaming,
        within=within and not is_connect(df),
        piece_bytes=None if df.isStreaming or within else PIECE_BYTES,
        site=site_column(df, site),
        token=token,
        columns=tuple(df.columns),
    )
    check_columns(df)
    rows = _ticked(df, task) if real_time else _routed(df, task)
    spark_schema = _spark_schema(operator, spec)
    check_key(df, operator, operator_name, deployment)
    check_executors(df.sparkSession, address, deployed.owners, token)
    if initial_state is not None:
        if initial_state.isStreaming:
            raise InvalidArgument("initial_state is a streaming DataFrame", remedy="pass a batch DataFrame")
        check_columns(initial_state)
        check_initial_columns(operator, tuple(initial_state.columns))
        check_initial_keys(initial_state, df, key, operator_name)
        _load(initial_state, task, spark_schema)
    if state_manager is not None:
        record_once(df.sparkSession, state_manager)
    given = with_report_column(spark_schema) if task.observed else spark_schema
    applied: Any = task
    if real_time:
        applied = RealTimeTask(task, tuple(position or ()), hears_time(operator), local_slots(df.sparkSession))
    out, observation = rows.mapInArrow(applied, given), None
    if task.observed:
        out, observation = observed(out, task.run)
    if df.isStreaming:
        if is_connect(df):
            watch_connect(task, real_time=real_time)
        else:
            refuse_batches(task) if real_time else complete_batches(task)
        return with_outputs(out) if spec.side_schemas else out
    # Spark completes all tasks before a shuffle before it starts the first task after the shuffle. So the operator gets
    # all rows even if the caller takes only five. The price is that the outputs pass through local files; the outputs
    # of a micro-batch do not.
    out = out.repartitionById(count, F.spark_partition_id())
    remember(out, task.batch_query, observation)
    return with_outputs(out) if spec.side_schemas else out


def _routed(df: DataFrame, task: OperatorTask) -> DataFrame:
    """Adds the partition's number to each row, and sends the rows of partition p to task p modulo the number of tasks.

    A single task gets all partitions without a shuffle. The task runs even without rows, because Spark runs
    ``coalesce(1)`` over no partitions as one task without rows.

    Rows of a batch DataFrame are put in the same order for each attempt, because the task cuts them into pieces.
    """
    from pyspark.sql import functions as F  # noqa: N812

    placed, partition = _placed(df), _partition(df, task)
    # A generator, not a plain column: if Spark knew the input to be empty (a union's source without new data), it would
    # leave out the shuffle and its tasks, and no partition would receive the batch.
    numbered = placed.select("*", F.stack(F.lit(1), partition).alias(PARTITION_COLUMN))
    plain = task.tasks == 1 and not _ends_in_operator(df)
    routed = numbered.coalesce(1) if plain else numbered.repartitionById(task.tasks, PARTITION_COLUMN)
    if task.piece_bytes is None:
        return routed
    # Another generator, after the shuffle: if the shuffle turned out to be empty, Spark would leave out the shuffle and
    # a sort right after it.
    hashed = routed.select("*", F.stack(F.lit(1), row_hash(placed)).alias(HASH_COLUMN))
    by = [] if task.order_by is None else [F.asc_nulls_last(_place(df.columns.index(task.order_by)))]
    if plain and not by and comes_in_order(df):
        return hashed
    return hashed.sortWithinPartitions(*by, HASH_COLUMN)


def _ticked(df: DataFrame, task: OperatorTask) -> DataFrame:
    """Adds the partition's number to each row, in the tasks that read the rows, and emits each row twice.

    Spark passes a row on to Python only when it has read the next row, and the copy serves as that next row.
    """
    from pyspark.sql import functions as F  # noqa: N812

    ticks = F.explode(F.array(F.lit(0), F.lit(1)))
    return _placed(df).select("*", _partition(df, task).alias(PARTITION_COLUMN), ticks.alias(TICK_COLUMN))


def _placed(df: DataFrame) -> DataFrame:
    """Returns the frame with its columns renamed by position; the tasks restore the names.

    Spark reads a dot or a backtick in a name as syntax, and cannot tell apart two columns of one name.
    """
    return df.toDF(*map(_place, range(len(df.columns))))


def _place(number: int) -> str:
    return f"{RESERVED_COLUMNS}{number}"


def _partition(df: DataFrame, task: OperatorTask) -> Column:
    """Returns the number of each row's partition, as a column of the frame from :func:`_placed`."""
    from pyspark.sql import functions as F  # noqa: N812

    columns = [_hashable(df, column, task.operator) for column in task.key]
    return F.pmod(F.xxhash64(*columns), F.lit(task.partitions)).cast("int")


def _ends_in_operator(df: DataFrame) -> bool:
    """Tells whether the frame may be the output of another operator, without a shuffle in between.

    If it is, ``coalesce(1)`` would make one Spark task run all tasks of the other operator.
    """
    if is_connect(df):
        return True  # the server makes the plan
    left = [df._jdf.queryExecution().analyzed()]
    while left:
        node = left.pop()
        name = node.nodeName()
        if name.startswith("MapInArrow"):
            return True
        if not name.startswith(("Repartition", "Rebalance")):
            children = node.children()
            left += [children.apply(number) for number in range(children.size())]
    return False


def _load(rows: DataFrame, task: OperatorTask, schema: Any) -> None:
    """Loads the initial state into every partition that lacks it."""
    loaded = positions(Router(task.controller, task.operator), INITIAL)
    if len(loaded) == task.partitions:
        log.warning("operator %s already has its initial state, ignoring the rows of initial_state=", task.operator)
    else:
        task = replace(
            task,
            order_by=None,
            initial=True,
            watermark=None,
            reports=None,
            observed=False,
            piece_bytes=None,
            site="",
            columns=tuple(rows.columns),
        )
        _routed(rows, task).mapInArrow(task, schema).write.format("noop").mode("overwrite").save()


def _time_column(df: DataFrame, column: str | None) -> str | None:
    from pyspark.sql import types as t

    if column is None:
        return None
    check_once(df, column, "the watermark")
    kind = df.schema[column].dataType if column in df.columns else None
    if not isinstance(kind, t.TimestampType):
        what = "there is no such column" if kind is None else f"it is {kind.simpleString()}"
        raise InvalidArgument(
            f"{column!r} cannot be the watermark column: {what}", remedy="name a timestamp column of the input"
        )
    return column


def _micros(lateness: timedelta) -> int:
    """Returns microseconds, at most those of the years 1 to 9999, which no row can exceed. Raises InvalidArgument.

    A watermark that is further behind might not fit into 64 bits.
    """
    if not isinstance(lateness, timedelta) or lateness < timedelta():
        raise InvalidArgument(f"allowed_lateness cannot be {lateness!r}", remedy="use a timedelta of zero or more")
    return min(lateness, datetime.max - datetime.min) // timedelta(microseconds=1)


def _check_seconds(timeout: Any) -> None:
    """Checks ``unavailable_timeout``, because only a task would find it wrong. Raises InvalidArgument."""
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not is_number or not 0 <= timeout <= FRACTION_MAX:
        raise InvalidArgument(
            f"unavailable_timeout cannot be {timeout!r}", remedy=f"use seconds, from 0 to {FRACTION_MAX:.0f}"
        )


def _hashable(df: DataFrame, column: str, operator: str) -> Column:
    """Returns a key column of the frame from :func:`_placed`, cast for hashing.

    Integers become longs and floats become doubles, so that Python and the JVM compute the same hash. Raises
    KeyColumnMissing, UnsupportedKeyType.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql import types as t

    if column not in df.columns:
        raise KeyColumnMissing(
            f"there is no column {column!r} in the input",
            remedy=f"rename or select the key column; the input has {', '.join(df.columns)}",
            operator=operator,
        )
    if df.columns.count(column) > 1:
        raise KeyColumnMissing(
            f"several input columns are named {column!r}, so the key is ambiguous",
            remedy="rename the others: df.toDF(…) names all columns in order",
            operator=operator,
        )
    number = df.columns.index(column)
    kind, found = df.schema[number].dataType, F.col(_place(number))
    if (
        isinstance(kind, t.StringType) and kind.collation != "UTF8_BINARY"
    ):  # Spark would hash 'A' as 'a', Python would not
        raise UnsupportedKeyType(
            f"Spark and Python hash the key column {column!r} differently: its collation is {kind.collation}",
            remedy="cast the column to string; to make 'A' and 'a' one key, convert its text to one case first",
            operator=operator,
        )
    if isinstance(kind, (t.ByteType, t.ShortType, t.IntegerType, t.LongType)):
        return found.cast("long")
    if isinstance(kind, t.FloatType):
        return found.cast("double")
    if isinstance(kind, (t.StringType, t.BinaryType, t.BooleanType, t.DoubleType, t.DateType, t.TimestampType)):
        return found
    raise UnsupportedKeyType(
        f"the key column {column!r} is {kind.simpleString()}, which cannot be a key",
        remedy="use a string, integer, binary, boolean, double, date or timestamp column",
        operator=operator,
    )


def _spark_schema(operator: type[Operator], spec: OperatorSpec) -> Any:
    if isinstance(operator.output, str) and not spec.side_schemas:
        return operator.output
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(with_side_columns(spec.output_schema, spec.side_schemas), prefer_timestamp_ntz=True)
    return marked(schema, tuple(tag for tag, _ in spec.side_schemas))
