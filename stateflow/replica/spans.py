"""A replica's spans: one for a batch that comes here, with its commit below it, and one for a part in a move."""

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
    """Of one batch. Told by the thread that applies, and by its call when that has come back."""

    def __init__(self, made: Made, clock: Clock) -> None:
        self._made, self._clock = made, clock
        self._commits = 0
        self._committing_us = self._committed_us = 0  # the first began, the last ended; wall clock
        self._spent = {"rows": 0, "partitions": 0, "replayed": 0, "refused": 0, "operator_us": 0, "commit_us": 0}

    @classmethod
    def begun(cls, tracing: Tracing | None, frame: Frame, started: float, clock: Clock) -> BatchSpan | None:
        """None: nobody follows it. Args: started: when its first message came, monotonic seconds."""
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
        """One of the partitions."""
        self._committed_us = self._clock.now_us()

    def came(self, outcome: Applied | StateflowError) -> None:
        """Of a partition, as its sender is told."""
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
        """They are on their way here."""
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
    """Handler of one answer or many, of a move's part: its lines say which move it is, and where the move is traced its
    span is below the one that asked. Within ``unary`` or ``streaming``."""

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
