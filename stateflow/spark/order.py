"""In which order rows of a batch DataFrame come: the same for each attempt of a task, or one is made of their contents.

Behind a shuffle rows come as the network brings them, each time in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stateflow.spark.connect import is_connect

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: give rows in the order in which they have them
_KEEPING = ("Project", "Filter", "SubqueryAlias", "View", "Generate", "LocalLimit")
#: make them, in an order of their own. Not so files: how they are split depends on the session, its cores with it
_MAKING = ("LocalRelation", "Range", "OneRowRelation")


def comes_in_order(df: DataFrame) -> bool:
    """Whether it is certain that the rows of each of its tasks come in the same order whenever they are read."""
    if is_connect(df):
        return False  # its plan is made in the server
    left = [df._jdf.queryExecution().analyzed()]
    while left:
        node = left.pop()
        name = node.nodeName()
        if name == "LogicalRDD":
            if node.rdd().outputDeterministicLevel().toString() != "DETERMINATE":
                return False
        elif name not in _MAKING + _KEEPING or node.subqueries().nonEmpty():  # which may become joins
            return False
        children = node.children()
        left += [children.apply(number) for number in range(children.size())]
    return True


def row_hash(df: DataFrame) -> Column:
    """64 bits of all columns, whose names Spark reads as they are. Rows that differ have different ones, but for one in
    2 ** 64: two that had the same could come the one way round and the other, and be taken for each other where one
    ends a piece. Rows that are the same have the same, whether their columns may be null or not.

    Spark's hash passes over nulls, and takes a list for its elements and -0.0 for 0.0: each is told apart here.
    """
    from pyspark.sql import functions as F  # noqa: N812

    parts: list[Column] = []
    for name, field in zip(df.columns, df.schema, strict=True):
        parts += _parts(F.col(name), field.dataType)
    return F.xxhash64(*parts)


def _parts(value: Column, kind: Any) -> list[Column]:
    """What to hash of a value. Of two that differ these differ, and the one's are not how the other's begin."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql import types as t

    is_null = value.isNull()
    if isinstance(kind, t.NullType):
        return [is_null]
    if isinstance(kind, t.StringType):
        return [is_null, value.cast(t.StringType())]  # whatever its collation takes for equal
    if isinstance(kind, (t.FloatType, t.DoubleType)):
        return [is_null, value, F.when(value == 0, value.cast("string"))]  # which has the sign
    if isinstance(kind, t.StructType):
        # by place: of fields called a and A, Spark would not know which is meant
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
