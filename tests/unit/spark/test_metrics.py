"""Metrics of queries: rows count once, time as often as it was spent, parts add up, and the tally stays small."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.types import StructType

from stateflow.errors import InvalidArgument, NoMetrics
from stateflow.spark import metrics, query_metrics
from stateflow.spark import metrics as task_reports
from stateflow.spark.metrics import (
    REPORT_COLUMN,
    OperatorMetrics,
    Seconds,
    Tally,
    TaskReport,
    Trigger,
    covered,
    decoded,
    elapsed,
    encoded,
    with_report,
    with_report_column,
)

SPENT = Seconds(spark=0.5, routing=0.125, rpc=0.25, operator=1.0, commit=0.125)
NOTHING = Seconds()


def report(batch: int = 0, task: int = 0, rows: int = 10, **changes: Any) -> TaskReport:
    known = TaskReport("q", "run", batch, "Op", None, task, rows, 4, 0, batch * 10_000_000, SPENT)
    return replace(known, **changes)


def trigger(batch: int = 0, **changes: Any) -> Trigger:
    return replace(Trigger("q", "flights", "run", batch, 25, 3.0), **changes)


def parts(seconds: Seconds) -> tuple[float, ...]:
    return seconds.spark, seconds.routing, seconds.rpc, seconds.operator, seconds.commit


def filled(*reports: TaskReport, triggers: tuple[Trigger, ...] = ()) -> Any:
    tally = Tally()
    tally.report(reports)
    tally.triggered(triggers)
    return tally.query("q")


def test_batches_operators_and_totals() -> None:
    other = {"operator": "Next", "source": "half", "rows": 3, "visits": 1, "replayed": 1}
    found = filled(report(), report(task=1), report(**other), report(1), triggers=(trigger(),))
    assert (found.id, found.name, found.batches_total, found.rows, found.tasks) == ("q", "flights", 2, 33, 4)
    first, second = found.batches
    assert (first.number, first.input_rows, first.trigger_s, first.rows, first.tasks) == (0, 25, 3.0, 23, 3)
    assert (second.number, second.input_rows, second.trigger_s, second.rows, second.tasks) == (1, None, None, 10, 1)
    assert first.operators == (
        OperatorMetrics("Op", None, 1, 20, 2, 8, 0, 0, SPENT + SPENT),
        OperatorMetrics("Next", "half", 1, 3, 1, 1, 0, 1, SPENT),
    )
    assert found.operators == (
        OperatorMetrics("Op", None, 2, 30, 3, 12, 0, 0, SPENT + SPENT + SPENT),
        OperatorMetrics("Next", "half", 1, 3, 1, 1, 0, 1, SPENT),
    )
    assert first.seconds == Seconds(0.5 + 1.0, 0.125, 0.25, 1.0, 0.125), "three tasks at once, 2 s of 3"
    assert second.seconds == SPENT
    assert found.seconds == first.seconds + second.seconds


def test_a_batch_is_whole_when_tasks_of_one_run_have_reported_for_all_partitions() -> None:
    tally = Tally()

    def whole(number: int = 0, run: str = "run", operator: str = "Op", source: str | None = None) -> bool:
        return tally.is_whole("q", run, number, operator, source, 8)

    assert not whole()
    tally.report([report(), report(), report(operator="Next", visits=8)])
    assert not whole(), "one task, twice"
    assert whole(operator="Next")
    tally.report([report(task=1)])
    assert whole()
    assert not whole(1)
    assert not whole(source="half")
    assert not whole(run="another")
    tally.report([report(run="another")])
    assert not whole(run="another"), "what an earlier run did, its retry has to do"


def test_a_task_that_is_repeated_adds_its_time_and_no_rows() -> None:
    again = report(replayed=4, seconds=replace(SPENT, operator=0.0, commit=0.0))
    (batch,) = filled(report(), report(task=1), again).batches
    assert batch.operators == (OperatorMetrics("Op", None, 1, 20, 2, 8, 1, 4, SPENT + SPENT + again.seconds),)


def test_a_batch_that_another_run_did_again_is_that_runs() -> None:
    """A batch that another run repeated is counted for that run alone.

    It may have fewer tasks, and the time of its trigger has nothing to do with what the former run spent.
    """
    late = {"run": "second", "began_us": 60_000_000}
    tally = Tally()
    tally.report([report(task=task) for task in range(3)])
    tally.triggered([trigger()])
    tally.report([report(rows=30, visits=12, **late)])
    (batch,) = tally.query("q").batches  # type: ignore[union-attr]
    assert (batch.rows, batch.tasks, batch.input_rows, batch.trigger_s, batch.seconds) == (30, 1, None, None, SPENT)
    assert (batch.operators[0].visits, batch.operators[0].repeated) == (12, 3)
    assert batch.operators[0].seconds == SPENT.scaled(4)
    tally.triggered([trigger(), trigger(run="second", seconds=4.0), trigger(7), trigger(query="unknown")])
    assert tally.batch("q", 0).trigger_s == 4.0  # type: ignore[union-attr]
    assert tally.batch("q", 7) is None
    assert tally.batch("unknown", 0) is None
    assert tally.query("unknown") is None


def test_two_operators_of_one_batch_pipeline_are_counted_beside_each_other() -> None:
    """Two operators of one batch pipeline are counted separately.

    Each is a call of its own, and they belong to no run of a query.
    """
    first, second = {"run": "", "use": "a"}, {"run": "", "use": "b", "operator": "Next", "rows": 3}
    found = filled(report(**first), report(**second), report(task=1, **first))
    assert [(each.operator, each.rows, each.tasks) for each in found.operators] == [("Op", 20, 2), ("Next", 3, 1)]
    again = filled(report(**first), report(task=1, **first), report(**first | {"use": "c"}))
    assert [(each.rows, each.tasks, each.repeated) for each in again.operators] == [(10, 1, 2)], (
        "applied anew, with one"
    )


def test_what_is_not_kept_in_detail_stays_in_the_totals() -> None:
    tally = Tally(batches_kept=3, queries_kept=2)
    for number in range(10):
        tally.report([report(number), report(number, task=1)])
        tally.triggered([trigger(number)])
    found = tally.query("q")
    assert found is not None
    assert [batch.number for batch in found.batches] == [7, 8, 9]
    assert (found.batches_total, found.rows, found.tasks) == (10, 200, 20)
    assert found.operators == (OperatorMetrics("Op", None, 10, 200, 20, 80, 0, 0, SPENT.scaled(20)),)
    assert found.seconds.total == pytest.approx(30.0)
    tally.report([report(query="second"), report(), report(query="third")])
    assert tally.query("second") is None, "the one that was silent for longest"
    assert tally.query("q") is not None
    assert tally.query("third") is not None


def test_a_name_is_that_of_the_query_that_reported_last() -> None:
    tally = Tally()
    tally.report([report(), report(query="newer"), report(query="other")])
    tally.triggered([trigger(), trigger(query="newer"), trigger(query="other", name=None)])
    assert tally.query("flights").id == "newer"  # type: ignore[union-attr]
    tally.report([report(1)])
    assert tally.query("flights").id == "q"  # type: ignore[union-attr]


amounts = st.integers(0, 100_000_000).map(lambda micros: micros / 1e6)
seconds = st.builds(Seconds, amounts, amounts, amounts, amounts, amounts)


@given(st.lists(st.tuples(amounts, amounts)), seconds, st.none() | amounts)
def test_elapsed_adds_up(begun: list[tuple[float, float]], spent: Seconds, trigger_s: float | None) -> None:
    spans = [(begin, begin + length) for begin, length in begun]
    found = elapsed(covered(spans), spent, trigger_s)
    assert all(part >= -1e-9 for part in parts(found))
    if trigger_s is not None:
        assert found.total == pytest.approx(trigger_s, abs=1e-9)
    elif spent.total:
        longest = max((length for _, length in begun), default=0.0)
        assert longest - 1e-6 <= found.total <= sum(length for _, length in begun) + 1e-6


def test_elapsed_counts_a_moment_once() -> None:
    spans = [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]
    assert covered(spans) == 4.0
    assert covered([]) == 0.0
    assert elapsed(4.0, Seconds(operator=8.0), None) == Seconds(operator=4.0)
    assert elapsed(4.0, Seconds(spark=4.0, operator=4.0), 10.0) == Seconds(spark=8.0, operator=2.0)
    assert elapsed(4.0, Seconds(rpc=8.0), 3.0) == Seconds(rpc=3.0), "clocks that disagree"
    assert elapsed(0.0, NOTHING, None) == NOTHING
    assert elapsed(0.0, NOTHING, 2.0) == Seconds(spark=2.0)


def test_a_frame_that_is_evaluated_for_ever_takes_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SPANS_KEPT", 5)
    tally = Tally()
    for number in range(23):
        tally.report([report(began_us=number * 10_000_000)])
    assert len(tally._queries["q"].batches[0].spans) <= 5
    (batch,) = tally.query("q").batches  # type: ignore[union-attr]
    assert batch.seconds.total == pytest.approx(23 * SPENT.total)
    assert (batch.rows, batch.operators[0].repeated) == (10, 22)


# -- reports to the driver, and their readers -------------------------------------------------------------------


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    fresh = Tally()
    monkeypatch.setattr(task_reports, "TALLY", fresh)
    monkeypatch.setattr(task_reports, "_running", lambda named: None)
    return fresh


def test_reports_are_a_list_on_their_way_and_the_book_at_the_driver() -> None:
    param, tally = task_reports._Reports(), Tally()
    sent = param.addInPlace(param.zero(tally), [report()])
    sent = param.addInPlace(sent, [report(task=1)])
    assert param.addInPlace(tally, pickle.loads(pickle.dumps(sent))) is tally
    assert tally.query("q").rows == 20  # type: ignore[union-attr]


def progress(batch: int = 0, ran: bool = True, **metrics: Any) -> dict[str, Any]:
    took = {"triggerExecution": 3000, **({"addBatch": 1000} if ran else {})}
    known = {"id": "q", "runId": "run", "name": "flights", "batchId": batch, "numInputRows": 25, "durationMs": took}
    return known | {"observedMetrics": metrics}


def test_a_query_is_told_from_one_that_has_no_operator(tally: Tally) -> None:
    query: Any = SimpleNamespace(id="q", name="flights", recentProgress=[])
    for waits in ([], [progress(ran=False)]):
        query.recentProgress = waits
        none_yet = query_metrics(query)
        assert (none_yet.id, none_yet.name, none_yet.batches, none_yet.rows) == ("q", "flights", (), 0)
    query.recentProgress = [progress()]
    with pytest.raises(NoMetrics, match=r"^no_metrics: no task of a stateflow operator .*query=q.*: apply an operator"):
        query_metrics(query)
    tally.report([report()])
    query.recentProgress = [progress(), progress(1, ran=False)]
    assert query_metrics(query).batches[0].trigger_s == 3.0
    assert query_metrics("q") == query_metrics("flights") == query_metrics(query)
    with pytest.raises(NoMetrics, match="query=elsewhere"):
        query_metrics("elsewhere")


def test_a_stopped_session_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        def __init__(self, is_stopped: bool, *queries: Any) -> None:
            self.is_stopped, self._queries = is_stopped, list(queries)

        @property
        def streams(self) -> Any:
            assert not self.is_stopped, "the channel is closed"
            return SimpleNamespace(active=self._queries)

    query = SimpleNamespace(id="q", name="flights", recentProgress=[])
    sessions = [Session(True), Session(False, query)]
    monkeypatch.setattr(metrics, "_SESSIONS", sessions)
    assert query_metrics("flights").batches_total == 0


class Frame:
    def __init__(self, streaming: bool) -> None:
        self.isStreaming = streaming


def test_a_batch_frame_is_asked_for_itself(tally: Tally) -> None:
    frame: Any = Frame(streaming=False)
    with pytest.raises(
        NoMetrics, match=r"returned by apply_operator.*: pass the DataFrame that apply_operator returned"
    ):
        query_metrics(frame)
    task_reports.remember(frame, "nightly")
    assert query_metrics(frame).batches_total == 0
    tally.report([report(query="nightly")])
    assert query_metrics(frame) == query_metrics("nightly")
    assert query_metrics(frame).rows == 10
    streaming: Any = Frame(streaming=True)
    with pytest.raises(InvalidArgument, match=r"start\(\)"):
        query_metrics(streaming)


def test_reports_that_come_with_the_progress_count_once(tally: Tally) -> None:
    """Reports that come with the query's progress count once.

    Over Spark Connect a query reports its newest micro-batches each time it is asked.
    """
    told = {"stateflow:use": Row(reports=[encoded(report()), encoded(report(task=1))]), "mine": Row(rows=3)}
    query: Any = SimpleNamespace(id="q", name="flights", recentProgress=[progress(**told), progress(1, ran=False)])
    found = query_metrics(query)
    assert [(batch.rows, batch.tasks, batch.trigger_s) for batch in found.batches] == [(20, 2, 3.0)]
    assert query_metrics(query) == found, "asked again it is told again"
    query.recentProgress.append(
        progress(
            1, **{"stateflow:use": Row(values=[[encoded(report(batch=1))]], schema={"fields": [{"name": "reports"}]})}
        )
    )
    query.recentProgress.append(progress(2, **{"stateflow:use": Row()()}))
    again = query_metrics(query)
    assert [batch.rows for batch in again.batches] == [20, 10]
    assert again.operators[0].repeated == 0


def test_a_report_reads_as_it_was_written() -> None:
    for each in (report(), report(run="", batch=3, source="s", use="u", began_us=1 << 50)):
        assert decoded(encoded(each)) == each


def test_a_tasks_last_row_is_its_report() -> None:
    schema = pa.schema([pa.field("k", pa.string(), nullable=False), pa.field("s", pa.struct([("n", pa.int64())]))])
    rows = pa.RecordBatch.from_pylist([{"k": "a", "s": {"n": 1}}, {"k": "b", "s": None}], schema)
    reports = [report()]
    first, last = with_report([rows], schema, reports)
    assert first.schema == last.schema, "a stream of Arrow has one"
    assert first.select(["k", "s"]).to_pylist() == rows.to_pylist()
    assert last.to_pylist() == [{"k": None, "s": None, REPORT_COLUMN: encoded(reports[0])}]
    [alone] = with_report([], schema, reports)
    assert alone == last
    assert [batch.num_rows for batch in with_report([rows], schema, [])] == [2, 0], "it did not come to its end"


def test_the_report_column_leaves_the_others_as_they_are_but_nullable() -> None:
    schema = with_report_column("`is not null` boolean NOT NULL, at timestamp_ntz, s struct<n: long not  null>")
    assert [(field.name, field.dataType.simpleString()) for field in schema] == [
        ("is not null", "boolean"),
        ("at", "timestamp_ntz"),
        ("s", "struct<n:bigint>"),
        (REPORT_COLUMN, "string"),
    ]
    assert all(field.nullable for field in schema)
    assert with_report_column(StructType(schema[:-1])) == schema
