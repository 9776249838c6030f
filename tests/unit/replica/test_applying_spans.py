"""Spans of batches: one for each batch and replica, with its commits below it; none for a batch that is not traced."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span

from stateflow.clock import ManualClock
from stateflow.errors import MoveUnknown, NotOwner
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.replica.applying import BatchSpan
from stateflow.replica.service import followed
from stateflow.tracing import KEY, Tracing, ids_of
from tests.unit.replica.test_applying import frame
from tests.unit.test_tracing_about import record

TRACE, PARENT = "ab" * 16, "cd" * 8
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
FOLLOWED = frame({0: [1], 1: [2]}, Batch("s", 7, traceparent=TRACEPARENT))


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("stateflow."): value for name, value in (span.attributes or {}).items()}


def test_nobody_follows_it(traces: Tracing) -> None:
    clock = ManualClock()
    assert BatchSpan.begun(None, FOLLOWED, 0.0, clock) is None
    assert BatchSpan.begun(traces, frame({0: [1]}), 0.0, clock) is None


def test_a_batch_and_its_commit(traces: Tracing, exporter: InMemorySpanExporter) -> None:
    clock = ManualClock(1_000_000)
    started = clock.monotonic()
    clock.advance(0.5)
    span = BatchSpan.begun(traces, FOLLOWED, started, clock)
    assert span is not None
    for _ in range(2):  # two groups
        clock.advance(1)
        span.committing()
        clock.advance(1)
        span.committed()
    clock.advance(1)
    span.came(Applied(b"", False, 5, operator_us=10, commit_us=20))
    span.came(Applied(b"", True, 0))
    span.came(NotOwner("no", remedy="ask"))
    span.passed(3)
    span.end(None)
    commit, whole = exporter.get_finished_spans()
    assert (whole.name, commit.name) == ("stateflow.apply", "stateflow.commit")
    assert whole.context.trace_id == commit.context.trace_id == int(TRACE, 16)
    assert whole.parent is not None
    assert whole.parent.span_id == int(PARENT, 16)
    assert commit.parent is not None
    assert commit.parent.span_id == whole.context.span_id == int(span.id, 16)
    assert whole.start_time == 10**9, "it began with its first message"
    assert (commit.start_time, commit.end_time) == (2_500 * 10**6, 5_500 * 10**6)
    assert attributes(commit) == {"groups": 2}
    assert attributes(whole) == {
        **{"operator": "Op", "source": "s", "batch": 7},
        **{"partitions": 3, "rows": 5, "replayed": 1, "refused": 1, "passed": 3},
        **{"operator_us": 10, "commit_us": 20, "code": "not_owner"},
    }


def test_nothing_was_committed(traces: Tracing, exporter: InMemorySpanExporter) -> None:
    span = BatchSpan.begun(traces, FOLLOWED, 0.0, ManualClock())
    assert span is not None
    span.held(2)
    span.end(NotOwner("it went", remedy="ask"))
    (whole,) = exporter.get_finished_spans()
    assert whole.status.description == "not_owner"
    assert [event.name for event in whole.events] == ["held"]


class Handlers:
    def __init__(self, traces: Tracing | None) -> None:
        self.tracing = traces
        self.seen: list[Any] = []

    @followed("stateflow.fence")
    async def Fence(self, request: Any, context: Any) -> str:
        self.seen += [get_current_span().get_span_context().trace_id, ids_of(record())]
        if request.move_id == "none":
            raise MoveUnknown("no such move", remedy="none")
        return "fenced"

    @followed("stateflow.prepare")
    async def Prepare(self, request: Any, context: Any) -> Any:
        self.seen.append(ids_of(record()))
        yield 1
        yield 2


def asked(handlers: Handlers, request: Any, *metadata: tuple[str, str]) -> tuple[str, list[int]]:
    context = SimpleNamespace(invocation_metadata=lambda: metadata)

    async def run() -> tuple[str, list[int]]:
        streamed = [each async for each in handlers.Prepare(request, context)]
        return await handlers.Fence(request, context), streamed

    return asyncio.run(run())


FENCE = SimpleNamespace(move_id="m-1", operator="Op", partition=3)
IDS = {"operator": "Op", "partition": 3, "move": "m-1"}


def test_a_part_in_a_move(traces: Tracing, exporter: InMemorySpanExporter) -> None:
    handlers = Handlers(traces)
    assert asked(handlers, FENCE, (KEY, TRACEPARENT)) == ("fenced", [1, 2])
    prepare, fence = exporter.get_finished_spans()
    assert (prepare.name, fence.name) == ("stateflow.prepare", "stateflow.fence")
    assert all(span.parent is not None and span.parent.span_id == int(PARENT, 16) for span in (prepare, fence))
    assert attributes(fence) == attributes(prepare) == IDS
    assert handlers.seen[0] == IDS
    assert handlers.seen[1] == int(TRACE, 16), "the lines that it logs are of the trace"
    assert handlers.seen[2].items() > IDS.items()


def test_one_that_is_refused(traces: Tracing, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(MoveUnknown):
        asked(Handlers(traces), SimpleNamespace(move_id="none", operator="Op", partition=3), (KEY, TRACEPARENT))
    assert exporter.get_finished_spans()[-1].status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("metadata", [(), ((KEY, "nonsense"),)])
def test_a_move_that_nobody_follows(
    traces: Tracing, exporter: InMemorySpanExporter, metadata: tuple[tuple[str, str], ...]
) -> None:
    handlers = Handlers(traces)
    assert asked(handlers, FENCE, *metadata) == ("fenced", [1, 2])
    assert exporter.get_finished_spans() == ()
    untraced = Handlers(None)
    assert asked(untraced, FENCE, (KEY, TRACEPARENT)) == ("fenced", [1, 2])
    assert handlers.seen == untraced.seen == [IDS, 0, IDS]
