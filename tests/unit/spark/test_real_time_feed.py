"""Rows by their offsets, through attempts that die anywhere, epochs that end elsewhere, and lingering attempts."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow import Context, Operator, Timer, state
from stateflow.client.delivery import Deliver, Look, Open, SameOperator, perform
from stateflow.errors import InvalidArgument, PositionGap, SourceRetired, SourceTaken, StaleBatch
from stateflow.operator.operator import output_schema
from stateflow.operator.output import OutputReader
from stateflow.partition import layout
from stateflow.partition.layout import Session
from stateflow.partition.processor import PartitionProcessor
from stateflow.partitioner import partition_of
from stateflow.spark.real_time import Epoch, EpochSteps, Kept, Of, Outputs, Plan, _by_source
from stateflow.spark.task import PARTITION_COLUMN
from stateflow.storage import MemoryStore
from stateflow.types import TOKEN, PartitionId
from tests.sizes import sized

PARTITIONS, KEYS, SOURCES = 3, 5, 2
NOW_US = [0]  # processing time of the newest batch
LATER = 1_000_000  # added to a row's offset in what its timer outputs


class Count(Operator):
    """Outputs each row with its key's count, and once more when its timer fires."""

    key = "k"
    output = "part long, off long, k long, n long"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Any:
        self.n.value += 1
        ctx.set_timer(NOW_US[0] + 1, name=f"{row.part}/{row.off}", domain="processing")
        yield row.part, row.off, row.k, self.n.value

    def on_timer(self, timer: Timer, ctx: Context) -> Any:
        part, off = map(int, timer.name.split("/"))
        yield part, off + LATER, ctx.key, 0


PLAN = Plan("Count", "real-time:q", PARTITIONS, ("k",), ("part", "off"), None, 0, True, 1 << 20)
READER = OutputReader.of(output_schema(Count).serialize().to_pybytes(), ())

#: What may happen: rows are read, and applied up to so many parts of them; time passes; an epoch ends; an attempt dies,
#: or lingers while another one begins; a lingering attempt goes on.
ACTIONS = st.one_of(
    st.tuples(st.just("read"), st.integers(0, SOURCES - 1), st.integers(1, 4), st.none()),
    st.tuples(st.just("read"), st.integers(0, SOURCES - 1), st.integers(1, 4), st.integers(0, PARTITIONS)),
    st.tuples(st.just("visit"), st.none() | st.integers(0, PARTITIONS)),
    st.tuples(st.sampled_from(["die", "linger"])),
    st.tuples(st.just("end"), st.none()),
    st.tuples(st.just("end"), st.integers(0, PARTITIONS)),
    st.tuples(st.just("stray"), st.integers(0, SOURCES - 1), st.integers(1, 4)),
    st.tuples(st.just("mark")),  # Spark dies before it commits an epoch that has ended, which may then get more rows
)


class Killed(Exception):
    pass


REFUSED = (SourceTaken, StaleBatch, PositionGap)


class Lost(Exception):
    pass


def key_of(part: int, off: int) -> int:
    return (off * 3 + part) % KEYS


class Attempt:
    def __init__(self, world: World, number: int, starts: list[int]) -> None:
        self.world, self.next = world, list(starts)
        world.made += 1
        self.epoch = Epoch(PLAN, number, 0, Session(world.clock, f"a{world.made}"))
        self.given: list[dict[str, Any]] = []
        self.run(self.epoch.open({}, 0.0), None)

    def run(self, steps: EpochSteps[list[Outputs]], parts: int | None) -> None:
        found = perform(steps, partial(self.world.do, [parts]))
        rows, _ = READER.rows(each[p] for each in found for p in sorted(each))
        self.given += rows

    def read(self, source: int, count: int, parts: int | None) -> None:
        offs = list(range(self.next[source], self.next[source] + count))
        keys = [key_of(source, off) for off in offs]
        columns = {"part": [source] * count, "off": offs, "k": keys}
        columns[PARTITION_COLUMN] = [partition_of(key, PARTITIONS) for key in keys]
        self.run(self.epoch.rows(pa.table(columns)), parts)
        self.next[source] += count


class World:
    """Partitions, Spark's checkpoint, and a sink that takes an attempt's outputs when its epoch ends."""

    def __init__(self) -> None:
        self.stores = [MemoryStore() for _ in range(PARTITIONS)]
        self.hosts: list[PartitionProcessor] = []
        self.start()
        self.clock, self.made, self.number = 1, 0, 0
        self.starts = [0] * SOURCES
        self.sink: list[dict[str, Any]] = []
        self.attempt: Attempt | None = None
        self.strays: list[Attempt] = []

    def start(self) -> None:
        self.hosts = [PartitionProcessor(Count, PartitionId("Count", p), s, epoch=1) for p, s in enumerate(self.stores)]

    def do(self, left: list[int | None], of: Of) -> Any:
        self.clock += 1
        match of.step:
            case Open(session, settled):
                assert TOKEN.holds(session.id), "replicas refuse other ids"
                for host in self.hosts:
                    host.open_source(of.source, session, settled)
                return self.look(of.source)
            case Look():
                return self.look(of.source)
            case SameOperator():
                return None
            case Kept(after):
                kept = {p: layout.pieces(store, of.source, after) for p, store in enumerate(self.stores)}
                return {p: [(number, piece.output) for number, piece in found] for p, found in kept.items()}
            case Deliver(batch, rows, after):
                outputs = {}
                for frame in rows.frames(1):
                    (partition,), (left_over,) = frame.partitions, left
                    if left_over == 0:
                        raise Killed
                    left[0] = None if left_over is None else left_over - 1
                    NOW_US[0] = self.clock
                    applied = self.hosts[partition].apply(
                        batch, rows.schema, frame.message, self.clock, after.get(partition)
                    )
                    outputs[partition] = applied.output
                return outputs
        raise AssertionError(of)

    def look(self, source: str) -> dict[int, layout.Position]:
        found = {p: host.reached(source) for p, host in enumerate(self.hosts)}
        return {p: position for p, position in found.items() if position is not None and position.batch >= 0}

    def act(self, name: str, *said: Any) -> None:
        if name == "stray":
            for stray in self.strays:
                try:
                    stray.read(*said, None)
                except REFUSED:  # the lingering attempt ends
                    self.strays.remove(stray)
            return
        try:
            attempt = self.attempt = self.attempt or Attempt(self, self.number, self.starts)
            if name == "read":
                attempt.read(*said)
            elif name == "visit":
                attempt.run(attempt.epoch.visit(0.0), *said)
            elif name == "end":
                attempt.run(attempt.epoch.end({}), *said)
                self.sink += attempt.given
                self.starts, self.number, self.attempt = attempt.next, self.number + 1, None
            elif name == "mark":
                attempt.run(attempt.epoch.end({}), None)
                self.attempt = None
            elif name == "linger":
                self.strays.append(attempt)
                self.attempt = None
            else:
                self.attempt = None
        except (Killed, *REFUSED):
            self.attempt = None


@settings(max_examples=sized(1200))
@given(st.lists(ACTIONS, min_size=12, max_size=40))
def test_each_row_is_applied_once_and_given_once(actions: list[tuple[Any, ...]]) -> None:
    world = World()
    for each in actions:
        world.act(*each)
    world.strays.clear()
    world.attempt = None
    finish(world)
    NOW_US[0] += 1
    world.act("visit", None)  # timers of the last rows, which had no further batch to fire in
    world.act("end", None)
    rows = [(source, off) for source in range(SOURCES) for off in range(world.starts[source])]
    assert Counter((row["part"], row["off"]) for row in world.sink) == Counter(
        [*rows, *((part, off + LATER) for part, off in rows)]
    )
    counts: dict[int, list[int]] = {}
    for row in world.sink:
        if row["off"] < LATER:
            counts.setdefault(row["k"], []).append(row["n"])
    for key, found in counts.items():
        assert sorted(found) == list(range(1, len(found) + 1))
        assert world.hosts[partition_of(key, PARTITIONS)].peek(key, 0).n.value == len(found)
    for source in range(SOURCES):  # the next epoch begins: nothing is kept of the former ones
        world.act("read", source, 1, None)
    kept = [
        number
        for source in range(SOURCES)
        for store in world.stores
        for number, _ in layout.pieces(store, PLAN.rows_of((source,)), -1)
    ]
    assert all(number in {start + 1 for start in world.starts} for number in kept)


def test_offsets_have_to_rise() -> None:
    world = World()
    world.act("read", 0, 3, None)
    attempt = world.attempt
    assert attempt is not None
    attempt.next[0] = 1
    with pytest.raises(InvalidArgument, match="do not increase: 1 after 2"):
        attempt.read(0, 1, None)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a/b", "c"), ("a", "b/c")),
        ((None, 3), ("None", 3)),
        ((None, None), ("None", None)),
    ],
)
def test_each_source_partition_has_a_source_of_its_own(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Rows of a source partition count as contained if another one with the same name is ahead of it."""
    assert PLAN.rows_of(one) != PLAN.rows_of(other)


def test_a_source_partition_keeps_its_name() -> None:
    """A query that goes on after an upgrade must find its sources."""
    names = [("flights", 3), ("s3://b/flights", 3), ("s3://b/f/3",), ("a", "b")]
    assert [PLAN.rows_of(name).removeprefix("real-time:q:rows:") for name in names] == [
        *("flights/3", "s3://b/flights/3", "s3://b/f/3", "a/b")
    ]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "+05:30"])
def test_a_source_partition_that_is_a_time_keeps_its_name_in_every_zone(zone: str) -> None:
    """An hour lies between the two times, which clocks in Berlin show alike."""
    at = pa.array([datetime(2024, 10, 27, hour, 30, tzinfo=UTC) for hour in (0, 1)], pa.timestamp("us", zone))
    found = _by_source(pa.table({"part": at}), ("part",))
    assert [PLAN.rows_of(name).removeprefix("real-time:q:rows:") for name, _ in found] == [
        *("2024-10-27 00:30:00+00:00", "2024-10-27 01:30:00+00:00")
    ]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_a_source_partition_may_be_called_nan(kind: pa.DataType) -> None:
    """NaN differs from itself, so that each row opened the source once more, and dropped the outputs kept before."""
    world, opened = World(), list[str]()
    epoch = Epoch(replace(PLAN, position=("at", "off")), 0, 0, Session(1, "a"))

    def do(of: Of) -> Any:
        if isinstance(of.step, Open):
            opened.append(of.source)
        return world.do([None], of)

    perform(epoch.open({}, 0.0), do)
    for start in (0, 4):
        offs = range(start, start + 4)
        keys = [key_of(0, off) for off in offs]
        columns: dict[str, Any] = {"part": [0] * 4, "off": offs, "k": keys}
        columns["at"] = pa.array([float("nan"), 1.5] * 2, kind)
        columns[PARTITION_COLUMN] = [partition_of(key, PARTITIONS) for key in keys]
        perform(epoch.rows(pa.table(columns)), do)
    assert [source for source in opened if ":rows:" in source] == [PLAN.rows_of((name,)) for name in ("nan", 1.5)]


class Task(Attempt):
    """An attempt of one of several tasks."""

    def __init__(self, world: World, number: int, task: int, parts: int | None = None) -> None:
        self.world, self.given = world, []
        world.made += 1
        self.next = world.starts  # a task reads a source partition of its own
        self.epoch = Epoch(PLAN, number, task, Session(world.clock, f"a{world.made}"))
        self.run(self.epoch.open({}, 0.0), parts)

    def end(self, parts: int | None = None) -> None:
        self.run(self.epoch.end({}), parts)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_copy_from_between_the_ends_of_two_tasks_lacks_rows_of_the_later_one(epochs: int) -> None:
    """The mark of one task says nothing about the rows of another that ran in the epoch, too."""
    world = World()
    for number in range(epochs):
        first, second = Task(world, number, 0), Task(world, number, 1)
        first.end()
        saved = [dict(store.scan(b"")) for store in world.stores]
        second.read(1, 4, None)
        second.end()
    world.stores = [MemoryStore(entries) for entries in saved]
    world.start()
    Task(world, epochs, 0)
    with pytest.raises(PositionGap, match=f"3 partitions lack rows of epochs before {epochs}, .*restored"):
        Task(world, epochs, 1)


@pytest.mark.parametrize("parts", [1, None])
def test_rows_behind_the_mark_of_a_former_attempt_are_missed(parts: int | None) -> None:
    """Spark may be killed before it commits an epoch that tasks have marked. The epoch then gets more rows."""
    world = World()
    attempt = Attempt(world, 0, world.starts)
    attempt.read(0, 2, None)
    with suppress(Killed):
        attempt.run(attempt.epoch.end({}), parts)
    world.act("read", 0, 2, None)
    saved = dict(world.stores[0].scan(b""))
    world.act("read", 0, KEYS, None)
    world.act("end", None)
    world.stores[0] = MemoryStore(saved)
    world.start()
    with pytest.raises(PositionGap, match="1 partitions lack rows of epochs before 1"):
        Attempt(world, 1, world.starts)


@pytest.mark.parametrize("former", ["visit", "mark"])
def test_rows_behind_the_mark_of_a_former_attempt_are_missed_in_a_later_epoch_too(former: str) -> None:
    """Former attempts of the later epoch hide the newest mark in the other partitions, which still know of it."""
    world = World()
    world.act("read", 0, 2, None)
    world.act("mark")
    world.act("read", 0, 2, None)
    saved = dict(world.stores[0].scan(b""))
    world.act("read", 0, KEYS, None)
    world.act("end", None)
    for _ in range(2):
        world.act(former, *[None] * (former == "visit"))
        world.act("die")
    world.stores[0] = MemoryStore(saved)
    world.start()
    with pytest.raises(PositionGap, match="1 partitions lack rows of epochs before 1"):
        Attempt(world, 1, world.starts)


def test_a_partition_that_lacks_only_the_epoch_is_completed_after_the_former_one_was_repeated() -> None:
    world = World()
    for _ in range(3):
        world.act("read", 0, 2, None)
        world.act("mark")
    world.act("read", 0, 2, None)
    world.act("end", None)
    saved = dict(world.stores[0].scan(b""))
    for _ in range(2):
        world.act("read", 0, KEYS, None)
        world.act("mark")
        world.stores[0] = MemoryStore(saved)
        world.start()
    finish(world)
    check_counts(world)


def test_an_epoch_may_be_repeated_after_it_was_marked() -> None:
    world = World()
    for _ in range(5):
        attempt = Attempt(world, 0, world.starts)
        attempt.read(0, 2, None)
        attempt.run(attempt.epoch.end({}), None)
    world.starts = attempt.next
    for number in (1, 2):
        attempt = Attempt(world, number, world.starts)
        attempt.run(attempt.epoch.end({}), None)


def test_an_epoch_is_not_ended_without_a_mark_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last number marked all further attempts, so that a partition that was put back lacked rows unnoticed."""
    monkeypatch.setattr("stateflow.spark.real_time._MARKS_MAX", 3)
    world = World()
    for _ in range(3):
        world.act("read", 0, 2, None)
        world.act("mark")
    saved = dict(world.stores[0].scan(b""))
    attempt = Attempt(world, 0, world.starts)
    attempt.read(0, 2 + KEYS, None)
    with pytest.raises(InvalidArgument, match=r"ended 3 times without being committed.*: see Spark's log"):
        attempt.run(attempt.epoch.end({}), None)
    world.stores[0] = MemoryStore(saved)
    world.start()
    with pytest.raises(InvalidArgument, match="ended 3 times"):  # Spark does not get to the next epoch
        finish(world)


@pytest.mark.parametrize("later", [1, 2, 3])
@pytest.mark.parametrize("marks", [0, 2])
def test_a_query_goes_on_from_an_epoch_to_which_it_was_rewound(later: int, marks: int) -> None:
    """Partitions that were not put back contain later epochs, and may know several marks of the epoch."""
    world = World()
    world.act("read", 0, 2, None)
    world.act("end", None)
    saved, starts = dict(world.stores[0].scan(b"")), world.starts
    for _ in range(later):
        for _ in range(marks):
            world.act("read", 0, KEYS, None)
            world.act("mark")
        world.act("read", 0, KEYS, None)
        world.act("end", None)
    furthest = world.starts
    world.stores[0] = MemoryStore(saved)
    world.start()
    world.number, world.starts = 1, starts
    for _ in range(later + 2):
        for _ in range(2):  # and each epoch is run again after it was marked
            world.act("read", 0, KEYS, None)
            world.act("mark")
        world.act("read", 0, KEYS, None)
        world.act("end", None)
    assert (world.number, world.starts > furthest) == (later + 3, True)
    check_counts(world)


def test_a_task_that_is_new_or_comes_back_is_taken_as_it_is() -> None:
    """A source may have more partitions than in the epoch before, and may have had more in earlier ones."""
    world = World()
    for number, tasks in enumerate((1, 2, 1, 1, 3)):
        for task in [Task(world, number, task) for task in range(tasks)]:
            task.end()


def test_a_task_that_was_missing_for_one_epoch_goes_on_after_a_rewind_by_that_epoch() -> None:
    """Copies from before the task began in that epoch would look the same, so that it cannot just go on."""
    world = World()
    for number, tasks in enumerate((2, 2, 1)):
        for task in [Task(world, number, task) for task in range(tasks)]:
            task.end()
    with pytest.raises(PositionGap, match="rewind the query to an epoch"):
        Task(world, 3, 1)
    for number in (2, 3, 4):
        for task in [Task(world, number, task) for task in range(2)]:
            task.end()


@pytest.mark.parametrize("parts", range(1, PARTITIONS))
def test_a_new_task_that_dies_before_all_partitions_know_it_goes_on(parts: int) -> None:
    """Partitions that know the new task do not show that the others lost its rows."""
    world = World()
    Task(world, 0, 0).end()
    Task(world, 1, 0).end()
    with pytest.raises(Killed):
        Task(world, 1, 1, parts)
    task = Task(world, 1, 1)
    task.read(1, 4, None)
    with pytest.raises(Killed):
        task.end(parts)
    Task(world, 1, 1).end()
    Task(world, 2, 1)


@pytest.mark.parametrize("later", [0, 1])
def test_a_partition_that_is_put_back_while_a_task_repeats_an_epoch_is_found(later: int) -> None:
    """A former attempt of the epoch may have visited the other partitions by then."""
    world = World()
    for number in range(2):
        for task in (Task(world, number, 0), Task(world, number, 1)):
            if number:
                saved = dict(world.stores[2].scan(b""))  # after the mark of the first task
                task.read(1, 4, None)
            task.end()
    Task(world, 2, later)
    world.stores[2] = MemoryStore(saved)
    world.start()
    with pytest.raises(PositionGap, match="1 partitions lack rows"):
        Task(world, 2, 1)


def test_a_watermark_of_another_use_is_not_taken_over() -> None:
    """The other use of the operator in the query has ``source="task"``."""
    epoch, told = Epoch(replace(PLAN, watermark="at"), 0, 0, Session(1, "a")), list[int | None]()
    world = World()

    def do(of: Of) -> Any:
        if isinstance(of.step, Deliver):
            told.append(of.step.batch.watermark_us)
        return world.do([None], of)

    perform(epoch.open({}, 0.0), do)
    perform(epoch.end({"real-time:q:task:1": 5, "real-time:q:task:task:0": 9}), do)
    assert told == [None, 5]


def test_rows_with_negative_offsets_are_refused() -> None:
    """A partition that contains nothing would take rows below offset 0 for contained."""
    world = World()
    world.starts = [-2] * SOURCES
    attempt = Attempt(world, 0, world.starts)
    with pytest.raises(InvalidArgument, match="the column 'off' does not hold offsets: its least value is -2"):
        attempt.read(0, 1, None)


def finish(world: World) -> None:
    """Lets everything that was applied come, and ends its epoch.

    Raises Lost if rows of former epochs are asked for.
    """
    furthest = max(
        (position.batch for s in range(SOURCES) for position in world.look(PLAN.rows_of((s,))).values()), default=0
    )
    try:
        attempt = Attempt(world, world.number, world.starts)
    except PositionGap as error:
        raise Lost from error
    for source in range(SOURCES):
        if (count := furthest + 1 - world.starts[source]) > 0:
            attempt.read(source, count, None)
    attempt.run(attempt.epoch.visit(0.0), None)
    attempt.run(attempt.epoch.end({}), None)
    world.sink += attempt.given
    world.starts, world.number, world.attempt = attempt.next, world.number + 1, None


@given(
    st.lists(ACTIONS | st.tuples(st.just("save"), st.integers(0, PARTITIONS - 1)) | st.tuples(st.just("back"))),
)
@settings(max_examples=sized(1200))
def test_what_a_partition_lost_is_applied_again_or_asked_for(actions: list[tuple[Any, ...]]) -> None:
    """Rows that a partition lost are applied again or asked for: a query never goes on without rows.

    The partition is put back to an earlier state.
    """
    world, saved = World(), dict[int, dict[bytes, bytes]]()
    for name, *said in actions:
        if name == "save":
            saved = {said[0]: dict(world.stores[said[0]].scan(b""))}
        elif name == "back":
            for number, entries in saved.items():
                world.stores[number] = MemoryStore(entries)
                world.start()
        else:
            world.act(name, *said)
    world.strays.clear()
    with suppress(Lost):
        finish(world)
        check_counts(world)


def check_counts(world: World) -> None:
    counts = Counter(key_of(source, off) for source in range(SOURCES) for off in range(world.starts[source]))
    for key, count in counts.items():
        assert world.hosts[partition_of(key, PARTITIONS)].peek(key, 0).n.value == count


def test_a_retired_source_whose_outputs_may_be_wanted_says_so() -> None:
    world = World()
    world.act("read", 0, 6, None)
    for host in world.hosts:
        host.retire(PLAN.rows_of((0,)))
    attempt = Attempt(world, world.number, world.starts)
    with pytest.raises(SourceRetired):
        attempt.read(0, 1, None)
