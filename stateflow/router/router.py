"""The router's I/O: threads that stream to replicas, around :class:`~stateflow.router.session.BatchSession`."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import StateflowError, Unavailable
from stateflow.router.session import BatchSession, Refresh, RoutingTable, Send, Wait, table_of
from stateflow.rpc.clients import ControllerClient, ReplicaClient
from stateflow.rpc.wire import unexpected
from stateflow.runtime.host import Batch
from stateflow.settings import RouterSettings
from stateflow.types import OperatorSpec

READ_ATTEMPTS = 20
_Answer = Callable[[BatchSession, float], None]


class Router:
    """Sends batches of one operator. Thread-safe. Raises OperatorNotDeployed or Unavailable when made.

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
        self._settings = settings or RouterSettings()
        self._clock = clock
        self.operator = operator
        self.spec, self.table = self._ask()

    def _ask(self) -> tuple[OperatorSpec, RoutingTable]:
        spec, version, owners, epochs = self._controller.deployment(self.operator)
        return spec, table_of(self.operator, version, owners, epochs)

    def send(self, batch: Batch, schema: bytes, rows: Mapping[int, bytes]) -> dict[int, bytes]:
        """Apply a batch everywhere it belongs, exactly once; returns when every partition has committed.

        Args:
            schema: Arrow IPC schema of the rows.
            rows: partition → Arrow record batch message, ``b""`` for a visit without rows.

        Returns partition → Arrow record batch message of outputs, ``b""`` for none. Raises what a replica refused
        the batch with, or Unavailable after ``unavailable_timeout_s``.
        """
        settings = self._settings
        session = BatchSession(
            self.table,
            rows,
            settings.unavailable_timeout_s,
            settings.backoff_initial_s,
            settings.backoff_max_s,
        )
        answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        while True:
            wait: float | None = None
            for instruction in session.poll(self._clock.monotonic()):
                match instruction:
                    case Send():
                        threading.Thread(
                            target=self._stream, args=(instruction, batch, schema, rows, answers), daemon=True
                        ).start()
                    case Refresh():
                        self._refresh(session)
                        wait = 0.0
                    case Wait(seconds):
                        wait = max(0.0, seconds)
            if session.done:
                return session.result()
            with contextlib.suppress(queue.Empty):
                answers.get(timeout=wait)(session, self._clock.monotonic())
            while not answers.empty():
                answers.get()(session, self._clock.monotonic())

    def refresh(self) -> None:
        """Take over what the controller says. Raises Unavailable."""
        self.table.merge(self._ask()[1])

    def _refresh(self, session: BatchSession) -> None:
        try:
            session.refreshed(self._ask()[1])
        except StateflowError as error:
            session.not_refreshed(error)

    def _stream(
        self,
        send: Send,
        batch: Batch,
        schema: bytes,
        rows: Mapping[int, bytes],
        answers: queue.SimpleQueue[_Answer],
    ) -> None:
        parts = [partition for partition, _ in send.parts]
        error: StateflowError
        try:
            replica = ReplicaClient(send.address)
            chunk = self._settings.chunk_bytes
            for partition, outcome, replayed in replica.apply(self.operator, batch, schema, send.parts, rows, chunk):
                answers.put(_answer(partition, outcome, replayed))
            error = Unavailable("the replica ended the stream without an answer", remedy="see its log")
        except StateflowError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - it reaches the caller through the session
            error = unexpected(caught)
        answers.put(lambda session, now: session.unreachable(send.address, parts, error, now))


def _answer(partition: int, outcome: bytes | StateflowError, replayed: bool) -> _Answer:
    if isinstance(outcome, StateflowError):
        return lambda session, now: session.refused(partition, outcome, now)
    return lambda session, now: session.answered(partition, outcome, replayed)


def backoff(attempts: int = READ_ATTEMPTS, initial_s: float = 0.01, longest_s: float = 0.5) -> Iterator[float | None]:
    """How long to wait after each attempt to read something that is on the move; None after the last."""
    for attempt in range(attempts - 1):
        yield min(longest_s, initial_s * 2**attempt)
    yield None
