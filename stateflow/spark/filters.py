"""What a streaming query leaves out of its source, as its plan has it."""

from __future__ import annotations

from typing import Any

#: they hand on the rows of what they stand on
_HANDED_ON = frozenset({"Project", "SubqueryAlias", "EventTimeWatermark", "View"})


def filter_of(execution: Any) -> str | None:
    """The conditions right behind the only source of a query, as SQL; None where there are none, or several sources.

    Args:
        execution: the JVM's object of the query.
    """
    above: list[Any] = []  # from the sink down to the source
    node = execution.analyzedPlan()
    while node.children().size() == 1:
        above.append(node)
        node = node.children().apply(0)
    conditions: list[str] = []
    if node.children().size() == 0:
        for each in reversed(above):
            name = str(each.nodeName())
            if name == "Filter":
                conditions.append(str(each.condition().sql()))
            elif name not in _HANDED_ON:
                break
    return " AND ".join(conditions) or None
