"""Rows straight into an operator, millisecond latency, no Spark."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from time import sleep
from typing import Any, TypeVar

import pyarrow as pa

from stateflow.client.delivery import Deliver, Delivery, Look, Open, Step, Steps, perform
from stateflow.client.given import number_given, rows_given, source_given
from stateflow.client.history import History
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import (
    InvalidArgument,
    KeyColumnMissing,
    LeaseLost,
    NotOwner,
    StandbyMissing,
    Unavailable,
    brief,
)
from stateflow.partitioner import partition_of
from stateflow.router import Router, backoff
from stateflow.rpc.clients import ReplicaClient
from stateflow.rpc.rows import BatchRows
from stateflow.runtime.ddl import parse_ddl
from stateflow.runtime.layout import Position, Session
from stateflow.runtime.output import OutputReader
from stateflow.runtime.timers import to_us
from stateflow.settings import RouterSettings
from stateflow.types import check_name

log = logging.getLogger(__name__)
T = TypeVar("T")


def positions(router: Router, source: str) -> dict[int, int]:
    """Partition → the last batch of ``source`` it contains; those that have seen none are left out."""
    return {partition: position.batch for partition, position in _positions(router, source).items()}


def _positions(router: Router, source: str, session: Session | None = None) -> dict[int, Position]:
    """Of all partitions. With a session they refuse older clients of the source from now on; raises SourceTaken."""
    found: dict[int, Position] = {}
    by_address: dict[str, list[int]] = {}
    for partition, route in enumerate(router.table.routes):
        by_address.setdefault(route.address, []).append(partition)
    for partitions in by_address.values():
        try:
            found |= _positions_of(router, source, partitions, session)
        except (LeaseLost, NotOwner, StandbyMissing, Unavailable):  # some of them are moving, or their owner was away
            for partition in partitions:
                found |= _positions_of_moving(router, source, partition, session)
    return found


def _positions_of(
    router: Router, source: str, partitions: list[int], session: Session | None = None
) -> dict[int, Position]:
    """Of partitions of one owner. Raises NotOwner when one of them is not with it, LeaseLost when it was away."""
    replica = ReplicaClient(router.table.routes[partitions[0]].address)
    if session is None:
        return replica.positions(router.operator, source, partitions)
    return replica.open_source(router.operator, source, partitions, session)


def _positions_of_moving(router: Router, source: str, partition: int, session: Session | None) -> dict[int, Position]:
    for pause in backoff():
        try:
            return _positions_of(router, source, [partition], session)
        except (LeaseLost, NotOwner, StandbyMissing, Unavailable):
            if pause is None:
                if (why := router.table.unserved.get(partition)) is not None:
                    raise why from None
                raise
            sleep(pause)
            with suppress(Unavailable):  # go on with what is known
                router.refresh()
    raise AssertionError


@brief
class StreamClient:
    """Sends batches of rows under one source name and returns the operator's output rows. Safe for threads: one batch
    is under way at a time, in the order in which threads get hold of the client.

    Batches are numbered 0, 1, 2, …; a number that was sent before changes nothing and gives the stored outputs, and
    with other rows it is refused (BatchChanged).

    A source belongs to its newest client. Making one takes the source over: every partition refuses older ones from
    then on (SourceTaken). The new client continues behind the newest number any partition contains (:attr:`position`).
    When its predecessor may have died in the middle of a batch, send that batch once more with
    ``sequence=client.position``: partitions that have it skip it.

    A batch that failed may have been applied to some partitions. Sent again with the same rows it keeps its number,
    and they skip it; other rows are another batch and get the next number, see :meth:`send` for what comes first. To
    send it mended, pass its number.

    A partition may lose batches it had acknowledged: its owner died and an older checkpoint was restored. The client
    notices, asks all partitions what they have, and sends them again what they lack, out of the batches it keeps
    (``STATEFLOW_ROUTER_REWIND_BUFFER_BYTES``). What it keeps no longer, or a predecessor sent, PositionGap asks for:
    send every batch from the one it names on again, in order, with ``rewind=True``. Outputs were given the first time.

    Args:
        schema: Spark DDL or Arrow schema of the rows; without it the types are inferred, batch by batch.
        acknowledged: the newest batch the application knows was acknowledged to a predecessor, or a function that
            looks it up, called when the source is this client's: until then a predecessor may be told of more.
            Partitions tell each other's losses; but where all that knew of a batch lost it, only the application can
            tell.
        site: where the rows come from, so that ``autopilot`` may bring their state there.
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
    ) -> None:
        source_given(source)
        if site:
            check_name("site", site)
        if acknowledged is not None and not callable(acknowledged):
            number_given(acknowledged, "acknowledged")
        settings = settings or RouterSettings()
        if site:
            settings = settings.model_copy(update={"site": site})
        self._router = Router(controller, operator, settings)
        self.source = source
        self._schema = parse_ddl(schema) if isinstance(schema, str) else schema
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
        """The newest number that was used, -1 for none."""
        return self._delivery.history.position

    @property
    def side_outputs(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of the side outputs of this thread's last send, by tag."""
        found: dict[str, list[dict[str, Any]]] = getattr(self._thread, "side_outputs", {})
        return found

    def send(
        self, rows: Iterable[Mapping[str, Any]], *, sequence: int | None = None, rewind: bool = False
    ) -> list[dict[str, Any]]:
        """Returns the output rows when every partition concerned has committed; grouped by partition, in order per key.

        Args:
            rewind: an older batch, ``sequence``, is sent again: partitions that contain it skip it, and give no output.

        Raises KeyColumnMissing, NullKey, OperatorFailed, PositionGap, …; nothing of a partition that failed was
        applied, and the same call can be made again, also after others: rows are not applied twice.

        Where it is not known how far a batch came (Unavailable, Ctrl-C), the next call, of whatever thread, first
        finishes it, and fails as it does where that is not possible yet (``unfinished_batch``); its own rows are not
        sent then. The failed call, made again, returns the outputs, and applies nothing. A batch that is refused for
        what it is (OperatorFailed, EncodeError, …) is not waited for. Its rows sent again, after others, are a new
        batch where no partition contains any of them; else StaleBatch is raised by partitions that have newer rows,
        and what the state lacks is the caller's to send. Equal rows are taken for the batch that failed up to 1,000
        batches later. With ``sequence`` nothing is waited for: that batch goes
        first, and rows that failed are applied once more when they are sent under another number.
        """
        if sequence is not None:
            number_given(sequence)
        rows = rows_given(rows)
        batch = self._sorted(rows) if rows else BatchRows.visit([])
        with self._lock:
            return self._run(self._delivery.deliver(batch, sequence, rewind, None, self._outputs))

    def advance_watermark(
        self, watermark: datetime | int, *, sequence: int | None = None, rewind: bool = False
    ) -> list[dict[str, Any]]:
        """Promise that no older rows follow from this source, to every partition; returns what timers produced.

        Args:
            watermark: an aware datetime, or microseconds since 1970. One that goes back changes nothing.
            rewind: as with :meth:`send`; this is a batch like others.
        """
        if sequence is not None:
            number_given(sequence)
        everywhere = BatchRows.visit(range(self._router.spec.partitions))
        steps = self._delivery.deliver(everywhere, sequence, rewind, to_us(watermark), self._outputs)
        with self._lock:
            return self._run(steps)

    def verify(self) -> None:
        """Ask every partition whether it contains what it acknowledged, and send again what it lost. Raises SourceTaken
        when a newer client has the source.

        A partition that lost something says so when the next rows come to it; here it is asked without any. Raises
        PositionGap when it is no longer kept.
        """
        with self._lock:
            self._run(self._delivery.verify())

    def accept_loss(self) -> None:
        """Go on without the batches that partitions lost and nobody can send again."""
        with self._lock:
            oldest = self._run(self._delivery.accept_loss())
        if oldest is not None:
            log.warning("source %s goes on without what partitions lost, from batch %d on", self.source, oldest)

    def close(self) -> None:
        """Let go of the rows that are kept for a loss. A batch under way is waited for; later ones are refused. The
        source stays this client's until another comes."""
        with self._lock:
            self._closed = True
            self._delivery.let_go()

    def __enter__(self) -> StreamClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, steps: Steps[T]) -> T:
        """Under the lock."""
        if self._closed:
            raise InvalidArgument("the client is closed", remedy="make another one", source=self.source)
        return perform(steps, self._do)

    def _do(self, step: Step) -> Any:
        match step:
            case Open(session):
                return _positions(self._router, self.source, session)
            case Look():
                return _positions(self._router, self.source)
            case Deliver(batch, rows, after):
                return self._router.send(batch, rows, after)

    def _outputs(self, outputs: Mapping[int, bytes]) -> list[dict[str, Any]]:
        rows, self._thread.side_outputs = self._output.rows(outputs[partition] for partition in sorted(outputs))
        return rows

    def _sorted(self, rows: list[Mapping[str, Any]]) -> BatchRows:
        key, partitions = self._router.spec.key, self._router.spec.partitions
        for index, row in enumerate(rows):
            missing = [column for column in key if column not in row]
            if missing:
                raise self._no_key(f"row {index} has no {missing[0]!r}")
        names = self._schema.names if self._schema is not None else dict.fromkeys(name for row in rows for name in row)
        for column in key:
            if column not in names:
                raise self._no_key(f"the schema has no {column!r}")
        try:
            columns = {name: [row.get(name) for row in rows] for name in names}
            table = pa.RecordBatch.from_pydict(columns, schema=self._schema)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"the rows do not fit one schema: {str(error).splitlines()[0]}",
                remedy="give schema=, or mend the rows",
            ) from error
        # of the keys as the replica will see them: an int in a double column is a double
        keys = zip(*(table.column(column).to_pylist() for column in key), strict=True)
        numbers = [partition_of(values, partitions) for values in keys]
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        ends = {numbers[index]: end for end, index in enumerate(order, 1)}  # the last one's stays
        batch = table.take(pa.array(order))
        return BatchRows(batch.schema.serialize().to_pybytes(), batch, list(ends), list(ends.values()))

    def _no_key(self, what: str) -> KeyColumnMissing:
        return KeyColumnMissing(what, remedy="every row needs the key", operator=self._router.operator)
