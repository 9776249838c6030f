"""Input of a task of a query in real-time mode: what it is given, and by when."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from stateflow import BatchOperator, Operator
from stateflow.errors import InputIncomplete, InvalidArgument
from stateflow.spark.real_time import Inbox, RealTimeTask, hears_time
from stateflow.spark.task import OperatorTask

ROW = pa.RecordBatch.from_pydict({"n": [1]})


def test_what_has_come_is_taken_together_and_the_end_behind_it() -> None:
    inbox, found = Inbox(iter([ROW] * 5)), list[pa.RecordBatch]()
    while not inbox.ended:
        found += inbox.take(None)
    assert found == [ROW] * 5


def test_nothing_comes_in_time() -> None:
    gate = threading.Event()

    def later() -> Iterator[pa.RecordBatch]:
        gate.wait()
        yield ROW

    inbox = Inbox(later())
    assert inbox.take(0.01) == []
    assert not inbox.ended
    gate.set()
    assert inbox.take(None) == [ROW]


def test_what_reading_raises_is_raised_behind_what_came() -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield ROW
        raise InputIncomplete("it ended", remedy="again")

    inbox = Inbox(broken())
    with pytest.raises(InputIncomplete):
        for _ in range(3):
            inbox.take(None)


def test_it_reads_no_more_than_it_holds_and_ends_when_it_is_closed() -> None:
    read = itertools.count()
    reached, threads = 0, threading.active_count()

    def endless() -> Iterator[pa.RecordBatch]:
        nonlocal reached
        while True:
            reached = next(read)
            yield ROW

    inbox = Inbox(endless(), messages_max=3)
    (reader,) = [each for each in threading.enumerate() if each.name == "real-time input" and each.is_alive()][-1:]
    while reached < 3:
        pass
    assert len(inbox.take(None)) >= 3
    inbox.close()
    reader.join(60)
    assert not reader.is_alive()
    assert reached < 20, "it did not run ahead"
    assert threading.active_count() <= threads + 1


class Timed(Operator):
    key = "k"
    output = "k string"

    def process(self, row: object, ctx: object) -> None: ...

    def on_timer(self, timer: object, ctx: object) -> None: ...


class Told(Timed):
    on_timer = Operator.on_timer

    def on_watermark(self, watermark: object, ctx: object) -> None: ...


class Plain(Timed):
    on_timer = Operator.on_timer


class TimedColumns(BatchOperator):
    key = "k"
    output = "k string"

    def on_timers(self, timers: object, ctx: object) -> None: ...


def test_partitions_are_visited_where_something_comes_of_time() -> None:
    assert [hears_time(each) for each in (Timed, Told, Plain, TimedColumns, BatchOperator)] == [
        *(True, True, False, True),
        False,
    ]


def test_a_task_that_waited_for_a_slot_is_refused() -> None:
    base = OperatorTask("c", "Op", ("k",), 4, 1, b"", (), None, None, "r", 1.0)
    for slots in (None, 3):
        RealTimeTask(base, ("part", "off"), False, slots).check_slot(2)
    with pytest.raises(InvalidArgument, match=r"all tasks must run at once \(operator=Op task=2 slots=2\): give the"):
        RealTimeTask(base, ("part", "off"), False, 2).check_slot(2)
