"""The router over real streams: what one batch waits for holds up no other, and a silent stream is replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import Any

import grpc
import pytest

from stateflow.clock import ManualClock
from stateflow.errors import InvalidArgument, NotOwner, OperatorOutdated, PositionGap, Unavailable
from stateflow.operator.arrow import read_batch
from stateflow.operator.operator import describe
from stateflow.partition.positions import Batch
from stateflow.reports import OperatorVersion
from stateflow.router import Router
from stateflow.router.router import backoff
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.clients import ControllerClient
from stateflow.rpc.faults import fault_of
from stateflow.settings import RouterSettings
from stateflow.status import Deployment
from stateflow.types import ReplicaInfo
from tests.applying import WORD, words
from tests.unit.operators import Count

LONG_S = 30.0
Serve = Callable[[int, Iterator[rpb.ApplyRequest]], Iterator[rpb.ApplyResponse]]


class Replica(replica_pb2_grpc.ReplicaServiceServicer):
    """A replica. ``serve``: what it does with its streams, which are numbered from 0."""

    def __init__(self, serve: Serve) -> None:
        self.serve, self.streams = serve, 0

    def Apply(self, requests: Iterator[rpb.ApplyRequest], context: Any) -> Iterator[rpb.ApplyResponse]:
        number, self.streams = self.streams, self.streams + 1
        yield from self.serve(number, requests)


def answer(request: rpb.ApplyRequest) -> rpb.ApplyResponse:
    """Answers a whole call; each output is the rows of its partition."""
    read = iter(read_batch(request.rows, WORD)["word"].to_pylist())
    outputs = [next(read) if count else b"" for count in request.counts]
    results = [
        rpb.PartitionResult(partition=partition, output=output, last=True)
        for partition, output in zip(request.partitions, outputs, strict=True)
    ]
    return rpb.ApplyResponse(call=request.call, results=results, last=True)


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Serve], tuple[Router, Replica]]]:
    """Yields a function that makes a router of 2 partitions and the one replica that has both."""
    servers: list[grpc.Server] = []

    def start(serve: Serve) -> tuple[Router, Replica]:
        server, replica = grpc.server(ThreadPoolExecutor(4)), Replica(serve)
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(replica, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        owners = (ReplicaInfo("a", "edge", f"127.0.0.1:{port}"),) * 2
        deployment = Deployment(describe(Count, 2), 1, owners, (1, 1))
        monkeypatch.setattr(ControllerClient, "deployment", lambda *_: deployment)
        settings = RouterSettings(stall_s=0.05, unavailable_timeout_s=0.3, backoff_initial_s=0.01)
        return Router("nowhere:1", "Count", settings, silence_s=0.3), replica

    yield start
    for server in servers:
        server.stop(None).wait(LONG_S)


def test_a_batch_that_waits_holds_up_no_other(routed: Callable[[Serve], tuple[Router, Replica]]) -> None:
    sent = threading.Event()

    def late(_: int, requests: Iterator[rpb.ApplyRequest]) -> Iterator[rpb.ApplyResponse]:
        first = next(requests)
        sent.set()
        yield answer(next(requests))
        yield answer(first)

    router, replica = routed(late)
    router.settings = RouterSettings()
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(router.send, Batch("s", 0), words({0: b"early"}))
        assert sent.wait(LONG_S)
        assert router.send(Batch("t", 0), words({1: b"late"})) == {1: b"late"}
        assert waiting.result(LONG_S) == {0: b"early"}
    assert replica.streams == 1


def test_a_replica_that_dies_holds_up_no_rows_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the owner of one partition is dead, batches of the other go on, and so does its part of a batch of both.

    The dead one comes back at another address, and the batch that waited for it is complete.
    """
    begun, lost = threading.Event(), threading.Event()
    alive: list[str] = []

    def lives(_: int, requests: Iterator[rpb.ApplyRequest]) -> Iterator[rpb.ApplyResponse]:
        for request in requests:
            alive.append(request.header.source)
            yield answer(request)

    def dies(_: int, requests: Iterator[rpb.ApplyRequest]) -> Iterator[rpb.ApplyResponse]:
        for _request in requests:
            begun.set()
        yield from ()

    owners: list[ReplicaInfo] = []
    servers: list[grpc.Server] = []

    def start(name: str, serve: Serve) -> ReplicaInfo:
        servers.append(grpc.server(ThreadPoolExecutor(4)))
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(Replica(serve), servers[-1])
        port = servers[-1].add_insecure_port("127.0.0.1:0")
        servers[-1].start()
        return ReplicaInfo(name, "edge", f"127.0.0.1:{port}")

    def deployment(*_: Any) -> Deployment:
        if begun.is_set():
            lost.set()  # the router asks since the stream to the dead one broke
        return Deployment(describe(Count, 2), 1, tuple(owners), (1, 1))

    monkeypatch.setattr(ControllerClient, "deployment", deployment)
    owners += [start("n", lives), start("n~1", dies)]
    router = Router("nowhere:1", "Count", RouterSettings(unavailable_timeout_s=LONG_S, backoff_initial_s=0.01))
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(router.send, Batch("both", 0), words({0: b"x", 1: b"y"}))
        assert begun.wait(LONG_S)
        servers[1].stop(None).wait(LONG_S)
        assert lost.wait(LONG_S)
        for number in range(20):
            assert router.send(Batch("t", number), words({0: b"%d" % number})) == {0: b"%d" % number}
        assert not waiting.done()
        assert sorted(alive) == ["both", *["t"] * 20], "its part of the batch came once"
        owners[1] = start("n~1", lives)
        assert waiting.result(LONG_S) == {0: b"x", 1: b"y"}
    assert alive.count("both") == 2, "each part once"
    for server in servers:
        server.stop(None).wait(LONG_S)


def test_a_stream_that_breaks_is_opened_anew_for_the_same_batch(
    routed: Callable[[Serve], tuple[Router, Replica]],
) -> None:
    def broken(stream: int, requests: Iterator[rpb.ApplyRequest]) -> Iterator[rpb.ApplyResponse]:
        for request in requests:
            if stream == 0:
                return
            yield answer(request)

    router, replica = routed(broken)
    router.settings = RouterSettings(backoff_initial_s=0.01)
    assert router.send(Batch("s", 0), words({0: b"x", 1: b""})) == {0: b"x", 1: b""}
    assert replica.streams == 2


def test_a_call_that_is_refused_goes_out_again_on_the_same_stream(
    routed: Callable[[Serve], tuple[Router, Replica]],
) -> None:
    def refuses(_: int, requests: Iterator[rpb.ApplyRequest]) -> Iterator[rpb.ApplyResponse]:
        fault = fault_of(NotOwner("it went", remedy="refresh"))
        yield rpb.ApplyResponse(call=next(requests).call, fault=fault, last=True)
        for request in requests:
            yield answer(request)

    router, replica = routed(refuses)
    router.settings = RouterSettings(backoff_initial_s=0.01)
    assert router.send(Batch("s", 0), words({0: b"x", 1: b"y"})) == {0: b"x", 1: b"y"}
    assert replica.streams == 1


def test_a_silent_stream_fails_its_batch_and_the_next_gets_another(
    routed: Callable[[Serve], tuple[Router, Replica]],
) -> None:
    over = threading.Event()

    def silent(stream: int, requests: Iterator[rpb.ApplyRequest]) -> Iterator[rpb.ApplyResponse]:
        for request in requests:
            if stream == 0:
                over.wait(LONG_S)
                return
            yield answer(request)

    router, replica = routed(silent)
    with pytest.raises(Unavailable, match="received the batch and has been silent"):
        router.send(Batch("s", 0), words({0: b"x"}))
    router.settings = RouterSettings(unavailable_timeout_s=LONG_S)
    assert router.send(Batch("s", 0), words({0: b"x"})) == {0: b"x"}
    assert replica.streams == 2
    over.set()


def test_an_address_that_is_none_is_refused_before_anybody_is_asked() -> None:
    with pytest.raises(InvalidArgument, match="'nowhere' is not a valid address: write host:port"):
        Router("nowhere:1", "Count", addresses={"a:1": "nowhere"})


def test_pauses_for_a_partition_that_moves_vary_by_a_quarter_and_end_in_time() -> None:
    def pauses(random: Random) -> list[float]:
        clock, found = ManualClock(), list[float]()
        for pause in backoff(8.0, clock, random):
            if pause is None:
                assert 8.0 <= clock.monotonic() < 9.0
                return found
            found.append(pause)
            clock.advance(pause)
        raise AssertionError

    found = pauses(Random(1))
    assert found == pytest.approx([min(0.5, 0.01 * 2**number) for number in range(len(found))], rel=0.2501)
    assert len(set(found)) == len(found), "also at the bound"
    assert found == pauses(Random(1)) != pauses(Random(2))


@pytest.mark.parametrize(("given", "waited_s"), [({}, 5.0), ({"connect_timeout_s": 60.0}, 60.0)])
def test_the_first_request_waits_for_a_controller_as_long_as_the_caller_says(
    given: dict[str, float], waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def deployment(client: ControllerClient, _operator: str) -> Deployment:
        waited.append(client._connect_timeout_s)
        return Deployment(describe(Count, 1), 1, (ReplicaInfo("a", "edge", "127.0.0.1:1"),), (1,))

    monkeypatch.setattr(ControllerClient, "deployment", deployment)
    Router("nowhere:1", "Count", **given).refresh()  # type: ignore[arg-type]
    assert waited == [waited_s, 0.0]


def test_two_routers_draw_their_own_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(describe(Count, 2), 1, (ReplicaInfo("a", "edge", "a:1"),) * 2, (1, 1))
    monkeypatch.setattr(ControllerClient, "deployment", lambda *_: deployment)
    one, two, given = Router("c:1", "Count"), Router("c:1", "Count"), Router("c:1", "Count", random=Random(3))
    assert one.random.random() != two.random.random()
    assert given.random.random() == Random(3).random()


def test_an_operator_with_another_number_of_partitions_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with more partitions used to end in an IndexError."""
    owner = ReplicaInfo("a", "edge", "a:1")
    deployed = [Deployment(describe(Count, count), 1, (owner,) * count, (1,) * count) for count in (2, 3, 1)]
    found = iter(deployed)
    monkeypatch.setattr(ControllerClient, "deployment", lambda *_: next(found))
    router = Router("c:1", "Count")
    for count in (3, 1):
        with pytest.raises(OperatorOutdated, match=f"deployed anew, with {count} partitions instead of 2"):
            router.refresh()
    assert len(router.table.routes) == 2


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"output_schema": b"other"}, "another output schema"),
        ({"key": ("n",), "side_schemas": (("late", b"s"),)}, "another key and another schema of side outputs"),
    ],
)
def test_an_operator_with_another_key_or_other_outputs_is_another_one(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], what: str
) -> None:
    """A client read outputs of the new operator by the schema of the former one: n = 2 became 4611686018427387904."""
    owner, spec = ReplicaInfo("a", "edge", "a:1"), describe(Count, 2)
    deployed = [Deployment(each, 1, (owner,) * 2, (1, 1)) for each in (spec, replace(spec, **changed))]
    found = iter(deployed)
    monkeypatch.setattr(ControllerClient, "deployment", lambda *_: next(found))
    router = Router("c:1", "Count")
    with pytest.raises(OperatorOutdated, match=f"deployed anew, with {what} "):
        router.refresh()


@pytest.mark.parametrize("is_other", [True, False])
def test_where_batches_are_missing_the_operator_may_be_another_one(
    routed: Callable[[Serve], tuple[Router, Replica]], monkeypatch: pytest.MonkeyPatch, is_other: bool
) -> None:
    """A client that is new to a partition must not send it batches of an operator that was deployed before."""
    gap = fault_of(PositionGap("the partition does not know this client", remedy="-", expected=0))

    def lacks(_: int, requests: Iterator[rpb.ApplyRequest]) -> Iterator[rpb.ApplyResponse]:
        for request in requests:
            result = rpb.PartitionResult(partition=0, fault=gap, last=True)
            yield rpb.ApplyResponse(call=request.call, results=[result], last=True)

    router, _ = routed(lacks)
    spec = replace(router.spec, output_schema=b"other") if is_other else router.spec
    deployment = replace(router.deployment, spec=spec)
    monkeypatch.setattr(ControllerClient, "deployment", lambda *_: deployment)
    with pytest.raises(OperatorOutdated if is_other else PositionGap):
        router.send(Batch("s", 0), words({0: b"x"}))


def test_an_operator_that_was_undeployed_and_deployed_again_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator has the same key and outputs, but none of the versions that were deployed before."""
    owner = ReplicaInfo("a", "edge", "a:1")
    found, known = [replace(describe(Count, 1), recorded_us=7)], [7]
    monkeypatch.setattr(ControllerClient, "deployment", lambda *_: Deployment(found[0], 1, (owner,), (1,)))
    versions = [OperatorVersion(number, "m:Count", "", "", number) for number in range(10)]
    monkeypatch.setattr(ControllerClient, "versions", lambda *_: [versions[us] for us in known])
    router = Router("c:1", "Count")
    for known[:] in ([7], [7, 8]):  # as it was, or upgraded
        router.check_deployment()
    known[:] = [9]
    with pytest.raises(OperatorOutdated, match=r"undeployed and deployed anew.*: start a new client"):
        router.check_deployment()
    found[0] = replace(found[0], recorded_us=0)  # by a release without an order
    Router("c:1", "Count").check_deployment()
