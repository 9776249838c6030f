"""The controller's gRPC shell: it takes requests and hands them to its parts."""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import grpc
import grpc.aio

from reconfig.controller.adopting import Adopter
from reconfig.controller.claims import Claims
from reconfig.controller.cluster_state import ClusterState, Deployed, Home
from reconfig.controller.context import ClusterStates, ControllerContext
from reconfig.controller.executor import Executor
from reconfig.controller.leaving import Leaving
from reconfig.controller.options import options_of
from reconfig.controller.rebalancing import AutoRebalance
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.controller.restores import Restores
from reconfig.controller.run_registry import RunRegistry
from reconfig.controller.standbys import Standbys
from reconfig.controller.survey import Survey
from reconfig.controller.takeovers import Takeovers
from reconfig.tenure import Tenure
from stateflow import ring
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import AlreadyDeployed, ForeignLedger, StateflowError
from stateflow.ledger import Ledger, RecordState
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
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
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId

log = logging.getLogger(__name__)
CHECKPOINT_TIMEOUT_S = 3600.0
#: partitions in one request: each takes some durable writes, which are long on an SD card
CREATED_AT_ONCE = 32
CREATE_TIMEOUT_S = 60.0
#: how much later than a lease ends it is looked whether it has
LAPSING_S = 0.05
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
        self._deploying = asyncio.Lock()
        self._leaving = Leaving(self._context, self._standbys, self._takeovers)
        self._claims = Claims(self.settings, clock)
        self._adopter = Adopter(self._context)
        self._created: dict[str, int] = {}  # partitions so far, of deployments under way
        self._survey = Survey(self._context, self._runs, self._standbys, self._takeovers, self._created)

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
        async with self._deploying, self._context.planning:
            return await self._adopter.adopt(self._claims.present(), request.dry_run, request.partial)

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
        async with self._deploying:
            return await self._leaving.undeploy(request.operator, request.delete_state)

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
        async with self._deploying:
            return await self._deploy(spec, list(request.sites))

    async def _deploy(self, spec: OperatorSpec, sites: list[str]) -> cpb.Deployment:
        planned = self._cluster.planned.get(spec.name)
        existing = self._cluster.deployed.get(spec.name) or (planned[0] if planned else None)
        if existing is not None:
            spec = spec.after(existing.spec)
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
            await self._create_or_take_back(*planned)
        if existing is not None:
            return self._survey.deployment(self._cluster.operator(spec.name))
        if not self._cluster.deployed and not self._cluster.planned:  # replicas may have what this ledger has lost
            await asyncio.sleep(self._claims.early_s)
        await self._former_owners(spec.name)
        self._claims.check_free(spec.name, self._context.ledger_id)
        candidates = [info for info in self._cluster.replicas.values() if self._members.alive(info.name)]
        if sites:
            for site in sites:
                self._context.check_site(site)
            candidates = [info for info in candidates if info.site in sites]
        owners = await self._context.aside(ring.propose, spec.name, range(spec.partitions), candidates)
        await self._check_possible(spec, Counter(owners.values()))
        record = await self._context.record(ClusterState.plan_deployment, spec, owners)
        await self._create_or_take_back(self._cluster.planned[spec.name][0], record)
        return self._survey.deployment(self._cluster.operator(spec.name))

    async def _former_owners(self, operator: str) -> None:
        """Wait for whoever was not told that an earlier deployment has ended: it may serve what it had of that as long
        as its lease runs."""
        while operator in self._cluster.undeployed:
            untold = [name for name in self._cluster.replicas if not self._members.alive(name)]
            left_s = [self._members.lease_left_s(name) for name in untold if self._members.may_serve(name)]
            if not left_s:
                return
            await asyncio.sleep(min(max(left_s) + LAPSING_S, self.settings.heartbeat_interval_s))

    async def _upgrade(self, deployed: Deployed, spec: OperatorSpec) -> cpb.Deployment:
        """New code and states of an operator. Every replica that answers must have the code, and says so first; one
        that does not answer now says so when it registers: an owner that was silent for a while must, though its lease
        may still run."""
        owners = Counter(deployed.assignment.owners)
        await self._check_possible(spec, {name: owners[name] for name in owners.keys() & self._context.alive().keys()})
        await self._context.record(ClusterState.upgrade, spec)
        alive = self._context.alive()
        for silent in owners.keys() - alive.keys():
            self._members.expel(silent)
        await asyncio.gather(*(self._tell(name, spec, name in owners) for name in sorted(alive)))
        return self._survey.deployment(self._cluster.operator(spec.name))

    async def _tell(self, name: str, spec: OperatorSpec, owns: bool) -> None:
        """A replica runs this version from its next batch on. An owner that does not answer is to register again, which
        it cannot without hearing of it; others hear of it with the first partition."""
        try:
            await self._context.call(name, lambda stub: stub.Create, rpb.CreateRequest(spec=spec_to_pb(spec)))
        except StateflowError as error:
            log.warning("%s has not taken the new version of %s yet: %s", name, spec.name, error)
            if owns:
                self._members.expel(name)

    async def _check_possible(self, spec: OperatorSpec, counts: Mapping[str, int]) -> None:
        """A replica that cannot load the code, or have so many partitions, refuses here, before anything is decided."""
        for name, count in sorted(counts.items()):
            request = rpb.CreateRequest(spec=spec_to_pb(spec), total=count, asked=True)
            await self._context.call(name, lambda stub: stub.Create, request)

    async def _create_or_take_back(self, deployed: Deployed, record: Any) -> None:
        """What is reported as failed is not deployed, and no later controller goes on with it."""
        try:
            await self._create(deployed, record)
        except StateflowError as error:
            self._context.check_leads()  # else it is the next one's, which goes on with it
            await self._context.record(ClusterState.fail_deployment, record, error.to_wire())
            await self._leaving.drop(deployed.spec.name)
            raise

    async def _create(self, deployed: Deployed, record: Any) -> None:
        """A few partitions at a time, at every owner beside the others. What is there already stays as it is, so a
        deployment that was interrupted is gone on with by doing it again."""
        name = deployed.spec.name
        self._created[name] = 0
        try:
            owners = sorted(set(deployed.assignment.owners))
            done = await asyncio.gather(*(self._create_at(o, deployed) for o in owners), return_exceptions=True)
            for failed in filter(None, done):
                raise failed
        finally:
            del self._created[name]
        await self._context.record(ClusterState.finish_deployment, record)

    async def _create_at(self, owner: str, deployed: Deployed) -> None:
        spec, numbers = spec_to_pb(deployed.spec), sorted(deployed.assignment.of(owner))
        for at in range(0, len(numbers), CREATED_AT_ONCE):
            request = rpb.CreateRequest(
                spec=spec,
                partitions=numbers[at : at + CREATED_AT_ONCE],
                epoch=deployed.first_epoch,
                total=len(numbers),
            )
            await self._context.call(owner, lambda stub: stub.Create, request, CREATE_TIMEOUT_S)
            self._created[spec.name] += len(request.partitions)

    @unary
    async def GetDeployment(
        self, request: cpb.GetDeploymentRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Deployment:
        return self._survey.deployment(self._cluster.operator(request.operator))

    @unary
    async def Status(self, request: cpb.StatusRequest, context: grpc.aio.ServicerContext) -> cpb.StatusReply:
        return self._survey.status()

    # -- reconfigurations ---------------------------------------------------------------------------------

    @unary
    @to_the_end
    async def Migrate(self, request: cpb.MigrateRequest, context: grpc.aio.ServicerContext) -> cpb.Reconfiguration:
        options = options_of(request.options)
        return await self._reconfigurations.migrate(request.operator, request.partitions, request.to, options)

    @unary
    @to_the_end
    async def Rebalance(
        self, request: cpb.RebalanceRequest, context: grpc.aio.ServicerContext
    ) -> cpb.ReconfigurationList:
        started = await self._reconfigurations.rebalance(request.operator, options_of(request.options))
        return cpb.ReconfigurationList(reconfigurations=started)

    @unary
    @to_the_end
    async def Drain(self, request: cpb.DrainRequest, context: grpc.aio.ServicerContext) -> cpb.ReconfigurationList:
        started = await self._reconfigurations.drain(request.replica, options_of(request.options))
        return cpb.ReconfigurationList(reconfigurations=started)

    @unary
    @to_the_end
    async def Standby(self, request: cpb.StandbyRequest, context: grpc.aio.ServicerContext) -> cpb.StandbyReply:
        return cpb.StandbyReply(standbys=await self._standbys.want(request.operator, request.count))

    @streaming
    async def ListReconfigurations(
        self, request: cpb.ListRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cpb.ReconfigurationList]:
        for page in batched(self._runs.history(request.limit)):
            yield cpb.ReconfigurationList(reconfigurations=page)

    @unary
    async def GetReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return self._runs.found(request.id).refresh()

    @streaming
    async def WatchReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cpb.Reconfiguration]:
        async for report in self._runs.watch(request.id):
            yield report

    @unary
    async def CancelReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return self._runs.cancel(request.id)

    @unary
    async def ResolveReconfiguration(
        self, request: cpb.ResolveRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return self._takeovers.resolve(request.id, request.how)

    @unary
    async def PauseReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return self._runs.pause(request.id)

    @unary
    async def ResumeReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return self._runs.resume(request.id)

    @unary
    @to_the_end
    async def RetryReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return await self._reconfigurations.retry(request.id)

    # -- after a restart ----------------------------------------------------------------------------------

    def resume(self) -> None:
        """Carry on with what the ledger says was under way, and watch over leases from now on."""
        for deployed, record in list(self._cluster.planned.values()):
            self._context.spawn(self._resume_deployment(deployed, record))
        self._standbys.resume_all()
        self._takeovers.resume_all()
        self._reconfigurations.resume_all()
        self._context.spawn(self._restores.resume())
        self._context.spawn(self._takeovers.watch())
        if self.settings.auto_rebalance:
            self._context.spawn(self._auto_rebalance.watch())

    async def _resume_deployment(self, deployed: Deployed, record: Any) -> None:
        if record.state is RecordState.NEW:  # the process ended between its two records
            record = await self._context.record(ClusterState._append, record.item_id, RecordState.PROCESSING, record)
        while True:
            try:
                async with self._deploying:
                    if deployed.spec.name in self._cluster.planned:  # else somebody deployed it again meanwhile
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
            names = sorted(set(self._cluster.operator(request.operator).assignment.owners))
        else:
            names = [name for name in sorted(self._cluster.replicas) if self._members.alive(name)]
        started = self._clock.monotonic()
        total = rpb.CheckpointReply()
        for reply in await asyncio.gather(
            *(self._context.call(n, lambda s: s.Checkpoint, request, CHECKPOINT_TIMEOUT_S) for n in names)
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
        async with self._context.planning:
            planned = await self._restores.plan(request)
        return await self._restores.run(planned)

    # -- plumbing -----------------------------------------------------------------------------------------

    async def close(self) -> None:
        await self._context.close()


def _home_of(message: cpb.Directory) -> Home:
    return Home(message.id, message.place)


def _may_follow(deployed: OperatorSpec, spec: OperatorSpec) -> bool:
    """Whether routers and stored keys cannot tell the new version from the old one; states evolve."""
    same = ("partitions", "key", "output_schema", "side_schemas")
    return all(getattr(deployed, name) == getattr(spec, name) for name in same)
