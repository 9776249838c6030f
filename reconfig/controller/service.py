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

from reconfig.controller.adopting import Adopter
from reconfig.controller.checkpoints import Checkpoints
from reconfig.controller.claims import Claims
from reconfig.controller.cluster_state import ClusterState, Home
from reconfig.controller.context import ClusterStates, ControllerContext
from reconfig.controller.deployments import Deployments
from reconfig.controller.executor import Executor
from reconfig.controller.leaving import Leaving
from reconfig.controller.options import options_of
from reconfig.controller.rebalancing import AutoRebalance
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.controller.restores import Request, Restores
from reconfig.controller.run_registry import RunRegistry
from reconfig.controller.standbys import Standbys
from reconfig.controller.survey import Survey
from reconfig.controller.takeovers import Takeovers
from reconfig.tenure import Tenure
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import ForeignLedger
from stateflow.ledger import Ledger
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.control import taken_to_pb
from stateflow.rpc.reports import (
    adopted_to_pb,
    cluster_to_pb,
    deployment_to_pb,
    reconfiguration_to_pb,
    restored_to_pb,
    standby_to_pb,
)
from stateflow.rpc.wire import (
    batched,
    connect,
    replica_of,
    spec_of,
    spec_to_pb,
    streaming,
    unary,
)
from stateflow.runtime.code_key import check_signed
from stateflow.runtime.control import Wanted
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
T = TypeVar("T")


def to_the_end(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Awaitable[T]]:
    """Handler that goes on when its caller leaves, as gRPC cancels it then: what it planned would be locked for ever,
    with nobody to carry it out."""

    @functools.wraps(method)
    async def handler(self: ControllerServer, request: Any, context: grpc.aio.ServicerContext) -> T:
        return await asyncio.shield(self._context.spawn(method(self, request, context)))

    return handler


class ControllerServer(controller_pb2_grpc.ControllerServiceServicer):
    """A controller for one term: it decides while ``tenure`` lasts. ``over`` is done when that ended early.

    Args:
        tenure: by default for ever, of a controller that is alone.
        states: of the ledger, where they were read already.
        grace_s: a predecessor may grant leases for so long from now on.
    """

    def __init__(
        self,
        ledger: Ledger,
        settings: ControllerSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        connect: Callable[[str], grpc.aio.Channel] = connect,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12],
        *,
        tenure: Tenure | None = None,
        states: ClusterStates | None = None,
        grace_s: float = 0.0,
    ) -> None:
        self.settings = settings or ControllerSettings()
        self._clock = clock
        self._context = ControllerContext(
            ledger,
            self.settings,
            clock,
            connect,
            new_id,
            tenure or Tenure(),
            states or ClusterStates.read(ledger),
            grace_s,
        )
        self.over = self._context.over
        self._cluster, self._members, self._names = self._context.cluster, self._context.members, self._context.names
        self._runs = RunRegistry(self._cluster)
        executor = Executor(self._context, self._runs)
        self._standbys = Standbys(self._context, executor)
        self._restores = Restores(self._context, self._standbys.end)
        self._takeovers = Takeovers(self._context, self._runs, executor, self._standbys)
        self._reconfigurations = Reconfigurations(self._context, self._runs, executor)
        self._auto_rebalance = AutoRebalance(self._context, self._runs, self._reconfigurations)
        self._leaving = Leaving(self._context, self._standbys, self._takeovers)
        self._claims = Claims(self.settings, clock)
        self._checkpoints = Checkpoints(self._context)
        self._adopter = Adopter(self._context)
        self._deployments = Deployments(self._context, self._claims, self._leaving.drop)
        self._survey = Survey(self._context, self._runs, self._standbys, self._takeovers, self._deployments.created)

    # -- membership ---------------------------------------------------------------------------------------

    @unary
    async def Register(self, request: cpb.RegisterRequest, context: grpc.aio.ServicerContext) -> cpb.RegisterReply:
        info, home = replica_of(request.replica), _home_of(request.directory)
        views = self._members.said(info.name, request.ticket, request.partitions)
        if views is None:
            return cpb.RegisterReply(late=True)
        if request.more:
            return cpb.RegisterReply(ledger=self._context.ledger_id, term=self._context.term)
        self._names.check(info, home, {PartitionId(view.operator, view.partition) for view in views})
        if not self._members.is_good(info.name, request.ticket, self._cluster.assigned(info.name)):
            return cpb.RegisterReply(late=True)
        await self._context.record(ClusterState.register, info, home)
        self._context.check_leads()
        if not self._members.is_good(info.name, request.ticket, self._cluster.assigned(info.name)):
            return cpb.RegisterReply(late=True)
        self._members.registered(info.name, request.incarnation, request.ticket)
        dropped = self._leaving.dropped(views)
        self._claims.registered(request, [view for view in views if not self._is_known(view)])
        superseded = self._takeovers.registered(info.name, views)
        log.info("replica %s at %s (%s) registered", info.name, info.site, info.address)
        return cpb.RegisterReply(
            operators=[spec_to_pb(deployed.spec) for deployed in self._cluster.deployed.values()],
            heartbeat_interval_s=self.settings.heartbeat_interval_s,
            superseded=superseded,
            dropped=dropped,
            ledger=self._context.ledger_id,
            term=self._context.term,
        )

    @unary
    async def Heartbeat(self, request: cpb.HeartbeatRequest, context: grpc.aio.ServicerContext) -> cpb.HeartbeatReply:
        known = self._members.beat(request.name, request.incarnation)
        belongs_to = request.directory.ledger
        adopted = belongs_to if belongs_to in self._cluster.adopted else ""
        claimed = self._claims.heard(request.directory.id)
        if belongs_to and not adopted and belongs_to != self._context.ledger_id:
            self._names.note(replica_of(request.replica), _home_of(request.directory), self._foreign(belongs_to))
            claimed = self._claims.foreign(request.name, request.directory.id)
            return cpb.HeartbeatReply(ledger=self._context.ledger_id, term=self._context.term, claimed=claimed)
        if not known:
            self._names.check(replica_of(request.replica), _home_of(request.directory))
            if request.opening:
                self._members.opens(request.name)
                return cpb.HeartbeatReply(ledger=self._context.ledger_id, term=self._context.term)
            return cpb.HeartbeatReply(
                ticket=self._issue(request.name),
                ledger=self._context.ledger_id,
                term=self._context.term,
                claimed=claimed,
                adopted=adopted,
            )
        ended = [copy for copy in request.incoming if self._is_over(copy)]
        return cpb.HeartbeatReply(
            known=True,
            lease_s=self.settings.lease_s,
            ended=ended,
            ledger=self._context.ledger_id,
            term=self._context.term,
        )

    def _foreign(self, ledger: str) -> ForeignLedger:
        return ForeignLedger(
            "the replica belongs to another ledger than this controller's",
            remedy="start the controller with that ledger; if it is lost, `stateflow adopt --dry-run` shows what its "
            "replicas have, and `stateflow adopt` takes it into this one",
            ledger=self._context.ledger_id,
            belongs_to=ledger,
        )

    @unary
    async def Claim(self, request: cpb.ClaimRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        if request.directory.ledger == self._context.ledger_id:  # it was told what is deployed, not what is about to be
            unknown = [view for view in request.partitions if not self._is_known(view)]
            del request.partitions[:]
            request.partitions.extend(unknown)
        self._claims.note(request)
        return pb.Empty()

    def _is_known(self, view: rpb.PartitionView) -> bool:
        """Is it of an operator of this ledger, or of one that it had?"""
        name, cluster = view.operator, self._cluster
        return name in cluster.deployed or name in cluster.planned or view.epoch <= cluster.undeployed.get(name, 0)

    @unary
    @to_the_end
    async def Adopt(self, request: cpb.AdoptRequest, context: grpc.aio.ServicerContext) -> cpb.AdoptReply:
        async with self._deployments.one_at_a_time, self._context.planning:
            found = await self._adopter.adopt(self._claims.present(), request.dry_run, request.partial)
        return cpb.AdoptReply(operators=map(adopted_to_pb, found))

    @unary
    @to_the_end
    async def Replace(self, request: cpb.ReplaceRequest, context: grpc.aio.ServicerContext) -> cpb.ReplaceReply:
        """A name is another data directory's from now on. The former one is refused, whatever it has."""
        async with self._context.planning:
            directory = self._names.successor(request.replica, request.directory)
            await self._context.record(ClusterState.replace, request.replica, directory)
            self._names.replaced(request.replica)
        partitions = len(self._cluster.assigned(request.replica))
        log.warning(
            "replica %s is the data directory %s from now on; the former one had %d partitions",
            request.replica,
            directory,
            partitions,
        )
        return cpb.ReplaceReply(directory=directory, partitions=partitions)

    @unary
    @to_the_end
    async def Undeploy(self, request: cpb.UndeployRequest, context: grpc.aio.ServicerContext) -> cpb.UndeployReply:
        async with self._deployments.one_at_a_time:
            partitions, waiting = await self._leaving.undeploy(request.operator, request.delete_state)
        return cpb.UndeployReply(partitions=partitions, waiting=waiting)

    @unary
    @to_the_end
    async def Forget(self, request: cpb.ForgetRequest, context: grpc.aio.ServicerContext) -> pb.Empty:
        await self._leaving.forget(request.replica)
        return pb.Empty()

    def _issue(self, name: str) -> str:
        return self._members.issue(name, self._context.new_id(), self._cluster.assigned(name))

    def _is_over(self, copy: cpb.Incoming) -> bool:
        """A copy is wanted as long as its move is open, and where it may take over for an owner that is gone. Who does
        not know the operator, in an empty ledger, ends nothing of it."""
        if copy.operator not in self._cluster.deployed:
            return False
        if self._takeovers.concerns(PartitionId(copy.operator, copy.partition)):
            return False
        return all(open_move.planned.move_id != copy.move_id for open_move in self._cluster.open_moves.values())

    # -- deployments --------------------------------------------------------------------------------------

    @unary
    @to_the_end
    async def Deploy(self, request: cpb.DeployRequest, context: grpc.aio.ServicerContext) -> cpb.Deployment:
        spec = spec_of(request.spec)
        check_signed(spec)
        return deployment_to_pb(self._survey.deployment(await self._deployments.deploy(spec, request.sites)))

    @unary
    async def GetDeployment(
        self, request: cpb.GetDeploymentRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Deployment:
        return deployment_to_pb(self._survey.deployment(self._cluster.operator(request.operator)))

    @unary
    async def Status(self, request: cpb.StatusRequest, context: grpc.aio.ServicerContext) -> cpb.StatusReply:
        return cluster_to_pb(self._survey.status())

    # -- reconfigurations ---------------------------------------------------------------------------------

    @unary
    @to_the_end
    async def Migrate(self, request: cpb.MigrateRequest, context: grpc.aio.ServicerContext) -> cpb.Reconfiguration:
        options = options_of(request.options)
        started = await self._reconfigurations.migrate(request.operator, request.partitions, request.to, options)
        return reconfiguration_to_pb(started)

    @unary
    @to_the_end
    async def Rebalance(
        self, request: cpb.RebalanceRequest, context: grpc.aio.ServicerContext
    ) -> cpb.ReconfigurationList:
        started = await self._reconfigurations.rebalance(request.operator, options_of(request.options))
        return cpb.ReconfigurationList(reconfigurations=map(reconfiguration_to_pb, started))

    @unary
    @to_the_end
    async def Drain(self, request: cpb.DrainRequest, context: grpc.aio.ServicerContext) -> cpb.ReconfigurationList:
        started = await self._reconfigurations.drain(request.replica, options_of(request.options))
        return cpb.ReconfigurationList(reconfigurations=map(reconfiguration_to_pb, started))

    @unary
    @to_the_end
    async def Standby(self, request: cpb.StandbyRequest, context: grpc.aio.ServicerContext) -> cpb.StandbyReply:
        wanted = await self._standbys.want(request.operator, request.count)
        return cpb.StandbyReply(standbys=map(standby_to_pb, wanted))

    @streaming
    async def ListReconfigurations(
        self, request: cpb.ListRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cpb.ReconfigurationList]:
        for page in batched(map(reconfiguration_to_pb, self._runs.history(request.limit))):
            yield cpb.ReconfigurationList(reconfigurations=page)

    @unary
    async def GetReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return reconfiguration_to_pb(self._runs.found(request.id).report())

    @streaming
    async def WatchReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cpb.Reconfiguration]:
        async for report in self._runs.watch(request.id):
            yield reconfiguration_to_pb(report)

    @unary
    async def CancelReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return reconfiguration_to_pb(self._runs.cancel(request.id))

    @unary
    async def ResolveReconfiguration(
        self, request: cpb.ResolveRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return reconfiguration_to_pb(self._takeovers.resolve(request.id, request.how))

    @unary
    @to_the_end
    async def PauseReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return reconfiguration_to_pb(await self._reconfigurations.pause(request.id))

    @unary
    @to_the_end
    async def ResumeReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return reconfiguration_to_pb(await self._reconfigurations.resume(request.id))

    @unary
    @to_the_end
    async def RetryReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return reconfiguration_to_pb(await self._reconfigurations.retry(request.id))

    # -- after a restart ----------------------------------------------------------------------------------

    def resume(self) -> None:
        """Carry on with what the ledger says was under way, and watch over leases from now on."""
        self._deployments.resume_all()
        self._standbys.resume_all()
        self._takeovers.resume_all()
        self._reconfigurations.resume_all()
        self._context.spawn(self._restores.resume())
        self._context.spawn(self._takeovers.watch())
        if self.settings.auto_rebalance:
            self._context.spawn(self._auto_rebalance.watch())

    # -- checkpoints --------------------------------------------------------------------------------------

    @unary
    async def Checkpoint(
        self, request: rpb.CheckpointRequest, context: grpc.aio.ServicerContext
    ) -> rpb.CheckpointReply:
        taken = await self._checkpoints.take(request.operator, request.partitions, request.savepoint)
        return taken_to_pb(taken)

    @unary
    @to_the_end
    async def Restore(
        self, request: cpb.RestoreOperatorRequest, context: grpc.aio.ServicerContext
    ) -> cpb.RestoreReport:
        async with self._context.planning:
            planned = await self._restores.plan(_restore_of(request))
        done = await self._restores.run(planned)
        return cpb.RestoreReport(id=planned[0].restore_id, partitions=map(restored_to_pb, done))

    # -- plumbing -----------------------------------------------------------------------------------------

    async def close(self) -> None:
        await self._context.close()


def _home_of(message: cpb.Directory) -> Home:
    return Home(message.id, message.place)


def _restore_of(message: cpb.RestoreOperatorRequest) -> Request:
    wanted = Wanted(message.savepoint, message.source, message.batch)
    return Request(message.operator, tuple(message.partitions), message.to, message.url, wanted)
