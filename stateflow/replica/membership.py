"""A replica's place in its cluster: it registers, seals what was given away meanwhile, and keeps its lease alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from stateflow.clock import Clock
from stateflow.errors import ForeignLedger, StaleTerm, StateflowError
from stateflow.replica.messages import views_of
from stateflow.replica.pulls import Pulls
from stateflow.replica.threads import Threads
from stateflow.replica.troubles import Troubles
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc
from stateflow.rpc.wire import answered, batched, next_of, remote_error, replica_of, replica_to_pb, spec_of, spec_to_pb
from stateflow.runtime.authority import Command
from stateflow.runtime.replica import ReplicaNode
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 5.0
#: copies that a heartbeat names
INCOMING_MAX = 1000


@dataclass(frozen=True, slots=True)
class Member:
    """A replica as its cluster is to know it. ``connect``: a channel to a controller's address."""

    node: ReplicaNode
    info: ReplicaInfo
    clock: Clock
    connect: Callable[[str], grpc.aio.Channel]
    threads: Threads
    pulls: Pulls


async def say_opening(member: Member, controller: str) -> None:
    """Heartbeats of a replica that does not know yet what it has, until cancelled. They give it no lease: they say that
    it is worth waiting for."""
    node, info = member.node, member.info
    request = cpb.HeartbeatRequest(
        name=info.name, directory=_directory(node), replica=replica_to_pb(info), opening=True
    )
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(member.connect(each)) for each in controller.split(",")]
        while True:
            for channel in channels:
                stub = controller_pb2_grpc.ControllerServiceStub(channel)
                with contextlib.suppress(grpc.aio.AioRpcError):  # what is wrong is said when it registers
                    await stub.Heartbeat(request, timeout=CALL_TIMEOUT_S)
            await asyncio.sleep(node.settings.heartbeat_interval_s)


async def stay_registered(member: Member, controller: str, incarnation: str) -> None:
    """Heartbeat; register whenever the controller does not know this incarnation.

    A controller that gave partitions away forgets the incarnation first. So the lease of a replica that comes back
    begins behind its registration, and that behind the seals of what it lost. A registration whose answer did not
    arrive, or could not be carried out, counts for the controller and not here: it is made again, and until then no
    heartbeat says who this is. That goes on whatever a disk or a database does: it serves nothing until that is mended,
    and then without being started again. One that lost a partition registers without it. One that has nothing follows
    its controller to another ledger.

    Args: controller: its address, or those of several, with commas: the one that leads is asked.
    """
    node, info = member.node, member.info
    troubles, registered = Troubles(log, "what the controller said cannot be carried out"), False
    free = ""  # the ledger that it belonged to, where nothing is here that a controller could want back
    beats = -1
    claimed: Holding | None = None  # what the controller was told that its ledger does not know of
    addresses = controller.split(",")
    asked = addresses[0]
    channels: dict[str, grpc.aio.Channel] = {}
    async with contextlib.AsyncExitStack() as stack:
        while True:
            beats += 1
            try:
                if node.lost_some:
                    node.lost_some = registered = False
                if asked not in channels:
                    channels[asked] = await stack.enter_async_context(member.connect(asked))
                stub = controller_pb2_grpc.ControllerServiceStub(channels[asked])
                sent_at = member.clock.monotonic()
                beat = await stub.Heartbeat(
                    cpb.HeartbeatRequest(
                        name=info.name,
                        incarnation=incarnation if registered else "",
                        incoming=_some(member.pulls.incoming(), beats),
                        directory=_directory(node, free),
                        replica=replica_to_pb(info),
                        term=node.authority.seen[1],
                    ),
                    timeout=CALL_TIMEOUT_S,
                )
                answered(beat, asked)
                beat.adopted = beat.adopted or (free if free and node.is_empty else "")
                if node.authority.seen[0] not in ("", beat.ledger, beat.adopted):
                    claimed = await _claim(member, stub, _held(node), claimed if beat.claimed else None)
                node.authority.check_answer(beat.ledger, beat.term, beat.adopted)
                if beat.known and (beat.ledger, beat.term) == node.authority.seen:
                    node.lease.granted(sent_at, beat.lease_s)
                    for ended in beat.ended:
                        await member.pulls.end(PartitionId(ended.operator, ended.partition), ended.move_id)
                    troubles.over()
                else:
                    node.lease.revoke()
                    registered = False
                    registered = await _register(member, stub, incarnation, beat, free)
                    if registered:
                        claimed, free = None, ""
                        log.info("registered as %s at %s", info.name, asked)
                        continue
            except grpc.aio.AioRpcError as error:
                meant = remote_error(error, asked)
                if troubles.is_new(meant.code):
                    log.warning("%s", meant)
                asked = next_of(addresses, asked, meant)
            except (StaleTerm, ForeignLedger) as error:  # as if nothing had been heard
                if isinstance(error, ForeignLedger) and node.is_empty and not free:
                    free = node.authority.seen[0]
                    log.warning("nothing is here of %s, the ledger that this replica belonged to", free)
                    continue
                free = ""
                if troubles.is_new(error.code):
                    log.error("the controller at %s is ignored: %s", asked, error)
                asked = next_of(addresses, asked, error)
            except Exception as error:  # noqa: BLE001 - which is said, and the next round may go better
                troubles.met(error)
            await asyncio.sleep(node.settings.heartbeat_interval_s)


async def _register(
    member: Member,
    stub: controller_pb2_grpc.ControllerServiceStub,
    incarnation: str,
    beat: cpb.HeartbeatReply,
    free: str,
) -> bool:
    """With the ticket of this answer. False: it was void by then. ``free``: see :func:`_directory`."""
    ticket, by = beat.ticket, (beat.ledger, beat.term)
    await member.threads.in_files(
        member.node.begin_session, Command(*by, ticket), beat.adopted
    )  # what is said now stays true
    *pieces, last = batched(views_of(member.node))
    for partitions in [*pieces, last]:
        request = cpb.RegisterRequest(
            replica=replica_to_pb(member.info),
            incarnation=incarnation,
            partitions=partitions,
            ticket=ticket,
            directory=_directory(member.node, free),
            more=partitions is not last,
        )
        reply = answered(await stub.Register(request, timeout=2 * CALL_TIMEOUT_S), "the controller")
        if reply.late or (reply.ledger, reply.term) != by:
            return False
    for undeployed in reply.dropped:
        await member.threads.in_files(member.node.drop, undeployed.operator, undeployed.epoch)
    known = {spec.name for spec in reply.operators}
    unknown = {partition: held for partition, held in _held(member.node).items() if partition.operator not in known}
    if unknown:
        await _claim(member, stub, unknown, None)
    for spec in reply.operators:
        with contextlib.suppress(StateflowError):  # it is named again when it is really needed
            await member.threads.in_files(member.node.learn, spec_of(spec))
    for gone in reply.superseded:
        partition = PartitionId(gone.operator, gone.partition)
        owner = replica_of(gone.owner)
        if await member.threads.in_files(member.node.successor.supersede, partition, gone.epoch, owner, gone.burnt):
            log.warning("%s went to %s at epoch %d while this replica was not heard", partition, owner.name, gone.epoch)
    return True


#: partition → its state and epoch here
Holding = dict[PartitionId, tuple[str, int]]


def _held(node: ReplicaNode) -> Holding:
    return {lifecycle.partition: (lifecycle.state, lifecycle.epoch) for lifecycle, _ in node.inventory()}


async def _claim(
    member: Member,
    stub: controller_pb2_grpc.ControllerServiceStub,
    holding: Holding,
    said: Holding | None,
) -> Holding:
    """Tell a controller what is here of which its ledger knows nothing, unless that was ``said``: it must not be
    created empty."""
    if holding == said:
        return holding
    names = {partition.operator for partition in holding}
    views = [view for view in views_of(member.node) if PartitionId(view.operator, view.partition) in holding]
    pieces = list(batched(views))
    for number, partitions in enumerate(pieces):
        request = cpb.ClaimRequest(
            replica=replica_to_pb(member.info),
            directory=_directory(member.node),
            operators=[spec_to_pb(spec) for spec in member.node.operators() if not number and spec.name in names],
            partitions=partitions,
            first=not number,
            last=number == len(pieces) - 1,
        )
        await stub.Claim(request, timeout=2 * CALL_TIMEOUT_S)
    return holding


def _some(incoming: list[tuple[PartitionId, str]], beats: int) -> list[cpb.Incoming]:
    """Those whose turn it is: asked after in every heartbeat, thousands of copies would be most of what is sent."""
    first = beats * INCOMING_MAX % max(len(incoming), 1)
    return [
        cpb.Incoming(operator=partition.operator, partition=partition.partition, move_id=move_id)
        for partition, move_id in (incoming[first:] + incoming[:first])[:INCOMING_MAX]
    ]


def _directory(node: ReplicaNode, free: str = "") -> cpb.Directory:
    """Args: free: a ledger that it belongs to no more."""
    identity, ledger = node.identity, node.authority.seen[0]
    return cpb.Directory(id=identity.id, place=identity.place, ledger="" if ledger == free else ledger)
