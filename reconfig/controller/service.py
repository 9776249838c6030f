"""The controller's gRPC shell: it takes requests and hands them to its parts."""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from reconfig.controller.book import Book, Deployed
from reconfig.controller.carrying import Carrier
from reconfig.controller.desk import Desk
from reconfig.controller.options import Options
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.controller.restores import Restores
from reconfig.controller.standbys import Standbys
from reconfig.controller.takeovers import Takeovers
from reconfig.controller.underway import Underway
from stateflow import ring
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import AlreadyDeployed, StateflowError
from stateflow.ledger import Ledger, RecordState
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import (
    OPTIONS,
    bind,
    connect,
    replica_of,
    replica_to_pb,
    spec_of,
    spec_to_pb,
    streaming,
    unary,
)
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId

log = logging.getLogger(__name__)
CHECKPOINT_TIMEOUT_S = 3600.0
T = TypeVar("T")


def to_the_end(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Awaitable[T]]:
    """Handler that goes on when its caller leaves, as gRPC cancels it then: what it planned would be locked for ever,
    with nobody to carry it out."""

    @functools.wraps(method)
    async def handler(self: ControllerServer, request: Any, context: grpc.aio.ServicerContext) -> T:
        return await asyncio.shield(self._desk.spawn(method(self, request, context)))

    return handler


class ControllerServer(controller_pb2_grpc.ControllerServiceServicer):
    def __init__(
        self,
        ledger: Ledger,
        settings: ControllerSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        connect: Callable[[str], grpc.aio.Channel] = connect,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12],
    ) -> None:
        self.settings = settings or ControllerSettings()
        self._clock = clock
        self._desk = Desk(ledger, self.settings, clock, connect, new_id)
        self._book, self._members = self._desk.book, self._desk.members
        self._underway = Underway(self._book)
        carrier = Carrier(self._desk, self._underway)
        self._restores = Restores(self._desk)
        self._standbys = Standbys(self._desk, carrier)
        self._takeovers = Takeovers(self._desk, self._underway, carrier, self._standbys)
        self._reconfigurations = Reconfigurations(self._desk, self._underway, carrier, self._standbys.make_way)
        self._deploying = asyncio.Lock()

    # -- membership ---------------------------------------------------------------------------------------

    @unary
    async def Register(self, request: cpb.RegisterRequest, context: grpc.aio.ServicerContext) -> cpb.RegisterReply:
        info = replica_of(request.replica)
        if not self._members.is_good(info.name, request.ticket, self._book.assigned(info.name)):
            return cpb.RegisterReply(late=True)
        await self._desk.record(Book.register, info, request.incarnation)
        if not self._members.is_good(info.name, request.ticket, self._book.assigned(info.name)):
            return cpb.RegisterReply(late=True)
        self._members.registered(info.name, request.incarnation, request.ticket)
        superseded = self._takeovers.registered(info.name, request.partitions)
        log.info("replica %s at %s (%s) registered", info.name, info.site, info.address)
        return cpb.RegisterReply(
            operators=[spec_to_pb(deployed.spec) for deployed in self._book.deployed.values()],
            heartbeat_interval_s=self.settings.heartbeat_interval_s,
            superseded=superseded,
        )

    @unary
    async def Heartbeat(self, request: cpb.HeartbeatRequest, context: grpc.aio.ServicerContext) -> cpb.HeartbeatReply:
        known = self._members.beat(request.name, request.incarnation)
        if not known:
            return cpb.HeartbeatReply(ticket=self._issue(request.name))
        ended = [copy for copy in request.incoming if self._is_over(copy)]
        return cpb.HeartbeatReply(known=True, lease_s=self.settings.lease_s, ended=ended)

    def _issue(self, name: str) -> str:
        return self._members.issue(name, self._desk.new_id(), self._book.assigned(name))

    def _is_over(self, copy: cpb.Incoming) -> bool:
        """A copy is wanted as long as its move is open, and where it may take over for an owner that is gone."""
        if self._takeovers.concerns(PartitionId(copy.operator, copy.partition)):
            return False
        return all(open_move.planned.move_id != copy.move_id for open_move in self._book.open_moves.values())

    # -- deployments --------------------------------------------------------------------------------------

    @unary
    @to_the_end
    async def Deploy(self, request: cpb.DeployRequest, context: grpc.aio.ServicerContext) -> cpb.Deployment:
        async with self._deploying:
            return await self._deploy(spec_of(request.spec), list(request.sites))

    async def _deploy(self, spec: OperatorSpec, sites: list[str]) -> cpb.Deployment:
        planned = self._book.planned.get(spec.name)
        existing = self._book.deployed.get(spec.name) or (planned[0] if planned else None)
        if existing is not None and planned is None and existing.spec != spec and _may_follow(existing.spec, spec):
            return await self._upgrade(existing, spec)
        if existing is not None and existing.spec != spec:
            raise AlreadyDeployed(
                "another version of the operator is deployed, with other partitions, key or output",
                remedy="deploy this one with the same partitions, key and output, or under another name",
                operator=spec.name,
                deployed=existing.spec.target,
                partitions=existing.spec.partitions,
            )
        if planned is not None:
            await self._create(*planned)
        if existing is not None:
            return self._deployment(self._book.operator(spec.name))
        candidates = [info for info in self._book.replicas.values() if self._members.alive(info.name)]
        if sites:
            for site in sites:
                self._desk.check_site(site)
            candidates = [info for info in candidates if info.site in sites]
        owners = ring.propose(spec.name, range(spec.partitions), candidates)
        await self._check_loadable(spec, {owners[p] for p in owners})
        record = await self._desk.record(Book.plan_deployment, spec, owners)
        await self._create(self._book.planned[spec.name][0], record)
        return self._deployment(self._book.operator(spec.name))

    async def _upgrade(self, deployed: Deployed, spec: OperatorSpec) -> cpb.Deployment:
        """New code and states of an operator. Every replica that answers must have the code, and says so first; one
        that does not answer now says so when it registers."""
        await self._check_loadable(spec, set(deployed.assignment.owners) & self._desk.alive().keys())
        await self._desk.record(Book.upgrade, spec)
        return self._deployment(self._book.operator(spec.name))

    async def _check_loadable(self, spec: OperatorSpec, names: set[str]) -> None:
        """A replica that cannot load the code refuses here, before anything is decided."""
        for name in sorted(names):
            await self._desk.call(name, lambda stub: stub.Create, rpb.CreateRequest(spec=spec_to_pb(spec)))

    async def _create(self, deployed: Deployed, record: Any) -> None:
        for name in sorted(set(deployed.assignment.owners)):
            request = rpb.CreateRequest(
                spec=spec_to_pb(deployed.spec), partitions=sorted(deployed.assignment.of(name)), epoch=1
            )
            await self._desk.call(name, lambda stub: stub.Create, request)
        await self._desk.record(Book.finish_deployment, record)

    @unary
    async def GetDeployment(
        self, request: cpb.GetDeploymentRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Deployment:
        return self._deployment(self._book.operator(request.operator))

    def _deployment(self, deployed: Deployed) -> cpb.Deployment:
        names = sorted(set(deployed.assignment.owners))
        index = {name: number for number, name in enumerate(names)}
        return cpb.Deployment(
            spec=spec_to_pb(deployed.spec),
            version=deployed.assignment.version,
            replicas=[replica_to_pb(self._book.replicas[name]) for name in names],
            owners=[index[name] for name in deployed.assignment.owners],
            epochs=deployed.assignment.epochs,
        )

    @unary
    async def Status(self, request: cpb.StatusRequest, context: grpc.aio.ServicerContext) -> cpb.StatusReply:
        owned = self._desk.owned_counts()
        return cpb.StatusReply(
            replicas=[
                cpb.ReplicaStatus(
                    replica=replica_to_pb(info),
                    alive=self._members.alive(info.name),
                    last_heartbeat_s=self._members.heard_s(info.name),
                    partitions=owned.get(info.name, 0),
                )
                for info in sorted(self._book.replicas.values(), key=lambda info: info.name)
            ],
            deployments=[self._deployment(deployed) for _, deployed in sorted(self._book.deployed.items())],
            reconfigurations=[running.message for running in self._underway.running.values()],
            standbys=self._standbys.views(),
        )

    # -- reconfigurations ---------------------------------------------------------------------------------

    @unary
    @to_the_end
    async def Migrate(self, request: cpb.MigrateRequest, context: grpc.aio.ServicerContext) -> cpb.Reconfiguration:
        options = Options.of(request.options)
        return await self._reconfigurations.migrate(request.operator, request.partitions, request.to, options)

    @unary
    @to_the_end
    async def Rebalance(
        self, request: cpb.RebalanceRequest, context: grpc.aio.ServicerContext
    ) -> cpb.ReconfigurationList:
        started = await self._reconfigurations.rebalance(request.operator, Options.of(request.options))
        return cpb.ReconfigurationList(reconfigurations=started)

    @unary
    @to_the_end
    async def Drain(self, request: cpb.DrainRequest, context: grpc.aio.ServicerContext) -> cpb.ReconfigurationList:
        started = await self._reconfigurations.drain(request.replica, Options.of(request.options))
        return cpb.ReconfigurationList(reconfigurations=started)

    @unary
    @to_the_end
    async def Standby(self, request: cpb.StandbyRequest, context: grpc.aio.ServicerContext) -> cpb.StandbyReply:
        return cpb.StandbyReply(standbys=await self._standbys.want(request.operator, request.count))

    @unary
    async def ListReconfigurations(
        self, request: cpb.ListRequest, context: grpc.aio.ServicerContext
    ) -> cpb.ReconfigurationList:
        return cpb.ReconfigurationList(reconfigurations=self._underway.history(request.limit))

    @unary
    async def GetReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        for message in self._underway.history():
            if message.id == request.id:
                return message
        return self._underway.found(request.id).refresh()  # raises what there is to say

    @streaming
    async def WatchReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cpb.Reconfiguration]:
        async for report in self._underway.watch(request.id):
            yield report

    @unary
    async def CancelReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return self._underway.cancel(request.id)

    @unary
    async def PauseReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return self._underway.pause(request.id)

    @unary
    async def ResumeReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return self._underway.resume(request.id)

    @unary
    @to_the_end
    async def RetryReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return await self._reconfigurations.retry(request.id)

    # -- after a restart ----------------------------------------------------------------------------------

    def resume(self) -> None:
        """Carry on with what the ledger says was under way, and watch over leases from now on."""
        for deployed, record in list(self._book.planned.values()):
            self._desk.spawn(self._resume_deployment(deployed, record))
        self._standbys.resume_all()
        self._takeovers.resume_all()
        self._reconfigurations.resume_all()
        self._desk.spawn(self._restores.resume())
        self._desk.spawn(self._takeovers.watch())

    async def _resume_deployment(self, deployed: Deployed, record: Any) -> None:
        if record.state is RecordState.NEW:  # the process ended between its two records
            record = await self._desk.record(Book._append, record.item_id, RecordState.PROCESSING, record)
        while True:
            try:
                async with self._deploying:
                    if deployed.spec.name in self._book.planned:  # else somebody deployed it again meanwhile
                        await self._create(deployed, record)
                    return
            except StateflowError as error:
                log.warning("deployment of %s waits: %s", deployed.spec.name, error)
                await asyncio.sleep(self.settings.heartbeat_interval_s)

    # -- checkpoints --------------------------------------------------------------------------------------

    @unary
    async def Checkpoint(
        self, request: rpb.CheckpointRequest, context: grpc.aio.ServicerContext
    ) -> rpb.CheckpointReply:
        if request.operator:
            names = sorted(set(self._book.operator(request.operator).assignment.owners))
        else:
            names = [name for name in sorted(self._book.replicas) if self._members.alive(name)]
        started = self._clock.monotonic()
        total = rpb.CheckpointReply()
        for reply in await asyncio.gather(
            *(self._desk.call(n, lambda s: s.Checkpoint, request, CHECKPOINT_TIMEOUT_S) for n in names)
        ):
            total.partitions += reply.partitions
            total.numbers.extend(reply.numbers)
            total.bytes_new += reply.bytes_new
            total.bytes_total += reply.bytes_total
            total.url = reply.url
        total.duration_s = self._clock.monotonic() - started
        return total

    @unary
    @to_the_end
    async def Restore(
        self, request: cpb.RestoreOperatorRequest, context: grpc.aio.ServicerContext
    ) -> cpb.RestoreReport:
        async with self._desk.planning:
            planned = await self._restores.plan(request)
        return await self._restores.run(planned)

    # -- plumbing -----------------------------------------------------------------------------------------

    async def close(self) -> None:
        await self._desk.close()


def _may_follow(deployed: OperatorSpec, spec: OperatorSpec) -> bool:
    """Whether routers and stored keys cannot tell the new version from the old one; states evolve."""
    same = ("partitions", "key", "output_schema", "side_schemas")
    return all(getattr(deployed, name) == getattr(spec, name) for name in same)


async def serve(
    ledger: Ledger,
    listen: str,
    settings: ControllerSettings | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
    ready: asyncio.Future[str] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run a controller until ``stop``. Raises PortInUse."""
    server = grpc.aio.server(options=OPTIONS)
    shell = ControllerServer(ledger, settings, clock)
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(shell, server)
    try:
        address = bind(server, listen)
        await server.start()
        shell.resume()
        if ready is not None:
            ready.set_result(address)
        await (stop or asyncio.Event()).wait()
        await server.stop(grace=1)
    finally:
        await shell.close()
