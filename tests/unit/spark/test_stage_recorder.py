"""Query events that come late, or while other queries or runs are under way, and stages whose source changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.ledger import Ledger, StateManager
from stateflow.spark import stage_recorder
from stateflow.spark.stage_recorder import End, Pulled, _Recorder, batch_state_id, record_once, run_stage


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


# -- Stages of a batch pipeline --------------------------------------------------------------------------------------

Row = int | None


@dataclass
class Condition:
    holds: Callable[[Row], bool]

    def __or__(self, other: Condition) -> Condition:
        return Condition(lambda row: self.holds(row) or other.holds(row))

    def isNull(self) -> Condition:
        return Condition(lambda row: row is None)

    def __le__(self, last: int) -> Condition:
        return Condition(lambda row: row is not None and row <= last)


class Frame:
    """A frame with one column. Like Spark's, it reads its source anew each time, in which rows may have arrived."""

    def __init__(self, source: list[Row], wanted: Condition | None = None) -> None:
        self.source, self.wanted = source, wanted

    def __getitem__(self, name: str) -> Condition:
        return Condition(bool)

    def where(self, wanted: Condition) -> Frame:
        return Frame(self.source, wanted)

    def rows(self) -> list[Row]:
        return [row for row in self.source if self.wanted is None or self.wanted.holds(row)]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[StateManager]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        yield StateManager(ledger)


class Stage:
    """A stage that pulls ``source``. ``late``: rows that arrive when the pulled rows have been measured."""

    def __init__(self, manager: StateManager, patch: pytest.MonkeyPatch) -> None:
        self.manager = manager
        self.source: list[Row] = []
        self.late: list[Row] = []
        self.pushed: list[Row] = []
        patch.setattr(stage_recorder, "measured", self._measured)

    def _measured(self, frame: Frame, _: str) -> Pulled:
        found = [row for row in frame.rows() if row is not None]
        pulled = Pulled(min(found, default=None), max(found, default=None), len(frame.rows()))
        self.source += self.late
        return pulled

    def run(self, push: Callable[[Any], int | None] | None = None) -> dict[str, Any]:
        ends = {"source": End("raw", entity="raw"), "sink": End("clean")}
        pull: Any = lambda _: Frame(self.source)  # noqa: E731
        return run_stage(self.manager, "load", **ends, pull=pull, push=push or self._push, record="id")

    def _push(self, frame: Any) -> int:
        self.pushed = frame.rows()
        return len(self.pushed)


@pytest.mark.parametrize(
    ("source", "pushed"), [([], [None]), ([None], [None, None]), ([1, 2], [1, 2, None]), ([None, 1], [None, 1, None])]
)
def test_rows_that_arrive_after_the_measurement_are_left_to_the_next_stage(
    source: list[Row], pushed: list[Row], manager: StateManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows behind an empty measurement were pushed, and once more by the next stage."""
    stage = Stage(manager, monkeypatch)
    stage.source, stage.late = [*source], [8, None]
    done = stage.run()
    newest = max(filter(None, source), default=None)
    assert stage.pushed == pushed
    assert done["last_record_pulled"] == (newest and str(newest))


def test_a_stage_that_is_repeated_keeps_no_records_of_its_failed_attempt(
    manager: StateManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later pull would go on behind rows that were never pushed."""

    def fails(_: Any) -> int:
        raise RuntimeError("the sink is full")

    stage = Stage(manager, monkeypatch)
    stage.source = [1, 7]
    with pytest.raises(RuntimeError, match="full"):
        stage.run(fails)
    (failed,) = manager.get_failures()
    assert (failed["first_record_pulled"], failed["last_record_pulled"]) == ("1", "7")
    stage.source = []
    done = stage.run()
    assert (done["first_record_pulled"], done["last_record_pulled"], done["record_count"]) == (None, None, 0)
    assert manager.ledger.verify() == []
