"""Slots and visits of a task of a query in real-time mode."""

from __future__ import annotations

import pytest

from stateflow import BatchOperator, Operator
from stateflow.errors import InvalidArgument
from stateflow.spark.real_time import RealTimeTask, hears_time
from stateflow.spark.task import OperatorTask


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
