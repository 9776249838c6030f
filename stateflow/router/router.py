"""The router's I/O around :class:`~stateflow.router.session.BatchSession`: what it wants sent goes to the replicas'
streams, and answers are waited for by the thread that delivers the batch."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator, Mapping
from dataclasses import replace

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import StateflowError
from stateflow.router.session import BatchSession, Delivery, Refresh, RoutingTable, Send, Wait, table_of
from stateflow.rpc.batches import PASSED, Answers
from stateflow.rpc.clients import ControllerClient, ReplicaClient
from stateflow.rpc.rows import BatchRows
from stateflow.runtime.positions import Batch
from stateflow.settings import ClientSettings, RouterSettings
from stateflow.types import OperatorSpec

log = logging.getLogger(__name__)
READ_ATTEMPTS = 20
#: a batch that waits for an owner says so this often
SAY_EVERY_S = 5.0
#: who answers what
_Arrived = queue.SimpleQueue[tuple[str, Answers]]


class Router:
    """Sends batches of one operator. Thread-safe. Raises OperatorNotDeployed or Unavailable when made.

    A controller that is not there, or does not lead, is waited for while this is made, and not later: owners go on
    without it, and their answers are not to wait.

    Args:
        controller: its address.
        operator: name of a deployed operator.
    """

    def __init__(
        self,
        controller: str,
        operator: str,
        settings: RouterSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._controller = ControllerClient(controller)
        self.settings = settings or RouterSettings()
        self.clock = clock
        self.operator = operator
        self.spec, self.table = self._ask(
            ControllerClient(controller, connect_timeout_s=ClientSettings().connect_timeout_s)
        )

    def _ask(self, controller: ControllerClient) -> tuple[OperatorSpec, RoutingTable]:
        found = controller.deployment(self.operator)
        return found.spec, table_of(self.operator, found.version, found.owners, found.epochs, found.why_unserved())

    def send(self, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None = None) -> dict[int, bytes]:
        """Apply a batch everywhere it belongs, exactly once; returns when every partition has committed.

        Args:
            rows: of every partition that is to be visited.
            after: partition → newest batch of this source that it acknowledged, as far as it is known.

        Returns partition → Arrow record batch message of outputs, ``b""`` for none. Raises what a replica refused
        the batch with, or Unavailable after ``unavailable_timeout_s``.
        """
        return self.deliver(batch, rows, after).outputs

    def deliver(self, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None = None) -> Delivery:
        """:meth:`send`, and what it took of replicas."""
        settings = self.settings
        session = BatchSession(
            self.table,
            rows,
            settings.unavailable_timeout_s,
            settings.backoff_initial_s,
            settings.backoff_max_s,
        )
        arrived: _Arrived = queue.SimpleQueue()
        said_at = self.clock.monotonic()
        while True:
            wait: float | None = None
            for instruction in session.poll(self.clock.monotonic()):
                match instruction:
                    case Send():
                        self._send(instruction, batch, rows, after, arrived)
                    case Refresh():
                        self._refresh(session)
                        wait = 0.0
                    case Wait(seconds):
                        wait = max(0.0, seconds)
            if session.done:
                return session.delivery()
            said_at = self._say_what_it_waits_for(session, batch, said_at)
            try:
                self._hear(session, *arrived.get(timeout=settings.stall_s if wait is None else wait))
            except queue.Empty:
                self._look_who_is_silent(session)
                if wait is None:  # an owner that hangs, or was stopped, may have been replaced
                    self._refresh(session)
                    session.reroute(self.clock.monotonic())
            while not arrived.empty():
                self._hear(session, *arrived.get())

    def _hear(self, session: BatchSession, address: str, answers: Answers) -> None:
        now = self.clock.monotonic()
        session.passed([partition for partition, outcome in answers if outcome is PASSED], address)
        for partition, outcome in answers:
            if outcome is PASSED or not session.awaits(partition, address):
                continue
            if isinstance(outcome, StateflowError):
                session.refused(partition, outcome, now)
            else:
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
                "batch %s of %s waits for %d partitions of %s, for %.0f s of at most %.0f s: %s of partition %d: %s",
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
        """Take over what the controller says. Raises Unavailable."""
        self.table.merge(self._ask(self._controller)[1])

    def _refresh(self, session: BatchSession) -> None:
        try:
            session.refreshed(self._ask(self._controller)[1])
        except StateflowError as error:
            session.not_refreshed(error)

    def _send(
        self, send: Send, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None, arrived: _Arrived
    ) -> None:
        address, chunk_bytes = send.address, self.settings.chunk_bytes

        def tell(answers: Answers) -> None:
            arrived.put((address, answers))

        replica = ReplicaClient(address)
        if self.settings.site and not batch.site:
            batch = replace(batch, site=self.settings.site)
        replica.apply(self.operator, batch, rows, send.parts, chunk_bytes, after, tell)


def backoff(attempts: int = READ_ATTEMPTS, initial_s: float = 0.01, longest_s: float = 0.5) -> Iterator[float | None]:
    """How long to wait after each attempt to read something that is on the move; None after the last."""
    for attempt in range(attempts - 1):
        yield min(longest_s, initial_s * 2**attempt)
    yield None
