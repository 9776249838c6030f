"""Blocking clients: among threads, in child processes, and while a controller is not there yet."""

from __future__ import annotations

import gc
import itertools
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from stateflow.errors import NotLeading, Unavailable
from stateflow.partition.layout import Session
from stateflow.rpc import clients, controller_pb2_grpc, replica_pb2_grpc
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.clients import ControllerClient, ReplicaClient, _not_begun, on_behalf_of
from stateflow.rpc.faults import FAULT_KEY, fault_of
from stateflow.rpc.wire import NEWEST_KEY, TERM_KEY, USER_KEY
from stateflow.security.authority import Authority
from stateflow.security.plain import use_token
from stateflow.security.roles import Identity, Role

#: PySpark starts its JVM by fork and exec
SCRIPT = """
import os, signal, subprocess, threading
from stateflow.errors import StateflowError
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.clients import ControllerClient, _not_begun

def call():
    while True:
        try:
            ControllerClient("127.0.0.1:1").call("Status", cpb.StatusRequest(), 5)
        except StateflowError:
            pass

for _ in range(3):
    threading.Thread(target=call, daemon=True).start()
ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
ended = [subprocess.Popen(["true"], preexec_fn=ignore).wait(30) for _ in range(300)]
print([code for code in ended if code])
os._exit(0)
"""


@pytest.mark.thorough
def test_children_live_while_calls_are_under_way() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


FORKS = """
import os, signal
from stateflow.errors import InvalidArgument, StateflowError
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.clients import ControllerClient

def call():
    try:
        ControllerClient("127.0.0.1:1").call("Status", cpb.StatusRequest(), 5)
    except StateflowError as error:
        return error.code

def in_a_child():
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(["unavailable", "invalid_argument"].index(call()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print(in_a_child(), call(), in_a_child(), call())
os._exit(0)
"""


def test_a_child_of_a_process_with_channels_is_refused() -> None:
    """gRPC's threads do not survive a fork: such a child used to wait for ever, whatever the time limit of its call."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0", "unavailable", "1", "unavailable"]


def test_channels_of_replicas_that_are_gone_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel was kept for every address that a replica ever had. One in use is not dropped."""
    monkeypatch.setattr(clients, "_STUBS", {})
    monkeypatch.setattr(clients, "CHANNELS_MAX", 3)

    def channel(port: int) -> Any:
        return clients._stub(replica_pb2_grpc.ReplicaServiceStub, f"127.0.0.1:{port}")

    used = channel(1)
    gone = weakref.ref(channel(2))
    for port in range(3, 9):
        channel(port)
        assert channel(1) is used
    assert [address for address, *_ in clients._STUBS] == ["127.0.0.1:7", "127.0.0.1:8", "127.0.0.1:1"]
    gc.collect()
    assert gone() is None


def test_streams_of_replicas_that_are_gone_are_dropped_when_they_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_LINKS", {})
    monkeypatch.setattr(clients, "CHANNELS_MAX", 2)
    busy = clients._link("a:1")
    busy._stream = SimpleNamespace(over=False)  # type: ignore[assignment]
    for address in ("b:1", "c:1", "d:1"):
        clients._link(address)
    assert [address for address, _ in clients._LINKS] == ["a:1", "b:1", "c:1", "d:1"]
    busy._stream.over = True
    clients._link("d:1")
    clients._link("d:1")
    assert [address for address, _ in clients._LINKS] == ["c:1", "d:1"]


def reached(address: str = "127.0.0.1:1") -> tuple[Any, Any]:
    """Returns the channel and the stream of this process to an address."""
    return clients._stub(replica_pb2_grpc.ReplicaServiceStub, address), clients._link(address)


def test_tokens_that_are_used_in_turn_keep_their_channels_and_streams(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A Spark worker runs tasks of several operators, each with a token of its own. Each change of the token left an
    open stream behind, with its thread and connection."""
    monkeypatch.setattr(clients, "_STUBS", {})
    monkeypatch.setattr(clients, "_LINKS", {})
    authority = Authority.init(tmp_path / "authority", "acme")
    tokens = [
        authority.token(Identity.of(Role.DATA, "spark", (name,)), timedelta(hours=1))[0] for name in ("One", "Two")
    ]

    def used(token: str) -> tuple[Any, Any]:
        use_token(token)
        return reached()

    try:
        one, two, *again = [used(token) for token in tokens * 3]
    finally:
        use_token("")
    assert again == [one, two] * 2
    assert (one[0] is two[0], one[1] is two[1]) == (False, False)


def test_a_renewed_certificate_replaces_channel_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_STUBS", {})
    monkeypatch.setattr(clients, "_LINKS", {})
    numbers = iter([7, 7, 7, 7, 8, 8])
    monkeypatch.setattr(clients, "own_certificate", lambda: (None, next(numbers)))
    before, same, after = reached(), reached(), reached()
    assert before == same
    assert (before[0] is after[0], before[1] is after[1]) == (False, False)
    assert (len(clients._STUBS), len(clients._LINKS)) == (1, 1)


def test_a_call_that_has_begun_goes_on_when_its_channel_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, answer = threading.Event(), threading.Event()

    class Slow(replica_pb2_grpc.ReplicaServiceServicer):
        def Positions(self, request: Any, context: Any) -> rpb.PositionsReply:
            begun.set()
            answer.wait(30)
            return rpb.PositionsReply()

    monkeypatch.setattr(clients, "_STUBS", {})
    monkeypatch.setattr(clients, "CHANNELS_MAX", 1)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(Slow(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        result = ReplicaClient(f"127.0.0.1:{port}").begin_positions("Count", "s", [], 0)
        assert begun.wait(30)
        clients._stub(replica_pb2_grpc.ReplicaServiceStub, "127.0.0.1:1")
        gc.collect()
        answer.set()
        assert result() == {}
    finally:
        answer.set()
        server.stop(None).wait()


class Late(controller_pb2_grpc.ControllerServiceServicer):
    def Status(self, request: Any, context: Any) -> cpb.StatusReply:
        return cpb.StatusReply()

    def ListReconfigurations(self, request: Any, context: Any) -> Any:
        yield cpb.ReconfigurationList()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("method", ["call", "stream"])
def test_a_controller_that_is_being_started_is_waited_for(
    method: str, several: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    address = f"{listen},127.0.0.1:1" if several else listen
    server = grpc.server(futures.ThreadPoolExecutor(2))
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(Late(), server)
    asked = 0

    def later(_: float) -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            server.add_insecure_port(listen)
            server.start()

    monkeypatch.setattr(clients, "sleep", later)
    monkeypatch.setattr(clients, "TOLD_AFTER_S", 0.0)
    client = ControllerClient(address, connect_timeout_s=30)
    try:
        if method == "call":
            assert client.call("Status", cpb.StatusRequest()) == cpb.StatusReply()
        else:
            assert list(client.stream("ListReconfigurations", cpb.ListRequest())) == [cpb.ReconfigurationList()]
    finally:
        server.stop(None)
    assert asked >= 3
    assert [each.getMessage() for each in caplog.records] == [f"waiting for the controller at {address}"]


@pytest.mark.parametrize("method", ["call", "stream"])
def test_one_that_does_not_come_is_not_waited_for_for_ever(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(clients, "sleep", later)
    monkeypatch.setattr(clients.SYSTEM_CLOCK, "monotonic", lambda: now)
    client = ControllerClient("127.0.0.1:1", connect_timeout_s=5)
    with pytest.raises(Unavailable, match=r"no answer from the controller at 127.0.0.1:1: .*check that it runs"):
        client.call("Status", cpb.StatusRequest()) if method == "call" else next(
            client.stream("ListReconfigurations", cpb.ListRequest())
        )
    assert 5 <= now < 5 + 2 * clients.ASKED_AGAIN_S


class BetweenTerms(controller_pb2_grpc.ControllerServiceServicer):
    """A controller that does not lead until ``leads`` is set."""

    def __init__(self, leader: str = "") -> None:
        self.leads, self._leader = False, leader

    def _check(self, context: Any) -> None:
        if not self.leads:
            error = NotLeading("this controller does not lead", leader=self._leader or None)
            context.set_trailing_metadata(((FAULT_KEY, fault_of(error).SerializeToString()),))
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    def Undeploy(self, request: Any, context: Any) -> cpb.UndeployReply:
        self._check(context)
        return cpb.UndeployReply(partitions=4)

    def WatchReconfiguration(self, request: Any, context: Any) -> Any:
        self._check(context)
        yield cpb.Reconfiguration(id="r", operator="Op", state="COMPLETED", kind="migrate")


@contextmanager
def served(servicer: controller_pb2_grpc.ControllerServiceServicer) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


ASKED: dict[str, Callable[[ControllerClient], Any]] = {
    "call": lambda client: client.call("Undeploy", cpb.UndeployRequest()).partitions,
    "stream": lambda client: [each.id for each in client.stream("WatchReconfiguration", cpb.ReconfigurationRequest())],
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the clock by one that advances while a client waits."""
    now = [0.0]

    def later(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(clients, "sleep", later)
    monkeypatch.setattr(clients.SYSTEM_CLOCK, "monotonic", lambda: now[0])
    return now


class Broken(controller_pb2_grpc.ControllerServiceServicer):
    """A controller that ends each connection once it has the request."""

    def _end(self, context: Any) -> None:
        context.abort(grpc.StatusCode.UNAVAILABLE, "Stream removed (sendmsg: Broken pipe (32))")

    def Undeploy(self, request: Any, context: Any) -> Any:
        self._end(context)

    def WatchReconfiguration(self, request: Any, context: Any) -> Any:
        self._end(context)
        yield cpb.Reconfiguration()


def test_what_only_is_read_is_asked_of_another_one_where_the_connection_broke() -> None:
    leading = BetweenTerms()
    leading.leads = True
    with served(Broken()) as broken, served(leading) as other:
        assert ASKED["stream"](ControllerClient(f"{broken},{other}")) == ["r"]
        with pytest.raises(Unavailable, match="Broken pipe"):
            ASKED["call"](ControllerClient(f"{broken},{other}"))  # the call may have been carried out


@pytest.mark.parametrize("leader", ["", "127.0.0.1:1"])
@pytest.mark.parametrize(("asked", "answer"), [("call", 4), ("stream", ["r"])])
def test_one_that_does_not_lead_is_asked_again_whatever_it_is_asked(
    asked: str,
    answer: Any,
    leader: str,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A controller that does not lead has done nothing, and is asked again.

    This happens between two terms, and where the leader has gone.
    """
    servicer = BetweenTerms(leader)

    def later(seconds: float) -> None:
        clock[0] += seconds
        servicer.leads = clock[0] > 2

    monkeypatch.setattr(clients, "sleep", later)
    with served(servicer) as address:
        assert ASKED[asked](ControllerClient(address, connect_timeout_s=5)) == answer
    assert 2 < clock[0] < 3
    assert [each.getMessage() for each in caplog.records] == [f"waiting for the controller at {address}"]


@pytest.mark.parametrize("asked", ASKED)
def test_one_that_never_leads_says_so_after_the_time_out(asked: str, clock: list[float]) -> None:
    with served(BetweenTerms()) as address, pytest.raises(NotLeading, match="this controller does not lead"):
        ASKED[asked](ControllerClient(address, connect_timeout_s=5))
    assert 5 <= clock[0] < 5 + 2 * clients.ASKED_AGAIN_S


class Leads(controller_pb2_grpc.ControllerServiceServicer):
    """A controller that leads ``term`` and has read the ledger up to record ``newest``."""

    def __init__(self, term: int, newest: int) -> None:
        self.term, self.newest, self.asked = term, newest, 0

    def Status(self, request: Any, context: Any) -> cpb.StatusReply:
        self.asked += 1
        context.set_trailing_metadata(((TERM_KEY, str(self.term)), (NEWEST_KEY, str(self.newest))))
        return cpb.StatusReply(deploying=[cpb.Deploying(operator=f"of-term-{self.term}")])


def test_one_that_leads_no_more_and_does_not_know_it_is_not_believed(clock: list[float]) -> None:
    """A former leader that does not know its successor is not believed.

    The former leader had been stopped: a client that had heard the successor's answer used to read an older state from
    it.
    """
    late, leader = Leads(1, 5), Leads(2, 7)
    with served(late) as first, served(leader) as second:
        client = ControllerClient(f"{second},{first}", connect_timeout_s=5)

        def told() -> str:
            return str(client.call("Status", cpb.StatusRequest()).deploying[0].operator)

        assert told() == "of-term-2"
        client._asked = first
        assert told() == "of-term-2"
        assert late.asked == 1
        alone = ControllerClient(first, connect_timeout_s=5)
        assert alone.call("Status", cpb.StatusRequest()).deploying[0].operator == "of-term-1"


def test_the_time_out_begins_with_the_answer_however_long_that_took(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time-out begins with the answer, which a controller that is stopped for longer than its hold delays."""
    servicer = BetweenTerms()
    check = servicer._check

    def slowly(context: Any) -> None:
        clock[0] += 20 * (not clock[0])
        check(context)

    def later(seconds: float) -> None:
        clock[0] += seconds
        servicer.leads = clock[0] > 21

    monkeypatch.setattr(servicer, "_check", slowly)
    monkeypatch.setattr(clients, "sleep", later)
    with served(servicer) as address:
        assert ASKED["call"](ControllerClient(address, connect_timeout_s=5)) == 4


@pytest.mark.parametrize(
    ("details", "heard"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused", False),
        ("DNS resolution failed for ctl:7070: C-ares status is not ARES_SUCCESS", False),
        ("recvmsg:Connection reset by peer", True),
        ("Socket closed", True),
        ("upstream connect error or disconnect/reset before headers", True),
    ],
)
def test_a_call_whose_connection_broke_may_have_been_carried_out(details: str, heard: bool) -> None:
    """A call whose connection broke is not repeated.

    The call used to be sent again to the controller, which had come back and had carried it out.
    """
    error: Any = SimpleNamespace(code=lambda: grpc.StatusCode.UNAVAILABLE, details=lambda: details)
    assert _not_begun(Unavailable("-"), error) is not heard


class Named(controller_pb2_grpc.ControllerServiceServicer):
    """A controller that notes the user of each call."""

    def __init__(self) -> None:
        self.users: list[str | None] = []

    def _note(self, context: Any) -> None:
        self.users.append(dict(context.invocation_metadata()).get(USER_KEY))

    def Undeploy(self, request: Any, context: Any) -> cpb.UndeployReply:
        self._note(context)
        return cpb.UndeployReply()

    def WatchReconfiguration(self, request: Any, context: Any) -> Any:
        self._note(context)
        yield cpb.Reconfiguration(id="r", operator="Op", state="COMPLETED", kind="migrate")


@pytest.mark.parametrize("asked", ASKED)
def test_calls_within_the_context_name_the_user(asked: str) -> None:
    alice, named = Identity(Role.OPERATE, "alice"), Named()
    with served(named) as address:
        client = ControllerClient(address)
        with on_behalf_of(alice):
            ASKED[asked](client)
            with on_behalf_of(None):
                ASKED[asked](client)
            ASKED[asked](client)
        ASKED[asked](client)
    assert named.users == [alice.uri, None, alice.uri, None]


# -- replicas that answer what no replica answers -------------------------------------------------------------


class Endless(replica_pb2_grpc.ReplicaServiceServicer):
    """A replica whose lists have no end. ``piece``: what each message has."""

    def __init__(self, piece: bytes) -> None:
        self.piece, self.left = piece, threading.Event()

    def _for_ever(self, context: Any, message: Any) -> Iterator[Any]:
        context.add_callback(self.left.set)
        return itertools.repeat(message)

    def Scan(self, request: Any, context: Any) -> Iterator[Any]:
        return self._for_ever(context, rpb.ScanPage(records=self.piece, continues=True))

    def Outputs(self, request: Any, context: Any) -> Iterator[Any]:
        return self._for_ever(context, rpb.OutputsReply(output=self.piece, more=True))

    def Sources(self, request: Any, context: Any) -> Iterator[Any]:
        views = [rpb.SourceView(source="s")] if self.piece else []
        return self._for_ever(context, rpb.SourcesReply(sources=views))


@contextmanager
def replica(servicer: replica_pb2_grpc.ReplicaServiceServicer) -> Iterator[ReplicaClient]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield ReplicaClient(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait(30)


@pytest.mark.parametrize("piece", [b"", bytes(1000)], ids=["empty", "full"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda client: list(client.scan("Op", "n", [0])),
        lambda client: list(client.outputs("Op", "s", [0], 1)),
        lambda client: client.sources("Op", [0]),
    ],
    ids=["scan", "outputs", "sources"],
)
def test_a_list_without_end_is_left(piece: bytes, ask: Callable[[ReplicaClient], Any], monkeypatch: Any) -> None:
    """Clients used to read such a list until their memory was full, or for ever."""
    monkeypatch.setattr(clients, "JOINED_BYTES_MAX", 100_000)
    monkeypatch.setattr(clients, "LISTED_MAX", 100)
    servicer = Endless(piece)
    with replica(servicer) as client:
        with pytest.raises(Unavailable, match=r"invalid answer from 127.* does not end"):
            ask(client)
        assert servicer.left.wait(30), "the call goes on"


class Others(replica_pb2_grpc.ReplicaServiceServicer):
    """A replica that answers for partitions that it was not asked for."""

    def Positions(self, request: Any, context: Any) -> Any:
        return rpb.PositionsReply(positions={7: 1})

    OpenSource = Positions

    def Outputs(self, request: Any, context: Any) -> Iterator[Any]:
        yield rpb.OutputsReply(partition=7)

    def Sources(self, request: Any, context: Any) -> Iterator[Any]:
        yield rpb.SourcesReply(sources=[rpb.SourceView(source="s", partition=7)])

    def DropOutput(self, request: Any, context: Any) -> Any:
        return rpb.DropOutputReply(sizes={7: 1})


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.positions("Op", "s", [0]),
        lambda client: client.begin_positions("Op", "s", [0], 3)(),
        lambda client: client.open_source("Op", "s", [0], Session(1, "i")),
        lambda client: list(client.outputs("Op", "s", [0], 1)),
        lambda client: client.sources("Op", [0]),
        lambda client: client.drop_output("Op", "s", 1, [0], True),
    ],
    ids=["positions", "begin_positions", "open_source", "outputs", "sources", "drop_output"],
)
def test_a_partition_that_was_not_asked_for_is_no_answer(ask: Callable[[ReplicaClient], Any]) -> None:
    with replica(Others()) as client, pytest.raises(Unavailable, match="names partition 7, which was not asked for"):
        ask(client)
