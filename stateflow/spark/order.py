"""In which order rows of a batch DataFrame come: the same for each attempt of a task, or one is made of their contents.

Behind a shuffle rows come as the network brings them, each time in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: give rows in the order in which they have them
_KEEPING = ("Project", "Filter", "SubqueryAlias", "View", "Generate", "LocalLimit")
#: read them, in an order of their own
_READING = ("LocalRelation", "Range", "Relation", "OneRowRelation")


def comes_in_order(df: DataFrame) -> bool:
    """Whether it is certain that the rows of each of its tasks come in the same order whenever they are read."""
    left = [df._jdf.queryExecution().analyzed()]
    while left:
        node = left.pop()
        name = node.nodeName()
        if name == "LogicalRDD":
            if node.rdd().outputDeterministicLevel().toString() != "DETERMINATE":
                return False
        elif not name.startswith(_READING + _KEEPING):
            return False
        children = node.children()
        left += [children.apply(number) for number in range(children.size())]
    return True


def row_hash(df: DataFrame) -> Column:
    """64 bits of all columns. Rows that differ have different ones, but for one in 2 ** 64."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.xxhash64(*[_hashable(field.name, field.dataType) for field in df.schema])


def _hashable(name: str, kind: Any) -> Column:
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql import types as t

    column = F.col(f"`{name.replace('`', '``')}`")
    if isinstance(kind, t.StringType):
        return column.cast(t.StringType())  # whatever its collation takes for equal
    if _has(kind, (t.MapType, t.VariantType)):  # which Spark does not hash
        return F.to_json(F.struct(column))
    return column


def _has(kind: Any, wanted: tuple[type, ...]) -> bool:
    from pyspark.sql import types as t

    if isinstance(kind, t.ArrayType):
        return _has(kind.elementType, wanted)
    if isinstance(kind, t.StructType):
        return any(_has(field.dataType, wanted) for field in kind)
    return isinstance(kind, wanted)
