"""Pieces of a task, sent by a stand-in for the router: what the task holds while an operator is slow. And the input of
a task in real-time mode: what it is given, and by when."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pyarrow as pa
import pytest

from stateflow.clock import ManualClock
from stateflow.errors import DecodeError, InputIncomplete, InvalidArgument, OperatorFailed, OperatorOutdated
from stateflow.partition.positions import Batch
from stateflow.router import Delivery
from stateflow.rpc.apply import BatchRows
from stateflow.spark import task as tasks
from stateflow.spark.task import HASH_COLUMN, PARTITION_COLUMN, Inbox, OperatorTask
from stateflow.state.cells import LATEST_US
from stateflow.types import OperatorSpec

ROWS_EACH, BATCHES = 1000, 60
SCHEMA = pa.schema([("k", pa.string()), (PARTITION_COLUMN, pa.int32()), (HASH_COLUMN, pa.int64())])


class Input:
    """Input of a task, which counts how much of it was asked for."""

    def __init__(self) -> None:
        self.asked_for = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for number in range(BATCHES):
            self.asked_for += 1
            text = f"{number:0100}"
            yield pa.RecordBatch.from_pydict(
                {
                    "k": pa.array([text] * ROWS_EACH),
                    PARTITION_COLUMN: pa.array([number % 4] * ROWS_EACH, pa.int32()),
                    HASH_COLUMN: pa.array(range(ROWS_EACH), pa.int64()),
                }
            )


BATCH_BYTES = next(iter(Input())).nbytes
PIECE_BYTES = 5 * BATCH_BYTES


class Replicas:
    """A stand-in for the router. At each piece it notes how much input was asked for by then, and the memory in use."""

    def __init__(self, source: Input, fails_at: int | None = None) -> None:
        self.seen: list[tuple[int, int]] = []
        self.rows = 0
        self._source, self._fails_at = source, fails_at
        self._before = pa.total_allocated_bytes()

    def deliver(self, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None = None) -> Delivery:
        assert batch.number == len(self.seen)
        assert list(rows) == [0, 1, 2, 3], "every partition has every piece"
        if batch.number == self._fails_at:
            raise OperatorFailed("no", remedy="mend it")
        self.rows += rows.ends[-1]
        self.seen.append((self._source.asked_for, pa.total_allocated_bytes() - self._before))
        return Delivery(dict.fromkeys(rows, b""), 0, 0, 0)


class Noting:
    """A stand-in for the router that takes any batch, and notes it."""

    def __init__(self) -> None:
        self.delivered: list[Batch] = []

    def deliver(self, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None = None) -> Delivery:
        self.delivered.append(batch)
        return Delivery(dict.fromkeys(rows, b""), 0, 0, 0)


@pytest.fixture
def task() -> OperatorTask:
    output = pa.schema([("n", pa.int64())]).serialize().to_pybytes()
    return OperatorTask("c", "Op", ("k",), 4, 1, output, (), None, "s", "run", 1.0, piece_bytes=PIECE_BYTES)


def run(task: OperatorTask, replicas: Replicas, source: Input, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    monkeypatch.setattr(OperatorTask, "router", lambda _: replicas)
    monkeypatch.setattr(tasks, "ended", lambda: whole)
    first = Batch("batch:s", 0)
    work = tasks.Work(task, None, first, 0, ManualClock())
    for _ in task._in_pieces(first, 0, iter(source), work, PIECE_BYTES):
        pass


def test_an_operator_that_is_slow_is_waited_for_and_nothing_piles_up(
    task: OperatorTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task waits for a slow operator, and nothing piles up.

    While a piece is with the replicas, the task asks for no more than the piece and the rows that showed where it ends;
    Spark, which gives the rows, waits.
    """
    source = Input()
    replicas = Replicas(source)
    run(task, replicas, source, monkeypatch, whole=True)
    assert replicas.rows == BATCHES * ROWS_EACH
    assert len(replicas.seen) == 12
    for number, (asked_for, allocated) in enumerate(replicas.seen):
        assert asked_for <= 5 * (number + 1) + 1
        assert allocated <= 2 * PIECE_BYTES, "the piece, and what is being read"


class Context:
    """Spark's context of a task. Its thread evaluates micro-batch 7 of a query."""

    def partitionId(self) -> int:
        return 0

    def taskAttemptId(self) -> int:
        return 3

    group = "2b0c6f3e-0d0e-4a37-8f5c-5a9d1e4b7c60"

    def getLocalProperty(self, name: str) -> str | None:
        said = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "7", "spark.jobGroup.id": self.group}
        return said.get(name)


def test_a_batch_frame_that_micro_batches_evaluate_is_applied_as_its_own_run(
    task: OperatorTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream may be joined with a batch DataFrame of an operator: each micro-batch evaluates it, none applies it."""
    source = Input()
    replicas = Noting()
    monkeypatch.setattr(OperatorTask, "router", lambda _: replicas)
    monkeypatch.setattr(tasks, "ended", lambda: True)
    monkeypatch.setattr("pyspark.TaskContext.get", Context)
    for _ in task(iter(source)):
        pass
    assert [(each.source, each.number) for each in replicas.delivered] == [("batch:s", number) for number in range(12)]
    assert {each.attempt.run for each in replicas.delivered} == {""}


def test_the_last_piece_ends_the_run_and_each_says_its_event_time_less_the_lateness(
    task: OperatorTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(source):
            times = pa.array([1000 + number] * ROWS_EACH, pa.timestamp("us", "UTC"))
            yield batch.append_column("at", times)

    source = Input()
    replicas = Noting()
    monkeypatch.setattr(OperatorTask, "router", lambda _: replicas)
    monkeypatch.setattr(tasks, "ended", lambda: True)
    work = tasks.Work(task, None, Batch("batch:s", 0), 0, ManualClock())
    task = replace(task, watermark="at", lateness_us=100)
    for _ in task._in_pieces(Batch("batch:s", 0), 0, timed(), work, 20 * next(timed()).nbytes):
        pass
    found = [(each.watermark_us, each.event_us) for each in replicas.delivered]
    assert found == [(None, 919), (None, 939), (LATEST_US, 959)]


@pytest.mark.parametrize(("group", "run"), [(Context.group, Context.group), ("load of the day", "")])
def test_a_job_group_of_a_function_in_foreach_batch_is_no_run(
    group: str, run: str, task: OperatorTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run may have the group, too, and repeats the batch with another application of the operator."""
    source = Input()
    replicas = Noting()
    monkeypatch.setattr(OperatorTask, "router", lambda _: replicas)
    monkeypatch.setattr(OperatorTask, "_ask", lambda *_: None)
    monkeypatch.setattr(tasks, "ended", lambda: True)
    monkeypatch.setattr(Context, "group", group)
    monkeypatch.setattr("pyspark.TaskContext.get", Context)
    for _ in replace(task, piece_bytes=None)(iter(source)):
        pass
    assert [(each.source, each.number, each.attempt.run) for each in replicas.delivered] == [("query:q:s", 7, run)]


def test_an_operator_within_a_micro_batch_is_refused_where_the_query_is_not_named(
    task: OperatorTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain thread would apply the rows once more, as a batch of another source."""
    monkeypatch.setattr(Context, "getLocalProperty", lambda *_: None)
    monkeypatch.setattr("pyspark.TaskContext.get", Context)
    with pytest.raises(InvalidArgument, match=r"lacks the query's local properties.*InheritableThread"):
        next(replace(task, piece_bytes=None, within=True)(iter(Input())))


def test_what_spark_broke_off_is_sent_as_far_as_it_makes_whole_pieces(
    task: OperatorTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Input()
    replicas = Replicas(source)
    with pytest.raises(InputIncomplete, match="except whole pieces"):
        run(task, replicas, source, monkeypatch, whole=False)
    assert len(replicas.seen) == 11


@pytest.mark.parametrize("piece", [0, 5, 11])
def test_an_error_says_of_which_piece_it_is(task: OperatorTask, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    source = Input()
    with pytest.raises(OperatorFailed, match=rf"piece={piece} pieces_applied={piece}"):
        run(task, Replicas(source, piece), source, monkeypatch, whole=True)


def test_more_than_can_be_one_batch_is_refused_as_soon_as_it_is_read(
    task: OperatorTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch that is too large is refused as soon as that is known, before any of it is sent."""
    source = Input()
    monkeypatch.setattr(tasks, "WHOLE_BYTES_MAX", 7 * BATCH_BYTES)
    work = tasks.Work(task, "q", Batch("query:q", 0), 0, ManualClock())
    with pytest.raises(InvalidArgument, match=r"one task has more than .* bytes of rows.*maxFilesPerTrigger"):
        list(task._whole_batch(Batch("query:q", 0), 0, iter(source), work, None))
    assert source.asked_for == 8


def test_a_stored_output_that_cannot_be_read_names_the_command_that_drops_it(
    task: OperatorTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stored:
        def deliver(self, _batch: Batch, rows: BatchRows) -> Delivery:
            return Delivery({0: b"no rows"}, 0, 0, 0)

    monkeypatch.setattr(OperatorTask, "router", lambda _: Stored())
    batch = Batch("query:it's mine", 7)
    work = tasks.Work(task, "q", batch, 0, ManualClock())
    rows = task._by_partition([next(iter(Input()))], 0, digests=False)
    with pytest.raises(
        DecodeError, match=r"stored output of batch 7.*drop-output Op 'query:it'\"'\"'s mine' --batch 7 --apply`"
    ):
        task._delivered(batch, rows, work)


def test_columns_that_come_by_their_places_have_their_own_names_again() -> None:
    """Columns regain their names, also duplicates and names that Arrow or Spark would read as a path."""
    names = ("k", "x", "x", ".o", "a.b", "c`d")
    output = pa.schema([("n", pa.int64())]).serialize().to_pybytes()
    task = OperatorTask("c", "Op", ("k",), 2, 1, output, (), ".o", "s", "run", 1.0, columns=names)
    placed = [f"__stateflow_{number}" for number in range(len(names))]
    arrays = [pa.array(["a", "b", "c"]), *(pa.array([number, 20, 30]) for number in (1, 2)), pa.array([3, 1, 2])]
    arrays += [pa.array([4, 5, 6]), pa.array([7, 8, 9]), pa.array([0, 0, 1], pa.int32())]
    fields = [pa.field(name, array.type, name != "__stateflow_0") for name, array in zip(placed, arrays, strict=False)]
    schema = pa.schema([*fields, pa.field(PARTITION_COLUMN, pa.int32())])
    came = task.named(pa.record_batch(arrays, schema))
    assert came.schema.names == [*names, PARTITION_COLUMN]
    rows = task._by_partition([came], 0, digests=False).batch
    assert rows.rows is not None
    assert rows.rows.schema.names == list(names)
    assert [field.nullable for field in rows.rows.schema] == [False, True, True, True, True, True]
    assert [column.to_pylist() for column in rows.rows.columns[2:4]] == [[20, 2, 30], [1, 3, 2]], "in order"


class Deployed:
    """A stand-in for the router, of an operator that may be deployed anew."""

    partitions, made, waited_s = 4, 0, 0.0
    output = pa.schema([("n", pa.int64())]).serialize().to_pybytes()

    def __init__(self, controller: str, operator: str, *_: object, connect_timeout_s: float) -> None:
        Deployed.made, Deployed.waited_s = Deployed.made + 1, connect_timeout_s
        self.spec = OperatorSpec(operator, f"m:{operator}", Deployed.partitions, ("k",), Deployed.output, "[]")


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the router by :class:`Deployed`. Returns a list with an entry for each freeze of the objects."""
    frozen: list[str] = []
    monkeypatch.setattr(tasks, "Router", Deployed)
    monkeypatch.setattr(tasks, "_ROUTERS", {})
    monkeypatch.setattr(tasks, "_WHOLE", {})
    monkeypatch.setattr(tasks, "keep_buffers", lambda: None)
    monkeypatch.setattr("gc.freeze", lambda: frozen.append("frozen"))
    for name, value in {"partitions": 4, "made": 0}.items():
        monkeypatch.setattr(Deployed, name, value)
    return frozen


def test_a_worker_leaves_the_router_of_a_former_deployment(
    task: OperatorTask, frozen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's router made for 4 partitions failed with IndexError for a task of the next deployment, with 8."""
    former = task.router()
    assert task.router() is former
    tasks._WHOLE.update({(*task._identity, "query:q"): 7, ("c", "Other", 1.0, "query:q"): 5})
    monkeypatch.setattr(Deployed, "partitions", 8)
    task = replace(task, partitions=8, run="2")
    assert task.router().spec.partitions == 8
    assert task.router() is task.router()
    assert tasks._WHOLE == {("c", "Other", 1.0, "query:q"): 5}, "the new deployment has none of the former batches"
    assert frozen == ["frozen"], "once in a process"


def test_a_task_of_a_former_deployment_is_refused(
    task: OperatorTask, frozen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task divides its rows by the number of partitions that it knows."""
    monkeypatch.setattr(Deployed, "partitions", 8)
    kept = replace(task, partitions=8).router()
    with pytest.raises(OperatorOutdated, match=r"deployed anew, with another number of partitions.*apply_operator"):
        task.router()
    assert replace(task, partitions=8).router() is kept


@pytest.mark.parametrize(("unavailable_timeout_s", "waited_s"), [(60.0, 60.0), (1.0, 5.0)])
def test_a_new_worker_waits_for_the_controller_as_long_as_for_a_replica(
    task: OperatorTask, frozen: list[str], unavailable_timeout_s: float, waited_s: float
) -> None:
    replace(task, unavailable_timeout_s=unavailable_timeout_s).router()
    assert Deployed.waited_s == waited_s


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
