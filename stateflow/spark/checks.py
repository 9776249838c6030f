"""What can be told to be wrong before the first batch."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stateflow.errors import (
    InvalidArgument,
    NotOwner,
    OperatorNotImportable,
    SchemaMismatch,
    Unavailable,
    UnknownState,
)
from stateflow.rpc.clients import ControllerClient, ReplicaClient
from stateflow.runtime.arrow import read_table
from stateflow.runtime.operator import Operator
from stateflow.state import declarations_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: names of columns that are added to the input begin so
RESERVED_COLUMNS = "__stateflow_"
_MISSING = re.compile(r"(?:ModuleNotFoundError|ImportError): .+")
#: applications whose executors were asked
_PROBED: set[str] = set()
#: a stored key's type by that of its column, as replicas show stored keys
_STORED: dict[str, Callable[[pa.DataType], bool]] = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), pa.types.is_integer),
    **dict.fromkeys(("float", "double"), pa.types.is_floating),
    "string": pa.types.is_string,
    "binary": pa.types.is_binary,
    "boolean": pa.types.is_boolean,
    "date": pa.types.is_date,
    "timestamp": pa.types.is_timestamp,
}


def check_classic(frame: Any) -> None:
    """Raises InvalidArgument for a frame or session of Spark Connect, whose driver runs elsewhere."""
    if type(frame).__module__.startswith("pyspark.sql.connect"):
        raise InvalidArgument(
            "this is Spark Connect, whose client cannot number the operator's tasks",
            remedy="use a classic session: SparkSession.builder.master(…), not remote(…)",
        )


def check_frame(frame: Any) -> None:
    """Raises InvalidArgument for what is no DataFrame of a classic session that runs."""
    check_classic(frame)
    session = getattr(frame, "sparkSession", None)
    if session is None or not hasattr(frame, "isStreaming"):
        raise InvalidArgument(f"{type(frame).__name__} is no DataFrame", remedy="pass a DataFrame of PySpark")
    check_running(session)


def check_running(spark: SparkSession) -> None:
    """Raises InvalidArgument for a session that was stopped."""
    if spark.sparkContext._jsc is None:
        raise InvalidArgument(
            "the Spark session was stopped", remedy="make another, and the DataFrame with it: local_session(…)"
        )


def check_executors(spark: SparkSession) -> None:
    """Raises OperatorNotImportable when Spark's Python workers lack this package: those on other machines, and those
    here that are another Python than this. They are asked once."""
    context = spark.sparkContext
    here = context.master.startswith("local") and not context.master.startswith("local-cluster")
    if (here and _same_environment(context.pythonExec)) or context.applicationId in _PROBED:
        return
    try:
        context.parallelize([0], 1).map(_probe).collect()
    except Exception as error:
        refused = not_importable(str(error))
        if refused is None:
            raise
        raise refused from None
    _PROBED.add(context.applicationId)


def _same_environment(python: str) -> bool:
    """Not by what the names resolve to: in virtual environments those are the same interpreter."""
    found = shutil.which(python)
    return found is not None and Path(found).absolute().parent == Path(sys.executable).parent


def _probe(number: int) -> int:
    """Sent by its name, so that whoever runs it has imported what an operator's task imports."""
    import stateflow.spark.task as _  # noqa: F401 - importing it is the question

    return number


def not_importable(said: str) -> OperatorNotImportable | None:
    missing = _MISSING.findall(said)
    if not missing:
        return None
    return OperatorNotImportable(
        f"the executors' Python lacks what the operator's tasks need: {missing[-1]}",
        remedy="install stateflow-streams[spark] there, or name a Python that has it: spark.pyspark.python, "
        "PYSPARK_PYTHON",
    )


def check_key(df: DataFrame, operator: type[Operator], name: str, controller: ControllerClient) -> None:
    """Raises SchemaMismatch when stored keys are of another type than the key column is now: they would never meet.

    Of operators with one key column, as one stored key shows it; replicas that are away are not waited for.
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
            f"the key column {key!r} is {kind} now, stored keys are {stored}",
            remedy="cast the column to what it was, or deploy the operator under another name and pass name=",
            operator=name,
        )


def check_columns(df: DataFrame) -> None:
    """Raises InvalidArgument for a column of a type that Python's Arrow has not, or of a reserved name."""
    for field in df.schema:
        if field.name.lower().startswith(RESERVED_COLUMNS):
            raise InvalidArgument(
                f"the column {field.name!r} has a name that is reserved", remedy="rename it: withColumnRenamed"
            )
        kind = field.dataType.simpleString()
        if "interval year" in kind or "interval month" in kind:
            raise InvalidArgument(
                f"the column {field.name!r} is {kind}, which does not reach Python",
                remedy="drop it, or cast it, e.g. to a number of months",
            )


def check_initial_keys(rows: DataFrame, df: DataFrame, key: tuple[str, ...], operator: str) -> None:
    """Raises SchemaMismatch when first state has keys of other types than the input: they would never meet."""
    for column in key:
        if column not in rows.columns or column not in df.columns:
            continue  # is said by whoever needs it
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
            except UnknownState:  # new in this class
                break
            except (NotOwner, Unavailable):  # the others have keys, too
                continue
            if table is not None:
                found: pa.DataType = table.schema.field("key").type
                return found
    return None
