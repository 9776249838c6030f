"""A replica's spans: one for each batch, with its commit as a child, and one for its part in a move."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from stateflow.about import begin_about
from stateflow.clock import Clock
from stateflow.errors import StateflowError
from stateflow.runtime.host import Applied
from stateflow.runtime.shares import Frame
from stateflow.tracing import Made, Tracing, traceparent_in


class BatchSpan:
    """The span of one batch. The batch thread reports to it, and the call that waits for that thread."""

    def __init__(self, made: Made, clock: Clock) -> None:
        self._made, self._clock = made, clock
        self._commits = 0
        self._committing_us = self._committed_us = 0  # begin of the first commit, end of the last; wall clock
        self._spent = {"rows": 0, "partitions": 0, "replayed": 0, "refused": 0, "operator_us": 0, "commit_us": 0}

    @classmethod
    def begun(cls, tracing: Tracing | None, frame: Frame, started: float, clock: Clock) -> BatchSpan | None:
        """Begins a span; None: the batch is not traced.

        Args:
            started: when the first message of the batch came, in monotonic seconds.
        """
        batch = frame.batch
        if tracing is None or not batch.traceparent:
            return None
        made = tracing.begin(
            "stateflow.apply",
            parent=batch.traceparent,
            kind="server",
            began_us=clock.now_us() - round((clock.monotonic() - started) * 1e6),
            operator=frame.operator,
            source=batch.source,
            batch=batch.number,
        )
        return cls(made, clock)

    @property
    def id(self) -> str:
        return self._made.traceparent[36:52]

    def committing(self) -> None:
        self._commits += 1
        self._committing_us = self._committing_us or self._clock.now_us()

    def committed(self) -> None:
        """Notes that one of the partitions has committed."""
        self._committed_us = self._clock.now_us()

    def came(self, outcome: Applied | StateflowError) -> None:
        """Adds the outcome of one partition, as its sender is told."""
        spent = self._spent
        spent["partitions"] += 1
        if isinstance(outcome, StateflowError):
            spent["refused"] += 1
            self._made.tell(code=outcome.code)
            return
        spent["rows"] += outcome.rows
        spent["replayed"] += outcome.replayed
        spent["operator_us"] += outcome.operator_us
        spent["commit_us"] += outcome.commit_us

    def passed(self, partitions: int) -> None:
        self._made.tell(passed=partitions)

    def held(self, partitions: int) -> None:
        """Notes that batch slices wait for partitions on their way here."""
        self._made.happened("held", partitions=partitions)

    def end(self, error: BaseException | None) -> None:
        made = self._made
        if self._committed_us:
            commit = made.child("stateflow.commit", self._committing_us, groups=self._commits)
            commit.end(self._committed_us)
        made.tell(**self._spent)
        if error is not None:
            made.failed(error)
        made.end()


def followed(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a handler, unary or streaming, of a move's part on this replica.

    Lines that it logs name the move. If the move is traced, the handler has a span below that of its caller. Belongs
    inside ``unary`` or ``streaming``.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(method):

            @functools.wraps(method)
            async def stream(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
                made = _begun(name, self.tracing, request, context)
                try:
                    async for message in method(self, request, context):
                        yield message
                except BaseException as error:
                    if made is not None and not isinstance(error, GeneratorExit):
                        made.failed(error)
                    raise
                finally:
                    if made is not None:
                        made.end()

            return stream

        @functools.wraps(method)
        async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
            made = _begun(name, self.tracing, request, context)
            if made is None:
                return await method(self, request, context)
            try:
                with made.current():
                    return await method(self, request, context)
            except BaseException as error:
                made.failed(error)
                raise
            finally:
                made.end()

        return handler

    return decorate


def _begun(name: str, tracing: Tracing | None, request: Any, context: grpc.aio.ServicerContext) -> Made | None:
    ids: dict[str, Any] = _ids_of(request)
    begin_about(lambda: ids)
    traceparent = "" if tracing is None else traceparent_in(context.invocation_metadata())
    if tracing is None or not traceparent:
        return None
    return tracing.begin(name, parent=traceparent, kind="server", **ids)


def _ids_of(request: Any) -> dict[str, Any]:
    operator = request.operator if hasattr(request, "operator") else request.spec.name
    return {"move": request.move_id, "operator": operator, "partition": request.partition}


def answers_seen(span: BatchSpan | None, answers: Sequence[tuple[object, Applied | StateflowError]]) -> None:
    if span is not None:
        for _, outcome in answers:
            span.came(outcome)
