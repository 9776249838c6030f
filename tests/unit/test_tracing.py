"""Spans exist only where they are wanted, and nest as their work does, across processes too."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from stateflow.errors import InvalidArgument, NullKey, OperatorFailed, from_wire
from stateflow.operator.instance import failure
from stateflow.tracing import (
    TRACEPARENT,
    Tracing,
    begin_tracing,
    carried,
    end_tracing,
    traceparent_in,
    tracing,
    use,
)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    use(provider)
    found = tracing()
    assert found is not None
    yield found
    use(None)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_without_a_word_there_are_none_and_nothing_is_imported() -> None:
    program = (
        "import sys; from stateflow.tracing import begin_tracing, carried, tracing; import stateflow.client, "
        "stateflow.replica.server, reconfig.controller.server; assert begin_tracing('replica') is None; "
        "assert tracing() is None and carried() is None; assert not [m for m in sys.modules if 'opentelemetry' in m]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://elsewhere:4318"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_what_does_not_want_them(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert begin_tracing("replica", "r") is None
    assert tracing() is None


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "console"},
        {"OTEL_TRACES_EXPORTER": "otlp,console"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
    ],
)
def test_what_cannot_be_is_said(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match="OTEL_TRACES_EXPORTER=otlp"):
        begin_tracing("replica")


def test_without_the_extra_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    from stateflow.errors import ExtraMissing

    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ExtraMissing, match=r"stateflow-streams\[traces\]"):
        begin_tracing("replica")


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    try:
        made = begin_tracing("replica", "edge-0", "edge")
        assert made is not None
        assert made is tracing() is begin_tracing("another")
        resource = made.begin("s").span.resource.attributes  # type: ignore[attr-defined]
        assert resource["service.name"] == "stateflow-replica"
        assert (resource["service.instance.id"], resource["stateflow.site"]) == ("edge-0", "edge")
        end_tracing()
        monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
        made = begin_tracing("replica", "edge-0")
        assert made is not None
        assert made.begin("s").span.resource.attributes["service.name"] == "ours"  # type: ignore[attr-defined]
    finally:
        end_tracing()
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    assert tracing() is None


def test_spans_are_below_each_other(traces: Tracing, exporter: InMemorySpanExporter) -> None:
    with traces.span("outer", operator="Op", nothing=None) as outer:
        with traces.span("inner", kind="client"):
            metadata = carried()
        outer.child("aside", began_us=1_000_000, n=3).end(2_000_000)
    assert carried() is None, "nothing is current any more"
    found = by_name(exporter)
    assert metadata is not None
    (name, traceparent), *_ = metadata
    assert TRACEPARENT.fullmatch(traceparent)
    assert traceparent_in([("user-agent", "x"), (name, traceparent)]) == traceparent
    traces.begin("elsewhere", parent=traceparent, kind="server").end()
    elsewhere = by_name(exporter)["elsewhere"]
    assert {span.context.trace_id for span in (*found.values(), elsewhere)} == {found["outer"].context.trace_id}
    assert found["inner"].parent.span_id == found["aside"].parent.span_id == found["outer"].context.span_id
    assert elsewhere.parent.span_id == found["inner"].context.span_id
    assert dict(found["outer"].attributes or {}) == {"stateflow.operator": "Op"}
    assert (found["aside"].start_time, found["aside"].end_time) == (10**9, 2 * 10**9)


def test_errors_are_told_without_where_they_were(traces: Tracing, exporter: InMemorySpanExporter) -> None:
    """The text of an operator's exception is often a key, as in ``KeyError: 'secret'``."""
    failed = failure("process()", KeyError("secret"), "mend", key="secret")
    for error, said in (
        (failed, "operator_failed: KeyError"),
        (from_wire(failed.to_wire()), "operator_failed: KeyError"),
        (OperatorFailed("the secret's process() raised KeyError", remedy="mend"), "operator_failed"),
        (NullKey("row 1 (secret) has no key", remedy="mend"), "null_key"),
        (ValueError("secret"), "ValueError"),
    ):
        exporter.clear()
        with pytest.raises(type(error)), traces.span("s"):
            raise error
        span = by_name(exporter)["s"]
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == said
        assert span.events == ()


def test_a_generator_that_is_left_has_not_failed(traces: Tracing, exporter: InMemorySpanExporter) -> None:
    def numbers() -> Iterator[int]:
        with traces.span("s"):
            yield 1
            yield 2

    generator = numbers()
    assert next(generator) == 1
    generator.close()  # type: ignore[attr-defined]
    assert by_name(exporter)["s"].status.status_code is StatusCode.UNSET


def test_what_is_not_recorded_is_not_carried() -> None:
    use(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
    try:
        traces = tracing()
        assert traces is not None
        with traces.span("s") as made:
            assert not made.is_recorded
            assert made.traceparent == ""
            assert carried() is None
    finally:
        use(None)


@pytest.mark.parametrize(
    "text", ["", "00-1-2-01", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01", "x" * 55]
)
def test_what_is_no_traceparent(text: str) -> None:
    assert not re.fullmatch(TRACEPARENT, text)
    assert traceparent_in([("traceparent", text)]) == ""
    assert traceparent_in(None) == ""
