"""The controller's requests to replicas: every command names its sender; which replicas are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

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
from stateflow.rpc.wire import FAULT_KEY, fault_of
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


class World:
    """A replica that gives ``answers`` in their order, and then empty ones."""

    def __init__(self, *answers: Any, connected: bool = True) -> None:
        self.answers, self.connected = list(answers), connected
        self.known = {"a": A}
        self.sessions, self.asked = ["first"], list[tuple[str, Any]]()
        self.refused: list[StateflowError] = []
        self.replicas = Replicas(
            SimpleNamespace(roster=SimpleNamespace(replicas=self.known)),  # type: ignore[arg-type]
            SimpleNamespace(session=lambda _: self.sessions[0], may_serve=lambda _: True),  # type: ignore[arg-type]
            ControllerSettings(retry_interval_s=0.001),
            SYSTEM_CLOCK,
            lambda _: self,
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
        async def call(request: Any) -> Any:
            self.asked.append((path.rpartition("/")[2], request))
            for answer in self.answers:
                yield answer

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
    with pytest.raises(Unavailable, match="wrong number of replicas"):
        done(world.replicas.round_trips_ms("a", ["a"], 1.0))


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
