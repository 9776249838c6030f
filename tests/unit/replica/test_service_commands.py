"""Commands to a replica: every control RPC names its sender, one place checks it, and no other sender is obeyed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from stateflow.errors import (
    DecodeError,
    ForeignLedger,
    InvalidArgument,
    LeaseLost,
    StaleEpoch,
    StaleTerm,
    StateflowError,
)
from stateflow.operator.operator import describe
from stateflow.partition.batches import HOLD_S_MAX
from stateflow.partition.control import Command, FencingGuard
from stateflow.partition.lifecycle import EPOCH_STEP_MAX, State
from stateflow.partition.registry import Lease, PartitionRegistry
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.service import ReplicaService
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.faults import remote_error
from stateflow.rpc.wire import message_of
from stateflow.types import PartitionId, ReplicaInfo
from tests.unit.operators import Count

SERVICE = rpb.DESCRIPTOR.services_by_name["ReplicaService"]
NOT_CONTROL = {
    *("Apply", "Inspect", "Scan", "Stats", "Positions"),
    *("Snapshot", "Fetch", "Follow", "Confirm"),  # between replicas
    *("OpenSource", "Outputs", "Sources", "RetireSource", "DropOutput"),  # from clients, for their sources
}
CONTROL = sorted(method.name for method in SERVICE.methods if method.name not in NOT_CONTROL)
LEDGER, TERM, SESSION = "a-ledger", 5, "a-secret-of-the-two"
SPEC = describe(Count, 4)
P = PartitionId("Count", 1)


def sample(method: str) -> Any:
    """Makes a request that would be carried out if its sender were allowed to command."""
    other = message_of(pb.Replica, ReplicaInfo("b", "b", "127.0.0.1:1"))
    of = {"operator": P.operator, "partition": P.partition}
    match method:
        case "Create":
            return message_of(rpb.CreateRequest, spec=SPEC, partitions=[3], epoch=1)
        case "Prepare":
            return message_of(rpb.PrepareRequest, move_id="m", spec=SPEC, partition=2, source=other)
        case "Fence":
            return rpb.FenceRequest(move_id="m", **of, epoch=2, target=other, cold=True)
        case "Surrender":
            return rpb.FenceRequest(move_id="r", **of, epoch=2, target=other)
        case "Cancel":
            return rpb.CancelRequest(move_id="m", **of, owned_at=1)
        case "Drop":
            return rpb.DropRequest(operator="Count", epoch=9)
        case "Release":
            return rpb.ReleaseRequest(move_id="m", **of)
        case "TakeOver":
            return message_of(rpb.TakeOverRequest, move_id="t", spec=SPEC, partition=1, epoch=2)
        case "Hold":
            return rpb.HoldRequest(operator="Count", seconds=1.0)
        case "Restore":
            return message_of(rpb.RestoreRequest, restore_id="r", spec=SPEC, partition=1, epoch=2, own=True)
        case "Checkpoint":
            return rpb.CheckpointRequest()
        case "RoundTrips":
            return rpb.RoundTripsRequest(addresses=["127.0.0.1:1"])
        case "Try":
            return message_of(rpb.TryRequest, spec=SPEC, partitions=[1])
        case "Verify":
            return rpb.VerifyRequest(**of)
    raise AssertionError(f"{method} needs a sample")


def test_every_control_rpc_says_who_commands_and_no_other_does() -> None:
    command = pb.DESCRIPTOR.message_types_by_name["Command"]
    for method in SERVICE.methods:
        field = method.input_type.fields_by_name.get("command")
        assert (field is not None and field.message_type is command) == (method.name in CONTROL), method.name
    assert len(CONTROL) >= 10


# -- the decision -------------------------------------------------------------------------------------------


def test_only_the_newest_registration_is_obeyed() -> None:
    authority = FencingGuard(alone=False)
    with pytest.raises(LeaseLost):
        authority.check(Command())
    authority.obey(Command(LEDGER, 5, "one"))
    authority.check(Command(LEDGER, 5, "one"))
    authority.obey(Command(LEDGER, 5, "two"))
    for refused in (Command(LEDGER, 5, "one"), Command(LEDGER, 5, ""), Command(LEDGER, 6, "one"), Command(LEDGER, 6)):
        with pytest.raises(LeaseLost):
            authority.check(refused)


def test_a_smaller_term_is_refused_and_changes_nothing() -> None:
    kept: list[tuple[str, int]] = []
    authority = FencingGuard(keep=lambda *seen: kept.append(seen), alone=False)
    authority.obey(Command(LEDGER, 5, "one"))
    authority.obey(Command(LEDGER, 5, "two"))
    assert kept == [(LEDGER, 5)], "written once a term"
    for attempt in (authority.obey, authority.check):
        with pytest.raises(StaleTerm):
            attempt(Command(LEDGER, 4, "two"))
    with pytest.raises(ForeignLedger):
        authority.obey(Command("another", 9, "three"))
    authority.check(Command(LEDGER, 5, "two"))
    authority.obey(Command(LEDGER, 7, "four"))
    assert kept == [(LEDGER, 5), (LEDGER, 7)]


def test_nothing_is_obeyed_before_its_term_is_durable() -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    authority = FencingGuard(keep=full, alone=False)
    with pytest.raises(OSError, match="no space"):
        authority.obey(Command(LEDGER, 5, "one"))
    with pytest.raises(LeaseLost):
        authority.check(Command(LEDGER, 5, "one"))


def test_the_greatest_term_outlives_the_process(tmp_path: Path) -> None:
    info = ReplicaInfo("a", "a", "")
    node = ReplicaNode(info, tmp_path, lease=Lease.none())
    node.begin_session(Command(LEDGER, 5, "one"))
    node.close()
    again = ReplicaNode(info, tmp_path, lease=Lease.none())
    with pytest.raises(StaleTerm):
        again.begin_session(Command(LEDGER, 4, "one"))
    with pytest.raises(LeaseLost, match="not registered yet"):
        again.authority.check(Command(LEDGER, 5, "one"))
    again.close()
    (tmp_path / "TERM").write_text("{")
    with pytest.raises(DecodeError, match="damaged"):
        ReplicaNode(info, tmp_path, lease=Lease.none())


def test_a_creation_that_a_registration_overtakes_is_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A creation that a registration overtakes is void.

    The creation stood still in its thread. Its deployment may have been undone since and made elsewhere, and the
    replica was told of nothing to drop, as it had nothing.
    """
    node = ReplicaNode(ReplicaInfo("a", "a", ""), tmp_path, lease=Lease.none())
    node.begin_session(asked := Command(LEDGER, TERM, SESSION))
    again = Command(LEDGER, TERM, "another")
    monkeypatch.setattr(PartitionRegistry, "expect", lambda _self, _more: node.begin_session(again))
    with pytest.raises(LeaseLost):
        node.create(SPEC, [P.partition], 1, command=asked)
    assert list(node.inventory()) == []
    newer = replace(SPEC, dropped=(("gone", 1),))
    node._registry.learn(newer)
    with pytest.raises(LeaseLost):
        node.create(SPEC, [], 0, command=asked)
    assert node.operators() == [newer], "nor is an older version learnt again"
    node.close()


# -- at the replica -----------------------------------------------------------------------------------------


def serving(tmp_path: Path, work: Callable[[Any, ReplicaNode], Awaitable[None]]) -> None:
    """Serves a registered replica with one partition on loopback."""

    async def run() -> None:
        node = ReplicaNode(ReplicaInfo("a", "a", ""), tmp_path, lease=Lease.none())
        node.begin_session(registered := Command(LEDGER, TERM, SESSION))
        node.create(SPEC, [P.partition], 1, command=registered)
        node.lease.granted(0.0, 1e12)
        shell = ReplicaService(node, None)
        server = grpc.aio.server()
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(shell, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await work(replica_pb2_grpc.ReplicaServiceStub(channel), node)
        await server.stop(None)
        await shell.close()

    asyncio.run(run())


async def refused(stub: Any, method: str, request: Any) -> StateflowError:
    try:
        answer = getattr(stub, method)(request, timeout=30)
        if isinstance(answer, AsyncIterator) or method in ("Prepare", "Try", "Verify"):
            async for _ in answer:
                pass
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        return remote_error(error, "a")
    raise AssertionError(f"{method} was carried out")


@pytest.mark.parametrize("method", CONTROL)
def test_nobody_else_commands(tmp_path: Path, method: str) -> None:
    async def work(stub: Any, node: ReplicaNode) -> None:
        for sent, kind in (
            (None, ForeignLedger),
            (pb.Command(ledger="another", term=TERM, session=SESSION), ForeignLedger),
            (pb.Command(ledger=LEDGER, term=TERM - 1, session=SESSION), StaleTerm),
            (pb.Command(ledger=LEDGER, term=TERM), LeaseLost),
            (pb.Command(ledger=LEDGER, term=TERM, session="guessed"), LeaseLost),
            (pb.Command(ledger=LEDGER, term=TERM + 1, session=SESSION), LeaseLost),
        ):
            request = sample(method)
            if sent is not None:
                request.command.CopyFrom(sent)
            error = await refused(stub, method, request)
            assert isinstance(error, kind), error
            assert SESSION not in str(error.to_wire())
        lifecycle = node.lifecycle(P)
        assert (lifecycle.state, lifecycle.epoch, lifecycle.cancelled) == (State.OWNED, 1, frozenset())
        assert [held.partition for held, _ in node.inventory()] == [P]
        assert not node.batches._is_held("Count")

    serving(tmp_path, work)


def test_an_absurd_epoch_seals_nothing(tmp_path: Path) -> None:
    command = pb.Command(ledger=LEDGER, term=TERM, session=SESSION)

    async def work(stub: Any, node: ReplicaNode) -> None:
        for epoch, kind in ((1, StaleEpoch), (0, StaleEpoch), (1 << 63, InvalidArgument), (1 << 62, InvalidArgument)):
            request = sample("Surrender")
            request.epoch = epoch
            request.command.CopyFrom(command)
            assert isinstance(await refused(stub, "Surrender", request), kind), epoch
            assert node.lifecycle(P).state is State.OWNED
        request.epoch = 1 + EPOCH_STEP_MAX
        assert (await stub.Surrender(request)).sealed

    serving(tmp_path, work)


def test_requests_are_held_for_a_bounded_time(tmp_path: Path) -> None:
    command = pb.Command(ledger=LEDGER, term=TERM, session=SESSION)

    async def work(stub: Any, node: ReplicaNode) -> None:
        for seconds in (-1.0, HOLD_S_MAX * 1.01, float("inf"), float("nan")):
            request = rpb.HoldRequest(operator="Count", seconds=seconds, command=command)
            assert isinstance(await refused(stub, "Hold", request), InvalidArgument), seconds
            assert not node.batches._is_held("Count")
        await stub.Hold(rpb.HoldRequest(operator="Count", seconds=HOLD_S_MAX, command=command))
        assert node.batches._is_held("Count")

    serving(tmp_path, work)
