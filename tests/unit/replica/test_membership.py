"""A replica's registration, against a controller on loopback whose answers get lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import NotAllowed, NotLeading, StateMissing
from stateflow.partition.control import FencingGuard
from stateflow.partition.data_directory import Identity
from stateflow.replica import membership
from stateflow.replica.membership import Member, say_opening, stay_registered
from stateflow.replica.transfer_out import Followers
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc
from stateflow.rpc.faults import abort
from stateflow.rpc.wire import connect
from stateflow.security import roles
from stateflow.types import PartitionId, ReplicaInfo

LOST = cpb.Superseded(operator="Op", partition=3, epoch=2, owner=pb.Replica(name="b-0", site="b", address="x:1"))


class Controller(controller_pb2_grpc.ControllerServiceServicer):
    """A controller that knows an incarnation as soon as it registers, and loses its first answers."""

    def __init__(self, answers_lost: int) -> None:
        self.answers_lost = answers_lost
        self.known = ""

    async def Heartbeat(self, request: cpb.HeartbeatRequest, context: Any) -> cpb.HeartbeatReply:
        known = bool(request.incarnation) and request.incarnation == self.known
        return cpb.HeartbeatReply(known=known, lease_s=10.0, ticket="" if known else "a-ticket")

    async def Register(self, request: cpb.RegisterRequest, context: Any) -> cpb.RegisterReply:
        self.known = request.incarnation
        if self.answers_lost:
            self.answers_lost -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return cpb.RegisterReply(superseded=[LOST])


class Shell:
    """A replica that records what happens to it, in order.

    ``seals_failing``: how many of its first attempts to seal fail.
    """

    clock = SYSTEM_CLOCK
    connect = staticmethod(connect)

    def __init__(self, seals_failing: int) -> None:
        self.happened: list[str] = []
        self.leased = asyncio.Event()
        self.raising: list[Exception] = []
        self._failing = seals_failing
        authority = FencingGuard(alone=False)
        self.node = SimpleNamespace(
            lost_some=False,
            identity=Identity("d", "a-0"),
            lease=SimpleNamespace(granted=self._granted, revoke=lambda: None, unanswered=lambda: None, cut_off=False),
            alone=(0, frozenset()),
            settings=SimpleNamespace(heartbeat_interval_s=0.01),
            successor=SimpleNamespace(supersede=self._supersede),
            authority=authority,
            begin_session=self._obey,
            drop=self._obey,
            inventory=lambda: (),
            views=list,
            is_empty=True,
            sender=SimpleNamespace(fenced_for=lambda *_: ""),
        )
        self.followers = Followers(cast(Any, self.node), self.clock)

    def member(self) -> Member:
        info, this = ReplicaInfo("a-0", "a", "127.0.0.1:1"), cast(Any, self)
        parts: dict[str, Any] = dict.fromkeys(("threads", "transfers", "bundles"), this)
        return Member(this.node, info, self.clock, self.connect, followers=self.followers, **parts, random=Random(5))

    async def ensure(self, _: Any) -> None:
        """Loads nothing: no operator came in a bundle."""

    def _obey(self, *_: Any) -> None:
        if self.raising:
            raise self.raising.pop()
        self.node.authority.obey(*_)

    async def end(self, partition: PartitionId, move_id: str) -> None:
        if self.raising:
            raise self.raising.pop()
        self.happened.append(f"ended {move_id}")

    def _granted(self, sent_at: float, lease_s: float) -> None:
        self.happened.append("lease")
        self.leased.set()

    def _supersede(self, partition: PartitionId, epoch: int, owner: ReplicaInfo, voided: int) -> bool:
        if self._failing:
            self._failing -= 1
            raise StateMissing("it cannot be sealed", remedy="none")
        self.happened.append(f"sealed {partition.partition} for {owner.name} at {epoch}")
        return True

    def incoming(self) -> list[tuple[PartitionId, str]]:
        return []

    async def in_files(self, work: Any, *arguments: Any) -> Any:
        return work(*arguments)


@pytest.mark.parametrize(("answers_lost", "seals_failing"), [(0, 0), (1, 0), (3, 0), (0, 1), (2, 2)])
def test_there_is_no_lease_before_what_was_lost_is_sealed(answers_lost: int, seals_failing: int) -> None:
    async def run() -> list[str]:
        shell = Shell(seals_failing)
        server = grpc.aio.server()
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(Controller(answers_lost), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        staying = asyncio.create_task(stay_registered(shell.member(), f"127.0.0.1:{port}", "this-one"))
        await asyncio.wait_for(shell.leased.wait(), 30)
        staying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await staying
        await server.stop(None)
        return shell.happened

    assert asyncio.run(run())[:2] == ["sealed 3 for b-0 at 2", "lease"]


class Waits(Controller):
    """A controller that does not lead, and names the leader."""

    def __init__(self, leader: str) -> None:
        super().__init__(0)
        self._leader = leader

    async def Heartbeat(self, request: cpb.HeartbeatRequest, context: Any) -> cpb.HeartbeatReply:
        await abort(context, NotLeading("this controller does not lead", leader=self._leader))
        raise AssertionError


def test_who_leads_is_found_in_one_round() -> None:
    """The leader is found in one round.

    The second of three controllers used to name the first, which was dead, and the third, which led, was never asked.
    """

    async def run() -> None:
        shell = Shell(0)
        shell.node.settings.heartbeat_interval_s = 3600.0
        dead, addresses, servers = "127.0.0.1:1", ["127.0.0.1:1"], []
        for controller in (Waits(dead), Controller(0)):
            servers.append(grpc.aio.server())
            controller_pb2_grpc.add_ControllerServiceServicer_to_server(controller, servers[-1])
            addresses.append(f"127.0.0.1:{servers[-1].add_insecure_port('127.0.0.1:0')}")
            await servers[-1].start()
        staying = asyncio.create_task(stay_registered(shell.member(), ",".join(addresses), "this-one"))
        await asyncio.wait_for(shell.leased.wait(), 30)
        staying.cancel()
        await asyncio.wait([staying])
        for server in servers:
            await server.stop(None)

    asyncio.run(run())


def no_room() -> Exception:
    return OSError(errno.ENOSPC, "No space left on device")


def unforeseen() -> Exception:
    return KeyError("nobody thought of it")


class Ending(Controller):
    """A controller whose heartbeat replies report that a move ended."""

    async def Heartbeat(self, request: cpb.HeartbeatRequest, context: Any) -> cpb.HeartbeatReply:
        reply = await super().Heartbeat(request, context)
        reply.ended.append(cpb.Incoming(operator="Op", partition=3, move_id="m"))
        return reply


@pytest.mark.parametrize(("error", "line", "traced"), [(no_room, "disk_full: ", False), (unforeseen, "KeyError", True)])
@pytest.mark.parametrize(("controller", "until"), [(Controller, "lease"), (Ending, "ended m")])
def test_whatever_a_disk_does_is_said_once_and_tried_again(
    error: Callable[[], Exception],
    line: str,
    traced: bool,
    controller: type[Controller],
    until: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        shell = Shell(0)
        if controller is Controller:
            shell.raising += [error() for _ in range(3)]
        server = grpc.aio.server()
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(controller(0), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        staying = asyncio.create_task(stay_registered(shell.member(), f"127.0.0.1:{port}", "this-one"))
        leased = asyncio.create_task(shell.leased.wait())
        await asyncio.wait([staying, leased], timeout=30, return_when=asyncio.FIRST_COMPLETED)
        if controller is Ending:
            shell.raising += [error() for _ in range(3)]
            shell.happened.clear()
        async with asyncio.timeout(30):
            while until not in shell.happened and not staying.done():
                await asyncio.sleep(0.01)
        assert not staying.done(), "the replica has given up"
        staying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await staying
        await server.stop(None)

    with caplog.at_level(logging.ERROR, logger="stateflow"):
        asyncio.run(run())
    (said,) = [each for each in caplog.records if "cannot be carried out" in each.getMessage()]
    assert line in said.getMessage()
    assert bool(said.exc_info) == traced


class Naming(Controller):
    """A controller that lets ``b-0`` follow, as a standby."""

    async def Heartbeat(self, request: cpb.HeartbeatRequest, context: Any) -> cpb.HeartbeatReply:
        reply = await super().Heartbeat(request, context)
        for each in request.outgoing:
            where: dict[str, Any] = {"operator": each.operator, "partition": each.partition, "move_id": each.move_id}
            reply.followers.append(cpb.NamedFollower(**where, replica="b-0", standby=True))
        return reply


def test_a_question_is_asked_with_a_heartbeat_at_once_and_answered_by_the_controller() -> None:
    """A question is not kept until the next regular heartbeat, for which a copy would wait."""

    async def run() -> None:
        shell = Shell(0)
        shell.node.settings.heartbeat_interval_s = 3600.0
        server = grpc.aio.server()
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(Naming(0), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        staying = asyncio.create_task(stay_registered(shell.member(), f"127.0.0.1:{port}", "this-one"))
        await asyncio.wait_for(shell.leased.wait(), 30)
        where = PartitionId("Op", 3), "m", True
        for _ in range(2):
            asked = shell.followers.check(roles.Identity(roles.Role.NODE, "b-0"), *where)
            assert await asyncio.wait_for(asked, 30) == "b-0"
            with pytest.raises(NotAllowed, match="node/c-0 may not call Snapshot for this copy: it is for b-0"):
                await asyncio.wait_for(shell.followers.check(roles.Identity(roles.Role.NODE, "c-0"), *where), 30)
        staying.cancel()
        await asyncio.wait([staying])
        await server.stop(None)

    asyncio.run(run())


class Enough(Exception):
    """Ends a loop of heartbeats."""


@pytest.mark.parametrize("opening", [False, True])
def test_heartbeats_of_replicas_do_not_stay_in_step(opening: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 20:
            raise Enough

    async def run() -> None:
        shell = Shell(0)
        shell.node.settings.heartbeat_interval_s = 4.0
        server = grpc.aio.server()
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(Controller(0), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        beating = say_opening(shell.member(), address) if opening else stay_registered(shell.member(), address, "one")
        with monkeypatch.context() as patch, pytest.raises(Enough):
            patch.setattr(membership, "asyncio", SimpleNamespace(sleep=sleep))
            patch.setattr(Followers, "pause", lambda _, seconds: sleep(seconds))
            await asyncio.wait_for(beating, 30)
        await server.stop(None)

    asyncio.run(run())
    assert 3.0 <= min(slept) < max(slept) <= 5.0
