"""Spans of a move: its phases in sequence, below its reconfiguration's. A standby has none, as it has no end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from reconfig.controller.executor import reconfiguring
from reconfig.controller.runners import Hooks, moving
from reconfig.decisions.plan import PlannedStandby
from stateflow.errors import MoveAborted
from stateflow.tracing import carried, ids_of, use
from stateflow.types import PartitionId
from tests.unit.reconfig.controller.test_runners_move_runner import Pair, _nothing, runner_of
from tests.unit.test_tracing_about import record


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    found = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(found))
    use(provider)
    yield found
    use(None)


class Asked(Pair):
    """A pair that records the trace and the ids that a call carries."""

    async def fence(self, name: str, fence: Any) -> Any:
        self.carried, self.ids = carried(), ids_of(record())
        return await super().fence(name, fence)


def phases(spans: dict[str, ReadableSpan]) -> list[str]:
    found = sorted((span for span in spans.values() if ".move." in span.name), key=lambda span: span.start_time or 0)
    return [span.name.rpartition(".")[2] for span in found]


def run_move(pair: Pair) -> None:
    async def run() -> None:
        with reconfiguring("r", "Count", "migrate"):
            await runner_of(pair, Hooks(_nothing, _nothing, _nothing, lambda: None)).run()

    asyncio.run(run())


def test_a_move(exporter: InMemorySpanExporter) -> None:
    pair = Asked()
    run_move(pair)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    whole, move = spans["stateflow.reconfiguration"], spans["stateflow.move"]
    assert move.parent is not None
    assert move.parent.span_id == whole.context.span_id
    attributes = {name.removeprefix("stateflow."): value for name, value in (move.attributes or {}).items()}
    assert (
        attributes.items()
        >= {
            **{"operator": "Count", "partition": 0, "reconfiguration": "r", "move": "r-0"},
            **{"from_replica": "a", "to_replica": "b", "strategy": "warm-up", "state": "COMPLETED"},
        }.items()
    )
    assert phases(spans) == ["warming", "catching_up", "fenced", "owned"]
    below = [span for span in spans.values() if ".move." in span.name]
    assert all(span.parent is not None and span.parent.span_id == move.context.span_id for span in below)
    assert pair.carried is not None
    assert pair.carried[0][1].split("-")[2] == f"{move.context.span_id:016x}", "the replica's part is below the move"
    assert pair.ids.items() >= {"move": "r-0", "reconfiguration": "r", "operator": "Count", "partition": 0}.items()
    assert ids_of(record()) == {}


def test_one_that_fails(exporter: InMemorySpanExporter) -> None:
    async def refuse() -> None:
        raise MoveAborted("by the test", remedy="none")

    async def run() -> None:
        await runner_of(Pair(), Hooks(refuse, _nothing, _nothing, lambda: None)).run()

    with pytest.raises(MoveAborted):
        asyncio.run(run())
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans["stateflow.move"].status.description == "move_aborted"
    assert phases(spans)[0] == "warming", "and the phase that it was in has ended, too"


def test_a_standby_has_none_and_its_lines_have_its_ids(exporter: InMemorySpanExporter) -> None:
    with moving(PlannedStandby("s", PartitionId("Count", 1), "a", "b", 1)) as span:
        assert span is None
        assert ids_of(record()) == {"operator": "Count", "partition": 1, "move": "s-1", "reconfiguration": "s"}
    assert exporter.get_finished_spans() == ()


def test_without_traces_a_move_is_as_it_was() -> None:
    pair = Asked()
    run_move(pair)
    assert pair.carried is None
    assert pair.ids == {"operator": "Count", "partition": 0, "move": "r-0", "reconfiguration": "r"}
