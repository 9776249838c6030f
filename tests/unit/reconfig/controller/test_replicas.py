"""The controller's requests to replicas: every command names its sender; which replicas are waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from reconfig.controller import replicas as calls
from reconfig.controller.replicas import Replicas
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import LeaseLost, MoveUnknown, StaleTerm, StateflowError, Unavailable
from stateflow.operator.operator import describe
from stateflow.partition.control import (
    Cancellation,
    Cancelled,
    Command,
    DiskView,
    Fence,
    Fenced,
    Phase,
    Preparation,
    Progress,
    Restore,
    TakeOver,
)
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.faults import FAULT_KEY, fault_of
from stateflow.settings import ControllerSettings
from stateflow.types import How, PartitionId, ReplicaInfo
from tests.unit.operators import Count

SPEC, P, A = describe(Count, 4), PartitionId("Count", 1), ReplicaInfo("a", "site", "a:1")
CANCELLATION = Cancellation(P, "m")
CALLS: dict[str, Callable[[Replicas], Awaitable[Any]]] = {
    "learn": lambda r: r.learn("a", SPEC),
    "check": lambda r: r.check("a", SPEC, 2),
    "create": lambda r: r.create("a", SPEC, [1], 1, 2),
    "drop": lambda r: r.drop("a", "Count", 1),
    "hold": lambda r: r.hold("a", "Count", 1.0),
    "fence": lambda r: r.fence("a", Fence(P, "m", 2, A)),
    "cancel": lambda r: r.cancel("a", CANCELLATION),
    "release": lambda r: r.release("a", P, "m", 2, A),
    "take_over": lambda r: r.take_over("a", TakeOver(SPEC, P, "t", 2, How.LOCAL)),
    "checkpoint": lambda r: r.checkpoint("a"),
    "fetch": lambda r: r.fetch("a", Restore("r", SPEC, P, 2)),
    "own": lambda r: r.own("a", Restore("r", SPEC, P, 2)),
    "round_trips_ms": lambda r: r.round_trips_ms("a", ["a"], 1.0),
    "surrender": lambda r: r.surrender("a", Fence(P, "r", 2, A)),
}
EMPTY = {"Create": pb.Empty, "Drop": pb.Empty, "Hold": pb.Empty, "Release": pb.Empty, "Checkpoint": rpb.CheckpointReply}
ANSWERS = EMPTY | {
    "Fence": rpb.FenceReply,
    "Cancel": rpb.FenceReply,
    "Surrender": rpb.FenceReply,
    "TakeOver": rpb.TakeOverReply,
    "Restore": rpb.RestoreReply,
    "Stats": rpb.StatsReply,
    "RoundTrips": lambda: rpb.RoundTripsReply(milliseconds=[2.5]),
}


def refusal(error: StateflowError) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata((FAULT_KEY, fault_of(error).SerializeToString()))
    return grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata(), metadata)


class Answers:
    """A stream of answers."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = iter(answers)

    async def read(self) -> Any:
        return next(self._answers, grpc.aio.EOF)

    def cancel(self) -> None:
        """Ends nothing, as there is no server."""


class World:
    """A replica that gives ``answers`` in their order, and then empty ones.

    ``address``: where a real one answers instead.
    """

    def __init__(
        self, *answers: Any, connected: bool = True, address: str = "", settings: ControllerSettings | None = None
    ) -> None:
        self.answers, self.connected = list(answers), connected
        self.known = {"a": A}
        self.sessions, self.asked = ["first"], list[tuple[str, Any]]()
        self.refused: list[StateflowError] = []
        self.replicas = Replicas(
            SimpleNamespace(roster=SimpleNamespace(replicas=self.known)),  # type: ignore[arg-type]
            SimpleNamespace(session=lambda _: self.sessions[0], may_serve=lambda _: True),  # type: ignore[arg-type]
            settings or ControllerSettings(retry_interval_s=0.001),
            SYSTEM_CLOCK,
            lambda _: grpc.aio.insecure_channel(address) if address else self,  # type: ignore[arg-type,return-value]
            lambda _: Command("ledger", 5, self.sessions[0]),
            self.refused.append,
            Random(5),
        )

    async def channel_ready(self) -> None:
        if not self.connected:
            await asyncio.sleep(3600)

    def unary_unary(self, path: str, **_: Any) -> Any:
        async def call(request: Any, timeout: float) -> Any:
            method = path.rpartition("/")[2]
            self.asked.append((method, type(request).FromString(request.SerializeToString())))
            answer = self.answers.pop(0) if self.answers else ANSWERS[method]()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def unary_stream(self, path: str, **_: Any) -> Any:
        def call(request: Any) -> Answers:
            self.asked.append((path.rpartition("/")[2], request))
            return Answers(self.answers)

        return call

    stream_stream = unary_stream


def done(work: Awaitable[Any]) -> Any:
    async def run() -> Any:
        return await asyncio.wait_for(work, 10)

    return asyncio.run(run())


@pytest.mark.parametrize("call", CALLS)
def test_every_command_says_who_commands(call: str) -> None:
    world = World()
    done(CALLS[call](world.replicas))
    ((_, request),) = world.asked
    assert request.command == pb.Command(ledger="ledger", term=5, session="first")


def test_what_is_only_read_is_no_command() -> None:
    view = rpb.PartitionView(operator="Count", partition=2, state="OWNED", bytes=7, batch_rate=1.5)
    world = World(rpb.StatsReply(partitions=[view]))
    ((found,), _) = done(world.replicas.views("a", 1.0))
    assert (found.partition, found.bytes, found.batch_rate) == (PartitionId("Count", 2), 7, 1.5)
    ((method, request),) = world.asked
    assert (method, request.sizes) == ("Stats", True)


def test_room_comes_with_what_is_there() -> None:
    world = World(rpb.StatsReply(disk="d", disk_free_bytes=5, room_bytes=6))
    assert done(world.replicas.views("a", 1.0)) == ([], DiskView("d", 5, 6))


def test_round_trips_of_those_that_answer() -> None:
    world = World(
        rpb.RoundTripsReply(milliseconds=[-1.0]), rpb.RoundTripsReply(milliseconds=[2.5]), rpb.RoundTripsReply()
    )
    assert done(world.replicas.round_trips_ms("a", ["a"], 1.0)) == {}
    assert done(world.replicas.round_trips_ms("a", ["a"], 1.0)) == {"a": 2.5}
    with pytest.raises(Unavailable, match="wrong number of round trips"):
        done(world.replicas.round_trips_ms("a", ["a"], 1.0))


def test_the_round_trip_of_a_replica_that_answers_or_refuses() -> None:
    unanswered = grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata())
    world = World(rpb.PartitionView(), refusal(MoveUnknown("no such partition")), unanswered)
    assert [done(world.replicas.round_trip_s("a")) is not None for _ in range(3)] == [True, True, False]
    del world.known["a"]
    assert done(world.replicas.round_trip_s("a")) is None


def test_the_shortest_of_the_last_round_trips_counts() -> None:
    took = iter([0.3, 0.1, *[0.2] * calls.ROUND_TRIPS_KEPT])
    world = World(*[rpb.PartitionView() for _ in range(10)])
    times = iter([at for each in took for at in (0.0, each)])
    world.replicas._clock = SimpleNamespace(monotonic=lambda: next(times))  # type: ignore[assignment]
    found = [done(world.replicas.round_trip_s("a")) for _ in range(10)]
    assert found == [0.3, *[0.1] * calls.ROUND_TRIPS_KEPT, 0.2]


def test_a_process_that_is_new_is_asked_again_when_it_has_registered() -> None:
    world = World(refusal(LeaseLost("not registered yet")), rpb.FenceReply(sealed=True))

    async def run() -> Cancelled:
        asking = asyncio.ensure_future(world.replicas.cancel("a", CANCELLATION))
        while not world.asked:
            await asyncio.sleep(0)
        world.sessions = ["second"]
        return await asking

    assert done(run()) == Cancelled(sealed=True)
    assert [request.command.session for _, request in world.asked] == ["first", "second"]


def test_what_a_pause_may_depend_on_waits_for_nobody() -> None:
    world = World(refusal(LeaseLost("not registered yet")), connected=False)
    with pytest.raises(LeaseLost):
        done(world.replicas.cancel("a", CANCELLATION, at_once=True))
    assert done(world.replicas.fence("a", Fence(P, "m", 2, A))) != Fenced(), "an empty answer is no seal"


def test_one_that_is_forgotten_while_it_is_asked_is_unavailable() -> None:
    world = World(refusal(LeaseLost("not registered yet")))

    async def run() -> None:
        asking = asyncio.ensure_future(world.replicas.learn("a", SPEC))
        while not world.asked:
            await asyncio.sleep(0)
        world.known.clear()
        world.sessions = ["second"]
        await asking

    with pytest.raises(Unavailable, match="a was forgotten"):
        done(run())


def test_a_later_term_is_told_of() -> None:
    world = World(refusal(StaleTerm("it has heard term 6")))
    with pytest.raises(StaleTerm):
        done(world.replicas.hold("a", "Count", 1.0))
    assert [error.code for error in world.refused] == ["stale_term"]


def test_an_answer_that_cannot_be_is_none() -> None:
    world = World(rpb.TakeOverReply(epoch=1 << 63))
    with pytest.raises(Unavailable, match="invalid answer from"):
        done(CALLS["take_over"](world.replicas))


def test_a_target_tells_how_far_it_is() -> None:
    fault = MoveUnknown("it is gone", remedy="start a new one")
    world = World(
        rpb.MoveProgress(phase=rpb.MoveProgress.CATCHING_UP, lag_bytes=5),
        rpb.MoveProgress(phase=rpb.MoveProgress.FAILED, fault=fault_of(fault)),
    )

    async def run() -> list[Progress]:
        move = Preparation("m", SPEC, P, A, 1)
        return [progress async for progress in world.replicas.prepare("a", move, "s")]

    first, last = done(run())
    assert first == Progress(Phase.CATCHING_UP, lag_bytes=5)
    assert (last.phase, str(last.fault)) == (Phase.FAILED, str(fault))
    ((method, request),) = world.asked
    assert (method, request.standby_move, request.command.session) == ("Prepare", "s", "first")


# -- work that takes long ---------------------------------------------------------------------------------------


class Working(replica_pb2_grpc.ReplicaServiceServicer):
    """A replica that works until it was asked for something else twice. It refuses the first time."""

    def __init__(self) -> None:
        self.asked, self.enough = 0, threading.Event()

    def Try(self, request: rpb.TryRequest, context: Any) -> Iterator[rpb.TryPage]:
        self.enough.wait(60)
        yield rpb.TryPage(partition=1)

    def Verify(self, request: rpb.VerifyRequest, context: Any) -> Iterator[rpb.VerifyPage]:
        self.enough.wait(60)
        yield rpb.VerifyPage(done=True)

    def Prepare(self, request: rpb.PrepareRequest, context: Any) -> Iterator[rpb.MoveProgress]:
        self.enough.wait(60)
        yield rpb.MoveProgress(phase=rpb.MoveProgress.OWNED)

    def Inspect(self, request: rpb.InspectRequest, context: Any) -> rpb.PartitionView:
        self.asked += 1
        if self.asked == 1:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a refusal is an answer")
        self.enough.set()
        return rpb.PartitionView()


STREAMS: dict[str, Callable[[Replicas], AsyncIterator[Any]]] = {
    "try_out": lambda r: r.try_out("a", SPEC, [1]),
    "verify": lambda r: r.verify("a", P),
    "prepare": lambda r: r.prepare("a", Preparation("m", SPEC, P, A, 1), ""),
}


@contextmanager
def replica_of(threads: int, silence_s: float, patch: pytest.MonkeyPatch) -> Iterator[tuple[Working, str]]:
    """Yields a replica and its address.

    ``threads``: how many calls it works on at a time, while others wait. ``silence_s``: how long it may be silent.
    """
    patch.setattr(calls, "SILENCE_S", silence_s)
    server, replica = grpc.server(ThreadPoolExecutor(threads)), Working()
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(replica, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield replica, f"127.0.0.1:{port}"
    finally:
        replica.enough.set()
        server.stop(None).wait(30)


async def all_of(world: World, stream: str) -> list[Any]:
    try:
        return [each async for each in STREAMS[stream](world.replicas)]
    finally:
        await world.replicas.close()


def test_a_replica_that_works_for_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that works without a message is waited for, for more than the longest silence."""
    with replica_of(2, 1.6, monkeypatch) as (replica, address):
        (report,) = done(all_of(World(address=address), "prepare"))
    assert report.phase is Phase.OWNED
    assert replica.asked == 2


@pytest.mark.parametrize("stream", STREAMS)
def test_a_replica_that_hangs_is_not_waited_for(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that hangs answers nothing else either; its connection is alive, as gRPC's own threads keep it so."""
    with replica_of(1, 0.4, monkeypatch) as (replica, address):
        with pytest.raises(Unavailable, match=r"no message from a \(a:1\) for 0\.4 s"):
            done(all_of(World(address=address), stream))
        assert replica.asked == 0


def test_pauses_before_a_call_is_repeated_vary_by_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 20:
            world.sessions = ["second"]

    world = World(refusal(LeaseLost("not registered yet")), settings=ControllerSettings(retry_interval_s=4.0))

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(calls, "asyncio", SimpleNamespace(sleep=sleep))
            await world.replicas.cancel("a", CANCELLATION)

    done(run())
    assert 3.0 <= min(slept) < max(slept) <= 5.0
    assert slept == [4.0 * random.uniform(0.75, 1.25) for random in [Random(5)] for _ in range(20)]


def test_a_channel_to_an_address_that_no_replica_has_is_closed_when_no_call_uses_it() -> None:
    """Replicas of agents have another address after each restart. Every channel used to stay open."""
    world, closed = World(), list[str]()

    def connect(address: str) -> Any:
        async def close() -> None:
            closed.append(address)

        return SimpleNamespace(
            channel_ready=world.channel_ready,
            unary_unary=world.unary_unary,
            unary_stream=world.unary_stream,
            stream_stream=world.stream_stream,
            close=close,
        )

    world.replicas._connect = connect

    async def scenario() -> None:
        replicas, first = world.replicas, A.address
        world.known["b"] = replace(A, name="b", address="b:1")
        world.answers = [rpb.TryPage(partition=1), rpb.TryPage(partition=2)]
        trial = replicas.try_out("a", SPEC, [1, 2])
        await anext(trial)
        kept = world.answers
        world.known["a"] = replace(A, address="a:2")
        world.answers = []
        for name in "ab":
            await replicas.learn(name, SPEC)
        assert set(replicas._channels) == {first, "a:2", "b:1"}, "a call uses the first one"
        world.answers = kept
        await trial.aclose()
        world.known["a"] = replace(A, address="a:3")
        world.answers = []
        for name in "abab":
            await replicas.learn(name, SPEC)
        await asyncio.gather(*replicas._closing)
        assert (set(replicas._channels), set(closed)) == ({"a:3", "b:1"}, {first, "a:2"})
        await replicas.close()
        assert set(closed) == {first, "a:2", "a:3", "b:1"}

    done(scenario())
