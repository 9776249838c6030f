"""A replica's place in its cluster: it registers, seals what was given away meanwhile, and keeps its lease alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import grpc.aio

from stateflow.errors import StateflowError
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc
from stateflow.rpc.moving import MoveHandlers, views_of
from stateflow.rpc.wire import remote_error, replica_of, replica_to_pb, spec_of
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 5.0


async def stay_registered(shell: MoveHandlers, info: ReplicaInfo, controller: str, incarnation: str) -> None:
    """Heartbeat; register whenever the controller does not know this incarnation.

    A controller that gave partitions away forgets the incarnation first. So the lease of a replica that comes back
    begins behind its registration, and that behind the seals of what it lost. A registration whose answer did not
    arrive, or could not be carried out, counts for the controller and not here: it is made again, and until then no
    heartbeat says who this is.
    """
    node = shell.node
    warned = registered = False
    async with shell.connect(controller) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        while True:
            try:
                sent_at = shell.clock.monotonic()
                incoming = [cpb.Incoming(**copy) for copy in shell.incoming()]
                beat = await stub.Heartbeat(
                    cpb.HeartbeatRequest(
                        name=info.name, incarnation=incarnation if registered else "", incoming=incoming
                    ),
                    timeout=CALL_TIMEOUT_S,
                )
                warned = False
                if beat.known:
                    node.lease.granted(sent_at, beat.lease_s)
                    for ended in beat.ended:
                        await shell.end(PartitionId(ended.operator, ended.partition), ended.move_id)
                else:
                    node.lease.revoke()
                    registered = False
                    registered = await _register(shell, stub, info, incarnation, beat.ticket)
                    if registered:
                        log.info("registered as %s at %s", info.name, controller)
                        continue
            except grpc.aio.AioRpcError as error:
                if not warned:
                    log.warning("%s", remote_error(error, controller))
                    warned = True
            except StateflowError as error:  # it serves nothing before this is mended
                log.error("cannot seal what was given away: %s", error)
            await asyncio.sleep(node.settings.heartbeat_interval_s)


async def _register(
    shell: MoveHandlers,
    stub: controller_pb2_grpc.ControllerServiceStub,
    info: ReplicaInfo,
    incarnation: str,
    ticket: str,
) -> bool:
    """False: the ticket was void by then."""
    await shell.in_files(shell.node.begin_session, ticket)  # what is said now stays true
    request = cpb.RegisterRequest(
        replica=replica_to_pb(info), incarnation=incarnation, partitions=views_of(shell.node), ticket=ticket
    )
    reply = await stub.Register(request, timeout=2 * CALL_TIMEOUT_S)
    if reply.late:
        return False
    for spec in reply.operators:
        with contextlib.suppress(StateflowError):  # it is named again when it is really needed
            await shell.in_files(shell.node.learn, spec_of(spec))
    for gone in reply.superseded:
        partition = PartitionId(gone.operator, gone.partition)
        owner = replica_of(gone.owner)
        if await shell.in_files(shell.node.successor.supersede, partition, gone.epoch, owner, gone.burnt):
            log.warning("%s went to %s at epoch %d while this replica was not heard", partition, owner.name, gone.epoch)
    return True
