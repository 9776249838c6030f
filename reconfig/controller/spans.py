"""A controller's spans: one per reconfiguration, below it one per move, and below that one per phase.

Lines that are logged meanwhile carry the ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from reconfig.decisions.work import Planned, PlannedStandby
from stateflow.reports import MoveReport
from stateflow.tracing import Made, about, tracing

#: phases in which a move has ended: they last no time, and have no span
_OVER = frozenset({"COMPLETED", "ABORTED"})


@contextmanager
def reconfiguring(reconfiguration: str, operator: str, kind: str) -> Iterator[None]:
    """Opens the span of a reconfiguration, around all its moves."""
    ids = {"operator": operator, "reconfiguration": reconfiguration}
    traces = tracing()
    with about(lambda: ids):
        if traces is None:
            yield
        else:
            with traces.span("stateflow.reconfiguration", kind="internal", cause=kind, **ids):
                yield


class MoveSpan:
    def __init__(self, made: Made) -> None:
        self._made = made
        self._phase = ""
        self._child: Made | None = None

    def phase(self, phase: str) -> None:
        """Notes the phase that the move is in now."""
        if phase == self._phase:
            return
        self._phase = phase
        self._leave()
        if phase not in _OVER:
            self._child = self._made.child(f"stateflow.move.{phase.lower()}")

    def _leave(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def end(self, report: MoveReport, error: BaseException | None) -> None:
        self._leave()
        error = error or report.fault
        self._made.tell(
            state=str(report.state),
            pause_ms=report.pause_ms,
            predicted_pause_ms=report.predicted_pause_ms,
            bytes_warm=report.bytes_warm,
            bytes_delta=report.bytes_delta,
            code=getattr(error, "code", None),
        )
        if error is not None:
            self._made.failed(error)
        self._made.end()


@contextmanager
def moving(planned: Planned) -> Iterator[MoveSpan | None]:
    """Opens the span of a move, which the caller ends.

    Yields None if tracing is off, or where the move is a standby, whose span would last as long as the copy.
    """
    ids: dict[str, Any] = {
        "operator": planned.partition.operator,
        "partition": planned.partition.partition,
        "reconfiguration": planned.reconfiguration,
        "move": planned.move_id,
    }
    traces = None if isinstance(planned, PlannedStandby) else tracing()
    with about(lambda: ids):
        if traces is None:
            yield None
            return
        made = traces.begin(
            "stateflow.move",
            from_replica=planned.source,
            to_replica=planned.target,
            strategy=str(planned.strategy),
            cause=str(planned.cause),
            **ids,
        )
        with made.current():
            yield MoveSpan(made)
