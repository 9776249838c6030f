"""Order of a batch DataFrame's rows: the same for each attempt of a task, or made from the rows' contents.

Behind a shuffle rows arrive as the network brings them, each time in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stateflow.spark.connect import is_connect

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: plan nodes that keep the order of their rows
_KEEPING = ("Project", "Filter", "SubqueryAlias", "View", "Generate", "LocalLimit")
#: plan nodes that make rows, in a fixed order. Files are not among them: how Spark splits files depends on the session,
#: including its cores.
_MAKING = ("LocalRelation", "Range", "OneRowRelation")


def comes_in_order(df: DataFrame) -> bool:
    """Tells whether the rows of each task certainly come in the same order whenever they are read."""
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
    """Hashes all columns, whose names must be plain for Spark, to 64 bits.

    Rows that differ have different hashes, except one pair in 2 ** 64. Two rows with the same hash could come in either
    order, and be taken for each other where one of them ends a piece. Equal rows have the same hash, whether their
    columns are nullable or not.

    Spark's hash ignores nulls, and takes a list for its elements and -0.0 for 0.0; this one distinguishes all of these.
    """
    from pyspark.sql import functions as F  # noqa: N812

    parts: list[Column] = []
    for name, field in zip(df.columns, df.schema, strict=True):
        parts += _parts(F.col(name), field.dataType)
    return F.xxhash64(*parts)


def _parts(value: Column, kind: Any) -> list[Column]:
    """Returns what to hash of a value.

    Two different values have different parts, and the parts of one are no prefix of the other's.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql import types as t

    is_null = value.isNull()
    if isinstance(kind, t.NullType):
        return [is_null]
    if isinstance(kind, t.StringType):
        return [is_null, value.cast(t.StringType())]  # whatever its collation takes for equal
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
