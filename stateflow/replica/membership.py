"""A replica's membership of its cluster: it registers, seals partitions that were given away meanwhile, and keeps its
lease alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from stateflow.clock import Clock
from stateflow.errors import BundleDamaged, ForeignLedger, HoldLost, StaleTerm, StateflowError, Unavailable
from stateflow.fleet import Directory
from stateflow.partition.control import Command
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.executor import ErrorThrottle, Threads
from stateflow.replica.peers import Bundles, Controller, Heartbeat, HeartbeatReply, Unanswered
from stateflow.replica.transfer_in import IncomingTransfers
from stateflow.rpc.clients import Round, addresses_of
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: while there are controllers but no leader, heartbeats during the time of one: the lease runs out, and the next leader
#: decides nothing that needs this replica before it has heard from the replica
UNLED = 3
#: errors of a controller that does not answer as one that decides for this replica
SILENT = (Unavailable, HoldLost, StaleTerm, ForeignLedger)
#: maximum number of incoming copies that one heartbeat names
INCOMING_MAX = 1000


@dataclass(frozen=True, slots=True)
class Member:
    """The description of a replica for its cluster. ``connect``: opens a channel to a controller's address."""

    node: ReplicaNode
    info: ReplicaInfo
    clock: Clock
    connect: Callable[[str], grpc.aio.Channel]
    threads: Threads
    transfers: IncomingTransfers
    bundles: Bundles


async def say_opening(member: Member, controller: str) -> None:
    """Sends heartbeats, until cancelled, for a replica that does not know yet which partitions it has.

    They give the replica no lease, but tell the controller to wait for it.
    """
    node, info = member.node, member.info
    beat = Heartbeat(info, _directory(node), opening=True)
    async with contextlib.AsyncExitStack() as stack:
        controllers = [
            Controller(await stack.enter_async_context(member.connect(each)), each) for each in addresses_of(controller)
        ]
        while True:
            for each in controllers:
                with contextlib.suppress(Unanswered, StateflowError):  # registration reports the error
                    await each.heartbeat(beat)
            await asyncio.sleep(node.settings.heartbeat_interval_s)


async def stay_registered(member: Member, controller: str, incarnation: str) -> None:
    """Sends heartbeats, and registers whenever the controller does not know this incarnation.

    A controller that gave partitions away forgets the incarnation first. So the lease of a returning replica begins
    after its registration, and the registration comes after the seals of the partitions it lost.

    A registration whose answer got lost, or could not be carried out, counts for the controller but not here: the
    replica registers again, and until then its heartbeats carry no incarnation. Errors of disks and databases do not
    end this loop: the replica serves nothing until they are fixed, and then serves without a restart. A replica that
    lost a partition registers without it. A replica without partitions follows its controller to another ledger.

    Args:
        controller: address of the controller, or comma-separated addresses of several, of whom the leader is asked.
    """
    node, info, threads = member.node, member.info, member.threads
    throttle, registered = ErrorThrottle(log, "the controller's orders cannot be carried out"), False
    free = ""  # the ledger that this replica belonged to, if no partition here could be wanted back by a controller
    beats = -1
    claimed: Holding | None = None  # partitions reported to the controller because its ledger does not know them
    addresses = addresses_of(controller)
    turn = Round(addresses, addresses[0])
    refused = False  # by a controller in this round
    controllers: dict[str, Controller] = {}
    async with contextlib.AsyncExitStack() as stack:
        while True:
            beats += 1
            asked, failed = turn.asked, None
            try:
                if node.lost_some:
                    node.lost_some = registered = False
                if asked not in controllers:
                    channel = await stack.enter_async_context(member.connect(asked))
                    controllers[asked] = Controller(channel, asked)
                sent_at = member.clock.monotonic()
                reply = await controllers[asked].heartbeat(
                    Heartbeat(
                        info,
                        _directory(node, free),
                        incarnation if registered else "",
                        _some(member.transfers.incoming(), beats),
                        node.authority.seen[1],
                        alone=node.alone,
                    )
                )
                adopted = reply.adopted or (free if free and node.is_empty else "")
                if node.authority.seen[0] not in ("", reply.ledger, adopted):
                    claimed = await _claim(member, controllers[asked], _held(node), claimed if reply.claimed else None)
                node.authority.check_answer(reply.ledger, reply.term, adopted)
                member.bundles.controller = controllers[asked]
                if reply.known and (reply.ledger, reply.term) == node.authority.seen:
                    node.lease.granted(sent_at, reply.lease_s)
                    if reply.alone != node.alone:
                        await threads.in_files(node.serve_alone, *reply.alone)
                    for partition, move_id in reply.ended:
                        await member.transfers.end(partition, move_id)
                    throttle.over()
                else:
                    node.lease.revoke()
                    registered = False
                    registered = await _register(member, controllers[asked], incarnation, reply, adopted, free)
                    if registered:
                        claimed, free = None, ""
                        log.info("registered as %s at %s", info.name, asked)
                        continue
            except Unanswered as error:
                if throttle.is_new(error.meant.code):
                    log.warning("%s", error.meant)
                failed = error.meant
            except (StaleTerm, ForeignLedger) as error:  # the answer counts as not heard
                if isinstance(error, ForeignLedger) and node.is_empty and not free:
                    free = node.authority.seen[0]
                    log.warning("this replica has no state of its ledger %s any more and may join another ledger", free)
                    continue
                free = ""
                if throttle.is_new(error.code):
                    log.error("controller at %s ignored: %s", asked, error)
                failed = error
            except Exception as error:  # noqa: BLE001 - logged; the next round may go better
                throttle.met(error)
            refused |= failed is not None and not isinstance(failed, SILENT)
            if failed is not None and turn.go_on(failed):
                continue  # no address is asked twice in a round: the current leader is found at once
            if refused:
                node.lease.cut_off = False
            elif failed is not None:
                node.lease.unanswered()
            refused = False
            await asyncio.sleep(node.settings.heartbeat_interval_s / (UNLED if turn.unled else 1))
            turn = Round(addresses, turn.asked)


async def _register(
    member: Member, controller: Controller, incarnation: str, reply: HeartbeatReply, adopted: str, free: str
) -> bool:
    """Registers with the ticket of ``reply``. Returns False if the ticket was void by then. ``free``: see
    :func:`_directory`."""
    node, threads = member.node, member.threads
    command = Command(reply.ledger, reply.term, reply.ticket)
    await threads.in_files(node.begin_session, command, adopted)  # the replica's report stays true from here on
    told = await controller.register(member.info, _directory(node, free), incarnation, command, node.views())
    if told is None:
        return False
    for operator, epoch in told.dropped:
        await threads.in_files(node.drop, operator, epoch)
    known = {spec.name for spec in told.operators}
    unknown = {partition: held for partition, held in _held(node).items() if partition.operator not in known}
    if unknown:
        await _claim(member, controller, unknown, None)
    for spec in told.operators:
        with contextlib.suppress(BundleDamaged):  # then the operator is not served, and says why
            await member.bundles.ensure(spec)
        await threads.in_files(node.follow, spec)
    for gone in told.superseded:
        if await threads.in_files(node.successor.supersede, gone.partition, gone.epoch, gone.owner, gone.voided):
            log.warning(
                "%s moved to %s at epoch %d while this replica was out of contact",
                gone.partition,
                gone.owner.name,
                gone.epoch,
            )
    return True


#: state and epoch of the partitions held here
Holding = dict[PartitionId, tuple[str, int]]


def _held(node: ReplicaNode) -> Holding:
    return {lifecycle.partition: (lifecycle.state, lifecycle.epoch) for lifecycle, _ in node.inventory()}


async def _claim(member: Member, controller: Controller, holding: Holding, said: Holding | None) -> Holding:
    """Reports to a controller the partitions here that its ledger does not know, unless it has heard the same before
    (``said``).

    The controller must not create these empty.
    """
    if holding != said:
        names = {partition.operator for partition in holding}
        operators = [spec for spec in member.node.operators() if spec.name in names]
        views = [view for view in member.node.views() if view.partition in holding]
        await controller.claim(member.info, _directory(member.node), operators, views)
    return holding


def _some(incoming: list[tuple[PartitionId, str]], beats: int) -> list[tuple[PartitionId, str]]:
    """Returns the copies to name in this heartbeat, in turns: all of them, perhaps thousands, would make up most of
    each heartbeat."""
    first = beats * INCOMING_MAX % max(len(incoming), 1)
    return (incoming[first:] + incoming[:first])[:INCOMING_MAX]


def _directory(node: ReplicaNode, free: str = "") -> Directory:
    """Describes the data directory.

    Args:
        free: a ledger that the replica no longer belongs to; the directory is reported as belonging to none.
    """
    identity, ledger = node.identity, node.authority.seen[0]
    return Directory(identity.id, identity.place, "" if ledger == free else ledger)
