"""Checks of what can be recognised as wrong before the first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stateflow.errors import InvalidArgument, NotOwner, SchemaMismatch, Unavailable, UnknownState
from stateflow.rpc.clients import ControllerClient, ReplicaClient
from stateflow.runtime.arrow import read_table
from stateflow.runtime.operator import Operator
from stateflow.runtime.times import python_zone
from stateflow.spark.connect import is_connect
from stateflow.spark.session import real_time_settings
from stateflow.spark.versions import REAL_TIME, require
from stateflow.state import declarations_of
from stateflow.types import LABEL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: columns that identify a row of Kafka
KAFKA = ("topic", "partition", "offset")
#: prefix of the names of columns that are added to the input
RESERVED_COLUMNS = "__stateflow_"
#: Spark's name for the error
_IN_QUERY_FUNCTION = "ATTEMPT_ANALYSIS_IN_PIPELINE_QUERY_FUNCTION"
#: type of a key column → test of the type of stored keys, as replicas show them
_STORED: dict[str, Callable[[pa.DataType], bool]] = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), pa.types.is_integer),
    **dict.fromkeys(("float", "double"), pa.types.is_floating),
    "string": pa.types.is_string,
    "binary": pa.types.is_binary,
    "boolean": pa.types.is_boolean,
    "date": pa.types.is_date,
    "timestamp": pa.types.is_timestamp,
}


def check_frame(frame: Any) -> None:
    """Checks that this is a DataFrame of a running session. Raises InvalidArgument."""
    session = getattr(frame, "sparkSession", None)
    if is_connect(frame):
        _check_may_ask(frame)
    if session is None or not hasattr(frame, "isStreaming"):
        raise InvalidArgument(f"{type(frame).__name__} is not a DataFrame", remedy="pass a PySpark DataFrame")
    check_running(session)


def _check_may_ask(frame: Any) -> None:
    """Checks that this is not called within a query function of a declarative pipeline. Raises InvalidArgument."""
    try:
        _ = frame.isStreaming
    except Exception as error:
        if _IN_QUERY_FUNCTION not in str(error):
            raise
        raise InvalidArgument(
            "Spark does not analyse DataFrames within a pipeline's query function",
            remedy="apply the operator outside of it, at module level, and return the result",
        ) from None


def check_running(spark: SparkSession) -> None:
    """Checks that the session was not stopped. Raises InvalidArgument."""
    if spark.is_stopped if is_connect(spark) else spark.sparkContext._jsc is None:
        raise InvalidArgument(
            "the Spark session was stopped", remedy="create a new one, and the DataFrame with it: local_session(…)"
        )


def check_key(df: DataFrame, operator: type[Operator], name: str, controller: ControllerClient) -> None:
    """Checks that stored keys have the type of the key column. Raises SchemaMismatch, as other keys would never meet.

    Checks operators with one key column only, as one stored key shows its type. Replicas that are away are not waited
    for.
    """
    owners = controller.deployment(name).owners
    key = operator.key if isinstance(operator.key, str) else operator.key[0] if len(operator.key) == 1 else None
    if key is None or key not in df.columns:
        return
    kind = df.schema[key].dataType.simpleString()
    by_owner: dict[str, list[int]] = {}
    for partition, owner in enumerate(owners):
        by_owner.setdefault(owner.address, []).append(partition)
    stored = _stored_key(by_owner, operator, name)
    if stored is not None and kind in _STORED and not _STORED[kind](stored):
        raise SchemaMismatch(
            f"the key column {key!r} is {kind}, but stored keys are {stored}",
            remedy="cast the column to that type, or deploy the operator under another name and pass name=",
            operator=name,
        )


def check_columns(df: DataFrame) -> None:
    """Checks that Python can take the columns.

    Raises InvalidArgument for a column of a type that Python's Arrow lacks, or of a reserved name, and for times in a
    zone that Python lacks.
    """
    from pyspark.sql import types as t

    refused = {
        t.YearMonthIntervalType: "drop it, or cast it, e.g. to a number of months",
        t.VariantType: "variants are not supported yet: cast it to string, or extract what is needed with variant_get",
    }
    for field in df.schema:
        if field.name.lower().startswith(RESERVED_COLUMNS):
            raise InvalidArgument(f"the column name {field.name!r} is reserved", remedy="rename it: withColumnRenamed")
        inner = list(types_in(field.dataType))
        for kind in inner:
            if (remedy := refused.get(type(kind))) is not None:
                raise InvalidArgument(
                    f"the column {field.name!r} is {field.dataType.simpleString()}, which cannot be passed to Python",
                    remedy=remedy,
                )
            names = kind.names if isinstance(kind, t.StructType) else []
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise InvalidArgument(
                    f"the column {field.name!r} contains a struct with several fields named {twice!r}",
                    remedy="cast it to a struct with distinct field names",
                )
        if any(isinstance(kind, t.TimestampType) for kind in inner):
            try:
                python_zone(df.sparkSession.conf.get("spark.sql.session.timeZone") or "UTC")
            except InvalidArgument as error:
                error.located(column=field.name)
                raise


def types_in(kind: Any) -> Iterator[Any]:
    """Yields the type, and all types within it."""
    yield kind
    inner = [getattr(kind, name) for name in ("elementType", "keyType", "valueType") if hasattr(kind, name)]
    for each in [*inner, *(field.dataType for field in getattr(kind, "fields", ()))]:
        yield from types_in(each)


def check_once(df: DataFrame, column: str, use: str) -> None:
    """Checks that a column that is named for one use does not occur several times. Raises InvalidArgument."""
    if (times := df.columns.count(column)) > 1:
        raise InvalidArgument(
            f"{times} columns are named {column!r}, so {use} is ambiguous",
            remedy="rename the others: df.toDF(…) names all columns in order",
        )


def check_order(df: DataFrame, column: str | None, *, by_arrow: bool) -> None:
    """Checks that rows can be ordered by a column. Raises InvalidArgument.

    Args:
        by_arrow: True for a micro-batch, whose rows Arrow orders in the tasks; False for a batch DataFrame, whose rows
            Spark orders.
    """
    from pyspark.sql import types as t

    if column is None:
        return
    if column not in df.columns:
        raise InvalidArgument(
            f"there is no column {column!r} to order by", remedy=f"use one of {', '.join(df.columns)}"
        )
    check_once(df, column, "the order of rows")
    kind = df.schema[df.columns.index(column)].dataType
    never: tuple[type[t.DataType], ...] = (t.MapType, t.VariantType, t.CalendarIntervalType, t.UserDefinedType)
    if by_arrow:
        never = (*never, t.ArrayType)
    if any(isinstance(each, never) for each in types_in(kind)):
        raise InvalidArgument(
            f"rows cannot be ordered by the column {column!r} of type {kind.simpleString()}",
            remedy="order by a number, string or timestamp, for example by a field of it",
        )


def site_column(df: DataFrame, column: str | None) -> str:
    """Returns the name of the site column; empty for None.

    Raises InvalidArgument for a column that is missing or no string.
    """
    if column is None:
        return ""
    check_once(df, column, "the site")
    kind = df.schema[column].dataType.simpleString() if column in df.columns else None
    if kind is None or kind.partition(" ")[0] != "string" or not LABEL.holds(column):
        what = f"it is {kind}" if kind else f"the input has {', '.join(df.columns)}"
        raise InvalidArgument(
            f"{column!r} cannot be the site column: {what}",
            remedy="name a string column of the input",
        )
    return column


def check_real_time(df: DataFrame, position: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the columns that identify a row in real-time mode.

    They are those of the source partition, then that of the offset.

    Raises InvalidArgument, also for what the session or its Spark lacks.
    """
    require(REAL_TIME, df.sparkSession)
    if not df.isStreaming:
        raise InvalidArgument(
            "a batch DataFrame cannot run in real-time mode", remedy="leave real_time= out, or use readStream"
        )
    if position is None:
        position = KAFKA
        if not set(KAFKA) <= set(df.columns):
            raise InvalidArgument(
                "real-time mode identifies rows by source partition and offset, which this input lacks",
                remedy='name the columns with position=("partition", "offset"), or keep the columns '
                "topic, partition and offset of a Kafka source",
            )
    names = (position,) if isinstance(position, str) else tuple(position)
    missing = [name for name in names if name not in df.columns]
    if len(names) < 2 or missing:
        raise InvalidArgument(
            f"position={names!r} does not name the columns of source partition and offset",
            remedy=f"name columns of the input, the offset last; the input has {', '.join(df.columns)}",
        )
    for name in names:
        check_once(df, name, "the position")
    offset = df.schema[names[-1]].dataType.simpleString()
    if offset not in ("tinyint", "smallint", "int", "bigint"):
        raise InvalidArgument(
            f"the column {names[-1]!r} is {offset}, which cannot be an offset",
            remedy="name the offset last, an integer column",
        )
    if not is_connect(df) and (node := _shuffle_in(df)):
        raise InvalidArgument(
            f"a {node} precedes the operator, so rows do not arrive in offset order",
            remedy="apply the operator directly to the source; select and where may precede it",
        )
    wanted = real_time_settings().items()
    lacking = [
        f"{key}={value}" for key, value in wanted if (df.sparkSession.conf.get(key, None) or "").lower() != value
    ]
    if lacking:
        raise InvalidArgument(
            f"the session lacks settings that real-time mode needs: {', '.join(lacking)}",
            remedy="create it with local_session(…, real_time=True) or with real_time_settings()",
        )
    return names


def _shuffle_in(df: DataFrame) -> str | None:
    """Returns the name of a plan node that spreads or reorders the rows of one source partition.

    None: there is none.
    """
    left = [df._jdf.queryExecution().analyzed()]
    while left:
        node = left.pop()
        name = str(node.nodeName())
        if name.startswith(("Repartition", "Rebalance", "Aggregate", "Join", "Sort", "Window", "Deduplicate", "Union")):
            return name
        children = node.children()
        left += [children.apply(number) for number in range(children.size())]
    return None


def check_initial_keys(rows: DataFrame, df: DataFrame, key: tuple[str, ...], operator: str) -> None:
    """Checks that first state has keys of the input's types. Raises SchemaMismatch, as other keys would never meet."""
    for column in key:
        if column not in rows.columns or column not in df.columns:
            continue  # reported by the code that needs the column
        first, later = (frame.schema[column].dataType.simpleString() for frame in (rows, df))
        if _STORED.get(first) is not _STORED.get(later):
            raise SchemaMismatch(
                f"the key column {column!r} is {first} in initial_state, {later} in the input",
                remedy="cast one of them",
                operator=operator,
            )


def _stored_key(by_owner: dict[str, list[int]], operator: type[Operator], name: str) -> pa.DataType | None:
    for state in declarations_of(operator):
        for address, partitions in by_owner.items():
            pages = ReplicaClient(address).scan(name, state, partitions)
            try:
                tables = (read_table(page) for page in pages)
                table = next((table for table in tables if table.num_rows), None)
            except UnknownState:  # the state is new in this class
                break
            except (NotOwner, Unavailable):  # the other replicas have keys, too
                continue
            if table is not None:
                found: pa.DataType = table.schema.field("key").type
                return found
    return None
