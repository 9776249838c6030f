"""Keeps a replica a member of its cluster.

The replica registers, seals partitions that were given to other replicas while it was out of contact, and renews its
lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random  # noqa: TID251 - the type; which one is handed in

import grpc.aio

from stateflow.clock import Clock
from stateflow.errors import BundleDamaged, ForeignLedger, HoldLost, StaleTerm, StateflowError, Unavailable
from stateflow.fleet import Directory
from stateflow.partition.control import Command
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.executor import ErrorThrottle, Threads
from stateflow.replica.peers import Bundles, Controller, Heartbeat, HeartbeatReply, Unanswered
from stateflow.replica.transfer_in import IncomingTransfers
from stateflow.replica.transfer_out import Followers
from stateflow.rpc.clients import Round, addresses_of
from stateflow.schedule import jittered
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: factor by which heartbeats are more frequent while no controller leads. The lease is running out then, and the next
#: leader decides nothing that needs this replica before it has received a heartbeat.
UNLED = 3
#: errors after which a replica counts as cut off: no controller has answered that may decide for it
SILENT = (Unavailable, HoldLost, StaleTerm, ForeignLedger)
#: most incoming copies that one heartbeat names
INCOMING_MAX = 1000


@dataclass(frozen=True, slots=True)
class Member:
    """Parts of a replica that its membership needs.

    Attributes:
        connect: opens a channel to a controller's address.
        random: varies the intervals of heartbeats, so that replicas that started together do not stay in step.
    """

    node: ReplicaNode
    info: ReplicaInfo
    clock: Clock
    connect: Callable[[str], grpc.aio.Channel]
    threads: Threads
    transfers: IncomingTransfers
    followers: Followers
    bundles: Bundles
    random: Random


async def say_opening(member: Member, controller: str) -> None:
    """Sends heartbeats, until cancelled, for a replica that does not know yet which partitions it has.

    These heartbeats get no lease for the replica, but make the controllers wait for it.

    Args:
        controller: address of the controller, or comma-separated addresses of several, all of which are notified.
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
            await asyncio.sleep(jittered(node.settings.heartbeat_interval_s, member.random))


async def stay_registered(member: Member, controller: str, incarnation: str) -> None:
    """Sends heartbeats, and registers whenever the controller does not know this incarnation.

    Before a controller gives a replica's partitions to others, it forgets the replica's incarnation. So a returning
    replica first registers and seals the partitions that it lost, and only then gets a lease.

    If the answer to a registration is lost, or cannot be carried out, the controller considers the replica registered,
    but the replica considers itself unregistered. The replica registers again, and until then its heartbeats contain no
    incarnation. Errors of disks and databases do not end this loop: the replica serves nothing until they are fixed,
    and then continues without a restart. A replica that lost a partition registers again without it. A replica without
    partitions follows its controller to another ledger.

    Args:
        controller: address of the controller, or comma-separated addresses of several, which are tried until the leader
            answers.
    """
    node, info, threads = member.node, member.info, member.threads
    throttle, registered = ErrorThrottle(log, "the controller's orders cannot be carried out"), False
    free = ""  # the ledger that this replica belonged to, if the replica has no state of it any more
    beats = -1
    claimed: Holding | None = None  # partitions reported to the controller because its ledger does not know them
    addresses = addresses_of(controller)
    turn = Round(addresses, addresses[0])
    refused = False  # whether a controller has refused this replica in this round
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
                sent_at, questions = member.clock.monotonic(), member.followers.questions()
                reply = await controllers[asked].heartbeat(
                    Heartbeat(
                        info,
                        _directory(node, free),
                        incarnation if registered else "",
                        _some(member.transfers.incoming(), beats),
                        node.authority.seen[1],
                        alone=node.alone,
                        outgoing=questions,
                    )
                )
                adopted = reply.adopted or (free if free and node.is_empty else "")
                if node.authority.seen[0] not in ("", reply.ledger, adopted):
                    claimed = await _claim(member, controllers[asked], _held(node), claimed if reply.claimed else None)
                node.authority.check_answer(reply.ledger, reply.term, adopted)
                member.bundles.controller = controllers[asked]
                if reply.known and (reply.ledger, reply.term) == node.authority.seen:
                    node.lease.granted(sent_at, reply.lease_s)
                    member.followers.answered(questions, reply.followers)
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
                    log.warning("no lease from the controller at %s, will retry: %s", asked, error.meant)
                failed = error.meant
            except (StaleTerm, ForeignLedger) as error:  # the answer is ignored
                if isinstance(error, ForeignLedger) and node.is_empty and not free:
                    free = node.authority.seen[0]
                    log.warning("this replica has no state of its ledger %s any more and may join another ledger", free)
                    continue
                free = ""
                if throttle.is_new(error.code):
                    log.error("answer of the controller at %s ignored: %s", asked, error)
                failed = error
            except Exception as error:  # noqa: BLE001 - logged; the next round may succeed
                throttle.met(error)
            refused |= failed is not None and not isinstance(failed, SILENT)
            if failed is not None and turn.go_on(failed):
                continue  # ask another address without a pause, at most once in a round, to find the leader quickly
            if refused:
                node.lease.cut_off = False
            elif failed is not None:
                node.lease.unanswered()
            refused = False
            interval_s = node.settings.heartbeat_interval_s / (UNLED if turn.unled else 1)
            await member.followers.pause(jittered(interval_s, member.random))
            turn = Round(addresses, turn.asked)


async def _register(
    member: Member, controller: Controller, incarnation: str, reply: HeartbeatReply, adopted: str, free: str
) -> bool:
    """Registers with the ticket of ``reply``. Returns False if the ticket was no longer valid.

    Args:
        adopted: ledger that the controller's ledger has taken over.
        free: see :func:`_directory`.
    """
    node, threads = member.node, member.threads
    command = Command(reply.ledger, reply.term, reply.ticket)
    # from now on no earlier session changes anything, so the report about the partitions stays true
    await threads.in_files(node.begin_session, command, adopted)
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
        with contextlib.suppress(BundleDamaged):  # then the operator is not served, and its batches get the error
            await member.bundles.ensure(spec)
        await threads.in_files(node.follow, spec)
    for gone in told.superseded:
        if await threads.in_files(node.successor.supersede, gone.partition, gone.epoch, gone.owner, gone.voided):
            log.warning(
                "partition %s moved to %s at epoch %d while this replica was out of contact",
                gone.partition,
                gone.owner.name,
                gone.epoch,
            )
    return True


#: partition → (state, epoch), for the partitions on this replica
Holding = dict[PartitionId, tuple[str, int]]


def _held(node: ReplicaNode) -> Holding:
    return {lifecycle.partition: (lifecycle.state, lifecycle.epoch) for lifecycle, _ in node.inventory()}


async def _claim(member: Member, controller: Controller, holding: Holding, said: Holding | None) -> Holding:
    """Reports to a controller the partitions here that its ledger does not know, so that no replica creates them empty.

    Returns ``holding``.

    Args:
        holding: partitions to report.
        said: partitions in the controller's last report from this replica; if they are the same, nothing is sent.
    """
    if holding != said:
        names = {partition.operator for partition in holding}
        operators = [spec for spec in member.node.operators() if spec.name in names]
        views = [view for view in member.node.views() if view.partition in holding]
        await controller.claim(member.info, _directory(member.node), operators, views)
    return holding


def _some(incoming: list[tuple[PartitionId, str]], beats: int) -> list[tuple[PartitionId, str]]:
    """Returns the copies to name in this heartbeat. There may be thousands, which would make heartbeats large, so
    successive heartbeats name them in turns."""
    first = beats * INCOMING_MAX % max(len(incoming), 1)
    return (incoming[first:] + incoming[:first])[:INCOMING_MAX]


def _directory(node: ReplicaNode, free: str = "") -> Directory:
    """Describes the data directory.

    Args:
        free: ledger that the replica may leave, because it has no state of it any more; a directory of this ledger is
            reported as belonging to none.
    """
    identity, ledger = node.identity, node.authority.seen[0]
    return Directory(identity.id, identity.place, "" if ledger == free else ledger)
