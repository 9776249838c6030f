"""Main rows and side outputs of an operator as DataFrames of their own.

Spark's ``mapInArrow`` gives one DataFrame, so ``apply_operator`` returns main rows and the rows of every side output
together. A side output's row is in the struct column of its tag, and all its other columns are null. The functions here
separate them again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from stateflow.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: metadata of the columns that hold side outputs; it survives into ``foreachBatch``
MARK = "stateflow.side"


def marked(schema: Any, tags: tuple[str, ...]) -> Any:
    """Returns the StructType with the columns of its side outputs marked."""
    from pyspark.sql.types import StructField, StructType

    fields = [StructField(f.name, f.dataType, f.nullable, {MARK: True} if f.name in tags else None) for f in schema]
    return StructType(fields)


def side_output(frame: DataFrame, tag: str) -> DataFrame:
    """Returns the rows of one side output, with its columns and no others.

    Args:
        frame: as :func:`apply_operator` returned it for a batch, or as ``foreachBatch`` is given it.

    Raises InvalidArgument for a tag that the operator does not have, and for a streaming DataFrame: two queries would
    each send all rows to the operator.

    Example: ``side_output(applied, "late").show()``
    """
    tags = _tags(frame)
    if tag not in tags:
        raise InvalidArgument(
            f"there is no side output {tag!r}", remedy=f"use a declared one: {', '.join(tags) or 'there are none'}"
        )
    return frame.where(frame[tag].isNotNull()).select(f"`{tag}`.*")


def main_output(frame: DataFrame) -> DataFrame:
    """Returns the main rows, without the columns of the side outputs. ``frame`` and errors as with :func:`side_output`.

    Example: ``main_output(applied).show()``
    """
    tags = _tags(frame)
    for tag in tags:
        frame = frame.where(frame[tag].isNull())
    return frame.drop(*tags)


def with_outputs(frame: DataFrame) -> DataFrame:
    """Adds ``frame.side(tag)`` and ``frame.main()`` to a frame, and returns it."""
    frame.side, frame.main = partial(side_output, frame), partial(main_output, frame)
    return frame


def _tags(frame: DataFrame) -> list[str]:
    if frame.isStreaming:
        raise InvalidArgument(
            "a streaming DataFrame cannot be split into its outputs: each query would send all rows to the operator",
            remedy="use main_output(batch) and side_output(batch, tag) in writeStream.foreachBatch(…)",
        )
    return [field.name for field in frame.schema if field.metadata.get(MARK)]
