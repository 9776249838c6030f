"""Filters that a streaming query's plan applies to its source."""

from __future__ import annotations

from typing import Any

#: plan nodes that pass on the rows of their child
_HANDED_ON = frozenset({"Project", "SubqueryAlias", "EventTimeWatermark", "View"})


def filter_of(execution: Any) -> str | None:
    """Returns the conditions right behind the only source of a query, as SQL.

    Returns None where there are no conditions, or several sources.

    Args:
        execution: the query's execution object in the JVM.
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
