"""Sends the rows of one Spark task to the owners of their partitions, and returns the outputs.

A task of a micro-batch sends its rows as one batch, once every partition is known to contain the batch before. A task
of a batch DataFrame cuts its rows into pieces of a bounded size, see :func:`cut`, and sends each piece as a batch.
A partition that already contains a batch answers with the stored output, so an attempt may send the same rows again.

The code runs in Spark's Python workers, which Spark forks and reuses for later batches. Routers and channels are made
at first use and kept.
"""

from __future__ import annotations

import gc
import queue
import re
import shlex
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from stateflow.client.stream import look
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import (
    BatchIncomplete,
    DecodeError,
    InputIncomplete,
    InvalidArgument,
    OperatorOutdated,
    PositionGap,
    StateflowError,
    TasksMerged,
)
from stateflow.operator.arrow import ARROW_RAISES, BatchReader, read_schema
from stateflow.operator.output import split_output
from stateflow.operator.rows import null_key
from stateflow.partition.environment import keep_buffers
from stateflow.partition.layout import BATCH_RUN, REAL_TIME, Attempt
from stateflow.partition.positions import INITIAL, Batch
from stateflow.router import Asked, Delivery, Reached, Router, check_whole, newest_event_us
from stateflow.rpc.apply import BatchRows
from stateflow.security.plain import use_token
from stateflow.settings import ClientSettings, RouterSettings
from stateflow.spark.metrics import Seconds, TaskReport, with_report
from stateflow.state.cells import LATEST_US
from stateflow.tracing import tracing
from stateflow.types import OperatorSpec

#: size of the rows of a piece in Arrow's form, in bytes. Python holds a few times as much while it sends them.
PIECE_BYTES = 16 << 20
#: bytes of an offset, which Arrow stores for each value of variable length and each list, besides their contents
_OFFSET_BYTES = 4
PARTITION_COLUMN = "__stateflow_partition"
#: column with a hash of each row, by which Spark puts the rows of a batch DataFrame in the same order for each attempt
HASH_COLUMN = "__stateflow_hash"
#: id of a run of a streaming query
_RUN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
OUTPUT_ROWS = 10_000
#: most bytes of rows that a task applies as one batch; Arrow limits a column of texts to this size
WHOLE_BYTES_MAX = (1 << 31) - 1
_ROUTERS: dict[tuple[str, str, float], Router] = {}
#: router and source → last batch that this process sent to every partition by itself, as a single task does
_WHOLE: dict[tuple[str, str, float, str], int] = {}


# -- Pieces of a batch DataFrame's rows ------------------------------------------------------------------------------


def cut(batches: Iterable[pa.RecordBatch], bytes_max: int = PIECE_BYTES) -> Iterator[tuple[list[pa.RecordBatch], bool]]:
    """Yields each piece as (rows, True if it is the last piece). There is at least one piece, which may be empty.

    The cuts depend only on the rows and their order. So another attempt cuts the same rows in the same places, even if
    Spark passes them in batches of other sizes.

    No piece is larger than ``bytes_max``, except a piece of a single row. A piece is yielded once it is known whether
    more rows follow. The caller owns the list of rows and should clear it.
    """
    piece: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        ends = np.cumsum(row_bytes(batch))
        start, before = 0, 0
        while start < batch.num_rows:
            stop = int(np.searchsorted(ends, before + bytes_max - size, side="right"))
            if stop <= start:
                if piece:
                    yield piece, False
                    piece, size = [], 0
                    continue
                stop = start + 1
            piece.append(batch.slice(start, stop - start))
            size += int(ends[stop - 1]) - before
            start, before = stop, int(ends[stop - 1])
    yield piece, True


def row_bytes(batch: pa.RecordBatch) -> Any:
    """Returns the approximate size of each row's values in Arrow, in bytes."""
    total = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        total += _bytes_of(column)
    return total


def _bytes_of(column: pa.Array) -> Any:
    """Returns the size of each value in bytes, as an array, or as one number if all values have the same size."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _bytes_of(column.storage)
    if t.is_null(kind):
        return 0
    if t.is_struct(kind):
        return sum((_bytes_of(child) for child in column.flatten()), np.zeros(len(column), np.int64))
    if t.is_map(kind):
        column = column.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
    if t.is_list(column.type) or t.is_large_list(column.type):
        inner = np.zeros(len(column.flatten()) + 1, np.int64)
        inner[1:] = _bytes_of(column.flatten())
        ends = np.cumsum(_lengths(pc.list_value_length(column)))
        return _OFFSET_BYTES + np.diff(np.cumsum(inner)[np.r_[0, ends]])
    try:
        return -(-kind.bit_width // 8)
    except ValueError:
        return _OFFSET_BYTES + _lengths(pc.binary_length(column))


def _lengths(found: pa.Array) -> Any:
    return found.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


# -- Rows, work and outputs of a task --------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Rows of a task by partition, with a digest of each partition's rows that does not depend on their order.

    ``newest_us`` is the newest event time of the rows in µs, or None without a watermark column or without times.
    """

    batch: BatchRows
    newest_us: int | None


class Work:
    """Counts rows and measures times of a task's steps. Each method is called when the step that it names has ended."""

    def __init__(self, task: OperatorTask, query: str | None, batch: Batch, number: int, clock: Clock) -> None:
        self._task, self._clock, self._since = task, clock, clock.monotonic()
        self.told: list[TaskReport] = []
        self._report = TaskReport(
            query=task.batch_query if query is None else query,
            run=batch.attempt.run,
            batch=batch.number,
            operator=task.operator,
            source=task.source,
            task=number,
            rows=0,
            visits=0,
            replayed=0,
            began_us=clock.now_us(),
            seconds=Seconds(),
            use=task.run,
        )

    def read(self, rows: int) -> None:
        self._add(Seconds(spark=self._lap()), rows=rows)

    def routed(self) -> None:
        self._add(Seconds(routing=self._lap()))

    def delivered(self, delivery: Delivery, visits: int) -> None:
        operator, commit = delivery.operator_us / 1e6, delivery.commit_us / 1e6
        rpc = max(0.0, self._lap() - operator - commit)
        self._add(Seconds(rpc=rpc, operator=operator, commit=commit), visits=visits, replayed=delivery.replayed)

    def given(self) -> None:
        """Ends the step that passed outputs to Spark. The step's time counts as Spark's."""
        self._add(Seconds(spark=self._lap()))

    def tell(self) -> None:
        self.told.append(self._report)
        if self._task.reports is not None:
            self._task.reports.add([self._report])

    def _lap(self) -> float:
        before, self._since = self._since, self._clock.monotonic()
        return self._since - before

    def _add(self, seconds: Seconds, **counts: int) -> None:
        now = self._report
        counted = {name: getattr(now, name) + more for name, more in counts.items()}
        self._report = replace(now, seconds=now.seconds + seconds, **counted)


@dataclass(frozen=True, slots=True)
class OperatorTask:
    """Function that ``mapInArrow`` runs in each Spark task.

    Attributes:
        tasks: number of Spark tasks, among which the partitions are divided.
        run: identifies the call of ``apply_operator``.
        reports: accumulator for the task's reports; ``None`` if reports are not sent to an accumulator.
        observed: True if reports are emitted with the outputs. See :mod:`stateflow.spark.metrics`.
        within: True if the operator is applied within ``foreachBatch`` of a classic session, so that the rows belong to
            the micro-batch that the local properties name.
        piece_bytes: size in bytes of the pieces in which the rows of a batch DataFrame are sent; ``None`` if the rows
            belong to a micro-batch, which is sent as a whole.
        site: name of the column with the site that a row comes from; empty if rows have no site.
        token: the driver's token for executors. It is pickled with the function, so that it appears in no plan, log or
            command line.
        columns: names of the input's columns, which arrive renamed by position; empty if they arrive under their own
            names.
    """

    controller: str
    operator: str
    key: tuple[str, ...]
    partitions: int
    tasks: int
    output_schema: bytes
    side_schemas: tuple[tuple[str, bytes], ...]
    order_by: str | None
    source: str | None
    run: str
    unavailable_timeout_s: float
    initial: bool = False
    watermark: str | None = None
    lateness_us: int = 0
    reports: Any = field(default=None, compare=False)
    observed: bool = False
    streaming: bool = False
    within: bool = False
    piece_bytes: int | None = None
    site: str = ""
    token: str = field(default="", repr=False)
    columns: tuple[str, ...] = ()

    @property
    def __name__(self) -> str:
        """Name that plans show and that :mod:`stateflow.spark.whole` parses. Operators' names contain no ``~``."""
        return f"stateflow_{self.operator}{'~' if self.streaming else '_'}{self.run}"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        use_token(self.token)
        context = TaskContext.get()
        assert context is not None
        task = context.partitionId()
        if task >= self.tasks:
            raise self._merged()
        # A batch DataFrame that is not made within a micro-batch is applied once, also if micro-batches evaluate it: a
        # stream may be joined with it.
        query = context.getLocalProperty("sql.streaming.queryId") if self.piece_bytes is None else None
        batch = self._batch(query, context.getLocalProperty("streaming.sql.batchId"))
        attempt = Attempt(
            run=run_of(context.getLocalProperty("spark.jobGroup.id")) if query is not None else "",
            use=self.run,
            task=str(context.taskAttemptId()),
            call=uuid.uuid4().hex,
        )
        batch = replace(batch, attempt=attempt, site_column=self.site)
        work = Work(self, query, batch, task, SYSTEM_CLOCK)
        with span(self.operator, batch, task, query):
            outputs = self._applied(batch, task, batches, work, query)
            yield from with_report(outputs, self.schema, work.told) if self.observed else outputs

    def _applied(
        self, batch: Batch, task: int, batches: Iterator[pa.RecordBatch], work: Work, query: str | None
    ) -> Iterator[pa.RecordBatch]:
        if self.piece_bytes is not None and batch.source.startswith(BATCH_RUN):
            yield from self._in_pieces(batch, task, batches, work, self.piece_bytes)
        else:
            yield from self._whole_batch(batch, task, batches, work, query)

    def _whole_batch(
        self, batch: Batch, task: int, batches: Iterator[pa.RecordBatch], work: Work, query: str | None
    ) -> Iterator[pa.RecordBatch]:
        """Applies all of the task's rows as one batch."""
        if query is not None and not batch.number:
            self._refuse_real_time(query)
        asked = None if query is None else self._ask(batch)  # owners answer while the rows are read
        arrived = self._read_whole(batches, task)
        work.read(sum(batch.num_rows for batch in arrived))
        rows = self._by_partition(arrived, task, digests=False)  # a query's replay may lack rows
        del arrived  # the rows are encoded: they need not be in memory twice
        work.routed()
        reached = {} if asked is None else self._checked(batch, asked)
        if self.watermark is not None:
            batch = replace(batch, watermark_us=self._watermark_us(batch, reached), event_us=rows.newest_us)
        tables = self._delivered(batch, rows, work)
        if len(rows.batch) == self.partitions:
            _WHOLE[(*self._identity, batch.source)] = batch.number
        work.tell()
        yield from record_batches(tables)

    def _in_pieces(
        self, first: Batch, task: int, batches: Iterator[pa.RecordBatch], work: Work, bytes_max: int
    ) -> Iterator[pa.RecordBatch]:
        """Applies the rows of a batch DataFrame in pieces, and yields a piece's outputs before it reads the next piece.

        An error names the piece that failed. All pieces before that piece have been applied.
        """
        for number, (piece, last) in enumerate(cut(self._read(batches, task), bytes_max)):
            work.read(sum(batch.num_rows for batch in piece))
            rows = self._by_partition(piece, task, digests=True)
            piece.clear()  # several frames hold this list
            work.routed()
            watermark_us = LATEST_US if last and self.watermark is not None else None  # no row follows the last piece
            event_us = None if rows.newest_us is None else rows.newest_us - self.lateness_us
            sent = replace(first, number=number, watermark_us=watermark_us, event_us=event_us)
            try:
                tables = self._delivered(sent, rows, work)
            except StateflowError as error:
                if number or not last:
                    error.located(piece=number, pieces_applied=number)
                raise
            if last:
                work.tell()
            del rows
            yield from record_batches(tables)
            del tables
            work.given()

    def _delivered(self, batch: Batch, rows: _Rows, work: Work) -> list[pa.Table]:
        delivery = self.router().deliver(batch, rows.batch)
        work.delivered(delivery, len(rows.batch))
        try:
            tables = self.tables(delivery.outputs)
        except MemoryError:
            raise
        except (*ARROW_RAISES, StateflowError) as error:
            raise DecodeError(
                f"the stored output of batch {batch.number} cannot be read: {error}",
                remedy="make the operator return what Spark can read, and deploy it; `stateflow source drop-output "
                f"{shlex.quote(self.operator)} {shlex.quote(batch.source)} --batch {batch.number} --apply` lets the "
                "query continue without these rows",
                operator=self.operator,
                source=batch.source,
            ) from error
        work.routed()
        return tables

    def _read_whole(self, batches: Iterator[pa.RecordBatch], task: int) -> list[pa.RecordBatch]:
        """Reads all rows of the task. Raises InvalidArgument if they exceed :data:`WHOLE_BYTES_MAX`."""
        arrived: list[pa.RecordBatch] = []
        size = 0
        for batch in self._read(batches, task):
            size += batch.nbytes
            if size > WHOLE_BYTES_MAX:
                raise InvalidArgument(
                    f"one task has more than {WHOLE_BYTES_MAX} bytes of rows, the most that it can apply as one batch",
                    remedy="limit micro-batches with their source's options (maxFilesPerTrigger, maxOffsetsPerTrigger, "
                    "maxBytesPerTrigger), or raise tasks=",
                    operator=self.operator,
                    task=task,
                )
            arrived.append(batch)
        return arrived

    def _read(self, batches: Iterator[pa.RecordBatch], task: int) -> Iterator[pa.RecordBatch]:
        """Yields all rows of the task. Raises InputIncomplete after the last row if Spark closed the input early."""
        yield from (self.named(batch) for batch in batches if batch.num_rows)
        if not ended():
            raise InputIncomplete(
                "Spark closed the task's input early, as it does when it kills a task or cannot read a shuffle",
                remedy="see Spark's log for the cause; retrying is safe: nothing was applied except whole pieces of "
                "a batch DataFrame",
                operator=self.operator,
                task=task,
            )

    def named(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the batch with the input's column names. Columns added after the input's keep their own names."""
        fields = list(batch.schema)
        fields[: len(self.columns)] = [field.with_name(name) for field, name in zip(fields, self.columns, strict=False)]
        return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema(fields, batch.schema.metadata))

    def _merged(self) -> TasksMerged:
        return TasksMerged(
            "Spark renumbers the operator's tasks, as it does for a union or coalesce right after it",
            remedy="put .repartition(n) between the operator and the union or coalesce",
            operator=self.operator,
        )

    @property
    def batch_query(self) -> str:
        """Name that replaces the query's id for a batch DataFrame."""
        return self.source or self.run

    def _batch(self, query: str | None, batch: str | None) -> Batch:
        if self.initial:
            return Batch(INITIAL, 0)
        if query is None or batch is None:
            if self.streaming or self.within:
                raise no_query(self.operator)
            return Batch(f"{BATCH_RUN}{self.batch_query}", 0)
        return Batch(self.query_source(query), int(batch))

    def query_source(self, query: str) -> str:
        """Returns the name of the source for the micro-batches of the streaming query with the id ``query``."""
        return f"query:{query}" + (f":{self.source}" if self.source else "")

    def real_time_source(self, query: str) -> str:
        """Returns the prefix of the names of the query's sources in real-time mode."""
        return f"{REAL_TIME}{query}" + (f":{self.source}" if self.source else "")

    def _refuse_real_time(self, query: str) -> None:
        """Checks that a query did not run in real-time mode before its first micro-batch. Raises InvalidArgument.

        If it did, partitions may contain an epoch that was not committed, whose rows may differ from the micro-batch's.
        """
        if look(self.router(), f"{self.real_time_source(query)}:task:0"):
            raise InvalidArgument(
                "this query has run in real-time mode and cannot switch to micro-batches",
                remedy="continue with real_time=True, or start with a new checkpointLocation",
                operator=self.operator,
            )

    def _ask(self, batch: Batch) -> Asked | None:
        """Asks all partitions for the source's positions.

        Returns None, and asks nothing, if no watermark depends on the positions and all partitions are known to contain
        the batch before.
        """
        if self.watermark is None and _WHOLE.get((*self._identity, batch.source), -1) == batch.number - 1:
            return None
        return Asked(self.router(), batch.source, batch.number, self.unavailable_timeout_s)

    def _checked(self, batch: Batch, asked: Asked) -> dict[int, Reached]:
        """Returns the partitions' answers. Raises BatchIncomplete or PositionGap if the batch before is missing."""

        def check(reached: dict[int, Reached]) -> dict[int, Reached]:
            check_whole(self.operator, batch.source, batch.number, self.partitions, reached)
            return reached

        reached = asked.answers()
        try:
            return check(reached)
        except (BatchIncomplete, PositionGap):  # the answer may be from a former owner that does not know its successor
            self.router().refresh()
            return check(Asked(self.router(), batch.source, batch.number, self.unavailable_timeout_s).answers())

    def _watermark_us(self, batch: Batch, reached: dict[int, Reached]) -> int | None:
        """Returns the watermark of the batch as Spark defines it: the newest time of all earlier batches, less the
        allowed lateness."""
        newest_us = newest_event_us(reached, batch.number)
        return None if newest_us is None else newest_us - self.lateness_us

    @property
    def _identity(self) -> tuple[str, str, float]:
        return self.controller, self.operator, self.unavailable_timeout_s

    def router(self) -> Router:
        """Returns the router of a Spark worker, see :meth:`kept_router`."""
        is_first, router = not _ROUTERS, self.kept_router()
        if is_first:
            # Spark's worker collects garbage between tasks. Without freeze() a pass over all imported modules took
            # 95 ms, a fifth of a micro-batch of 100,000 rows, on the cores that the next batch needs.
            gc.collect()
            gc.freeze()
            keep_buffers()
        return router

    def kept_router(self) -> Router:
        """Returns this process's router, which is made at first use, and again after a new deployment.

        Waits for a controller as long as for a replica. Raises OperatorOutdated for a task of a former deployment.
        """
        router = _ROUTERS.get(self._identity)
        if router is None or not self._fits(router):
            settings = RouterSettings(unavailable_timeout_s=self.unavailable_timeout_s)
            wait_s = max(self.unavailable_timeout_s, ClientSettings().connect_timeout_s)
            router = Router(self.controller, self.operator, settings, connect_timeout_s=wait_s)
            if not self._fits(router):
                what = "the operator was deployed anew, with another number of partitions, key or output"
                raise OperatorOutdated(what, remedy="call apply_operator again", operator=self.operator)
            for known in [each for each in _WHOLE if each[:3] == self._identity]:
                del _WHOLE[known]
            _ROUTERS[self._identity] = router
        return router

    def _fits(self, router: Router) -> bool:
        return all(getattr(router.spec, name) == getattr(self, name) for name in OperatorSpec.AGREED)

    def _by_partition(self, arrived: list[pa.RecordBatch], task: int, *, digests: bool) -> _Rows:
        """Groups the rows by partition, in ``order_by`` order or in order of arrival.

        Partitions of the task without rows are included, because the batch must advance the position in each partition.
        """
        visited = range(task, self.partitions, self.tasks)
        if not arrived:
            return _Rows(BatchRows.visit(visited), None)
        table = pa.Table.from_batches(arrived)
        newest_us = None if self.watermark is None else _newest_us(table[self.watermark])
        for column in self.key:
            if table[column].null_count:
                raise null_key(column, table[column].null_count, self.operator)
        numbers = table[PARTITION_COLUMN].to_numpy().astype(np.uint16 if self.partitions <= 1 << 16 else np.uint32)
        if np.any(numbers % self.tasks != task):
            raise self._merged()
        if self.order_by is None or HASH_COLUMN in table.column_names:  # rows with hashes are in order
            order = np.argsort(numbers, kind="stable")
        else:
            # by number: Arrow would read a name that begins with a dot as a path
            places = [table.schema.get_field_index(name) for name in (PARTITION_COLUMN, self.order_by)]
            by = [(place, "ascending") for place in places]
            order = pc.sort_indices(table, sort_keys=by).to_numpy()
        numbers = numbers[order]
        ends = np.searchsorted(numbers, np.asarray(visited), side="right")
        table = table.drop_columns([PARTITION_COLUMN])
        sums: list[int] = []
        if HASH_COLUMN in table.column_names:
            if digests:
                hashes = table[HASH_COLUMN].to_numpy().view(np.uint64)[order]
                up_to = np.r_[np.uint64(0), np.cumsum(hashes)][np.r_[0, ends]]
                sums = np.diff(up_to).tolist()  # modulo 2**64, like the sums themselves
            table = table.drop_columns([HASH_COLUMN])
        whole = table.take(pa.array(order)).combine_chunks().to_batches()[0]
        schema = table.schema.serialize().to_pybytes()
        return _Rows(BatchRows(schema, whole, list(visited), ends.tolist(), sums), newest_us)

    def tables(self, outputs: dict[int, bytes]) -> list[pa.Table]:
        """Returns a table of the main rows and one of each side output, without tables that would be empty.

        The rows of a side output are in the struct column named after the output's tag.

        Args:
            outputs: partition → output, see :mod:`stateflow.operator.output`.
        """
        split = [split_output(outputs[partition]) for partition in sorted(outputs)]
        main = _whole(self.output_schema, [message for message, _ in split])
        tables = [main] if main is not None else []
        for tag, schema in self.side_schemas:
            rows = _whole(schema, [side[tag] for _, side in split if tag in side])
            if rows is not None:
                tables.append(pa.table({tag: rows.to_struct_array()}))
        if self.side_schemas:
            tables = [_widened(table, self.schema) for table in tables]
        return tables

    @property
    def schema(self) -> pa.Schema:
        """Schema of the outputs."""
        if self.side_schemas:
            return with_side_columns(self.output_schema, self.side_schemas)
        return read_schema(self.output_schema)


def span(operator: str, batch: Batch, task: int, query: str | None) -> AbstractContextManager[object]:
    """Returns the trace span of one task, from its first row to its last output."""
    traces = tracing()
    if traces is None:
        return nullcontext()
    said: dict[str, Any] = {"source": batch.source, "batch": batch.number, "attempt": batch.attempt.task}
    return traces.span("stateflow.task", operator=operator, task=task, query=query, **said)


def no_query(operator: str) -> InvalidArgument:
    return InvalidArgument(
        "the thread that evaluates a micro-batch lacks the query's local properties",
        remedy="start it as pyspark.InheritableThread(target=…, session=batch.sparkSession)",
        operator=operator,
    )


def run_of(group: str | None) -> str:
    """Returns the run of a streaming query by the job group of its tasks, which Spark names after the run.

    Returns an empty text if a function in ``foreachBatch`` has set a job group of its own. A later run may have the
    same group, and a batch that it repeats would count as one of another application of the operator.
    """
    return group if group is not None and _RUN.fullmatch(group) else ""


def record_batches(tables: list[pa.Table]) -> Iterator[pa.RecordBatch]:
    for table in tables:
        yield from table.combine_chunks().to_batches(max_chunksize=OUTPUT_ROWS)


def ended() -> bool:
    """Tells whether the worker's input was complete. Call it when the input has been read to its end.

    When Spark breaks off an input, it closes the connection between two record batches, which Arrow takes for a normal
    end of the stream. After a complete input Spark sends one more word as an end mark. This function peeks at that word
    and leaves it in the stream. Raises InputIncomplete if this PySpark's worker keeps its input in another place.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "main" and "infile" in frame.f_locals:  # frame of pyspark.worker
            return bool(frame.f_locals["infile"].peek(1))
    raise InputIncomplete(
        "this PySpark does not show whether a task's input is complete",
        remedy="use a version that stateflow-streams[spark] requires",
    )


def _newest_us(times: pa.ChunkedArray) -> int | None:
    """Returns the newest time in microseconds since 1970, or None if all times are null."""
    newest: int | None = pc.max(times.cast(pa.timestamp("us", "UTC")).cast(pa.int64())).as_py()
    return newest


def with_side_columns(output: bytes, side: tuple[tuple[str, bytes], ...]) -> pa.Schema:
    """Returns the schema of a DataFrame with side outputs: the main columns, then one struct column for each tag."""
    schema = read_schema(output)
    for tag, encoded in side:
        schema = schema.append(pa.field(tag, pa.struct(list(read_schema(encoded)))))
    return pa.schema([field.with_nullable(True) for field in schema])


def _whole(encoded: bytes, messages: list[bytes]) -> pa.Table | None:
    schema = read_schema(encoded)
    reader = BatchReader(schema)
    batches = [reader.read(message) for message in messages if message]
    return pa.Table.from_batches(batches) if batches else None


def _widened(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


# -- Input of a task in real-time mode -------------------------------------------------------------------------------

#: most messages (rows or ticks) that wait to be taken; when there are so many, Spark has to wait
MESSAGES_MAX = 4096
_LOOK_S = 0.1


class Inbox:
    """Input of a task, read by a separate thread, so that rows which arrive while others are applied form one batch.

    It contains at most ``messages_max`` messages. When it is full, the thread waits.
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
        """Waits for a message, and returns all messages that have arrived, or an empty list after ``timeout_s``.

        Raises the error with which reading the input failed.
        """
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
        """Stops the reading thread. Call it when no more messages will be taken."""
        self._closed.set()
