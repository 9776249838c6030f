"""One task of one epoch: which rows go to which source, and when partitions are visited without rows. Sans-io."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateflow.client.delivery import Look
from stateflow.errors import InvalidArgument, PositionGap
from stateflow.runtime.layout import Position, Session
from stateflow.runtime.rows import null_key
from stateflow.spark.real_time.feed import Feed, FeedStep, FeedSteps, Outputs, Visits
from stateflow.spark.task import PARTITION_COLUMN

T = TypeVar("T")
#: seconds after which an advanced watermark is sent, at the latest
TELL_EVERY_S = 0.1
#: seconds by which processing-time timers are late, at most
LOOK_EVERY_S = 1.0
#: longest text of a source partition in a source's name, which is limited; longer ones are hashed
_TEXT_MAX = 128
#: column with 1 in the copy that follows each row
TICK_COLUMN = "__stateflow_tick"


class Of(NamedTuple):
    """A step of one of the task's sources."""

    source: str
    step: FeedStep


EpochSteps: TypeAlias = Generator[Of, Any, T]


@dataclass(frozen=True, slots=True)
class Plan:
    """Facts that are the same for all tasks and epochs of a query.

    ``prefix``: prefix of the names of its sources. ``position``: columns of the source partition, then that of the
    offset in it. ``watermark``: a timestamp column; None: there is no watermark. ``visits``: the operator reacts to
    time alone. ``bytes_max``: bytes of rows of one source partition that a task keeps for partitions that lose them.
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
        """Returns the name of the source for a source partition.

        Args:
            name: the source partition's values in its columns.
        """
        text = "/".join(map(str, name))
        if len(text) > _TEXT_MAX or not text.isprintable():
            text = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return f"{self.prefix}:rows:{text}"

    @property
    def times(self) -> str:
        """Prefix of the sources for timers and watermarks."""
        return f"{self.prefix}:task:"


class Epoch:
    """State of one task in one epoch.

    Args:
        number: Spark's number of the epoch.
        task: number of the task in its stage.
        session: newer than that of every earlier attempt; if a partition reports that it is not, it is made newer.
    """

    def __init__(self, plan: Plan, number: int, task: int, session: Session) -> None:
        self._plan, self._session = plan, session
        self._feeds: dict[tuple[Any, ...], Feed] = {}
        self._number, self._task = number, task
        self._time_source = f"{plan.times}{task}"
        self._visits = Visits(plan.operator, self._time_source, plan.partitions, session, number, plan.bytes_max)
        self._promised_us: int | None = None  # by the last visit
        self._promises = False  # whether the watermark of rows read is promised within the epoch
        self._newest_us: int | None = None  # event time
        self._visited_at = -math.inf

    def open(self, watermarks_us: Mapping[str, int], now: float) -> EpochSteps[list[Outputs]]:
        """Opens the epoch. Returns the outputs that came of time in an earlier attempt at it.

        Raises PositionGap where rows of earlier epochs are lost.

        Args:
            watermarks_us: watermark of each source, as a partition knows them. A task that is not among them promises
                its first watermark at the end of its epoch: partitions go by the sources that have promised one, and
                would not wait for it.
            now: monotonic seconds.
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
        if len(unmarked) == self._plan.partitions and self._task:  # the task may not have existed in the epoch before
            first: Mapping[int, Position] = yield Of(f"{self._plan.times}0", Look())
            unmarked = [number for number in unmarked if number not in first or first[number].batch < marked]
        if unmarked:
            raise PositionGap(
                f"{len(unmarked)} partitions lack rows of epochs before {self._number}",
                remedy="they are older copies, or were deployed anew: rewind the query to an epoch that they "
                "contain (stateflow spark rewind), or start it with a new checkpointLocation",
                operator=self._plan.operator,
                source=self._time_source,
                partitions=",".join(map(str, unmarked[:20])),
            )

    def rows(self, table: pa.Table) -> EpochSteps[list[Outputs]]:
        """Sends the rows that have come, without ticks, and returns outputs."""
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
            raise InvalidArgument(
                f"the column {column!r} does not hold offsets: its type is {found.type}, {found.null_count} of "
                f"{len(found)} rows are null",
                remedy="name the columns of source partition and offset with position=",
                operator=self._plan.operator,
            )
        offsets: np.ndarray[Any, Any] = found.to_numpy().astype(np.int64)
        return offsets

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
        """Returns the seconds until partitions are to be visited; None: never."""
        if not self._plan.visits:
            return None
        every = TELL_EVERY_S if self._watermark_us != self._promised_us else LOOK_EVERY_S
        return max(0.0, self._visited_at + every - now)

    @property
    def _watermark_us(self) -> int | None:
        """Watermark to be promised now; None: none yet."""
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
        """Ends the epoch.

        Every task then promises the watermark of all tasks, as with Spark's own watermarks.
        """
        watermark_us = None if self._newest_us is None else self._newest_us - self._plan.lateness_us
        for source, promised_us in watermarks_us.items():
            if source.startswith(self._plan.times):
                watermark_us = _later(promised_us, watermark_us)
        yield from self._verify()
        outputs = yield from _of(self._time_source, self._visits.end(watermark_us))
        yield from self._verify()  # a copy that replaced another one meanwhile may have been marked
        return outputs

    def _verify(self) -> EpochSteps[None]:
        for name, feed in self._feeds.items():
            yield from _of(self._plan.rows_of(name), feed.verify())


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
    """Returns (values of the columns, places of the rows with these values); places None: all rows."""
    names = list(zip(*(table[column].to_pylist() for column in columns), strict=True))
    found: dict[tuple[Any, ...], list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(name, []).append(place)
    if len(found) == 1:
        return [(names[0], None)]
    return [(name, np.array(places)) for name, places in found.items()]
