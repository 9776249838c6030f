"""``StreamClient`` sends rows straight into an operator, with latency in milliseconds and without Spark.

Other clients share this module's functions, which check what callers pass, sort rows by partition, and ask all
partitions of an operator about its sources. Partitions that are moving, or have no owner, are asked again until they
answer. :mod:`~stateflow.client.delivery` decides what the client sends, and this module performs its steps.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from time import sleep
from typing import Any, TypeVar

import pyarrow as pa

from stateflow.client.delivery import Deliver, Delivery, Look, Open, SameOperator, Step, Steps, perform
from stateflow.client.history import History
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import (
    BatchChanged,
    InvalidArgument,
    KeyColumnMissing,
    LeaseLost,
    NotOwner,
    StandbyMissing,
    Unavailable,
    brief,
)
from stateflow.operator.arrow import schema_of
from stateflow.operator.exact import Misfit, column_of, type_of
from stateflow.operator.output import OutputReader
from stateflow.operator.timers import to_us
from stateflow.partition.layout import REAL_TIME, Position, Session
from stateflow.partition.positions import INITIAL, RESERVED, SourceView
from stateflow.partitioner import partition_of
from stateflow.reports import Report
from stateflow.router import Router, backoff
from stateflow.router.router import READ_TIMEOUT_S
from stateflow.rpc.apply import BatchRows
from stateflow.rpc.clients import ReplicaClient
from stateflow.settings import RouterSettings
from stateflow.types import LABEL, SEQUENCE_MAX, OperatorSpec, check_name, shown

log = logging.getLogger(__name__)
T = TypeVar("T")
#: largest batch number that a caller may pass, so that greater numbers remain for later batches; microseconds since
#: 1970 are far below it
GIVEN_MAX = SEQUENCE_MAX // 2
#: rows of initial state that are sent at a time
LOADED_ROWS = 50_000


# -- Checks of rows, source names and batch numbers that callers pass ------------------------------------------------


def rows_given(rows: object) -> list[Mapping[str, Any]]:
    """Returns the rows as a list. Raises InvalidArgument, naming the first item that is not a row."""
    found = list(iterable_given(rows))
    for index, row in enumerate(found):
        if not isinstance(row, Mapping):
            raise InvalidArgument(f"{shown(row)} is not a row", remedy="send dicts: column → value", row=index)
        wrong = next((name for name in row if not isinstance(name, str)), None)
        if wrong is not None:
            raise InvalidArgument(f"{shown(wrong)} is not a column name", remedy="use strings", row=index)
    return found


def iterable_given(rows: object) -> Iterable[Any]:
    """Checks that rows are an iterable of rows. Raises InvalidArgument."""
    if isinstance(rows, Mapping):
        raise InvalidArgument("this is one row, not a list of rows", remedy="send [row]")
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes):
        raise InvalidArgument(f"{shown(rows)} is not a list of rows", remedy="send a list of dicts")
    return rows


def source_given(source: object) -> str:
    """Checks the name of a source. Raises InvalidArgument. The reserved source of initial state is allowed."""
    if not isinstance(source, str):
        raise InvalidArgument(f"{shown(source)} is not a source name", remedy=LABEL.how)
    if source.startswith((RESERVED, REAL_TIME)) and source != INITIAL:
        raise InvalidArgument(f"{source!r} is a reserved name", remedy="choose another name for the source")
    return LABEL.check(source, "source name")


def number_given(number: object, what: str = "sequence") -> int:
    """Checks the number of a batch. Raises InvalidArgument."""
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= GIVEN_MAX:
        raise InvalidArgument(
            f"{shown(number)} is not a batch number",
            remedy=f"use an int from 0 to {GIVEN_MAX}, which leaves numbers for later batches",
            argument=what,
        )
    return number


# -- Callers' rows by partition --------------------------------------------------------------------------------------


def by_partition(spec: OperatorSpec, schema: pa.Schema | None, rows: list[Mapping[str, Any]]) -> BatchRows:
    """Sorts rows by partition. Raises KeyColumnMissing, InvalidArgument, NullKey.

    Args:
        schema: schema of the rows; None: inferred from them.
    """
    if not rows:
        return BatchRows.visit([])
    table, numbers = numbered(spec, schema, rows)
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    ends = {numbers[index]: end for end, index in enumerate(order, 1)}  # the end of each partition's last row stays
    batch = table.take(pa.array(order))
    return BatchRows(batch.schema.serialize().to_pybytes(), batch, list(ends), list(ends.values()))


def numbered(
    spec: OperatorSpec, schema: pa.Schema | None, rows: list[Mapping[str, Any]]
) -> tuple[pa.RecordBatch, list[int]]:
    """Returns the rows (at least one) as a record batch, and the partition of each row.

    Both clients and the test harness use it. Without a schema, the batch has all columns that occur in any row. A
    column that a row lacks is null; a value is stored exactly as it is, or refused. Arguments and errors are those of
    :func:`by_partition`.
    """
    for index, row in enumerate(rows):
        if missing := [column for column in spec.key if column not in row]:
            raise _no_key(spec, f"row {index} has no {missing[0]!r}")
    names = dict.fromkeys(name for row in rows for name in row) if schema is None else dict.fromkeys(schema.names)
    for column in spec.key:
        if column not in names:
            raise _no_key(spec, f"the schema has no {column!r}")
    if schema is not None:
        _check_names(spec, names, rows)
    fields, arrays = [], []
    for number, name in enumerate(names):
        values = [row.get(name) for row in rows]
        try:
            field = pa.field(name, type_of(values, name in spec.key)) if schema is None else schema.field(number)
            arrays.append(column_of(field).array(values))
            fields.append(field)
        except Misfit as misfit:
            raise _refused(spec, name, misfit, schema is not None) from misfit
    table = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields) if schema is None else schema)
    # computed from the keys as the replica will see them: an int in a double column is a double
    keys = zip(*(_in_utc(table.column(column)).to_pylist() for column in spec.key), strict=True)
    return table, [partition_of(values, spec.partitions) for values in keys]


def _in_utc(column: pa.Array) -> pa.Array:
    """Returns instants in UTC, because Python may lack their zone, or the zone their year."""
    kind = column.type
    return column.cast(pa.timestamp(kind.unit, "UTC")) if pa.types.is_timestamp(kind) and kind.tz else column


def _check_names(spec: OperatorSpec, names: Mapping[str, None], rows: list[Mapping[str, Any]]) -> None:
    for index, row in enumerate(rows):
        if not row.keys() <= names.keys():
            unknown = next(name for name in row if name not in names)
            raise InvalidArgument(
                f"a row has column {unknown!r}, which is not in the schema",
                remedy=f"leave it out, or add it to schema=, which has {', '.join(names)}",
                operator=spec.name,
                column=unknown,
                row=index,
            )


def _refused(spec: OperatorSpec, name: str, misfit: Misfit, declared: bool) -> InvalidArgument:
    what = misfit.what if declared else misfit.what.replace("is declared", "would be")
    remedy = "fix the row, or declare another type in schema=" if declared else "pass schema=, or fix the rows"
    return InvalidArgument(
        f"the rows do not fit {'the' if declared else 'one'} schema: column {name!r}{misfit.path} {what}",
        remedy=f"{misfit.how}; {remedy}" if misfit.how else remedy,
        operator=spec.name,
        column=f"{name}{misfit.path}",
        row=misfit.row,
    )


def _no_key(spec: OperatorSpec, what: str) -> KeyColumnMissing:
    return KeyColumnMissing(what, remedy="include every key column in each row", operator=spec.name)


# -- Questions to all partitions about a source ----------------------------------------------------------------------


def positions(router: Router, source: str) -> dict[int, int]:
    """Returns partition → the newest batch of ``source`` that it contains; partitions without one are left out."""
    return {partition: position.batch for partition, position in look(router, source).items()}


def look(router: Router, source: str) -> dict[int, Position]:
    """Returns the position of a source, by partition."""
    return _everywhere(router, lambda replica, asked: replica.positions(router.operator, source, asked))


def open_source(router: Router, source: str, session: Session, settled: int | None = None) -> dict[int, Position]:
    """Makes all partitions refuse older clients of a source from now on. Returns the source's position by partition.

    Args:
        settled: see :meth:`~stateflow.rpc.clients.ReplicaClient.open_source`.

    Raises SourceTaken, SourceRetired.
    """
    return _everywhere(
        router,
        lambda replica, asked: replica.open_source(router.operator, source, asked, session, settled=settled),
    )


def outputs(router: Router, source: str, after: int) -> dict[int, list[tuple[int, bytes]]]:
    """Returns the kept outputs of a source's batches after ``after``: partition → list of (batch, output), in order."""

    def ask(replica: ReplicaClient, asked: list[int]) -> dict[int, list[tuple[int, bytes]]]:
        found: dict[int, list[tuple[int, bytes]]] = {}
        for partition, batch, output in replica.outputs(router.operator, source, asked, after):
            found.setdefault(partition, []).append((batch, output))
        return found

    return _everywhere(router, ask)


def asked_of_moving(router: Router, partition: int, ask: Callable[[], T], timeout_s: float | None = None) -> T:
    """Asks the owner of a partition, and asks again while the partition moves or has no owner. Returns the answer.

    Args:
        timeout_s: see :func:`_everywhere`.

    Raises Unavailable, or the refusal of the owner that was asked last, if no owner answers in time.
    """
    for pause in backoff(router.settings.unavailable_timeout_s if timeout_s is None else timeout_s, router.clock):
        try:
            return ask()
        except (LeaseLost, NotOwner, StandbyMissing, Unavailable):
            if pause is None:
                if (why := router.table.unserved.get(partition)) is not None:
                    raise why from None
                raise
            sleep(pause)
            with suppress(Unavailable):  # continue with the known owners
                router.refresh()
    raise AssertionError


def _everywhere(
    router: Router, ask: Callable[[ReplicaClient, list[int]], dict[int, T]], timeout_s: float | None = None
) -> dict[int, T]:
    """Asks the owners of all partitions, each with one request, and collects their answers.

    Args:
        timeout_s: maximum wait for a partition that moves or has no owner, in seconds; None: ``unavailable_timeout_s``.
    """
    found: dict[int, T] = {}
    by_address: dict[str, list[int]] = {}
    for partition, route in enumerate(router.table.routes):
        by_address.setdefault(route.address, []).append(partition)

    def of(partitions: list[int]) -> dict[int, T]:
        return ask(ReplicaClient(router.table.routes[partitions[0]].address), partitions)

    for partitions in by_address.values():
        try:
            found |= of(partitions)
        except (LeaseLost, NotOwner, StandbyMissing, Unavailable):  # some are moving, or their owner was away
            for partition in partitions:
                once = partial(of, [partition])
                found |= asked_of_moving(router, partition, once, timeout_s)
    return found


# -- The sources of an operator --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceReport(Report):
    """Data that an operator's partitions keep for a source.

    Attributes:
        batch: newest batch of the source that any partition contains; -1: none.
        at_us: time of the source's last batch, µs.
        partitions: number of partitions that contain a batch of the source.
        bytes: size of the data that is kept for the source.
        watermark_us: the source's least watermark over the partitions; None: the source has no watermark that operators
            consider.
        retired: True if no partition keeps more than a tombstone of the source.
        holds: True if the source holds back the watermark of some partition.

    Example: ``[each.source for each in cluster.sources("Count") if each.holds]``
    """

    source: str
    batch: int
    at_us: int
    partitions: int
    bytes: int
    watermark_us: int | None
    retired: bool
    holds: bool


@dataclass(frozen=True, slots=True)
class OutputDropReport(Report):
    """Stored output of one batch of a source, which was dropped or would be dropped.

    ``sizes``: partition → bytes of its output; partitions that keep none are left out. ``applied``: True if the output
    was dropped, False if it was only reported.

    Example: ``cluster.drop_output("Count", source, 12, apply=True).sizes``
    """

    operator: str
    source: str
    batch: int
    sizes: Mapping[int, int]
    applied: bool


def list_sources(router: Router) -> list[SourceReport]:
    """Returns the sources that have sent to the operator, sorted by the time of their last batch. Raises
    Unavailable."""
    found: dict[str, list[SourceView]] = {}
    holders: set[str] = set()
    for views in _views(router):
        if (holder := _holder(views)) is not None:
            holders.add(holder)
        for view in views:
            found.setdefault(view.source, []).append(view)
    reports = (_source_report(source, views, source in holders) for source, views in found.items())
    return sorted(reports, key=lambda each: each.at_us)


def _views(router: Router) -> list[list[SourceView]]:
    """Returns the sources that have sent to each partition, by partition."""
    found = _everywhere(router, lambda replica, asked: replica.sources(router.operator, asked), READ_TIMEOUT_S)
    return [found[partition] for partition in sorted(found)]


def _holder(views: Iterable[SourceView]) -> str | None:
    """Returns the only source that holds back the watermark of a partition; None: there are several, or none."""
    promised = sorted((view.watermark_us, view.source) for view in views if view.watermark_us is not None)
    return promised[0][1] if len(promised) > 1 and promised[0][0] < promised[1][0] else None


def _source_report(source: str, views: list[SourceView], holds: bool) -> SourceReport:
    watermarks = [view.watermark_us for view in views if view.watermark_us is not None]
    return SourceReport(
        source,
        batch=max(view.batch for view in views),
        at_us=max(view.at_us for view in views),
        partitions=sum(view.batch >= 0 for view in views),
        bytes=sum(view.bytes for view in views),
        watermark_us=min(watermarks, default=None),
        retired=all(view.retired for view in views),
        holds=holds,
    )


def retire_source(router: Router, source: str) -> int:
    """Makes all partitions keep only a tombstone of a source; returns the number of partitions that kept more.

    Raises InvalidArgument for a source that no partition knows, Unavailable.
    """
    known = _known(router, source)

    def ask(replica: ReplicaClient, asked: list[int]) -> dict[int, None]:
        replica.retire_source(router.operator, source, asked)
        return {}

    _everywhere(router, ask, READ_TIMEOUT_S)
    # counted before, because a partition may be asked again after it retired the source; initial state is never retired
    return 0 if source == INITIAL else sum(not view.retired for view in known)


def drop_output(router: Router, source: str, batch: int, apply: bool) -> OutputDropReport:
    """Makes all partitions drop the output of a batch.

    Raises InvalidArgument if no partition keeps output of the batch, Unavailable.
    """
    newest = max(view.batch for view in _known(router, source))

    def ask(replica: ReplicaClient, asked: list[int], apply: bool = False) -> dict[int, int]:
        return replica.drop_output(router.operator, source, batch, asked, apply)

    # a separate request asks for the sizes, because a partition may be asked again after it dropped the output
    sizes = _everywhere(router, ask, READ_TIMEOUT_S)
    if not sizes:
        raise InvalidArgument(
            f"no partition keeps output of batch {batch} of the source",
            remedy=f"check the number: the newest batch is {newest}; a batch without output rows has nothing to drop",
            operator=router.operator,
            source=source,
        )
    if apply:
        _everywhere(router, partial(ask, apply=True), READ_TIMEOUT_S)
    return OutputDropReport(router.operator, source, batch, dict(sorted(sizes.items())), apply)


def _known(router: Router, source: str) -> list[SourceView]:
    """Returns the data of a source from each partition that knows the source. Raises InvalidArgument, Unavailable."""
    found = [view for views in _views(router) for view in views if view.source == source]
    if not found:
        raise InvalidArgument(
            f"no partition knows a source {source!r}",
            remedy=f"list sources with `stateflow source list {router.operator}`",
            operator=router.operator,
        )
    return found


# -- The client ------------------------------------------------------------------------------------------------------


@brief
class StreamClient:
    """Sends batches of rows under one source name, and returns the operator's output rows.

    Thread-safe: threads wait for each other, so that one batch is under way at a time.

    Batches are numbered 0, 1, 2, …. A batch that is sent again under its number changes nothing, and returns the stored
    outputs; other rows under that number are refused (BatchChanged).

    A source belongs to its newest client. A new client takes the source over: from then on every partition refuses
    older clients (SourceTaken). The new client continues after the newest number that any partition contains
    (:attr:`position`). If its predecessor may have died in the middle of a batch, send that batch again with
    ``sequence=client.position``: partitions that contain the batch skip it.

    A failed batch may have been applied to some partitions. If it is sent again with the same rows, it keeps its
    number, and those partitions skip it. Other rows are another batch and get the next number; :meth:`send` says which
    batch goes first. To send the batch with corrected rows, pass its number.

    A partition may lose batches that it had acknowledged, if its owner dies and an older checkpoint is restored. The
    client then asks all partitions what they contain, and sends again the missing batches that it keeps
    (``STATEFLOW_ROUTER_REWIND_BUFFER_BYTES``). For batches that it no longer keeps, or that a predecessor sent, it
    raises PositionGap: send every batch from the named one on again, in order, with ``rewind=True``. Their outputs were
    returned the first time.

    Args:
        schema: Spark DDL or Arrow schema of the rows; None: types are inferred, batch by batch. In both cases a value
            is stored exactly as it is, or refused (InvalidArgument). A column that a row lacks is null, and a column
            that the schema does not name is refused.
        acknowledged: the newest batch that was acknowledged to a predecessor, as far as the application knows; or a
            function that returns it. The function is called after this client has taken the source over, because a
            predecessor may receive acknowledgements until then. Partitions know of each other's batches; but if all
            partitions that knew of a batch lost it, only the application can tell that it was acknowledged.
        site: site that the rows come from, so that ``autopilot`` may bring their state there.
        addresses: advertised address of a replica → address to use from here, for replicas behind NAT or a tunnel.

    Example: ``StreamClient("ctl:7070", "Count", source="gateway-7").send([{"k": "a"}])``
    """

    def __init__(
        self,
        controller: str,
        operator: str,
        source: str,
        *,
        schema: str | pa.Schema | None = None,
        acknowledged: int | Callable[[], int | None] | None = None,
        settings: RouterSettings | None = None,
        site: str = "",
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        source_given(source)
        if site:
            check_name("site", site)
        if acknowledged is not None and not callable(acknowledged):
            number_given(acknowledged, "acknowledged")
        settings = settings or RouterSettings()
        if site:
            settings = settings.model_copy(update={"site": site})
        self._router = Router(controller, operator, settings, addresses=addresses)
        self.source = source
        self._schema = None if schema is None else schema_of(schema)
        self._output = OutputReader.of(self._router.spec.output_schema, self._router.spec.side_schemas)
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.local()
        history = History(operator, source, self._router.spec.partitions, settings.rewind_buffer_bytes)
        session = Session(SYSTEM_CLOCK.now_us(), uuid.uuid4().hex[:16])
        self._delivery = Delivery(history, session, acknowledged if callable(acknowledged) else lambda: acknowledged)
        self._run(self._delivery.open())

    @property
    def position(self) -> int:
        """The newest batch number that was used; -1: none."""
        return self._delivery.history.position

    @property
    def side_outputs(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of the side outputs of this thread's last send, by tag."""
        found: dict[str, list[dict[str, Any]]] = getattr(self._thread, "side_outputs", {})
        return found

    def send(
        self, rows: Iterable[Mapping[str, Any]], *, sequence: int | None = None, rewind: bool = False
    ) -> list[dict[str, Any]]:
        """Sends a batch, and returns the output rows when every partition concerned has committed.

        The rows are grouped by partition, in order per key.

        Args:
            sequence: the batch's number; None: the next number.
            rewind: True sends the older batch ``sequence`` again; partitions that contain it skip it, without output.

        Raises KeyColumnMissing, NullKey, OperatorFailed, PositionGap, …. A partition that failed has applied nothing.
        The failed call can be repeated, also after other batches: no row is applied twice.

        If it is unknown which partitions have applied a batch (Unavailable, Ctrl-C), the next call, from any thread,
        first finishes that batch. If it cannot, it raises the same error with ``unfinished_batch``, and does not send
        its own rows. Once the batch is finished, repeating the failed call returns the outputs and applies nothing.

        A batch that is refused for its content (OperatorFailed, EncodeError, …) does not hold up others. If its rows
        are sent again after other batches, they are a new batch, provided that no partition contains any of them.
        Otherwise partitions that have newer rows raise StaleBatch, and the caller has to send the rows that the state
        lacks. Equal rows count as the failed batch for up to 1,000 further batches.

        With ``sequence``, that batch is sent first, whatever failed before. Failed rows that are sent under another
        number are applied a second time.
        """
        if sequence is not None:
            number_given(sequence)
        with self._router.span(self.source):
            batch = by_partition(self._router.spec, self._schema, rows_given(rows))
            with self._lock:
                return self._run(self._delivery.deliver(batch, sequence, rewind, None, self._outputs))

    def advance_watermark(
        self, watermark: datetime | int, *, sequence: int | None = None, rewind: bool = False
    ) -> list[dict[str, Any]]:
        """Promises every partition that no older rows follow from this source; returns the output rows of timers.

        Args:
            watermark: an aware datetime, or microseconds since 1970. A watermark older than the last one changes
                nothing.
            sequence: as with :meth:`send`, because a watermark is a batch like others.
            rewind: as with :meth:`send`.
        """
        if sequence is not None:
            number_given(sequence)
        everywhere = BatchRows.visit(range(self._router.spec.partitions))
        steps = self._delivery.deliver(everywhere, sequence, rewind, to_us(watermark), self._outputs)
        with self._router.span(self.source), self._lock:
            return self._run(steps)

    def verify(self) -> None:
        """Asks every partition whether it still contains all batches that it acknowledged, and resends lost batches.

        A partition also reports a loss when the next rows arrive; this method needs no rows. Raises SourceTaken if a
        newer client has the source, PositionGap if lost batches are no longer kept.
        """
        with self._lock:
            self._run(self._delivery.verify())

    def accept_loss(self) -> None:
        """Gives up the batches that partitions lost and that no client can send again."""
        with self._lock:
            oldest = self._run(self._delivery.accept_loss())
        if oldest is not None:
            log.warning("source %s: lost batches given up, from batch %d on", self.source, oldest)

    def close(self) -> None:
        """Closes the client: waits for a batch under way, refuses later ones, and drops the rows kept for resending.

        The source belongs to this client until another client takes it over.
        """
        with self._lock:
            self._closed = True
            self._delivery.let_go()

    def __enter__(self) -> StreamClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, steps: Steps[T]) -> T:
        """Performs the steps. Callers hold the lock."""
        if self._closed:
            raise InvalidArgument("the client is closed", remedy="create a new client", source=self.source)
        return perform(steps, self._do)

    def _do(self, step: Step) -> Any:
        match step:
            case Open(session):
                return open_source(self._router, self.source, session)
            case Look():
                return look(self._router, self.source)
            case SameOperator():
                return self._router.check_deployment()
            case Deliver(batch, rows, after):
                return self._router.send(batch, rows, after)

    def _outputs(self, outputs: Mapping[int, bytes]) -> list[dict[str, Any]]:
        rows, self._thread.side_outputs = self._output.rows(outputs[partition] for partition in sorted(outputs))
        return rows


def load_rows(stream: StreamClient, rows: Iterable[Mapping[str, Any]]) -> int:
    """Sends the rows of an operator's initial state, LOADED_ROWS at a time; returns their number.

    Rows that an interrupted call has sent are not sent again, except those that it sent last. Only these are compared
    with the loaded rows, because a partition keeps a digest of its newest batch alone; earlier rows that differ are not
    noticed. Raises StaleBatch; BatchChanged if the rows sent last differ, or fewer rows are given than are loaded.
    """
    loaded = stream.position
    remaining, count = iter(iterable_given(rows)), 0
    for number in itertools.count():
        chunk = list(itertools.islice(remaining, LOADED_ROWS))
        if not chunk and number <= loaded:
            raise BatchChanged(
                f"{count} rows given, but more are already loaded",
                remedy="initial state loads once: pass the same rows, or deploy the operator under another name",
                operator=stream._router.spec.name,
            )
        if not chunk:
            break
        count += len(chunk)
        if number == loaded:
            _check_sent_last(stream, chunk)
        if number >= loaded:
            stream.send(chunk, sequence=number)
    return count


def _check_sent_last(stream: StreamClient, chunk: list[Mapping[str, Any]]) -> None:
    """Checks that rows are for the partitions of the batch that was sent last. Raises BatchChanged.

    A partition compares its own rows only: it cannot tell that it got none of a batch, or gets none any more.
    """
    spec = stream._router.spec
    then, now = stream._delivery.history.sent_last, set(by_partition(spec, stream._schema, chunk).partitions)
    if then and then != now:
        raise BatchChanged(
            f"the rows sent last were for {len(then)} partitions, and differ from these rows for {len(now)}",
            remedy="initial state loads once: pass the same rows, or deploy the operator under another name",
            operator=spec.name,
            partitions=",".join(map(str, sorted(then ^ now)[:20])),
        )
