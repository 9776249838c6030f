"""A forwarding client: its outbox, its errors and its end. No replica serves; tests answer what it sends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stateflow.client.delivery import FAULTS_MAX
from stateflow.client.forwarding import ForwardingClient
from stateflow.client.stream import by_partition
from stateflow.errors import (
    BadCertificate,
    DiskFull,
    InsecureRefused,
    InvalidArgument,
    OperatorFailed,
    OutboxForeign,
    SchemaMismatch,
    StateflowError,
    Unavailable,
    from_wire,
)
from stateflow.operator.operator import describe
from stateflow.operator.output import OutputWriter, join_output
from stateflow.partition.layout import Position
from stateflow.partition.positions import Batch
from stateflow.partitioner import partition_of
from stateflow.rpc.apply import BatchRows
from stateflow.rpc.clients import ControllerClient
from stateflow.state.evolution import check_schema
from stateflow.status import Deployment
from stateflow.types import OperatorSpec, ReplicaInfo
from tests.unit.operators import Count


class Alarm(Count):
    side_outputs = {"alarms": "v long"}  # noqa: RUF012


SPEC = describe(Count, 2)
LONG_S = 30.0
Made = Callable[..., ForwardingClient]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Yields a function that makes a client of the same outbox. ``spec``: the operator as it is deployed then."""
    clients: list[ForwardingClient] = []

    def make(spec: OperatorSpec = SPEC, **options: Any) -> ForwardingClient:
        # port 1 of this machine: nothing listens there
        deployment = Deployment(spec, 1, (ReplicaInfo("a", "edge", "127.0.0.1:1"),) * spec.partitions, (1,) * 2)
        monkeypatch.setattr(ControllerClient, "deployment", lambda *_: deployment)
        clients.append(ForwardingClient("127.0.0.1:1", "Count", "s", tmp_path, patience_s=0.01, **options))
        return clients[-1]

    yield make
    for each in clients:
        each.close()


def test_an_outbox_does_not_go_on_with_an_operator_of_another_key_or_other_outputs(made: Made) -> None:
    """Stored rows are sorted by the former key, and stored outputs would be read by the new schema."""
    made().close()
    with pytest.raises(OutboxForeign, match="has another output schema than when the outbox was created"):
        made(replace(SPEC, output_schema=SPEC.output_schema[:-8] + b"12345678"))
    with pytest.raises(OutboxForeign, match="has another key than when"):
        made(replace(SPEC, key=("n",)))
    made(replace(SPEC, state_schema='[{"name": "more"}]')).close()


def test_an_outbox_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="the outbox has no name"):
        ForwardingClient("127.0.0.1:1", "Count", "s", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [BadCertificate("-", remedy="-"), InsecureRefused("-", remedy="-")], ids=str)
def test_rows_that_this_process_may_not_send_now_wait(
    made: Made, monkeypatch: pytest.MonkeyPatch, error: StateflowError
) -> None:
    """A certificate that cannot be read, for example, was taken for a fault of the rows, which were put aside."""
    client = made()
    monkeypatch.setattr("stateflow.client.forwarding.ReplicaClient", raises(error))
    client.send([{"k": "a", "v": 1}])
    assert list(client.waiting().parts.values()) == [1]
    assert list(client.waiting().errors.values()) == [error]
    assert client.refused() == []


@pytest.mark.parametrize("code", ["error", "of_a_newer_release"])
def test_rows_are_put_aside_only_after_repeated_internal_errors(
    both: tuple[ForwardingClient, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """One internal error of a replica, which another attempt might not meet, was taken for a fault of the rows."""
    client, rows = both
    error = from_wire({"code": code, "what": "-", "remedy": "-", "where": {}})
    monkeypatch.setattr(client._router, "send", raises(error))
    client._outbox.log(0, by_partition(SPEC, None, rows[:1]), [], None, [])
    client._ways.begin(0, 1)
    monkeypatch.setattr(client._ways, "due", lambda _: [])  # this thread forwards
    for fault in range(FAULTS_MAX + 1):
        assert client.refused() == [], f"{fault} errors"
        client._claim(0)
        client._forward(0)
    ((refused, reason),) = client.refused()
    assert (refused, reason.code) == (rows[:1], error.code)
    assert not client.waiting()


def test_rows_wait_while_stored_states_do_not_fit_the_operator(
    both: tuple[ForwardingClient, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, rows = both
    with pytest.raises(SchemaMismatch) as mismatch:
        check_schema(
            [{"name": "n", "tag": "00", "kind": "value", "coders": ["int"]}],
            [{"name": "n", "tag": "01", "kind": "value", "coders": ["str"]}],
            "Count",
        )
    monkeypatch.setattr(client._router, "send", raises(from_wire(mismatch.value.to_wire())))
    client.send(rows[:1])
    assert client.waiting().parts == {0: 1}
    assert client.refused() == []


def test_outputs_that_could_not_be_returned_are_returned_later(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    client = made()
    client._outbox.forwarded(0, 0, b"one")
    monkeypatch.setattr(client, "_output", SimpleNamespace(rows=raises(MemoryError())))
    with pytest.raises(MemoryError):
        client.forwarded()
    monkeypatch.setattr(client, "_output", SimpleNamespace(rows=lambda outputs: (outputs, {})))
    assert client.forwarded() == [b"one"], "they were deleted"


def test_side_outputs_are_returned_as_by_a_stream_client(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client dropped them, whether their rows were applied at once or forwarded later."""
    client = made(describe(Alarm, 2))
    writer = OutputWriter(pa.schema([("v", pa.int64())]), "Alarm")
    outputs = [join_output(b"", {"alarms": writer.write([{"v": number}])}) for number in range(2)]
    monkeypatch.setattr("stateflow.client.forwarding.ReplicaClient", Replica)
    monkeypatch.setattr(client._router, "send", lambda batch, rows, after: dict.fromkeys(rows, outputs[0]))
    assert client.side_outputs == {}
    assert client.send([{"k": "a", "v": 1}]) == []
    assert client.side_outputs == {"alarms": [{"v": 0}]}
    client._outbox.forwarded(0, 7, outputs[1])
    assert client.forwarded() == []
    assert client.side_outputs == {"alarms": [{"v": 1}]}


def test_outputs_are_not_returned_again_because_the_disk_is_full(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    client = made()
    client._outbox.forwarded(0, 0, b"one")
    monkeypatch.setattr(client, "_output", SimpleNamespace(rows=lambda outputs: (outputs, {})))
    assert client.forwarded() == [b"one"]
    with monkeypatch.context() as full:
        full.setattr(client._outbox, "taken", raises(DiskFull("-", remedy="-")))
        with pytest.raises(DiskFull):
            client.forwarded()
    assert client.forwarded() == []


def test_a_client_that_cannot_delete_what_was_delivered_lets_its_outbox_go(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = made()
    monkeypatch.setattr(client._outbox, "delivered", raises(DiskFull("-", remedy="-")))
    with pytest.raises(DiskFull):
        client.close()
    made().close()


def test_rows_of_a_call_that_is_interrupted_after_it_stored_them_are_sent(made: Made) -> None:
    """Ctrl-C during the commit, which is when it mostly comes, is raised after the commit.

    The client did not know then that the rows were stored: it gave their number to the next batch, which the outbox
    refused, and sent neither.
    """
    client = made()
    client._outbox._db = Interrupted(client._outbox._db)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        client.send([{"k": "a", "v": 1}])
    (partition,) = client.waiting().parts
    client.send([{"k": "a", "v": 2}])
    assert client.waiting().parts == {partition: 2}
    assert client._outbox.newest == 1


class Replica:
    """A replica that knows no batch."""

    def __init__(self, *_: Any) -> None: ...

    def open_source(self, *_: Any) -> dict[int, Position]:
        return {}

    positions = open_source


@pytest.fixture
def both(made: Made, monkeypatch: pytest.MonkeyPatch) -> tuple[ForwardingClient, list[dict[str, Any]]]:
    """Returns a client, and a row for each of its two partitions. Outputs are read as they are."""
    monkeypatch.setattr("stateflow.client.forwarding.ReplicaClient", Replica)
    client = made()
    monkeypatch.setattr(client, "_output", SimpleNamespace(rows=lambda outputs: (list(outputs), {})))
    keys = {partition_of(key, 2): key for key in "abcdef"}
    return client, [{"k": keys[partition], "v": 1} for partition in range(2)]


@pytest.mark.parametrize("error", [OperatorFailed("-", remedy="-"), KeyboardInterrupt()], ids=repr)
def test_outputs_beside_a_refusal_are_returned_later(
    both: tuple[ForwardingClient, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    client, rows = both
    errors = [error]

    def send(batch: Batch, rows: BatchRows, after: Any) -> dict[int, bytes]:
        if 0 in rows.partitions:
            return {0: b"of 0"}
        raise errors.pop() if errors else Unavailable("-", remedy="-")

    monkeypatch.setattr(client._router, "send", send)
    with pytest.raises(type(error)):
        client.send(rows)
    assert client.forwarded() == [b"of 0"]
    assert client.forwarded() == []
    assert len(client.refused()) == isinstance(error, OperatorFailed)


def test_an_output_that_comes_after_its_call_was_interrupted_is_returned_later(
    both: tuple[ForwardingClient, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, rows = both
    begun, ended = threading.Event(), threading.Event()

    def send(batch: Batch, rows: BatchRows, after: Any) -> dict[int, bytes]:
        if 1 in rows.partitions:
            begun.set()
            assert ended.wait(LONG_S)
            return {1: b"of 1"}
        assert begun.wait(LONG_S)
        raise Unavailable("-", remedy="-") if ended.is_set() else KeyboardInterrupt

    monkeypatch.setattr(client._router, "send", send)
    with pytest.raises(KeyboardInterrupt):
        client.send(rows)
    ended.set()
    client._claim(1)  # waits until the thread that sends to the partition has ended
    client._release(1)
    assert client.forwarded() == [b"of 1"]


def test_parts_that_no_thread_has_taken_up_when_a_call_is_interrupted_are_forwarded(
    both: tuple[ForwardingClient, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions of such parts counted as busy: nothing more was sent to them, and flush() waited for ever."""

    class Pool(Executor):
        """Runs the first job, and leaves the others in its queue."""

        jobs = 0

        def submit(self, job: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
            future: Future[Any] = Future()
            self.jobs += 1
            if self.jobs == 1:
                try:
                    future.set_result(job(*args))
                except BaseException as error:  # noqa: BLE001 - the caller gets it
                    future.set_exception(error)
            return future

    client, rows = both
    interrupts: list[BaseException] = [KeyboardInterrupt()]

    def send(batch: Batch, rows: BatchRows, after: Any) -> dict[int, bytes]:
        if interrupts:
            raise interrupts.pop()
        return {partition: b"of %d" % partition for partition in rows}

    monkeypatch.setattr(client._router, "send", send)
    monkeypatch.setattr(client, "_pool", Pool())
    with pytest.raises(KeyboardInterrupt):
        client.send(rows)
    client.flush(LONG_S)
    assert sorted(client.forwarded()) == [b"of 0", b"of 1"]


class Interrupted:
    """A database whose first commit is interrupted."""

    def __init__(self, database: Any) -> None:
        self._database, self._commits = database, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def execute(self, statement: str, *values: Any) -> Any:
        done = self._database.execute(statement, *values)
        if statement == "COMMIT":
            self._commits += 1
            if self._commits == 1:
                raise KeyboardInterrupt
        return done


def raises(error: BaseException) -> Callable[..., None]:
    def call(*_: Any) -> None:
        raise error

    return call
