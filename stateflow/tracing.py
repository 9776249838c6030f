"""Creates OpenTelemetry spans, propagates them between processes, and adds ids to log lines.

Spans are created only if ``OTEL_TRACES_EXPORTER=otlp`` is set, or the program has a provider of its own. Otherwise
OpenTelemetry is not imported, and code that would create spans gets None in place of a :class:`Tracing`.

A span in one process becomes the parent of a span in another process by its ``traceparent`` (W3C Trace Context). The
traceparent of an unrecorded span is not sent, and a process that receives no traceparent creates no span. So the
process that begins a trace decides for all processes whether it is recorded.

Ids on log lines link them to traces and the ledger. Code that begins to work on something declares its ids once; then
every line that is logged in the same context carries them. The ids are computed only when a line is written.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal

from stateflow.errors import ExtraMissing, InvalidArgument, OperatorFailed, StateflowError
from stateflow.release import VERSION
from stateflow.types import PartitionId

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

Ids = Mapping[str, str | int]
#: ids in the order in which a line shows them. Other facts that locate an error are in the error's text
NAMES: Final = (
    *("operator", "partition", "source", "batch", "replica", "agent"),
    *("move", "reconfiguration", "trace_id", "span_id"),
)
_ABOUT: ContextVar[Callable[[], Ids] | None] = ContextVar("about", default=None)


def begin_about(ids: Callable[[], Ids]) -> None:
    """Declares ids for the running task, until it ends, and for the tasks that it starts."""
    _ABOUT.set(ids)


@contextmanager
def about(ids: Callable[[], Ids]) -> Iterator[None]:
    token = _ABOUT.set(ids)
    try:
        yield
    finally:
        _ABOUT.reset(token)


def ids_of(record: logging.LogRecord) -> dict[str, str | int]:
    """Returns the ids of a log line: declared ids, those of partitions and errors in its arguments, and ``extra``."""
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


Kind = Literal["internal", "client", "server"]
#: key in gRPC's metadata
KEY = "traceparent"
TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
#: beginning of the text of an OperatorFailed, with the type of the operator's exception
_RAISED = re.compile(r"\w+\(\) raised (\w+)")
#: seconds within which a process that ends sends its remaining spans; afterwards the unsent ones are lost
FLUSH_S = 3.0
_LOCK = threading.Lock()


class Made:
    """A span that is under way.

    ``traceparent`` makes it the parent of spans in other processes; it is empty if the span is not recorded.
    """

    __slots__ = ("_tracing", "span", "traceparent")

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing, self.span = tracing, span
        self.traceparent = traceparent_of(span)

    @property
    def is_recorded(self) -> bool:
        return self.traceparent != ""

    def tell(self, **attributes: Any) -> None:
        self.span.set_attributes(_named(attributes))

    def happened(self, name: str, **attributes: Any) -> None:
        self.span.add_event(name, _named(attributes))

    def child(self, name: str, began_us: int | None = None, **attributes: Any) -> Made:
        """Begins a child of this span. The caller must end it.

        Args:
            began_us: begin of the span by the wall clock; None: now.
        """
        return self._tracing.begin(name, parent=self, began_us=began_us, **attributes)

    def failed(self, error: BaseException) -> None:
        """Marks the span as failed, by the error's code and the type of an operator's exception. The error's text and
        the facts that locate it are left out, because they may contain rows and keys."""
        from opentelemetry.trace import Status, StatusCode

        said = error.code if isinstance(error, StateflowError) else type(error).__name__
        if isinstance(error, OperatorFailed) and (raised := _RAISED.match(error.what)):
            said = f"{said}: {raised[1]}"
        self.span.set_status(Status(StatusCode.ERROR, said))

    @contextmanager
    def current(self) -> Iterator[Made]:
        """Makes the span the current one while the block runs.

        Spans that are begun in the block, or by tasks that are started in it, become children of this span. The block
        does not end the span.
        """
        from opentelemetry import trace

        with trace.use_span(self.span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield self

    def end(self, ended_us: int | None = None) -> None:
        self.span.end(None if ended_us is None else ended_us * 1000)


class Tracing:
    """Makes the spans of a process."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import SpanKind

        self._tracer: Tracer = provider.get_tracer("stateflow", VERSION)
        self._kinds: Mapping[str, SpanKind] = {
            "internal": SpanKind.INTERNAL,
            "client": SpanKind.CLIENT,
            "server": SpanKind.SERVER,
        }

    def begin(
        self,
        name: str,
        *,
        parent: Made | str | None = None,
        kind: Kind = "internal",
        began_us: int | None = None,
        **attributes: Any,
    ) -> Made:
        """Begins a span, which the caller must end.

        Args:
            parent: a span of this process, or the traceparent of one in another process; None: the current span.
            began_us: begin of the span by the wall clock; None: now.
        """
        from opentelemetry import trace

        context = None
        if isinstance(parent, Made):
            context = trace.set_span_in_context(parent.span)
        elif parent is not None:
            context = _remote(parent)
        began = None if began_us is None else began_us * 1000
        return Made(self, self._tracer.start_span(name, context, self._kinds[kind], _named(attributes), (), began))

    @contextmanager
    def span(self, name: str, *, kind: Kind = "internal", **attributes: Any) -> Iterator[Made]:
        """Runs a block with a new span as the current one. An error that leaves the block becomes the span's
        status."""
        made = self.begin(name, kind=kind, **attributes)
        try:
            with made.current():
                yield made
        except GeneratorExit:  # the consumer closed the generator, which is no fault
            raise
        except BaseException as error:
            made.failed(error)
            raise
        finally:
            made.end()


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"stateflow.{name}": value for name, value in attributes.items() if value is not None}


def traceparent_of(span: Span) -> str:
    """Returns the traceparent of a span; empty: it is not recorded."""
    if not span.is_recording():
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _remote(traceparent: str) -> Any:
    """Returns the context of a span in another process, without OpenTelemetry's propagator, which would parse it again.

    Args:
        traceparent: text that matches :data:`TRACEPARENT`.
    """
    from opentelemetry import trace

    ids = int(traceparent[3:35], 16), int(traceparent[36:52], 16)
    context = trace.SpanContext(*ids, is_remote=True, trace_flags=trace.TraceFlags(int(traceparent[53:], 16)))
    return trace.set_span_in_context(trace.NonRecordingSpan(context))


# -- configuration --------------------------------------------------------------------------------------------


class _Process:
    """The tracing of this process.

    ``given`` was set by :func:`use`. ``own`` was made from environment variables, with ``provider`` and ``exporter``.
    """

    given: Tracing | None = None
    own: Tracing | None = None
    provider: Any = None
    exporter: Any = None


def use(provider: TracerProvider | None) -> None:
    """Sets the provider for objects that are created from now on. None restores the default."""
    _Process.given = None if provider is None else Tracing(provider)


def begin_tracing(process: str, name: str = "", site: str = "") -> Tracing | None:
    """Returns the tracing for a process of a cluster; None: tracing is off.

    Raises ExtraMissing if OpenTelemetry is not installed, and InvalidArgument for another exporter or protocol than
    OTLP over HTTP.

    Args:
        process: kind of the process, such as ``replica``.
        name: name of the process.
    """
    with _LOCK:
        if _Process.given is not None or not _is_wanted():
            return _Process.given
        if _Process.own is None:
            _Process.provider, _Process.exporter = _provider(process, name, site)
            _Process.own = Tracing(_Process.provider)
        return _Process.own


def tracing() -> Tracing | None:
    """Returns the tracing for new objects, from the program's own provider or from the environment's settings; None:
    tracing is off.

    Raises the errors of :func:`begin_tracing`.
    """
    if _Process.given is not None or _Process.own is not None:
        return _Process.given or _Process.own
    api = sys.modules.get("opentelemetry.trace")
    if api is not None and not isinstance(provider := api.get_tracer_provider(), api.ProxyTracerProvider):
        return Tracing(provider)
    return begin_tracing("client")


def end_tracing() -> None:
    """Sends the remaining spans within ``FLUSH_S``. Blocks."""
    with _LOCK:
        provider, exporter = _Process.provider, _Process.exporter
        _Process.provider = _Process.exporter = _Process.own = None
    if provider is None:
        return
    # in a thread, because the provider's own time limit does not end an export
    flushing = threading.Thread(target=provider.force_flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    if flushing.is_alive():
        exporter.shutdown()  # ends its retries
    provider.shutdown()


def carried() -> tuple[tuple[str, str]] | None:
    """Returns gRPC metadata that names the current span, for a call; None: no recorded span is current."""
    if _Process.given is None and _Process.own is None:
        return None
    from opentelemetry.trace import get_current_span

    traceparent = traceparent_of(get_current_span())
    return ((KEY, traceparent),) if traceparent else None


def traceparent_in(metadata: Any) -> str:
    """Returns the traceparent in the metadata of a call; empty: there is none, or an invalid one."""
    for key, value in metadata or ():
        if key == KEY and isinstance(value, str) and TRACEPARENT.fullmatch(value):
            return value
    return ""


def _is_wanted() -> bool:
    said = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if said in ("", "none") or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if said != "otlp" or protocol not in (None, "", "http/protobuf"):
        raise InvalidArgument(
            f"traces cannot be exported with {said!r}" + (f" and {protocol!r}" if protocol else ""),
            remedy="set OTEL_TRACES_EXPORTER=otlp with the protocol http/protobuf, or unset OTEL_TRACES_EXPORTER",
        )
    return True


def _provider(process: str, name: str, site: str) -> tuple[Any, Any]:
    """Returns a provider and its exporter."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ExtraMissing(
            f"OTEL_TRACES_EXPORTER=otlp, but {error.name} is not installed",
            remedy="pip install 'stateflow-streams[traces]', or unset the variable",
        ) from error
    ours = {"service.name": f"stateflow-{process}", "service.version": VERSION}
    ours |= {"service.instance.id": name} if name else {}
    ours |= {"stateflow.site": site} if site else {}
    # the environment's attributes take precedence
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    provider, exporter = TracerProvider(resource=resource), OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter
