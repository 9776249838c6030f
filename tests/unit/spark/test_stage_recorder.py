"""Query events that come late, or while other queries or runs are under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.spark import stage_recorder
from stateflow.spark.stage_recorder import _Recorder, batch_state_id, record_once


class Manager:
    def __init__(self) -> None:
        self.ledger = self
        self.stages: dict[str, dict[str, Any]] = {}

    def item(self, state_id: str) -> Any:
        return self.stages.get(state_id)

    def items(self, ids: Any) -> list[Any]:
        return [SimpleNamespace(item_id=each) for each in ids if each in self.stages]

    def insert_state(self, **columns: Any) -> None:
        self.stages[columns["state_id"]] = columns


class Query:
    """A query. ``commits``: batches in its checkpoint."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.commits: list[int] = []
        patch.setattr(stage_recorder, "execution_of", lambda *_: "execution")
        patch.setattr(stage_recorder, "filter_of", lambda _: None)
        patch.setattr(stage_recorder, "spark_errors", lambda: ZeroDivisionError)
        patch.setattr(stage_recorder, "committed", self._committed)
        patch.setattr(stage_recorder, "swallowed", lambda _spark, _execution, numbers: numbers)
        patch.setattr(stage_recorder, "stage_of_swallowed", lambda query, n: {"state_id": batch_state_id(query, n)})
        patch.setattr(stage_recorder, "stage_of", self._stage)
        self.manager = Manager()
        self.recorder = _Recorder(None, self.manager, None, None, None, None)  # type: ignore[arg-type]

    def _committed(self, _: Any, before: int | None) -> list[int]:
        return [number for number in self.commits if before is None or number < before]

    @staticmethod
    def _stage(progress: Any) -> dict[str, Any]:
        return {"state_id": batch_state_id(progress.id, progress.batchId), "sink_type": "FileSink"}

    def started(self, run: str) -> None:
        self.recorder.started(SimpleNamespace(id="q", runId=run, name=None))

    def progressed(self, run: str, batch: int) -> None:
        self.recorder.progressed(SimpleNamespace(id="q", runId=run, name=None, batchId=batch, numInputRows=1))

    def terminated(self, run: str) -> None:
        self.recorder.terminated(SimpleNamespace(id="q", runId=run, exception=None))

    def sinks(self) -> dict[str, Any]:
        return {name: stage.get("sink_type") for name, stage in self.manager.stages.items()}


def test_what_the_next_run_has_committed_is_left_to_what_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that the next run has committed is left to that run's report.

    The end of a run may be heard after the next run has committed, and before that is reported.
    """
    query = Query(monkeypatch)
    query.started("one")
    query.commits.append(0)
    query.progressed("one", 0)
    query.terminated("one")
    query.started("two")  # this run fails in its first batch
    query.started("three")
    query.commits.append(1)
    query.terminated("two")
    query.progressed("three", 1)
    query.terminated("three")
    assert query.sinks() == {"query/q/0": "FileSink", "query/q/1": "FileSink"}


def test_what_a_killed_run_has_committed_is_found_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query(monkeypatch)
    query.started("one")
    query.commits.append(0)
    query.progressed("one", 0)
    query.commits.append(1)  # the run is killed here
    query.started("two")
    query.terminated("two")
    assert query.sinks() == {"query/q/0": "FileSink", "query/q/1": None}


class Session:
    """A session, as far as listening to its queries looks at it."""

    def __init__(self) -> None:
        self.streams = self
        self.listeners: list[Any] = []

    def addListener(self, listener: Any) -> None:
        self.listeners.append(listener)


def test_a_query_that_is_started_again_for_ever_is_listened_to_once() -> None:
    """Each restart of a query applies its operator again, with the same ledger."""
    one, other, manager = Session(), Session(), Manager()
    for session in (one, one, other, one):
        record_once(session, manager)  # type: ignore[arg-type]
    assert [len(each.listeners) for each in (one, other)] == [1, 1]
    record_once(one, Manager())  # type: ignore[arg-type]
    assert len(one.listeners) == 2
