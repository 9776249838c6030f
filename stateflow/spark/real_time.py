"""Runs operators in Spark's real-time mode, in which rows are applied as they arrive, in epochs of seconds or minutes.

At an epoch's end Spark records the offset that each source partition has reached. If an epoch runs again, it may end at
other offsets, so that rows which were applied in the epoch arrive in the next epoch. Therefore a row is identified by
its offset in its source partition, and its output is emitted with the row:

* Each source partition is a sparse source of its own, to which a task sends the rows that have arrived as one batch.
  The batch's number is the offset of its last row plus one. A partition of the state skips rows with offsets below the
  newest batch number that it contains.
* Partitions keep the outputs of each batch. If Spark delivers again rows that a partition contains, the task emits the
  stored outputs of a batch once the batch's last row has arrived. So an output is emitted in every epoch in which Spark
  delivers its row, and in no other.
* The first row of a source partition in an epoch shows where earlier epochs have finally ended. Outputs up to that
  offset are no longer needed, and are dropped.
* Each attempt of a task opens its sources as their newest client. From then on partitions refuse everything that
  earlier attempts send.
* Outputs that are caused by time and not by a row, such as those of timers, belong to a separate source for each task.
  The epoch's number is part of the numbers of that source's batches. The kept outputs of an epoch are emitted again if
  the epoch is opened again.

:class:`Feed` sends the rows of one source partition to an operator's partitions, by their offsets. :class:`Visits`
sends batches without rows to all partitions. :class:`Epoch`, one task of one epoch, decides which rows go to which
source, and when partitions are visited. All three are sans-io, like :mod:`stateflow.client.delivery`: they yield steps.
:class:`RealTimeTask`, the function of the Spark task, performs the steps.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateflow.client.delivery import Deliver, Delivery, Look, Open, SameOperator, Step, Steps, perform
from stateflow.client.history import History
from stateflow.client.stream import asked_of_moving, look, open_source, outputs
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import InputIncomplete, InvalidArgument, PositionGap
from stateflow.operator.operator import BatchOperator, Operator
from stateflow.operator.rows import null_key
from stateflow.partition.layout import Attempt, Position, Session
from stateflow.partition.positions import Batch
from stateflow.router import Router
from stateflow.rpc.apply import BatchRows
from stateflow.rpc.clients import ReplicaClient
from stateflow.security.plain import use_token
from stateflow.spark.metrics import with_report
from stateflow.spark.task import (
    PARTITION_COLUMN,
    Inbox,
    OperatorTask,
    Work,
    ended,
    no_query,
    record_batches,
    run_of,
    span,
)

T = TypeVar("T")
#: partition → output, see :mod:`stateflow.operator.output`
Outputs: TypeAlias = dict[int, bytes]
#: numbers of the batches of an epoch without rows: those of visits, and at the end those of marks
_VISITS_MAX = 1 << 20
#: numbers for marks. Each attempt that reaches the epoch's end marks it with another one, for a month of one a minute.
_MARKS_MAX = 1 << 16
#: separates a client's id, which does not contain it, and the number of a mark
_MARKED = "."
#: longest delay until an advanced watermark is sent, in seconds
TELL_EVERY_S = 0.1
#: longest delay of processing-time timers, in seconds
LOOK_EVERY_S = 1.0
#: longest text of a source partition in a source's name, in characters; longer texts are hashed
_TEXT_MAX = 128
#: column that contains 0 in a row, and 1 in the copy (tick) that follows the row
TICK_COLUMN = "__stateflow_tick"
#: bytes of sent rows of one source partition that a task keeps during its epoch, in case partitions lose them
KEPT_BYTES = 16 << 20


# -- Sources of one attempt of a task --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """Step that asks for the kept outputs of batches after ``after``.

    Its result maps each partition to a list of (batch, output), in order of batches.
    """

    after: int


FeedStep: TypeAlias = Step | Kept
FeedSteps: TypeAlias = Generator[FeedStep, Any, T]


class _Source:
    """A source of one attempt of a task.

    Args:
        settled: batch up to which outputs are no longer needed.
        bytes_max: bytes of rows that are kept in case partitions lose them.
    """

    def __init__(
        self, operator: str, source: str, partitions: int, session: Session, settled: int, bytes_max: int
    ) -> None:
        self._history = History(operator, source, partitions, bytes_max)
        self._delivery = Delivery(self._history, session, lambda: None, settled)
        self._settled = settled

    def _open(self) -> FeedSteps[deque[tuple[int, int, bytes]]]:
        """Opens the source. Returns the kept outputs as (batch, partition, output), in order of batches."""
        yield from self._delivery.open()
        if self._history.incomplete:  # Spark delivers lost rows of this epoch again; Visits detects other losses
            yield from self._delivery.accept_loss()
        kept: dict[int, list[tuple[int, bytes]]] = yield Kept(self._settled)
        return deque(sorted((batch, p, output) for p, found in kept.items() for batch, output in found))

    def verify(self) -> Steps[None]:
        """Sends again the rows of this attempt that partitions have lost.

        Raises PositionGap if these rows are no longer kept. Then another attempt must send them.
        """
        return self._delivery.verify()

    def _sent(self, rows: BatchRows, number: int, watermark_us: int | None = None) -> Steps[Outputs]:
        return self._delivery.deliver(rows, number, False, watermark_us, dict)


class Feed(_Source):
    """Rows of a source partition that one attempt of a task sends in one epoch.

    Args:
        first: offset of the first row that Spark delivers in the epoch.
    """

    def __init__(
        self, operator: str, source: str, partitions: int, session: Session, first: int, bytes_max: int
    ) -> None:
        super().__init__(operator, source, partitions, session, first, bytes_max)
        self._first = self._next = first
        self._kept: deque[tuple[int, int, bytes]] = deque()
        self._contained = np.zeros(0, np.int64)
        self._ahead = 0  # newest batch of earlier attempts in any partition

    def open(self) -> FeedSteps[None]:
        """Opens the source. Raises SourceRetired if it was retired."""
        self._kept = yield from self._open()
        self._contained = np.array(self._history.contained, np.int64)
        self._ahead = int(self._contained.max())

    def apply(
        self, offsets: np.ndarray[Any, Any], partitions: np.ndarray[Any, Any], rows: pa.Table
    ) -> FeedSteps[list[Outputs]]:
        """Sends the next rows, and returns outputs in the order in which to emit them.

        Args:
            offsets: offset of each row.
            partitions: partition of each row.

        Raises InvalidArgument if the offsets do not rise.
        """
        if int(offsets[0]) < self._next or np.any(offsets[1:] <= offsets[:-1]):
            raise InvalidArgument(
                f"offsets of {self._history.source} do not increase: {int(offsets[0])} after {self._next - 1}",
                remedy="name the columns of source partition and offset with position=, and put no shuffle or "
                "union between source and operator",
                operator=self._history.operator,
            )
        number = self._next = int(offsets[-1]) + 1
        outputs: list[Outputs] = []
        while self._kept and self._kept[0][0] <= number:
            _, partition, output = self._kept.popleft()
            outputs.append({partition: output})
        if int(offsets[0]) < self._ahead:
            fresh = offsets >= self._contained[partitions]
            if not fresh.any():
                return outputs
            rows, partitions = rows.filter(pa.array(fresh)), partitions[fresh]
        outputs.append((yield from self._sent(sorted_rows(rows, partitions), number)))
        return outputs


class Visits(_Source):
    """Sends batches without rows to all partitions, for timers, for watermarks, and to mark the end of an epoch.

    A partition with an epoch's newest mark contains all of the epoch's rows. If an older copy replaced a newer copy of
    a partition, the mark is missing. An epoch may run again after it was marked, and then has more rows, so each
    attempt makes another mark. Batches of the next epoch replace the marks. So if there were several, the attempts at
    the next epoch add the newest one to their client's id, which partitions store with a batch.
    """

    def __init__(
        self, operator: str, source: str, partitions: int, session: Session, epoch: int, bytes_max: int
    ) -> None:
        super().__init__(operator, source, partitions, session, epoch * _VISITS_MAX - 1, bytes_max)
        self._everywhere = BatchRows.visit(range(partitions))
        self._number, self._last = epoch * _VISITS_MAX, (epoch + 1) * _VISITS_MAX - 1
        self._mine = self._mark = self._last + 1 - _MARKS_MAX  # of this attempt, and of the first one that ends
        self._newest = -1  # newest mark of the previous epoch

    def open(self) -> FeedSteps[list[Outputs]]:
        """Opens the source. Returns the outputs of an earlier attempt at the same epoch."""
        kept = yield from self._open()
        used = contained = self._history.contained
        if max(contained) > self._settled:  # attempts at this epoch, or at later ones, may have replaced marks
            found: Mapping[int, Position] = yield Look()
            clients = (position.client.partition(_MARKED)[2] for position in found.values())
            used = [*contained, *(int(mark) for mark in clients if mark.isdecimal())]
        self._newest = max((batch for batch in used if batch <= self._settled), default=-1)
        self._mine = max(self._mark, 1 + max((batch for batch in used if batch <= self._last), default=-1))
        if self._newest > self.marked:  # with one mark only there is no older one to take for it
            session = self._delivery.session
            self._delivery.session = Session(session.generation_us, f"{session.id}{_MARKED}{self._newest}")
            kept = yield from self._open()
        self._number = max(self._number, max(self._history.contained) + 1)
        return [{partition: output} for _, partition, output in kept]

    @property
    def marked(self) -> int:
        """Least number of a mark of the previous epoch; negative in the first epoch."""
        return self._settled + 1 - _MARKS_MAX

    @property
    def ran(self) -> bool:
        """Tells whether a partition shows that the task ran before this epoch, by a batch of the previous epoch, or by
        a mark of the epoch before that.

        A batch of this epoch, which an earlier attempt sent, shows nothing.
        """
        oldest = max(0, self.marked - _VISITS_MAX)
        return any(oldest <= batch <= self._settled for batch in self._history.contained)

    @property
    def unmarked(self) -> list[int]:
        """Partitions without the newest mark of the previous epoch."""
        least = max(self._newest, self.marked)
        return [number for number, batch in enumerate(self._history.contained) if batch < least]

    def visit(self, watermark_us: int | None) -> FeedSteps[list[Outputs]]:
        """Visits all partitions, and returns their outputs.

        Does nothing once an attempt has begun to mark the epoch's end, because no numbers before its mark are left.
        """
        if self._number > self._mark:
            return []
        if self._number == self._mark:
            raise InvalidArgument(
                f"an epoch reached the limit of {_VISITS_MAX - _MARKS_MAX} visits for its timers",
                remedy="shorten epochs with trigger(realTime=)",
            )
        outputs = yield from self._sent(self._everywhere, self._number, watermark_us)
        self._number += 1
        return [outputs]

    def end(self, watermark_us: int | None) -> FeedSteps[list[Outputs]]:
        """Sends this attempt's mark to all partitions, and returns their outputs.

        Raises InvalidArgument if no number is left: another attempt's mark does not show who has this one's rows.
        """
        if self._mine > self._last:
            what = f"the epoch ended {_MARKS_MAX} times without being committed, and no number is left for its end"
            raise InvalidArgument(what, remedy="see Spark's log, then restore state (stateflow checkpoint restore)")
        left = [p for p, batch in enumerate(self._history.contained) if batch < self._mine]  # others are further on
        return [(yield from self._sent(BatchRows.visit(left), self._mine, watermark_us))] if left else []


def sorted_rows(rows: pa.Table, partitions: np.ndarray[Any, Any]) -> BatchRows:
    """Groups rows by partition, in order of arrival."""
    order = np.argsort(partitions, kind="stable")
    numbers = partitions[order]
    last = np.flatnonzero(np.r_[numbers[1:] != numbers[:-1], True])
    whole = rows.take(pa.array(order)).combine_chunks().to_batches()[0]
    return BatchRows(rows.schema.serialize().to_pybytes(), whole, numbers[last].tolist(), (last + 1).tolist())


# -- One task of one epoch -------------------------------------------------------------------------------------------


class Of(NamedTuple):
    """A step of one of the task's sources."""

    source: str
    step: FeedStep


EpochSteps: TypeAlias = Generator[Of, Any, T]


@dataclass(frozen=True, slots=True)
class Plan:
    """Facts that are the same for all tasks and epochs of a query.

    Attributes:
        prefix: prefix of the names of the query's sources.
        position: columns that identify the source partition, followed by the column with the offset.
        watermark: a timestamp column; None if there is no watermark.
        visits: True if the operator also reacts to time, so that partitions must be visited without rows.
        bytes_max: bytes of rows of one source partition that a task keeps in case partitions lose them.
    """

    operator: str
    prefix: str
    partitions: int
    key: tuple[str, ...]
    position: tuple[str, ...]
    watermark: str | None
    lateness_us: int
    visits: bool
    bytes_max: int

    def rows_of(self, name: tuple[Any, ...]) -> str:
        """Returns the name of the source for the source partition that the values ``name`` identify."""
        text = "/".join(map(str, name))
        # "/" separates values, so only one value may contain it; integers never do
        split = len([each for each in name if not isinstance(each, int)]) > 1 and text.count("/") >= len(name)
        if split or None in name:  # other values may have the same text
            text = _digest(repr(name))
        elif len(text) > _TEXT_MAX or not text.isprintable():
            text = _digest(text)
        return f"{self.prefix}:rows:{text}"

    @property
    def times(self) -> str:
        """Prefix of the names of sources for timers and watermarks."""
        return f"{self.prefix}:task:"


class Epoch:
    """State of one task in one epoch.

    Args:
        number: Spark's number of the epoch.
        task: number of the task in its stage.
        session: session of this attempt, which should be newer than that of every earlier attempt. If a partition
            reports a newer session, a still newer one is used.
    """

    def __init__(self, plan: Plan, number: int, task: int, session: Session) -> None:
        self._plan, self._session = plan, session
        self._feeds: dict[tuple[Any, ...], Feed] = {}
        self._number, self._task = number, task
        self._time_source = f"{plan.times}{task}"
        self._visits = Visits(plan.operator, self._time_source, plan.partitions, session, number, plan.bytes_max)
        self._promised_us: int | None = None  # by the last visit
        self._promises = False  # whether the watermark of the rows read so far is promised before the epoch ends
        self._newest_us: int | None = None  # event time
        self._visited_at = -math.inf

    def open(self, watermarks_us: Mapping[str, int], now: float) -> EpochSteps[list[Outputs]]:
        """Opens the epoch. Returns outputs of an earlier attempt at this epoch that were caused by time.

        Args:
            watermarks_us: watermark of each source in one partition. A task that has none there sends its first
                watermark only at the end of its epoch. Other tasks may have sent none either, and partitions do not
                wait for rows of tasks without a watermark.
            now: monotonic seconds.

        Raises PositionGap if rows of earlier epochs are lost.
        """
        self._promised_us = watermarks_us.get(self._time_source)
        self._promises = self._promised_us is not None
        outputs = yield from _of(self._time_source, self._visits.open())
        yield from self._check_lost()
        if not self._plan.visits and self._number:
            return outputs
        # in the first epoch also to record that the query is in real-time mode
        return outputs + (yield from self.visit(now))

    def _check_lost(self) -> EpochSteps[None]:
        marked, unmarked = self._visits.marked, self._visits.unmarked
        if unmarked and self._task and not self._visits.ran:  # the task may not have existed in the epoch before
            first: Mapping[int, Position] = yield Of(f"{self._plan.times}0", Look())
            unmarked = [number for number in unmarked if number not in first or first[number].batch < marked]
        if unmarked:
            raise PositionGap(
                f"{len(unmarked)} partitions lack rows of epochs before {self._number}, because older copies were "
                "restored or the operator was deployed anew",
                remedy="rewind the query to an epoch that these partitions contain (stateflow spark rewind), or start "
                "it with a new checkpointLocation",
                operator=self._plan.operator,
                source=self._time_source,
                partitions=",".join(map(str, unmarked[:20])),
            )

    def rows(self, table: pa.Table) -> EpochSteps[list[Outputs]]:
        """Sends the rows that have arrived, without ticks, and returns outputs."""
        plan = self._plan
        for column in plan.key:
            if table[column].null_count:
                raise null_key(column, table[column].null_count, plan.operator)
        numbers = table[PARTITION_COLUMN].to_numpy().astype(np.int64)
        offsets = self._offsets(table)
        if plan.watermark is not None:
            newest: int | None = pc.max(table[plan.watermark].cast(pa.timestamp("us", "UTC")).cast(pa.int64())).as_py()
            if newest is not None:
                self._newest_us = newest if self._newest_us is None else max(self._newest_us, newest)
        rows = table.drop_columns([PARTITION_COLUMN])
        outputs: list[Outputs] = []
        for name, places in _by_source(table, plan.position[:-1]):
            if places is None:
                outputs += yield from self._fed(name, offsets, numbers, rows)
            else:
                outputs += yield from self._fed(name, offsets[places], numbers[places], rows.take(pa.array(places)))
        return outputs

    def _offsets(self, table: pa.Table) -> np.ndarray[Any, Any]:
        column = self._plan.position[-1]
        found = table[column]
        if not pa.types.is_integer(found.type) or found.null_count:
            raise self._no_offsets(f"its type is {found.type}, {found.null_count} of {len(found)} rows are null")
        offsets: np.ndarray[Any, Any] = found.to_numpy().astype(np.int64)
        if (least := int(offsets.min())) < 0:  # below every batch number, so a partition would count them as contained
            raise self._no_offsets(f"its least value is {least}")
        return offsets

    def _no_offsets(self, why: str) -> InvalidArgument:
        return InvalidArgument(
            f"the column {self._plan.position[-1]!r} does not hold offsets: {why}",
            remedy="name the columns of source partition and offset with position=; offsets are integers from 0 on",
            operator=self._plan.operator,
        )

    def _fed(
        self, name: tuple[Any, ...], offsets: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any], rows: pa.Table
    ) -> EpochSteps[list[Outputs]]:
        plan, feed = self._plan, self._feeds.get(name)
        source = plan.rows_of(name)
        if feed is None:
            feed = Feed(plan.operator, source, plan.partitions, self._session, int(offsets[0]), plan.bytes_max)
            yield from _of(source, feed.open())
            self._feeds[name] = feed
        return (yield from _of(source, feed.apply(offsets, numbers, rows)))

    # -- time ---------------------------------------------------------------------------------------------

    def due_in(self, now: float) -> float | None:
        """Returns the seconds until partitions must be visited, or None if they need no visits."""
        if not self._plan.visits:
            return None
        every = TELL_EVERY_S if self._watermark_us != self._promised_us else LOOK_EVERY_S
        return max(0.0, self._visited_at + every - now)

    @property
    def _watermark_us(self) -> int | None:
        """Watermark to send now, or None if no watermark is known yet."""
        if not self._promises or self._newest_us is None:
            return self._promised_us
        return _later(self._newest_us - self._plan.lateness_us, self._promised_us)

    def visit(self, now: float) -> EpochSteps[list[Outputs]]:
        """Visits all partitions, which fire their due timers."""
        self._visited_at, watermark_us = now, self._watermark_us
        outputs = yield from _of(self._time_source, self._visits.visit(watermark_us))
        self._promised_us = watermark_us
        return outputs

    def end(self, watermarks_us: Mapping[str, int]) -> EpochSteps[list[Outputs]]:
        """Ends the epoch, and returns outputs.

        Every task then sends the newest watermark of all tasks, as with Spark's own watermarks.
        """
        watermark_us = None if self._newest_us is None else self._newest_us - self._plan.lateness_us
        for source, promised_us in watermarks_us.items():
            number = source.removeprefix(self._plan.times)
            if number != source and number.isdecimal():  # another use's source= may begin in the same way
                watermark_us = _later(promised_us, watermark_us)
        yield from self._verify()
        outputs = yield from _of(self._time_source, self._visits.end(watermark_us))
        yield from self._verify()  # the mark may have gone to an older copy that replaced another since the first check
        return outputs

    def _verify(self) -> EpochSteps[None]:
        for name, feed in self._feeds.items():
            yield from _of(self._plan.rows_of(name), feed.verify())


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _of(source: str, steps: FeedSteps[T]) -> EpochSteps[T]:
    try:
        step = next(steps)
        while True:
            try:
                came = yield Of(source, step)
            except BaseException as error:  # noqa: BLE001 - as delivery.perform
                step = steps.throw(error)
            else:
                step = steps.send(came)
    except StopIteration as end:
        value: T = end.value
        return value


def _later(one: int, other: int | None) -> int:
    return one if other is None else max(one, other)


def _by_source(table: pa.Table, columns: tuple[str, ...]) -> list[tuple[tuple[Any, ...], np.ndarray[Any, Any] | None]]:
    """Returns (values of the columns, indices of the rows with these values). The indices are None if all rows have
    the same values."""
    names = list(zip(*(_comparable(table[column]) for column in columns), strict=True))
    found: dict[tuple[Any, ...], list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(name, []).append(place)
    if len(found) == 1:
        return [(names[0], None)]
    return [(name, np.array(places)) for name, places in found.items()]


def _comparable(column: pa.ChunkedArray) -> list[Any]:
    """Returns times in UTC, one object for all NaN, and other values as they are.

    Names must not change with the session's zone. Python takes two times of the hour that a zone repeats in autumn for
    equal, and NaN for equal to itself only if it is one object.
    """
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    values: list[Any] = column.to_pylist()
    if pa.types.is_floating(column.type):
        return [math.nan if value is not None and math.isnan(value) else value for value in values]
    return values


# -- The Spark task --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RealTimeTask:
    """Function that ``mapInArrow`` runs in each Spark task.

    Each row is followed by a tick, a copy with 1 in :data:`TICK_COLUMN`, which the task drops. Ticks are needed because
    Spark passes a row on to Python only when it has read the next row.

    Attributes:
        position: see :class:`Plan`.
        visits: True if the operator handles timers or watermarks.
        slots: number of tasks that Spark can run at once; None if unknown.
    """

    base: OperatorTask
    position: tuple[str, ...]
    visits: bool
    slots: int | None = None

    @property
    def __name__(self) -> str:
        return self.base.__name__

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        use_token(self.base.token)
        context = TaskContext.get()
        assert context is not None
        said = context.getLocalProperty
        query, number = said("sql.streaming.queryId"), said("streaming.sql.batchId")
        if query is None or number is None:
            raise no_query(self.base.operator)
        task = context.partitionId()
        self.check_slot(task)
        plan, router = self._plan(query), self.base.router()
        self._refuse_micro_batches(query, router)
        run = run_of(context.getLocalProperty("spark.jobGroup.id"))
        batch = Batch(plan.times, int(number), attempt=Attempt(run=run, use=self.base.run))
        work = Work(self.base, query, batch, task, SYSTEM_CLOCK)
        epoch = Epoch(plan, int(number), task, Session(SYSTEM_CLOCK.now_us(), uuid.uuid4().hex[:16]))
        with span(self.base.operator, batch, task, query):
            inbox = Inbox(map(self.base.named, batches))
            outputs = self._told(epoch, plan, router, inbox, work)
            try:
                yield from with_report(outputs, self.base.schema, work.told) if self.base.observed else outputs
            finally:
                inbox.close()

    def check_slot(self, task: int) -> None:
        """Checks that a task did not have to wait for the slot of another task. Raises InvalidArgument.

        Spark does not check this. In every epoch the task would begin only when another task has ended, and the rows of
        its source partition would wait until then.
        """
        if self.slots is not None and task >= self.slots:
            raise InvalidArgument(
                "the task had to wait for another task's slot, but in real-time mode all tasks must run at once",
                remedy="give the session as many cores as the source has partitions: local[N]; nothing is lost, the "
                "query resumes with this epoch",
                operator=self.base.operator,
                task=task,
                slots=self.slots,
            )

    def _told(self, epoch: Epoch, plan: Plan, router: Router, inbox: Inbox, work: Work) -> Iterator[pa.RecordBatch]:
        yield from self._outputs(epoch, plan, router, inbox, work)
        work.tell()

    def _outputs(self, epoch: Epoch, plan: Plan, router: Router, inbox: Inbox, work: Work) -> Iterator[pa.RecordBatch]:
        now = SYSTEM_CLOCK.monotonic

        def run(steps: EpochSteps[list[Outputs]]) -> Iterator[pa.RecordBatch]:
            for found in perform(steps, lambda of: _do(router, of, work)):
                yield from record_batches(self.base.tables(found))

        yield from run(epoch.open(_promised(plan, router), now()))
        while not inbox.ended:
            arrived = inbox.take(epoch.due_in(now()))
            if arrived:
                table = pa.Table.from_batches(arrived)
                table = table.filter(pc.equal(table[TICK_COLUMN], 0)).drop_columns([TICK_COLUMN])
                work.read(len(table))
                if len(table):
                    yield from run(epoch.rows(table))
            if epoch.due_in(now()) == 0:
                yield from run(epoch.visit(now()))
        if not ended():
            raise InputIncomplete(
                "Spark closed the task's input early, as it does when it kills a task",
                remedy="let Spark repeat the task: received rows are applied, and their outputs are returned then",
                operator=self.base.operator,
            )
        yield from run(epoch.end(_promised(plan, router)))

    def _plan(self, query: str) -> Plan:
        base = self.base
        return Plan(
            operator=base.operator,
            prefix=base.real_time_source(query),
            partitions=base.partitions,
            key=base.key,
            position=self.position,
            watermark=base.watermark,
            lateness_us=base.lateness_us,
            visits=self.visits or base.watermark is not None,
            bytes_max=KEPT_BYTES,
        )

    def _refuse_micro_batches(self, query: str, router: Router) -> None:
        """Checks that a query has not run in micro-batches. Raises InvalidArgument.

        If it has, partitions may contain a micro-batch that was not finished, whose rows may differ from those of the
        epoch with the same number.
        """
        source = self.base.query_source(query)
        if source in _CHECKED:
            return
        if look(router, source):
            raise InvalidArgument(
                "this query has run in micro-batches and cannot switch to real-time mode",
                remedy="continue without real_time=, or start with a new checkpointLocation",
                operator=self.base.operator,
                source=source,
            )
        _CHECKED.add(source)


#: names of micro-batch sources of which no partition has a batch, as this process has checked
_CHECKED: set[str] = set()


def hears_time(operator: type[Operator]) -> bool:
    """Tells whether the operator reacts to the passing of time, by timers or watermarks."""
    timers = operator.on_timer is not Operator.on_timer or operator.on_watermark is not Operator.on_watermark
    return timers or (issubclass(operator, BatchOperator) and operator.on_timers is not BatchOperator.on_timers)


def _do(router: Router, of: Of, work: Work) -> Any:
    match of.step:
        case Open(session, settled):
            return open_source(router, of.source, session, settled)
        case Look():
            return look(router, of.source)
        case SameOperator():  # Spark's checkpoint decides: a task keeps rows of the current epoch only
            return None
        case Kept(after):
            return outputs(router, of.source, after)
        case Deliver(batch, rows, after):
            work.routed()
            delivery = router.deliver(batch, rows, after)
            work.delivered(delivery, len(rows))
            return delivery.outputs


def _promised(plan: Plan, router: Router) -> dict[str, int]:
    """Returns the watermarks of sources, as known to partition 0."""
    if plan.watermark is None:
        return {}
    found = asked_of_moving(
        router, 0, lambda: ReplicaClient(router.table.routes[0].address).sources(router.operator, [0])[0]
    )
    return {view.source: view.watermark_us for view in found if view.watermark_us is not None}
