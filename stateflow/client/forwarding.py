"""``ForwardingClient`` sends rows into an operator from sites that cannot always reach its partitions.

:class:`Ways` decides to which partitions rows are sent at once, for which partitions they wait, and when these are
tried again. One thread at a time sends to a partition, which is BUSY meanwhile:

====  ====  =========  ===============================================================================================
from  to    by         when
====  ====  =========  ===============================================================================================
IDLE  BUSY  come       a batch is added, and none waits before it: the caller's thread, or one of the pool, sends it
BUSY  IDLE  release    the partition accepted all batches that were stored for it
BUSY  AWAY  release    batches are left: the partition did not accept one, or one was added while it was BUSY
AWAY  BUSY  due        the partition's pause is over: a thread of the forwarder sends all that waits, in order
====  ====  =========  ===============================================================================================

In a new client, each partition that has rows in the outbox is AWAY. ``accept_loss`` makes a partition BUSY, too.
Batches that were sent together and refused are then tried one by one. A batch that was sent by itself and is refused
for its content counts as accepted, and its rows are kept as refused; so is one that causes more than FAULTS_MAX
internal errors of replicas. SourceTaken ends all forwarding.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from stateflow.client.delivery import (
    Deliver,
    Look,
    Open,
    PartitionSender,
    SameOperator,
    Step,
    Steps,
    is_hopeless,
    perform,
    send_together,
)
from stateflow.client.history import LOG_BYTES_MAX, History
from stateflow.client.outbox import Outbox, Part, Refused, directory_given
from stateflow.client.stream import asked_of_moving, by_partition, rows_given, source_given
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import InvalidArgument, OutboxForeign, SourceTaken, StateflowError, Unavailable, brief
from stateflow.operator.arrow import schema_of
from stateflow.operator.output import OutputReader
from stateflow.operator.timers import to_us
from stateflow.partition.layout import Position, Session
from stateflow.partition.positions import Batch
from stateflow.router import Router
from stateflow.rpc.apply import BatchRows
from stateflow.rpc.clients import ReplicaClient, packed_deployment, unpacked_deployment
from stateflow.settings import RouterSettings
from stateflow.types import OperatorSpec, check_name

log = logging.getLogger(__name__)
T = TypeVar("T")
AGAIN_S, AGAIN_S_MAX = 0.25, 5.0
#: default limit of the rows and outputs in an outbox, in bytes
OUTBOX_BYTES = 1 << 30
#: maximum number of partitions to which rows of one batch are sent in parallel
ABREAST = 16


# -- Partitions that rows may go to ----------------------------------------------------------------------------------


class State(Enum):
    IDLE = auto()  # no batch waits for the partition
    BUSY = auto()  # a thread sends to the partition
    AWAY = auto()  # batches wait, because the partition did not accept one


@dataclass(slots=True)
class Way:
    """State of one partition.

    Attributes:
        waiting: number of batches that are stored for the partition.
        alone_to: batches up to this number are sent one by one, because some that were sent together were refused.
        again_at: monotonic time of the next attempt.
        error: why the last attempt failed; None: it did not fail.
        faults: number of internal errors that replicas reported for the first batch that waits.
        tried: True if the partition is BUSY because of :meth:`Ways.due`.
    """

    state: State = State.IDLE
    waiting: int = 0
    alone_to: int = -1
    again_at: float = 0.0
    pause_s: float = AGAIN_S
    error: StateflowError | None = None
    faults: int = 0
    tried: bool = False

    @property
    def answers(self) -> bool:
        """True if the partition's owner answered the last attempt, with a refusal."""
        return self.error is not None and not isinstance(self.error, Unavailable)


class Ways:
    """States of all partitions of an operator. Does no I/O; callers hold a lock.

    If an owner does not answer, only one of its partitions is tried at a time, at growing intervals. When the owner
    answers, its other partitions are tried at once.

    Args:
        address_of: returns the address of a partition's owner, as known now.
    """

    def __init__(self, count: int, address_of: Callable[[int], str]) -> None:
        self._ways, self._address_of = [Way() for _ in range(count)], address_of

    def __getitem__(self, partition: int) -> Way:
        return self._ways[partition]

    def __iter__(self) -> Iterator[Way]:
        return iter(self._ways)

    @property
    def at_rest(self) -> bool:
        """True while no batch waits and no thread sends, so that new rows are sent at once."""
        return not any(way.waiting or way.state is State.BUSY for way in self._ways)

    def begin(self, partition: int, waiting: int) -> None:
        """Sets the number of batches that are stored for a partition already."""
        self[partition].waiting, self[partition].state = waiting, State.AWAY

    def come(self, partitions: Iterable[int]) -> list[int]:
        """Adds a batch for ``partitions``. Returns the partitions that get the batch at once.

        These are the partitions for which no other batch waits.
        """
        direct = []
        for partition in partitions:
            way = self[partition]
            way.waiting += 1
            if way.state is State.IDLE:
                way.state = State.BUSY
                direct.append(partition)
        return direct

    def took(self, partition: int, parts: int) -> None:
        """Subtracts batches that the partition accepted, and makes its owner's other partitions due."""
        way = self[partition]
        way.waiting, way.error, way.pause_s, way.faults = way.waiting - parts, None, AGAIN_S, 0
        for other in self._away_with(partition):
            other.again_at = 0.0

    def failed(self, partition: int, error: StateflowError, now: float) -> None:
        way = self[partition]
        way.error, way.again_at, way.faults = error, now + way.pause_s, way.faults + (type(error) is StateflowError)
        way.pause_s = min(AGAIN_S_MAX, 2 * way.pause_s)
        for other in self._away_with(partition) if isinstance(error, Unavailable) else ():
            other.again_at = way.again_at

    def apart(self, partition: int, number: int) -> None:
        """Makes batches up to ``number``, which were sent together, go one by one from now on."""
        way = self[partition]
        way.alone_to, way.error, way.faults = number, None, 0

    def release(self, partition: int) -> None:
        """Ends sending to a partition."""
        way = self[partition]
        way.state, way.tried = (State.AWAY if way.waiting else State.IDLE), False

    def due(self, now: float) -> list[int]:
        """Returns the partitions to try now, and makes them BUSY."""
        owners, due = {self._address_of(p) for p, way in enumerate(self._ways) if way.tried and not way.answers}, []
        for partition, way in enumerate(self._ways):
            if way.state is not State.AWAY or way.again_at > now:
                continue
            if not way.answers:
                address = self._address_of(partition)
                if address in owners:
                    continue
                owners.add(address)
            way.state, way.tried = State.BUSY, True
            due.append(partition)
        return due

    def pause_s(self, now: float) -> float | None:
        """Returns the seconds until a partition may be due; None: no partition will be due by time alone."""
        at = [way.again_at for way in self._ways if way.state is State.AWAY]
        return max(0.01, min(at) - now) if at else None

    def at_once(self) -> None:
        """Makes all partitions due now, without waiting for the end of their pauses, except after internal errors."""
        for way in self._ways:
            way.again_at = way.again_at if way.faults else 0.0

    def _away_with(self, partition: int) -> list[Way]:
        """Returns the partitions that are AWAY and have the same owner as ``partition``.

        Partitions at which the owner refused the last attempt are left out.
        """
        address = self._address_of(partition)
        own = (way for other, way in enumerate(self._ways) if self._address_of(other) == address)
        return [way for way in own if way.state is State.AWAY and not way.answers]


# -- The client ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """Content of an outbox.

    Attributes:
        parts: partition → number of batches that it has not accepted yet.
        bytes: size of all stored data, including outputs and refused rows that the caller has not retrieved yet.
        errors: partition → why the last attempt to send to it failed.

    Example: ``forwarding.waiting().bytes``
    """

    parts: Mapping[int, int]
    bytes: int
    errors: Mapping[int, StateflowError]

    def __bool__(self) -> bool:
        return bool(self.parts)


@dataclass(slots=True)
class _Sent:
    """Results of a batch so far. ``given_up``: the caller gets an error instead of the outputs."""

    outputs: dict[int, bytes] = field(default_factory=dict)
    refused: list[StateflowError] = field(default_factory=list)
    given_up: bool = False


@brief
class ForwardingClient:
    """A :class:`~stateflow.client.stream.StreamClient` for sites that are cut off now and then.

    Rows are written to disk before they are sent, and stay there while their partition cannot be reached. Each row is
    applied exactly once, and a partition's rows in the order in which they were sent, even if the client, a replica or
    a link fails in between. Partitions that answer do not wait for others. Thread-safe.

    A new client with the same ``outbox`` continues with the stored rows; it can start while no controller or owner
    answers. As with any other client, a source belongs to its newest client.

    Args:
        outbox: a directory that only this client uses; created if missing.
        outbox_bytes: maximum number of bytes that may be stored; a batch that would exceed it raises OutboxFull, and
            nothing of it is stored.
        patience_s: seconds after which an owner that has not answered counts as unreachable.
        schema, settings, site, addresses: as with StreamClient.

    Raises OutboxForeign, OutboxDamaged, DataDirLocked if another client uses the outbox, OperatorNotDeployed, and
    Unavailable if no controller answers, and none has ever answered a client of this outbox.

    Example: ``cluster.forwarding("Count", "gateway-7", outbox="outbox").send([{"k": "a"}])``
    """

    def __init__(
        self,
        controller: str,
        operator: str,
        source: str,
        outbox: str | Path,
        *,
        outbox_bytes: int = OUTBOX_BYTES,
        patience_s: float = 1.0,
        schema: str | pa.Schema | None = None,
        settings: RouterSettings | None = None,
        site: str = "",
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        self.source = source_given(source)
        if site:
            check_name("site", site)
        if outbox_bytes <= 0 or not patience_s > 0:
            raise InvalidArgument(
                f"outbox_bytes={outbox_bytes!r} and patience_s={patience_s!r} are not both positive",
                remedy="pass positive numbers",
            )
        settings = settings or RouterSettings()
        own = {"unavailable_timeout_s": patience_s, "stall_s": min(settings.stall_s, patience_s)}
        settings = settings.model_copy(update=own | ({"site": site} if site else {}))
        self._patience_s = patience_s
        self._schema = None if schema is None else schema_of(schema)
        self._outbox = Outbox(directory_given(outbox), operator, source, outbox_bytes)
        try:
            self._start(controller, operator, settings, addresses)
        except BaseException:
            self._outbox.close()
            raise

    def _start(
        self, controller: str, operator: str, settings: RouterSettings, addresses: Mapping[str, str] | None
    ) -> None:
        kept = self._outbox.deployment
        known = None if kept is None else unpacked_deployment(kept)
        self._router = Router(
            controller, operator, settings, known=known, silence_s=self._patience_s, addresses=addresses
        )
        spec = self._router.spec
        if known is not None and (differs := known.spec.unlike(spec)):
            what = f"another {' and another '.join(OperatorSpec.AGREED[name] for name in differs)} than"
            if "partitions" in differs:
                what = f"{spec.partitions} partitions, but had {known.spec.partitions}"
            raise OutboxForeign(
                f"{operator} has {what} when the outbox was created",
                remedy="move the outbox aside, and resend from the application all rows that were not forwarded",
                outbox=self._outbox.directory,
            )
        self._session = Session(SYSTEM_CLOCK.now_us(), uuid.uuid4().hex[:16])
        self._outbox.begin(self._session.id, packed_deployment(self._router.deployment))
        self._mine = self._outbox.sessions()
        self._before = self._outbox.newest
        self._output = OutputReader.of(spec.output_schema, spec.side_schemas)
        self._thread = threading.local()
        self._senders: dict[int, PartitionSender] = {}
        self._ways = Ways(spec.partitions, lambda partition: self._router.table.routes[partition].address)
        for partition, count in self._outbox.parts().items():
            self._ways.begin(partition, count)
        self._sending, self._changed = threading.Lock(), threading.Condition()
        self._delivered: set[tuple[int, int]] = set()  # (partition, number): delivered, but still in the outbox
        self._taken: dict[str, int] = {}  # table → last row that was returned to the caller
        self._fatal: StateflowError | None = None
        self._closed = False
        abreast = min(ABREAST, spec.partitions)
        self._pool, self._later = ThreadPoolExecutor(abreast, "sending"), ThreadPoolExecutor(abreast, "forwarding")
        self._forwarder = threading.Thread(target=self._forward_all, name="forwarder", daemon=True)
        self._forwarder.start()

    # -- what callers do ----------------------------------------------------------------------------------

    def send(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Sends a batch, and returns when every row is applied or stored.

        Returns the output rows of partitions that have answered; :meth:`forwarded` later returns those of the others.
        :attr:`side_outputs` has the rows of side outputs.

        Raises KeyColumnMissing, NullKey, …, OutboxFull, DiskFull; nothing is sent or stored then. If an operator
        refuses rows, raises its error (OperatorFailed, EncodeError, …): these rows are not applied, and :meth:`refused`
        returns them; all other rows of the batch are applied or stored, and :meth:`forwarded` returns their output.
        Raises SourceTaken if another client has taken the source over; stored rows stay in the outbox.
        """
        return self._sent(by_partition(self._router.spec, self._schema, rows_given(rows)), None)

    def advance_watermark(self, watermark: datetime | int) -> list[dict[str, Any]]:
        """Promises every partition that no older rows follow from this source.

        Returns the output rows of timers at partitions that have answered, as with :meth:`send`.

        Args:
            watermark: an aware datetime, or microseconds since 1970.
        """
        return self._sent(BatchRows.visit(range(self._router.spec.partitions)), to_us(watermark))

    def forwarded(self) -> list[dict[str, Any]]:
        """Returns the output rows of batches forwarded since the last call, in order for each key.

        :attr:`side_outputs` has their rows of side outputs. The rows are deleted from the outbox at the next call, at
        the next batch, or by ``close``. If the client dies before that, its successor returns them again.
        """
        return self._take("output", self._outbox.outputs, self._rows)

    @property
    def side_outputs(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of the side outputs of this thread's last send, ``advance_watermark`` or ``forwarded``, by tag."""
        found: dict[str, list[dict[str, Any]]] = getattr(self._thread, "side_outputs", {})
        return found

    def refused(self) -> list[Refused]:
        """Returns the rows that the operator refused since the last call, with the reasons.

        The rows are deleted from the outbox as with :meth:`forwarded`.
        """
        return self._take("refused", self._outbox.refusals, list)

    def waiting(self) -> Waiting:
        """Returns the content of the outbox."""
        with self._changed:
            parts = {p: way.waiting for p, way in enumerate(self._ways) if way.waiting}
            errors = {p: error for p in parts if (error := self._ways[p].error) is not None}
            return Waiting(parts, self._outbox.size, errors)

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until all stored rows have been forwarded.

        If rows are left after ``timeout_s`` (None: no limit), raises the error that prevents their forwarding.
        """
        with self._changed:
            self._check_open()
            self._ways.at_once()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or self._ways.at_rest, timeout_s)
            self._check_open()
            if left := [way for way in self._ways if way.waiting]:
                raise next((way.error for way in left if way.error is not None), None) or Unavailable(
                    f"rows for {len(left)} partitions are not forwarded yet",
                    remedy="retry later; waiting() returns what is left",
                )

    def accept_loss(self) -> None:
        """Gives up the batches that partitions lost and that no client can send again."""
        for partition in range(self._router.spec.partitions):
            self._claim(partition)
            try:
                sender = self._sender(partition)
                self._run(partition, sender.accept_loss())
                self._outbox.base(partition, sender.base)
                self._before = self._outbox.newest  # the next sender must count what this client has sent so far
                del self._senders[partition]
            finally:
                self._release(partition)

    def close(self) -> None:
        """Ends forwarding. The stored rows stay on disk for the next client of this outbox."""
        with self._sending:
            with self._changed:
                if self._closed:
                    return
                self._closed = True
                self._changed.notify_all()
            self._forwarder.join()
            self._pool.shutdown()
            self._later.shutdown()
            try:
                self._outbox.delivered(self._delivered)
                for table, up_to in self._taken.items():
                    self._outbox.taken(table, up_to)
            finally:
                self._outbox.close()

    def __enter__(self) -> ForwardingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one batch ----------------------------------------------------------------------------------------

    def _sent(self, batch: BatchRows, watermark_us: int | None) -> list[dict[str, Any]]:
        with self._router.span(self.source), self._sending:
            self._check_open()
            sent, number = _Sent(), self._outbox.newest + 1
            try:
                if batch.partitions:
                    direct = self._logged(number, batch, watermark_us)
                    alone = self._sent_together(direct, batch, sent) if len(direct) > 1 else direct
                    if len(alone) > 1:
                        self._send_abreast(alone, sent)
                    elif alone:
                        self._send_at_once(alone[0], sent)
                self._check_open()
                if sent.refused:
                    raise sent.refused[0]
                return self._rows(sent.outputs[partition] for partition in sorted(sent.outputs))
            except BaseException:
                self._give_up(sent, number)
                raise

    def _rows(self, outputs: Iterable[bytes]) -> list[dict[str, Any]]:
        rows, self._thread.side_outputs = self._output.rows(outputs)
        return rows

    def _give_up(self, sent: _Sent, number: int) -> None:
        """Stores the outputs of partitions that have applied a batch whose caller gets an error."""
        with self._changed:
            sent.given_up = True
        for partition, output in sorted(sent.outputs.items()):
            self._outbox.forwarded(partition, number, output)
            with self._changed:
                self._delivered.discard((partition, number))

    def _logged(self, number: int, batch: BatchRows, watermark_us: int | None) -> list[Part]:
        """Stores a batch. Returns the parts to send at once, because no batch waits before them."""
        with self._changed:
            direct = self._ways.come(batch.partitions)
            delivered = set(self._delivered)
        try:
            self._outbox.log(number, batch, direct, watermark_us, delivered, self._taken)
            self._taken.clear()
            with self._changed:
                self._delivered -= delivered
            return [Part(p, number, batch.only([p]), watermark_us, attempted=True) for p in direct]
        except BaseException:
            with self._changed:
                if self._outbox.newest >= number:  # Ctrl-C came after the commit: the rows are stored
                    self._taken.clear()
                    self._delivered -= delivered
                else:
                    for partition in batch.partitions:
                        self._ways[partition].waiting -= 1
            for partition in direct:
                self._release(partition)
            raise

    def _sent_together(self, direct: list[Part], batch: BatchRows, sent: _Sent) -> list[Part]:
        """Sends parts as one message. Returns those without a result, which the caller sends one by one."""

        def deliver(of: Batch, partitions: Collection[int], after: Mapping[int, int]) -> Mapping[int, bytes]:
            return self._router.send(of, batch.only(partitions), after)

        try:
            senders = {part.partition: self._sender(part.partition) for part in direct}
            opened = [part for part in direct if senders[part.partition].is_open]
            steps = {part.partition: senders[part.partition].send(part) for part in opened}
            outputs = send_together(steps, deliver) if steps else {}
        except BaseException:  # Ctrl-C, or an outbox that cannot be read: the parts are stored
            for part in direct:
                self._release(part.partition)
            raise
        for part in direct:
            if part.partition in outputs:
                self._answered(part, outputs[part.partition], sent)
                self._release(part.partition)
        return [part for part in direct if part.partition not in outputs]

    def _answered(self, part: Part, output: bytes, sent: _Sent) -> None:
        with self._changed:
            if not (given_up := sent.given_up):
                sent.outputs[part.partition] = output
                self._delivered.add((part.partition, part.number))
        if given_up:
            self._outbox.forwarded(part.partition, part.number, output)
        self._took(part)

    def _send_abreast(self, parts: list[Part], sent: _Sent) -> None:
        begun: list[Future[None]] = []
        try:
            for part in parts:  # each continues the current span
                begun.append(self._pool.submit(copy_context().run, self._send_at_once, part, sent))
            for future in begun:
                future.result()
        except BaseException:  # Ctrl-C: parts that no thread has taken up wait for the forwarder
            for part, future in zip_longest(parts, begun):
                if future is None or future.cancel():
                    self._release(part.partition)
            raise

    def _send_at_once(self, part: Part, sent: _Sent) -> None:
        try:
            if (output := self._tried(part, sent.refused)) is not None:
                self._answered(part, output, sent)
        finally:
            self._release(part.partition)

    def _tried(self, part: Part, refused: list[StateflowError]) -> bytes | None:
        """Sends a part, and returns its output. None: the partition refused it, or cannot be reached."""
        sender = self._sender(part.partition)
        try:
            base = sender.base
            self._run(part.partition, sender.open(part))
            if sender.base != base:
                self._outbox.base(part.partition, sender.base)
            return self._run(part.partition, sender.send(part))
        except StateflowError as error:
            if not is_hopeless(error, self._ways[part.partition].faults):
                self._is_away(part.partition, error)
            elif part.parts > 1:
                self._outbox.apart(part)
                with self._changed:
                    self._ways.apart(part.partition, part.number)
            else:
                error.located(partition=part.partition)
                self._outbox.refuse(part, error)
                refused.append(error)
                self._took(part)
            return None

    def _took(self, part: Part) -> None:
        """Counts a part as done: it is not sent again."""
        with self._changed:
            self._ways.took(part.partition, part.parts)

    def _is_away(self, partition: int, error: StateflowError) -> None:
        with self._changed:
            self._ways.failed(partition, error, self._router.clock.monotonic())
            if isinstance(error, SourceTaken):
                self._fatal = error

    # -- batches that wait --------------------------------------------------------------------------------

    def _forward_all(self) -> None:
        clock = self._router.clock
        while True:
            with self._changed:
                while not (due := [] if self._over else self._ways.due(clock.monotonic())) and not self._closed:
                    self._changed.wait(None if self._over else self._ways.pause_s(clock.monotonic()))
                if self._closed:
                    return
            for partition in due:
                self._later.submit(self._forward, partition)

    def _forward(self, partition: int) -> None:
        way = self._ways[partition]
        try:
            while not self._closed and (part := self._outbox.next(partition, way.alone_to)) is not None:
                if (key := (partition, part.number)) in self._delivered:
                    self._outbox.delivered([key])
                    continue
                if (output := self._tried(part, [])) is not None:
                    self._outbox.forwarded(*key, output)
                    self._took(part)
                elif way.error is not None:
                    return
        except Exception as error:  # noqa: BLE001 - an error of the outbox's disk, or a bug; both are reported
            what = "forwarding to partition %d of operator %s failed, retrying later: %s"
            log.error(what, partition, self._router.operator, error)
            with self._changed:
                way.error = error if isinstance(error, StateflowError) else StateflowError(repr(error))
                way.again_at = self._router.clock.monotonic() + AGAIN_S_MAX
        finally:
            self._release(partition)

    # -- a partition --------------------------------------------------------------------------------------

    def _claim(self, partition: int) -> None:
        with self._changed:
            self._check_open()
            self._changed.wait_for(lambda: self._ways[partition].state is not State.BUSY)
            self._ways[partition].state = State.BUSY

    def _release(self, partition: int) -> None:
        with self._changed:
            self._ways.release(partition)
            self._changed.notify_all()

    def _sender(self, partition: int) -> PartitionSender:
        """Returns the partition's sender. Only the thread that made the partition BUSY may call it."""
        if (sender := self._senders.get(partition)) is None:
            router, count = self._router, self._router.spec.partitions
            shares = router.settings.rewind_buffer_bytes // count, LOG_BYTES_MAX // count
            history = History(router.operator, self.source, count, *shares, only=partition)
            known = self._session, self._outbox.sender(partition), self._mine, self._before
            sender = self._senders[partition] = PartitionSender(partition, history, *known)
        return sender

    def _run(self, partition: int, steps: Steps[T]) -> T:
        return perform(steps, lambda step: self._do(partition, step))

    def _do(self, partition: int, step: Step) -> Any:
        match step:
            case Open(session):
                return self._positions(partition, session)
            case Look():
                return self._positions(partition, None)
            case SameOperator():
                return self._router.check_deployment()
            case Deliver(batch, rows, after):
                return self._router.send(batch, rows, after)

    def _positions(self, partition: int, session: Session | None) -> dict[int, Position]:
        router, source, asked = self._router, self.source, [partition]

        def ask() -> dict[int, Position]:
            replica = ReplicaClient(router.table.routes[partition].address, self._patience_s)
            if session is None:
                return replica.positions(router.operator, source, asked)
            return replica.open_source(router.operator, source, asked, session, self._patience_s)

        found = asked_of_moving(router, partition, ask)
        # entries of former clients concern all partitions, but a sender knows only its own
        return {number: position._replace(known=b"") for number, position in found.items()}

    @property
    def _over(self) -> bool:
        """True when nothing will be forwarded any more."""
        return self._closed or self._fatal is not None

    # -- parts --------------------------------------------------------------------------------------------

    def _take(self, table: str, read: Callable[[], tuple[int, list[Any]]], rows: Callable[[list[Any]], T]) -> T:
        with self._sending:
            self._check_open(fatal=False)
            if (returned := self._taken.pop(table, None)) is not None:
                try:
                    self._outbox.taken(table, returned)
                except StateflowError:
                    self._taken[table] = returned  # otherwise the next call would return them again
                    raise
            up_to, found = read()
            taken = rows(found)
            self._taken[table] = up_to  # not before: what cannot be returned must stay in the outbox
            return taken

    def _check_open(self, *, fatal: bool = True) -> None:
        if self._closed:
            raise InvalidArgument("the client is closed", remedy="create a new client", source=self.source)
        if fatal and self._fatal is not None:
            raise self._fatal
