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
from stateflow.runtime.operator import Operator
from stateflow.state import declarations_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
        remedy="install stateflow[spark] there, or name a Python that has it: spark.pyspark.python, PYSPARK_PYTHON",
    )


def check_key(df: DataFrame, operator: type[Operator], name: str, controller: ControllerClient) -> None:
    """Raises SchemaMismatch when stored keys are of another type than the key column is now: they would never meet.

    Of operators with one key column, as one stored key shows it; replicas that are away are not waited for.
    """
    _, _, owners, _ = controller.deployment(name)
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


def _stored_key(by_owner: dict[str, list[int]], operator: type[Operator], name: str) -> pa.DataType | None:
    for state in declarations_of(operator):
        for address, partitions in by_owner.items():
            pages = ReplicaClient(address).scan(name, state, partitions)
            try:
                page = next(iter(pages), None)
            except UnknownState:  # new in this class
                break
            except (NotOwner, Unavailable):  # the others have keys, too
                continue
            if page is not None:
                found: pa.DataType = pa.ipc.open_stream(page).schema.field("key").type
                return found
    return None
