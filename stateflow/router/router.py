"""The router's I/O: it sends batches to the owners of partitions, and asks the owners for positions.

:class:`Router` runs a :class:`~stateflow.router.session.BatchSession` for each batch. It sends to the replicas'
streams, and the thread that delivers the batch waits for the answers. :class:`Asked` asks the owners of all partitions
whether they contain a source's batch, or for the source's position. :data:`SENT` counts, by operator, the batches of
all routers of this process.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from random import Random  # noqa: TID251 - seeded by the system, unless a caller hands one in
from time import sleep

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import OperatorOutdated, PositionGap, StateflowError, Unavailable
from stateflow.metrics.figures import BATCH_BUCKETS, Histogram, Values
from stateflow.partition.layout import Position
from stateflow.partition.positions import Batch
from stateflow.router.session import (
    SILENCE_S_MIN,
    BatchSession,
    Delivery,
    Reached,
    Refresh,
    RoutingTable,
    Send,
    Wait,
    table_of,
)
from stateflow.rpc.apply import PASSED, Answers, BatchRows
from stateflow.rpc.clients import ControllerClient, ReplicaClient
from stateflow.schedule import jittered
from stateflow.settings import ClientSettings, RouterSettings
from stateflow.status import Deployment
from stateflow.tracing import Made, Tracing, tracing
from stateflow.types import ADDRESS

log = logging.getLogger(__name__)
#: seconds for which a read waits for partitions that are moving
READ_TIMEOUT_S = 8.0
#: seconds between two warnings of a batch that waits for an owner
SAY_EVERY_S = 5.0
#: (address, its answers)
_Arrived = queue.SimpleQueue[tuple[str, Answers]]

# -- Metrics ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OfOperator:
    """Metrics of one operator.

    Attributes:
        took: durations, in seconds, of batches that all their partitions acknowledged.
        rows: number of rows in these batches.
        failed: number of batches that failed.
        replayed: number of partitions that already contained their batch.
        under_way: number of batches that are being sent.
    """

    took: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))
    rows: int = 0
    failed: int = 0
    replayed: int = 0
    under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def measured(self, clock: Clock, rows: BatchRows) -> Iterator[Callable[[int], None]]:
        """Measures a batch until it is acknowledged.

        The caller calls the yielded function with the number of partitions that contained the batch already. Without
        that call, the batch counts as failed.
        """
        began, contained = clock.monotonic(), -1

        def done(replayed: int) -> None:
            nonlocal contained
            contained = replayed

        with self.lock:
            self.under_way += 1
        try:
            yield done
        finally:
            took = clock.monotonic() - began
            with self.lock:
                self.under_way -= 1
                if contained >= 0:
                    self.replayed += contained
                    self.took.observe(took)
                    self.rows += 0 if rows.rows is None else rows.rows.num_rows
                else:
                    self.failed += 1


class Sent:
    """Metrics of all routers of a process, including closed ones. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operators: dict[str, OfOperator] = {}

    def of(self, operator: str) -> OfOperator:
        with self._lock:
            return self._operators.setdefault(operator, OfOperator())

    def figures(self) -> Values:
        with self._lock:
            operators = dict(self._operators)
        return {
            "stateflow_client_rows_total": {(name,): of.rows for name, of in operators.items()},
            "stateflow_client_batch_seconds": {(name,): of.took.copy() for name, of in operators.items()},
            "stateflow_client_batches_failed_total": {(name,): of.failed for name, of in operators.items()},
            "stateflow_client_replayed_total": {(name,): of.replayed for name, of in operators.items()},
            "stateflow_client_batches_running": {(name,): of.under_way for name, of in operators.items()},
        }


#: the metrics of this process
SENT = Sent()


# -- Sending ---------------------------------------------------------------------------------------------------------


class Router:
    """Sends batches of one operator. Thread-safe. Creating one raises OperatorNotDeployed or Unavailable.

    Only the constructor waits for a controller that does not answer or does not lead. Later requests do not wait for
    it, because owners serve without the controller.

    Args:
        controller: address of the controller, or several separated by commas.
        operator: name of a deployed operator.
        known: an earlier deployment, used if no controller answers.
        silence_s: an owner that received a batch counts as having lost it after this many seconds of silence, or after
            ``unavailable_timeout_s`` if that is longer.
        addresses: replicas' advertised addresses → addresses as seen from here, if they differ. Raises InvalidArgument
            for a malformed address.
        random: source of random numbers for the pauses before retries; None: one that the system seeds.
        connect_timeout_s: seconds for which the constructor waits for a controller; None: as long as a client does.
    """

    def __init__(
        self,
        controller: str,
        operator: str,
        settings: RouterSettings | None = None,
        known: Deployment | None = None,
        silence_s: float = SILENCE_S_MIN,
        addresses: Mapping[str, str] | None = None,
        random: Random | None = None,
        connect_timeout_s: float | None = None,
    ) -> None:
        self._addresses = {ADDRESS.check(each): ADDRESS.check(here) for each, here in (addresses or {}).items()}
        self._controller = ControllerClient(controller)
        self.settings = settings or RouterSettings()
        self.clock: Clock = SYSTEM_CLOCK
        self.random = random or Random()
        self.operator = operator
        self._silence_s = silence_s
        #: tracing of this process when the router was made; None: there is none
        self.tracing = tracing()
        self._sent = SENT.of(operator)
        if connect_timeout_s is None:
            connect_timeout_s = ClientSettings().connect_timeout_s
        self.deployment = self._first(ControllerClient(controller, connect_timeout_s=connect_timeout_s), known)
        self.spec, self.table = self.deployment.spec, self._table(self.deployment)

    def _first(self, waiting: ControllerClient, known: Deployment | None) -> Deployment:
        try:
            return waiting.deployment(self.operator)
        except Unavailable as error:
            if known is None:
                raise
            log.warning("controller unavailable, using the last known owners of %s: %s", self.operator, error.what)
            return known

    def _ask(self) -> RoutingTable:
        """Asks the controller for the table. Raises its error, Unavailable, and OperatorOutdated if the operator has
        another number of partitions, another key or other outputs than when this router was made."""
        found = self._controller.deployment(self.operator)
        if differs := self.spec.unlike(found.spec):
            what = f"another {' and another '.join(self.spec.AGREED[name] for name in differs)}"
            if "partitions" in differs:
                what = f"{found.spec.partitions} partitions instead of {self.spec.partitions}"
            raise OperatorOutdated(
                f"the operator was deployed anew, with {what}", remedy="start a new client", operator=self.operator
            )
        return self._table(found)

    def _table(self, found: Deployment) -> RoutingTable:
        return table_of(self.operator, found.version, found.owners, found.epochs, found.why_unserved(), self._addresses)

    def span(self, source: str) -> AbstractContextManager[object]:
        """Returns the span of a client's call, which is the parent of all calls made inside it.

        Without tracing, the span is an empty context.
        """
        if self.tracing is None:
            return nullcontext()
        return self.tracing.span("stateflow.send", operator=self.operator, source=source)

    def send(self, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None = None) -> dict[int, bytes]:
        """Applies a batch at every partition concerned, exactly once; returns when every partition has committed.

        Args:
            rows: rows of every partition to visit.
            after: partition → newest batch of this source that it acknowledged, if known.

        Returns partition → Arrow record batch message of outputs, ``b""`` for none. Raises the error of a replica that
        refused the batch, Unavailable after ``unavailable_timeout_s``, or OperatorOutdated if a partition lacks batches
        because the operator was deployed anew with another key or other outputs.
        """
        return self.deliver(batch, rows, after).outputs

    def deliver(self, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None = None) -> Delivery:
        """Sends a batch as :meth:`send` does, and also returns the time that replicas spent on it."""
        with self._sent.measured(self.clock, rows) as done:
            if self.tracing is None:
                delivery = self._deliver(batch, rows, after, None)
            else:
                delivery = self._traced(batch, rows, after, self.tracing)
            done(delivery.replayed)
            return delivery

    def _traced(self, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None, tracing: Tracing) -> Delivery:
        said = {"operator": self.operator, "source": batch.source, "batch": batch.number}
        with tracing.span("stateflow.deliver", kind="client", partitions=len(rows), **said) as made:
            if not made.is_recorded:
                return self._deliver(batch, rows, after, None)
            delivery = self._deliver(replace(batch, traceparent=made.traceparent), rows, after, made)
            made.tell(replayed=delivery.replayed)
            return delivery

    def _deliver(self, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None, made: Made | None) -> Delivery:
        """Runs a batch session to its end.

        Args:
            made: the span around the session; None: it is not recorded.
        """
        settings = self.settings
        session = BatchSession(
            self.table,
            rows,
            settings.unavailable_timeout_s,
            self.random,
            settings.backoff_initial_s,
            settings.backoff_max_s,
            self._silence_s,
        )
        arrived: _Arrived = queue.SimpleQueue()
        said_at = self.clock.monotonic()
        while True:
            wait: float | None = None
            for instruction in session.poll(self.clock.monotonic()):
                match instruction:
                    case Send():
                        if made is not None:
                            made.happened("sent", address=instruction.address, partitions=len(instruction.parts))
                        self._send(instruction, batch, rows, after, arrived)
                    case Refresh():
                        if made is not None:
                            made.happened("asked for owners")
                        self._refresh(session)
                        wait = 0.0
                    case Wait(seconds):
                        wait = max(0.0, seconds)
            if session.done:
                try:
                    return session.delivery()
                except PositionGap:
                    # the partition may lack batches because it is that of another operator, deployed anew under this
                    # name: its client must neither resend them there nor read the outputs by the former schema
                    try:
                        self.refresh()
                    except OperatorOutdated:
                        raise
                    except StateflowError:
                        pass  # owners serve without the controller
                    raise
            said_at = self._say_what_it_waits_for(session, batch, said_at)
            try:
                self._hear(session, made, *arrived.get(timeout=settings.stall_s if wait is None else wait))
            except queue.Empty:
                self._look_who_is_silent(session)
                if wait is None:  # an owner that hangs, or was stopped, may have been replaced
                    self._refresh(session)
                    session.reroute(self.clock.monotonic())
            while not arrived.empty():
                self._hear(session, made, *arrived.get())

    def _hear(self, session: BatchSession, made: Made | None, address: str, answers: Answers) -> None:
        now = self.clock.monotonic()
        session.passed([partition for partition, outcome in answers if outcome is PASSED], address)
        for partition, outcome in answers:
            if outcome is PASSED or not session.awaits(partition, address):
                continue
            if isinstance(outcome, StateflowError):
                if made is not None:
                    made.happened("refused", address=address, partition=partition, code=outcome.code)
                session.refused(partition, outcome, now)
            else:
                session.heard(address, now)
                session.answered(partition, outcome.output, outcome.replayed, outcome.operator_us, outcome.commit_us)

    def _look_who_is_silent(self, session: BatchSession) -> None:
        for address in session.asked:
            if (heard_at := ReplicaClient(address).heard_at) is not None:
                session.heard(address, heard_at)
        for address, since in session.check_silence(self.clock.monotonic()).items():
            ReplicaClient(address).give_up(since)

    def _say_what_it_waits_for(self, session: BatchSession, batch: Batch, said_at: float) -> float:
        now = self.clock.monotonic()
        if now - said_at < SAY_EVERY_S:
            return said_at
        if (waiting := session.waits(now)) is not None:
            log.warning(
                "batch %s of source %s waits for %d partitions of %s for %.0f of at most %.0f s: %s, owner of "
                "partition %d: %s",
                batch.number,
                batch.source,
                waiting.partitions,
                self.operator,
                waiting.seconds,
                self.settings.unavailable_timeout_s,
                waiting.owner,
                waiting.partition,
                waiting.error,
            )
        return now

    def refresh(self) -> None:
        """Updates the routing table from the controller. Raises Unavailable, OperatorOutdated."""
        self.table.merge(self._ask())

    def check_deployment(self) -> None:
        """Checks that the operator was not undeployed and deployed anew since this router was made.

        Raises OperatorOutdated if it was, OperatorNotDeployed, Unavailable. A version that was recorded by a release
        without an order of versions cannot be checked.
        """
        recorded_us = self.spec.recorded_us
        if not recorded_us or any(each.recorded_us == recorded_us for each in self._controller.versions(self.operator)):
            return
        raise OperatorOutdated(
            "the operator was undeployed and deployed anew, and contains no batch of this source",
            remedy="start a new client, and resend what the new state lacks",
            operator=self.operator,
        )

    def _refresh(self, session: BatchSession) -> None:
        try:
            session.refreshed(self._ask())
        except StateflowError as error:
            session.not_refreshed(error)

    def _send(
        self, send: Send, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None, arrived: _Arrived
    ) -> None:
        address, chunk_bytes = send.address, self.settings.chunk_bytes

        def tell(answers: Answers) -> None:
            arrived.put((address, answers))

        replica = ReplicaClient(address)
        if self.settings.site and not (batch.site or batch.site_column):
            batch = replace(batch, site=self.settings.site)
        replica.apply(self.operator, batch, rows, send.parts, chunk_bytes, after, tell)


def backoff(
    timeout_s: float = READ_TIMEOUT_S, clock: Clock = SYSTEM_CLOCK, random: Random | None = None
) -> Iterator[float | None]:
    """Yields the pause, in seconds, after each attempt to reach a moving partition; None: the time is over.

    Args:
        random: source of random numbers for the pauses; None: one that the system seeds.
    """
    random = random or Random()
    over_at, pause = clock.monotonic() + timeout_s, 0.01
    while clock.monotonic() < over_at:
        yield jittered(pause, random)
        pause = min(0.5, 2 * pause)
    yield None


# -- Asking for positions --------------------------------------------------------------------------------------------


class Asked:
    """Requests to all owners for the positions of a source.

    The constructor sends the requests; :meth:`answers` waits for the answers.

    Args:
        batch: the next batch. If all partitions of an owner contain the batch before it, the owner reports only that.
        timeout_s: seconds for which a partition may have no answering owner.
    """

    def __init__(self, router: Router, source: str, batch: int, timeout_s: float) -> None:
        self._router = router
        self._source = source
        self._batch = batch
        self._timeout_s = timeout_s
        self._found: dict[int, Reached] = {}
        self._open = set(range(router.spec.partitions))
        self._pending = self._ask()

    def _ask(self) -> list[tuple[list[int], Callable[[], dict[int, Position]]]]:
        by_address: dict[str, list[int]] = {}
        for partition in sorted(self._open):
            by_address.setdefault(self._router.table.routes[partition].address, []).append(partition)
        stall_s = self._router.settings.stall_s
        pending = []
        for address, partitions in by_address.items():
            replica = ReplicaClient(address, stall_s)
            asked = replica.begin_positions(self._router.operator, self._source, partitions, self._batch)
            pending.append((partitions, asked))
        return pending

    def answers(self) -> dict[int, Reached]:
        """Returns partition → position that the source has at least reached.

        Partitions without a batch of the source are left out.

        Waits for moving partitions, and for owners that do not answer. Raises Unavailable.
        """
        clock = self._router.clock
        settings = self._router.settings
        since, pause = clock.monotonic(), settings.backoff_initial_s / 2
        while (error := self._collect()) is not None:
            waited = clock.monotonic() - since
            if waited > self._timeout_s:
                table = self._router.table
                partition = min(self._open, key=lambda each: (each not in table.unserved, each))
                raise table.no_owner(partition, waited, error)
            sleep(jittered(pause, self._router.random))
            pause = min(settings.backoff_max_s, 2 * pause)
            try:
                self._router.refresh()
            except Unavailable:
                pass  # continue with the known owners
            self._pending = self._ask()
        return self._found

    def _collect(self) -> StateflowError | None:
        """Waits for the pending answers. Returns an error if some partitions have not answered, otherwise None."""
        last: StateflowError | None = None
        for partitions, result in self._pending:
            try:
                found = result()
            except StateflowError as error:
                if not error.retryable:
                    raise
                last = error
                continue
            self._open.difference_update(partitions)
            for partition, position in found.items():
                self._found[partition] = Reached(position.batch, position.event_us, position.event_before_us)
        return last
