"""One Spark task of a query in real-time mode: sends rows to the owners of partitions as they come, returns outputs."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stateflow.client.delivery import Deliver, Look, Open, perform
from stateflow.client.everywhere import asked_of_moving, look, open_source, outputs
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import InputIncomplete, InvalidArgument
from stateflow.router import Router
from stateflow.rpc.clients import ReplicaClient
from stateflow.runtime.layout import Attempt, Session
from stateflow.runtime.operator import BatchOperator, Operator
from stateflow.runtime.positions import Batch
from stateflow.security.connections import use_token
from stateflow.spark.observed import with_report
from stateflow.spark.real_time.epoch import TICK_COLUMN, Epoch, EpochSteps, Of, Plan
from stateflow.spark.real_time.feed import Kept, Outputs
from stateflow.spark.task import OperatorTask, Work, ended, no_query, record_batches, span

#: bytes of rows of one source partition that a task keeps after sending them in its epoch, for partitions that lose
#: them
KEPT_BYTES = 16 << 20
#: messages that have come and were not taken; each is a row or a tick. Spark holds as many before it waits, too
MESSAGES_MAX = 4096
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class RealTimeTask:
    """Function for ``mapInArrow``.

    Each row is followed by a tick, a copy with 1 in :data:`TICK_COLUMN`, which the task drops: Spark passes a row on to
    Python when it has seen the next one.

    ``position``, ``visits``: see :class:`~stateflow.spark.real_time.epoch.Plan`.
    """

    base: OperatorTask
    position: tuple[str, ...]
    visits: bool

    @property
    def __name__(self) -> str:
        return self.base.__name__

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        use_token(self.base.token)
        context = TaskContext.get()
        assert context is not None
        query, number = (
            context.getLocalProperty("sql.streaming.queryId"),
            context.getLocalProperty("streaming.sql.batchId"),
        )
        if query is None or number is None:
            raise no_query(self.base.operator)
        task, router = context.partitionId(), self.base.router()
        plan = self._plan(query)
        self._refuse_micro_batches(query, router)
        run = context.getLocalProperty("spark.jobGroup.id") or ""
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
        """Refuses a query that has run in micro-batches. Raises InvalidArgument.

        A micro-batch that was begun is in some partitions already, and has other rows than the epoch of its number.
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


#: sources of micro-batches that no partition has, as far as this process knows
_CHECKED: set[str] = set()


def hears_time(operator: type[Operator]) -> bool:
    """Tells whether the operator reacts to time alone, by timers or watermarks."""
    timers = operator.on_timer is not Operator.on_timer or operator.on_watermark is not Operator.on_watermark
    return timers or (issubclass(operator, BatchOperator) and operator.on_timers is not BatchOperator.on_timers)


def _do(router: Router, of: Of, work: Work) -> Any:
    match of.step:
        case Open(session, settled):
            return open_source(router, of.source, session, settled)
        case Look():
            return look(router, of.source)
        case Kept(after):
            return outputs(router, of.source, after)
        case Deliver(batch, rows, after):
            work.routed()
            delivery = router.deliver(batch, rows, after)
            work.delivered(delivery, len(rows))
            return delivery.outputs


def _promised(plan: Plan, router: Router) -> dict[str, int]:
    """Returns the watermarks of sources, as partition 0 has them."""
    if plan.watermark is None:
        return {}
    found = asked_of_moving(
        router, 0, lambda: ReplicaClient(router.table.routes[0].address).sources(router.operator, 0)
    )
    return {view.source: view.watermark_us for view in found if view.watermark_us is not None}


class Inbox:
    """Input of a task, read by a thread of its own.

    All that comes while other rows are applied becomes one batch.

    Holds at most ``messages_max`` messages; the thread waits when it is full.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], messages_max: int = MESSAGES_MAX) -> None:
        self._arrived: queue.Queue[pa.RecordBatch | BaseException | None] = queue.Queue(messages_max)
        self._closed = threading.Event()
        self.ended = False
        threading.Thread(target=self._read, args=(batches,), name="real-time input", daemon=True).start()

    def _read(self, batches: Iterator[pa.RecordBatch]) -> None:
        try:
            for batch in batches:
                if not self._put(batch):
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - raised where it is taken
            self._put(error)

    def _put(self, came: pa.RecordBatch | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._arrived.put(came, timeout=_LOOK_S)
                return True
            except queue.Full:
                continue
        return False

    def take(self, timeout_s: float | None) -> list[pa.RecordBatch]:
        """Waits for a message, and returns all that have come; none after ``timeout_s``. Raises what reading raised."""
        found: list[pa.RecordBatch] = []
        try:
            came = self._arrived.get(timeout=timeout_s)
            while True:
                if came is None:
                    self.ended = True
                    break
                if isinstance(came, BaseException):
                    raise came
                found.append(came)
                came = self._arrived.get_nowait()
        except queue.Empty:
            pass
        return found

    def close(self) -> None:
        """Stops the reading thread; nothing takes messages any more."""
        self._closed.set()
