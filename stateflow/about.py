"""Subjects of log lines: ids beside the text, by which lines, traces and the ledger can be joined.

Code that begins to work on something declares its ids once; each line logged meanwhile, by any code, carries them. The
ids are computed when a line is written, and cost nothing before.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from stateflow.errors import StateflowError
from stateflow.types import PartitionId

Ids = Mapping[str, str | int]
#: in the order of a line. Other facts that locate an error are in its text
NAMES: Final = (
    *("operator", "partition", "source", "batch", "replica", "agent"),
    *("move", "reconfiguration", "trace_id", "span_id"),
)
_ABOUT: ContextVar[Callable[[], Ids] | None] = ContextVar("about", default=None)


def begin_about(ids: Callable[[], Ids]) -> None:
    """Declares the ids of the running task until it ends, and of the tasks that it begins."""
    _ABOUT.set(ids)


@contextmanager
def about(ids: Callable[[], Ids]) -> Iterator[None]:
    token = _ABOUT.set(ids)
    try:
        yield
    finally:
        _ABOUT.reset(token)


def ids_of(record: logging.LogRecord) -> dict[str, str | int]:
    """Returns the ids of a line: those declared, those of partitions and errors among its arguments, and ``extra``."""
    found: dict[str, Any] = {}
    said = _ABOUT.get()
    if said is not None:
        found |= said()
    arguments = record.args if isinstance(record.args, tuple) else ()
    error = record.exc_info[1] if record.exc_info else None
    for argument in (*arguments, error):
        if isinstance(argument, PartitionId):
            found |= {"operator": argument.operator, "partition": argument.partition}
        elif isinstance(argument, StateflowError):
            found |= _ids_of_error(argument)
    found |= {name: value for name, value in vars(record).items() if name in NAMES}
    if "trace_id" not in found:
        found |= _current_trace()
    return {name: found[name] for name in NAMES if found.get(name, "") != ""}


def _ids_of_error(error: StateflowError) -> dict[str, Any]:
    where = {name: value for name, value in error.where.items() if name in NAMES}
    partition = where.get("partition")
    if isinstance(partition, PartitionId):
        where |= {"operator": partition.operator, "partition": partition.partition}
    elif isinstance(partition, str):  # from the wire: the number alone, or operator/number
        operator, _, number = partition.rpartition("/")
        where |= {"partition": int(number) if number.isdigit() else partition}
        where |= {"operator": operator} if operator else {}
    return where


def _current_trace() -> Ids:
    """Returns the ids of OpenTelemetry's current span, if this program has imported OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    context = None if trace is None else trace.get_current_span().get_span_context()
    if context is None or not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
