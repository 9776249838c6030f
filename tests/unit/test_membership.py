"""A replica's registration, against a controller on loopback whose answers get lost."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import StateMissing
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc
from stateflow.rpc.membership import stay_registered
from stateflow.rpc.wire import connect
from stateflow.runtime.authority import Authority
from stateflow.runtime.identity import Identity
from stateflow.types import PartitionId, ReplicaInfo

LOST = cpb.Superseded(operator="Op", partition=3, epoch=2, owner=pb.Replica(name="b-0", site="b", address="x:1"))


class Controller(controller_pb2_grpc.ControllerServiceServicer):
    """Knows an incarnation as soon as it registers, and loses the first answers."""

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
    """Writes down what happens to the replica, in order; ``seals_failing``: of the first attempts to seal."""

    clock = SYSTEM_CLOCK
    connect = staticmethod(connect)

    def __init__(self, seals_failing: int) -> None:
        self.happened: list[str] = []
        self.leased = asyncio.Event()
        self._failing = seals_failing
        authority = Authority(alone=False)
        self.node = SimpleNamespace(
            lost_some=False,
            identity=Identity("d", "a-0"),
            lease=SimpleNamespace(granted=self._granted, revoke=lambda: None),
            settings=SimpleNamespace(heartbeat_interval_s=0.01),
            successor=SimpleNamespace(supersede=self._supersede),
            authority=authority,
            begin_session=authority.obey,
            inventory=lambda: (),
            is_empty=True,
        )

    def _granted(self, sent_at: float, lease_s: float) -> None:
        self.happened.append("lease")
        self.leased.set()

    def _supersede(self, partition: PartitionId, epoch: int, owner: ReplicaInfo, burnt: int) -> bool:
        if self._failing:
            self._failing -= 1
            raise StateMissing("it cannot be sealed", remedy="none")
        self.happened.append(f"sealed {partition.partition} for {owner.name} at {epoch}")
        return True

    def incoming(self) -> list[dict[str, Any]]:
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
        info = ReplicaInfo("a-0", "a", "127.0.0.1:1")
        staying = asyncio.create_task(stay_registered(shell, info, f"127.0.0.1:{port}", "this-one"))  # type: ignore[arg-type]
        await asyncio.wait_for(shell.leased.wait(), 30)
        staying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await staying
        await server.stop(None)
        return shell.happened

    assert asyncio.run(run())[:2] == ["sealed 3 for b-0 at 2", "lease"]
