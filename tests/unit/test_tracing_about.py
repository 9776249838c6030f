"""Context of log lines: which operator, partition and so on a line is about, across threads and formats."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from stateflow.errors import OperatorFailed, Unavailable, from_wire
from stateflow.tracing import about, begin_about, ids_of
from stateflow.types import PartitionId

P = PartitionId("Op", 3)


def record(message: str = "so", *arguments: Any, error: BaseException | None = None, **extra: Any) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, None)
    return logging.getLogger("any").makeRecord("any", logging.INFO, "f", 1, message, arguments, exc_info, extra=extra)


def test_a_line_about_nothing_says_nothing() -> None:
    assert ids_of(record("%s of %d", "a", 3)) == {}
    assert ids_of(record("%(a)s", {"a": P})) == {}


def test_what_is_worked_on() -> None:
    with about(lambda: {"operator": "Op", "batch": 0, "move": ""}):
        assert ids_of(record()) == {"operator": "Op", "batch": 0}
        with about(lambda: {"move": "m-1"}):
            assert ids_of(record()) == {"move": "m-1"}
        assert ids_of(record()) == {"operator": "Op", "batch": 0}
    assert ids_of(record()) == {}


def test_another_thread_is_about_something_else() -> None:
    found: list[Any] = []

    def run() -> None:
        begin_about(lambda: {"source": "s"})
        found.append(ids_of(record()))

    with about(lambda: {"operator": "Op"}):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert ids_of(record()) == {"operator": "Op"}
    assert found == [{"source": "s"}]


def test_it_is_made_when_a_line_is_written() -> None:
    now = {"batch": 1}
    with about(lambda: now):
        now["batch"] = 2
        assert ids_of(record()) == {"batch": 2}


def test_partitions_and_errors_in_a_line() -> None:
    here = {"operator": "Op", "partition": 3}
    assert ids_of(record("%s: %s", P, "why")) == here
    error = Unavailable("no", remedy="wait", partition=P, replica="edge-0", waited_s="3", key="secret")
    assert ids_of(record("%s", error)) == here | {"replica": "edge-0"}
    assert ids_of(record("%s", from_wire(error.to_wire()))) == here | {"replica": "edge-0"}
    failed = OperatorFailed("no", remedy="mend", operator="Op", partition=3)
    assert ids_of(record("it failed", error=failed)) == here
    assert ids_of(record("%s", from_wire(failed.to_wire()))) == here


def test_who_logs_knows_best() -> None:
    with about(lambda: {"operator": "Another", "move": "m-1"}):
        assert ids_of(record("%s", P, move="m-2")) == {"operator": "Op", "partition": 3, "move": "m-2"}


def test_the_trace_of_a_program_that_has_one() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import use_span

    assert "opentelemetry.trace" in sys.modules
    assert ids_of(record()) == {}
    span = TracerProvider(shutdown_on_exit=False).get_tracer("t").start_span("s")
    context = span.get_span_context()
    with use_span(span):
        assert ids_of(record()) == {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
        with about(lambda: {"trace_id": "of the batch"}):
            assert ids_of(record()) == {"trace_id": "of the batch"}
