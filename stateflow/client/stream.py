"""``StreamClient``: rows straight into an operator, with latency in milliseconds and without Spark."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

import pyarrow as pa

from stateflow.client.delivery import Deliver, Delivery, Look, Open, Step, Steps, perform
from stateflow.client.everywhere import look, open_source
from stateflow.client.given import number_given, rows_given, source_given
from stateflow.client.history import History
from stateflow.client.sorting import by_partition
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import InvalidArgument, brief
from stateflow.router import Router
from stateflow.rpc.rows import BatchRows
from stateflow.runtime.ddl import schema_of
from stateflow.runtime.layout import Session
from stateflow.runtime.output import OutputReader
from stateflow.runtime.timers import to_us
from stateflow.settings import RouterSettings
from stateflow.types import check_name

log = logging.getLogger(__name__)
T = TypeVar("T")


@brief
class StreamClient:
    """Sends batches of rows under one source name, and returns the operator's output rows.

    Thread-safe: one batch is under way at a time, in the order in which threads get hold of the client.

    Batches are numbered 0, 1, 2, …. A number that was sent before changes nothing and returns the stored outputs; with
    other rows it is refused (BatchChanged).

    A source belongs to its newest client. A new client takes the source over: from then on every partition refuses
    older ones (SourceTaken). The new client continues behind the newest number that any partition contains
    (:attr:`position`). If its predecessor may have died in the middle of a batch, send that batch once more with
    ``sequence=client.position``: partitions that contain it skip it.

    A failed batch may have been applied to some partitions. Sent again with the same rows it keeps its number, and
    those partitions skip it. Other rows are another batch and get the next number; :meth:`send` says which batch goes
    first. To send the batch with corrected rows, pass its number.

    A partition may lose batches that it had acknowledged, when its owner died and an older checkpoint was restored. The
    client notices, asks all partitions what they contain, and sends them again what they lack, from the batches it
    keeps (``STATEFLOW_ROUTER_REWIND_BUFFER_BYTES``). For batches that it no longer keeps, or that a predecessor sent,
    it raises PositionGap: send every batch from the named one on again, in order, with ``rewind=True``. Their outputs
    were given the first time.

    Args:
        schema: Spark DDL or Arrow schema of the rows; None: types are inferred, batch by batch. Either way a value is
            taken exactly as it is, or refused (InvalidArgument). A column that a row lacks is null, and one that the
            schema does not name is refused.
        acknowledged: the newest batch that, as the application knows, was acknowledged to a predecessor; or a function
            that looks it up, called when this client has the source, as a predecessor may get acknowledgements until
            then. Partitions know of each other's losses; but if all that knew of a batch lost it, only the application
            can tell.
        site: site that the rows come from, so that ``autopilot`` may bring their state there.
        addresses: replicas' advertised addresses → addresses as seen from here, behind NAT or a tunnel.

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
        """Sends a batch, and returns the output rows when every partition concerned has committed.

        The rows are grouped by partition, in order per key.

        Args:
            sequence: the batch's number; None: the next one.
            rewind: an older batch, ``sequence``, is sent again: partitions that contain it skip it, and give no output.

        Raises KeyColumnMissing, NullKey, OperatorFailed, PositionGap, …. A partition that failed has applied nothing.
        The same call can be made again, also after other batches: rows are not applied twice.

        If it is unknown how far a batch came (Unavailable, Ctrl-C), the next call, from any thread, finishes it first.
        If that is not possible yet, that call fails for the same reason (``unfinished_batch``), and its own rows are
        not sent. The failed call, made again, returns the outputs, and applies nothing. A batch that is refused for its
        content (OperatorFailed, EncodeError, …) is not waited for. If its rows are sent again after other batches, they
        are a new batch, provided that no partition contains any of them. Otherwise partitions that have newer rows
        raise StaleBatch, and the caller has to send what the state lacks. Up to 1,000 batches later, equal rows are
        taken for the batch that failed. With ``sequence`` nothing is waited for: that batch goes first, and failed rows
        are applied once more if they are sent under another number.
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
        """Promises every partition that no older rows follow from this source; returns what timers produced.

        Args:
            watermark: an aware datetime, or microseconds since 1970. A watermark older than the last one changes
                nothing.
            sequence: as with :meth:`send`; this is a batch like others.
            rewind: as with :meth:`send`.
        """
        if sequence is not None:
            number_given(sequence)
        everywhere = BatchRows.visit(range(self._router.spec.partitions))
        steps = self._delivery.deliver(everywhere, sequence, rewind, to_us(watermark), self._outputs)
        with self._router.span(self.source), self._lock:
            return self._run(steps)

    def verify(self) -> None:
        """Asks every partition whether it contains what it acknowledged, and sends again what it lost.

        A partition that lost something also reports it when the next rows arrive; this asks without rows. Raises
        SourceTaken when a newer client has the source, PositionGap when lost batches are no longer kept.
        """
        with self._lock:
            self._run(self._delivery.verify())

    def accept_loss(self) -> None:
        """Gives up the batches that partitions lost and no client can send again."""
        with self._lock:
            oldest = self._run(self._delivery.accept_loss())
        if oldest is not None:
            log.warning("source %s: lost batches given up, from batch %d on", self.source, oldest)

    def close(self) -> None:
        """Drops the rows that are kept for a loss. Waits for a batch under way; later ones are refused.

        The source stays this client's until another client takes it.
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
            case Deliver(batch, rows, after):
                return self._router.send(batch, rows, after)

    def _outputs(self, outputs: Mapping[int, bytes]) -> list[dict[str, Any]]:
        rows, self._thread.side_outputs = self._output.rows(outputs[partition] for partition in sorted(outputs))
        return rows
