"""The controller's gRPC service. Each handler translates a request, and calls the part of the controller that does the
work."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import grpc.aio

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.controller import Controller
from reconfig.controller.folds import Home
from reconfig.controller.following import Following
from reconfig.controller.leading import Leading
from reconfig.controller.reconfigurations import Ask
from reconfig.controller.registration import Admitted, Answer, Arrival, Beat, Piece
from reconfig.controller.restores import Request
from reconfig.decisions.failover import Failover, Said
from reconfig.decisions.jobs import Do, Job
from reconfig.decisions.placement import Choice
from reconfig.decisions.plan import ReconfigurationState
from reconfig.decisions.policies import AutopilotSettings, policies_named
from reconfig.decisions.sweeps import Chore, chore_named
from stateflow.errors import HoldLost, InvalidArgument, NotAllowed, NotLeading
from stateflow.fleet import Beat as AgentBeat
from stateflow.fleet import Request as Requested
from stateflow.partition.control import Wanted
from stateflow.release import FIRST
from stateflow.reports import AutopilotReport, FollowerReport, JobReport, JobRun, Reconfiguration
from stateflow.rpc import agent_pb2 as apb
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.serving import caller
from stateflow.rpc.wire import (
    PAGE_BYTES,
    after_of,
    batched,
    message_of,
    streaming,
    tell_newest,
    unary,
    value_of,
)
from stateflow.security.refusals import REFUSALS
from stateflow.security.roles import check_owners
from stateflow.status import ClusterReport, Deployment
from stateflow.types import MoveOptions, OperatorSpec, ReplicaInfo, shown

log = logging.getLogger(__name__)
T = TypeVar("T")


class Tells(Protocol):
    """Questions that every controller answers. The leader answers from its state, followers from the part of the ledger
    that they have read.
    """

    @property
    def cluster(self) -> ClusterState: ...
    @property
    def follower(self) -> FollowerReport | None: ...
    @property
    def term(self) -> int: ...
    def deployment(self, operator: str) -> Deployment: ...
    def job_reports(self, name: str) -> list[JobReport]: ...
    def job_run(self, run_id: str) -> JobRun: ...
    def status(self) -> ClusterReport: ...
    def reconfiguration(self, reconfiguration: str) -> Reconfiguration: ...
    def history(self, limit: int = 0) -> Iterator[Reconfiguration]: ...


def of_the_term(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Makes a handler that works on the controller of the current term, and fails with the term's error if the term
    ends.
    """

    @functools.wraps(method)
    async def handler(self: ControllerService, request: Any, context: grpc.aio.ServicerContext) -> T:
        async with self.leading.term() as controller:
            answer = await method(self, request, controller)
            tell_newest(context, controller.term, controller.cluster.newest)
            return answer

    return handler


def of_any(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Makes a handler that reads from the controller of the current term, or, if this process does not lead and the
    caller accepts it, from what this process has read of the ledger.
    """

    @functools.wraps(method)
    async def handler(self: ControllerService, request: Any, context: grpc.aio.ServicerContext) -> T:
        async with self.telling(context) as tells:
            answer = await method(self, request, tells)
            tell_newest(context, tells.term, tells.cluster.newest)
            return answer

    return handler


def to_the_end(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Awaitable[T]]:
    """Makes a handler that completes even if its caller disconnects.

    Otherwise gRPC would cancel the handler, and work that it had planned would stay locked, with no task to carry it
    out.
    """

    @functools.wraps(method)
    async def handler(self: ControllerService, request: Any, controller: Controller) -> T:
        return await asyncio.shield(controller.context.spawn(method(self, request, controller)))

    return handler


def leader(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Decorates the handler of a request that only the leader answers."""
    return unary(of_the_term(method))


def command(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Awaitable[T]]:
    """Decorates the handler of a request that only the leader answers. The handler completes even if its caller
    disconnects."""
    return unary(of_the_term(to_the_end(method)))


def question(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Decorates the handler of a question that every controller may answer."""
    return unary(of_any(method))


class ControllerService(controller_pb2_grpc.ControllerServiceServicer):
    def __init__(self, leading: Leading, following: Following | None = None) -> None:
        self.leading, self._following = leading, following

    def add_to(self, server: grpc.aio.Server) -> None:
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self, server)

    @contextlib.asynccontextmanager
    async def telling(self, context: grpc.aio.ServicerContext) -> AsyncIterator[Tells]:
        """Yields the source of answers: the current controller, or what this process has read of the ledger.

        Raises NotLeading if the caller must ask the leader, also if the term ends before the answer.
        """
        after = None if self.leading.leads else after_of(context)
        if after is not None and self._following is not None:
            yield await self._following.overview(after)
            return
        try:
            async with self.leading.term() as controller:
                await controller.context.knows_what_it_wrote()
                yield controller
        except HoldLost as error:  # a question changes nothing, so its caller may ask again, or another controller
            raise NotLeading(f"this controller does not lead: {error.what}", remedy="try again") from error

    # -- membership ---------------------------------------------------------------------------------------

    @leader
    async def Register(self, request: cpb.RegisterRequest, controller: Controller) -> cpb.RegisterReply:
        admitted = await controller.registration.register(value_of(Arrival, request, **_sender(request)))
        return cpb.RegisterReply(late=True) if admitted is None else _admitted_to_pb(admitted, controller)

    @unary
    async def Heartbeat(self, request: cpb.HeartbeatRequest, context: grpc.aio.ServicerContext) -> cpb.HeartbeatReply:
        self.leading.heard_of(request.directory.ledger, request.term, request.name)
        return await self._heard(request, context)

    @of_the_term
    async def _heard(self, request: cpb.HeartbeatRequest, controller: Controller) -> cpb.HeartbeatReply:
        return _answer_to_pb(controller.registration.heard(_beat_of(request)), controller)

    @leader
    async def Claim(self, request: cpb.ClaimRequest, controller: Controller) -> pb.Empty:
        controller.registration.claim(value_of(Piece, request, **_sender(request)))
        return pb.Empty()

    @command
    async def Adopt(self, request: cpb.AdoptRequest, controller: Controller) -> cpb.AdoptReply:
        found = await controller.adopter.adopt(request.dry_run, request.partial)
        return message_of(cpb.AdoptReply, operators=found)

    @command
    async def Replace(self, request: cpb.ReplaceRequest, controller: Controller) -> cpb.ReplaceReply:
        directory, partitions = await controller.registration.replace(request.replica, request.directory)
        return cpb.ReplaceReply(directory=directory, partitions=partitions)

    @command
    async def Forget(self, request: cpb.ForgetRequest, controller: Controller) -> pb.Empty:
        await controller.leaving.forget(request.replica)
        return pb.Empty()

    # -- operators ----------------------------------------------------------------------------------------

    @leader
    async def Deploy(self, request: cpb.DeployRequest, controller: Controller) -> cpb.Deployment:
        await controller.try_out(value_of(OperatorSpec, request.spec))  # may take long; ends if the caller disconnects
        return await self._deploy(request, controller)

    @to_the_end
    async def _deploy(self, request: cpb.DeployRequest, controller: Controller) -> cpb.Deployment:
        sites = request.sites if request.sites or request.anywhere else None
        failover = Failover.named(request.failover) if request.failover else None
        deployment = await controller.deploy(value_of(OperatorSpec, request.spec), sites, failover)
        return message_of(cpb.Deployment, deployment)

    @command
    async def TakeOver(self, request: cpb.TakeOverLostRequest, controller: Controller) -> cpb.ReconfigurationList:
        numbers, accepted = list(request.partitions), request.accept_loss
        begun = await controller.giving_up.by_command(request.operator, numbers, accepted)
        return message_of(cpb.ReconfigurationList, reconfigurations=begun)

    @leader
    async def PutBundlePart(self, request: cpb.BundlePart, controller: Controller) -> pb.Empty:
        await controller.versions.put(request.bundle, request.number, request.count, request.data)
        return pb.Empty()

    @leader
    async def GetBundlePart(self, request: cpb.BundlePartRequest, controller: Controller) -> cpb.BundlePart:
        data, count = await controller.versions.part(request.bundle, request.number)
        return cpb.BundlePart(bundle=request.bundle, number=request.number, count=count, data=data)

    @leader
    async def ListVersions(self, request: cpb.VersionsRequest, controller: Controller) -> cpb.VersionList:
        versions = enumerate(controller.versions.of(request.operator), 1)
        return cpb.VersionList(versions=[message_of(cpb.Version, spec, number=number) for number, spec in versions])

    @leader
    async def Upgrade(self, request: cpb.UpgradeRequest, controller: Controller) -> cpb.Deployment:
        await controller.try_out(controller.versions.version(request.operator, request.version))
        return await self._upgrade(request, controller)

    @to_the_end
    async def _upgrade(self, request: cpb.UpgradeRequest, controller: Controller) -> cpb.Deployment:
        return message_of(cpb.Deployment, await controller.upgrade(request.operator, request.version))

    @command
    async def Undeploy(self, request: cpb.UndeployRequest, controller: Controller) -> cpb.UndeployReply:
        partitions, waiting = await controller.leaving.undeploy(request.operator, request.delete_state)
        return cpb.UndeployReply(partitions=partitions, waiting=waiting)

    @question
    async def GetDeployment(self, request: cpb.GetDeploymentRequest, tells: Tells) -> cpb.Deployment:
        return message_of(cpb.Deployment, tells.deployment(request.operator))

    @question
    async def Status(self, request: cpb.StatusRequest, tells: Tells) -> cpb.StatusReply:
        if request.measured and isinstance(tells, Controller):
            await tells.measuring.room()
        return message_of(cpb.StatusReply, tells.status())

    # -- reconfigurations ---------------------------------------------------------------------------------

    @command
    async def Migrate(self, request: cpb.MigrateRequest, controller: Controller) -> cpb.Reconfiguration:
        _check_mover(controller, request)
        options = _options_of(request.options)
        migrate = controller.reconfigurations.migrate
        return message_of(cpb.Reconfiguration, await migrate(request.operator, request.partitions, request.to, options))

    @command
    async def Rebalance(self, request: cpb.RebalanceRequest, controller: Controller) -> cpb.ReconfigurationList:
        started = await controller.reconfigurations.rebalance(request.operator, _options_of(request.options))
        return message_of(cpb.ReconfigurationList, reconfigurations=started)

    @command
    async def Drain(self, request: cpb.DrainRequest, controller: Controller) -> cpb.ReconfigurationList:
        asked = request.maintenance
        maintenance = Ask(asked.for_s, asked.one_of) if request.HasField("maintenance") else None
        started = await controller.reconfigurations.drain(
            request.replica, _options_of(request.options), "", maintenance
        )
        return message_of(cpb.ReconfigurationList, reconfigurations=started)

    @command
    async def EndMaintenance(self, request: cpb.EndMaintenanceRequest, controller: Controller) -> pb.Empty:
        await controller.reconfigurations.end_maintenance(request.node)
        return pb.Empty()

    @leader
    async def Propose(self, request: cpb.ProposeRequest, controller: Controller) -> cpb.PlaceReply:
        planning, command = controller.reconfigurations, request.WhichOneof("command")
        await controller.context.acquainted()
        match command:
            case "migrate":
                asked = request.migrate
                choice = planning.migrating(asked.operator, asked.partitions, asked.to)
            case "drain":
                choice = planning.draining(request.drain.replica)
            case "rebalance":
                choice = planning.rebalancing(request.rebalance.operator)
            case "take_over":
                lost = request.take_over
                moves, reasons = controller.giving_up.proposed(lost.operator, lost.partitions)
                return message_of(cpb.PlaceReply, await controller.costs(Choice(moves), reasons))
            case _:
                raise InvalidArgument("the request names no command", remedy="use the controller's stateflow version")
        return message_of(cpb.PlaceReply, await controller.costs(choice, dict.fromkeys(choice.moves, command)))

    @command
    async def Place(self, request: cpb.PlaceRequest, controller: Controller) -> cpb.PlaceReply:
        names, options = policies_named(",".join(request.policies)), _options_of(request.options)
        if request.dry_run:
            return message_of(cpb.PlaceReply, await controller.proposed(request.operator, names))
        begun = await controller.placing.place(request.operator, names, options)
        return message_of(cpb.PlaceReply, reconfigurations=begun)

    @command
    async def Autopilot(self, request: cpb.AutopilotRequest, controller: Controller) -> cpb.AutopilotOrders:
        if request.HasField("orders"):
            told = value_of(AutopilotReport, request.orders)
            fields = told.to_dict() | {"policies": list(told.policies)}
            await controller.placing.order(AutopilotSettings.of(fields))
        return message_of(cpb.AutopilotOrders, AutopilotReport(**_said(controller.context.cluster.autopilot)))

    @command
    async def CreateJob(self, request: cpb.Job, controller: Controller) -> cpb.Job:
        fields = {
            name: list(value) if name in ("policies", "partitions") else value
            for name, value in ((name, getattr(request, name)) for name in _JOB_FIELDS)
        }
        if request.do not in set(Do):
            raise InvalidArgument(
                f"a job cannot do {shown(request.do)}", remedy=f"use {', '.join(Do)}", job=request.name
            )
        job = replace(Job.of(request.name, fields), options=_options_of(request.options))
        return message_of(cpb.Job, await controller.jobs.create(job))

    @command
    async def ChangeJob(self, request: cpb.ChangeJobRequest, controller: Controller) -> cpb.Job:
        match request.change:
            case "pause" | "resume":
                return message_of(cpb.Job, await controller.jobs.pause(request.name, request.change == "pause"))
            case "run":
                return message_of(cpb.Job, await controller.jobs.run_now(request.name))
            case "delete":
                return message_of(cpb.Job, await controller.jobs.delete(request.name))
        raise InvalidArgument(f"a job has no command {shown(request.change)}", remedy="pause, resume, run or delete it")

    @question
    async def ListJobs(self, request: cpb.ListJobsRequest, tells: Tells) -> cpb.JobList:
        told = [replace(each, follower=None) for each in tells.job_reports(request.name)]  # the reply says it once
        return message_of(cpb.JobList, jobs=told, follower=tells.follower)

    @question
    async def GetJobRun(self, request: cpb.JobRunRequest, tells: Tells) -> cpb.JobRun:
        return message_of(cpb.JobRun, tells.job_run(request.id))

    @command
    async def Standby(self, request: cpb.StandbyRequest, controller: Controller) -> cpb.StandbyReply:
        standbys = await controller.standbys.want(request.operator, request.count)
        return message_of(cpb.StandbyReply, standbys=standbys)

    @streaming
    async def ListReconfigurations(
        self, request: cpb.ListRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cpb.ReconfigurationList]:
        async with self.telling(context) as tells:
            tell_newest(context, tells.term, tells.cluster.newest)
            told = (replace(each, follower=None) for each in tells.history(request.limit))  # the reply says it once
            for page in batched((message_of(cpb.Reconfiguration, each) for each in told), PAGE_BYTES):
                yield message_of(cpb.ReconfigurationList, reconfigurations=page, follower=tells.follower)

    @question
    async def GetReconfiguration(self, request: cpb.ReconfigurationRequest, tells: Tells) -> cpb.Reconfiguration:
        return message_of(cpb.Reconfiguration, tells.reconfiguration(request.id))

    @streaming
    async def WatchReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cpb.Reconfiguration]:
        after = None if self.leading.leads else after_of(context)
        if after is not None and self._following is not None:
            async for report in self._following.watch(request.id, after):
                yield message_of(cpb.Reconfiguration, report)
            if ReconfigurationState(report.state).over:
                return
        async with self.leading.term() as controller:  # raises NotLeading, which names the leader
            async for report in controller.runs.watch(request.id):
                yield message_of(cpb.Reconfiguration, report)

    @command
    async def CancelReconfiguration(
        self, request: cpb.ReconfigurationRequest, controller: Controller
    ) -> cpb.Reconfiguration:
        return message_of(cpb.Reconfiguration, await controller.reconfigurations.cancel(request.id))

    @command
    async def EditReconfiguration(self, request: cpb.EditRequest, controller: Controller) -> cpb.Reconfiguration:
        limits = {field.name: value for field, value in request.ListFields() if field.name != "id"}
        return message_of(cpb.Reconfiguration, await controller.reconfigurations.edit(request.id, **limits))

    @command
    async def ResolveReconfiguration(self, request: cpb.ResolveRequest, controller: Controller) -> cpb.Reconfiguration:
        return message_of(cpb.Reconfiguration, await controller.takeovers.resolve(request.id, request.how))

    @command
    async def PauseReconfiguration(
        self, request: cpb.ReconfigurationRequest, controller: Controller
    ) -> cpb.Reconfiguration:
        return message_of(cpb.Reconfiguration, await controller.reconfigurations.pause(request.id))

    @command
    async def ResumeReconfiguration(
        self, request: cpb.ReconfigurationRequest, controller: Controller
    ) -> cpb.Reconfiguration:
        return message_of(cpb.Reconfiguration, await controller.reconfigurations.resume(request.id))

    @command
    async def RetryReconfiguration(
        self, request: cpb.ReconfigurationRequest, controller: Controller
    ) -> cpb.Reconfiguration:
        return message_of(cpb.Reconfiguration, await controller.reconfigurations.retry(request.id, request.cancelled))

    # -- checkpoints --------------------------------------------------------------------------------------

    @leader
    async def Checkpoint(self, request: rpb.CheckpointRequest, controller: Controller) -> rpb.CheckpointReply:
        taken = await controller.checkpoints.take(request.operator, request.partitions, request.savepoint)
        return message_of(rpb.CheckpointReply, taken)

    @command
    async def Restore(self, request: cpb.RestoreOperatorRequest, controller: Controller) -> cpb.RestoreReport:
        restore_id, done = await controller.restores.restore(_restore_of(request))
        return message_of(cpb.RestoreReport, id=restore_id, partitions=done)

    @command
    async def CancelRestore(self, request: cpb.CancelRestoreRequest, controller: Controller) -> pb.Empty:
        await controller.restores.cancel(request.id)
        return pb.Empty()

    # -- agents -------------------------------------------------------------------------------------------

    @unary
    async def AgentBeat(self, request: cpb.AgentBeatRequest, context: grpc.aio.ServicerContext) -> cpb.AgentBeatReply:
        self.leading.heard_of(request.directory.ledger, request.term, request.agent.name)
        return await self._heard_agent(request, context)

    @of_the_term
    async def _heard_agent(self, request: cpb.AgentBeatRequest, controller: Controller) -> cpb.AgentBeatReply:
        return message_of(cpb.AgentBeatReply, await controller.agents.heard(value_of(AgentBeat, request)))

    @leader
    async def ListAgents(self, request: cpb.ListAgentsRequest, controller: Controller) -> cpb.AgentList:
        return message_of(cpb.AgentList, agents=controller.agents.states())

    @command
    async def Spawn(self, request: cpb.SpawnRequest, controller: Controller) -> cpb.SpawnReply:
        return message_of(cpb.SpawnReply, spawned=await controller.agents.spawn(value_of(Requested, request)))

    @command
    async def StopReplica(self, request: cpb.StopReplicaRequest, controller: Controller) -> cpb.SpawnReply:
        return message_of(cpb.SpawnReply, spawned=[await controller.agents.stop(request.replica, request.force)])

    @command
    async def RestartAll(self, request: cpb.RestartAllRequest, controller: Controller) -> cpb.Rolling:
        roll = await controller.sweeps.begin(Chore.RESTART, request.site, request.limit)
        return message_of(cpb.Rolling, controller.sweeps.rolling(roll))

    @leader
    async def GetRolling(self, request: cpb.RollingRequest, controller: Controller) -> cpb.Rolling:
        return message_of(cpb.Rolling, controller.sweeps.rolling(request.id))

    @command
    async def CancelRolling(self, request: cpb.RollingRequest, controller: Controller) -> cpb.Rolling:
        controller.sweeps.rolling(request.id)  # raises if it is not a rolling restart
        await controller.sweeps.cancel(request.id)
        return message_of(cpb.Rolling, controller.sweeps.rolling(request.id))

    @command
    async def BeginSweep(self, request: cpb.BeginSweepRequest, controller: Controller) -> cpb.Sweep:
        sweeps, chore = controller.sweeps, chore_named(request.chore)
        sweep_id = await sweeps.begin(chore, request.site, request.limit, request.operator)
        return message_of(cpb.Sweep, sweeps.report(sweep_id))

    @leader
    async def GetSweep(self, request: cpb.SweepRequest, controller: Controller) -> cpb.Sweep:
        return message_of(cpb.Sweep, controller.sweeps.report(request.id))

    @command
    async def CancelSweep(self, request: cpb.SweepRequest, controller: Controller) -> cpb.Sweep:
        await controller.sweeps.cancel(request.id)
        return message_of(cpb.Sweep, controller.sweeps.report(request.id))

    @command
    async def RestartReplica(self, request: cpb.RestartReplicaRequest, controller: Controller) -> cpb.SpawnReply:
        return message_of(cpb.SpawnReply, spawned=[await controller.agents.restart(request.replica)])

    @command
    async def ForgetAgent(self, request: cpb.ForgetAgentRequest, controller: Controller) -> pb.Empty:
        await controller.agents.forget(request.agent)
        return pb.Empty()

    @streaming
    async def Logs(self, request: apb.LogsRequest, _: grpc.aio.ServicerContext) -> AsyncIterator[apb.LogsPage]:
        async with self.leading.term() as controller:
            async for data in controller.agents.logs(request.replica, request.lines, request.follow):
                yield apb.LogsPage(data=data)


# -- messages ---------------------------------------------------------------------------------------------


def _sender(message: Any) -> dict[str, Any]:
    """Returns the fields of a message that say which replica sent it, as arguments of the value's class."""
    directory = message.directory
    return {
        "info": value_of(ReplicaInfo, message.replica),
        "home": Home(directory.id, directory.place),
        "belongs_to": directory.ledger,
    }


def _admitted_to_pb(admitted: Admitted, controller: Controller) -> cpb.RegisterReply:
    return message_of(
        cpb.RegisterReply,
        admitted,
        heartbeat_interval_s=controller.settings.heartbeat_interval_s,
        dropped=[cpb.Dropped(operator=operator, epoch=epoch) for operator, epoch in admitted.dropped.items()],
        ledger=controller.context.ledger_id,
        term=controller.context.term,
    )


def _check_mover(controller: Controller, request: cpb.MigrateRequest) -> None:
    """Checks that the caller, if it is a node, takes no partitions from other nodes. Raises NotAllowed."""
    if (who := caller()) is not None:
        owners = controller.cluster.operator(request.operator).assignment.owners
        try:
            check_owners(who, {number: owners[number] for number in request.partitions if number < len(owners)})
        except NotAllowed as error:
            REFUSALS.note("Migrate", error)
            raise


def _beat_of(message: cpb.HeartbeatRequest) -> Beat:
    sender = _sender(message)
    sender["info"] = replace(sender["info"], name=message.name)
    alone = Said(message.alone_order, frozenset(message.alone))
    return value_of(Beat, message, **sender, alone=alone, version=message.version or FIRST.version)


def _answer_to_pb(answer: Answer, controller: Controller) -> cpb.HeartbeatReply:
    failovers = controller.cluster.failovers
    return message_of(
        cpb.HeartbeatReply,
        answer,
        ledger=controller.context.ledger_id,
        term=controller.context.term,
        alone=sorted(failovers.manual()),
        alone_order=failovers.count,
    )


def _said(orders: AutopilotSettings) -> dict[str, Any]:
    return orders.to_dict() | {"policies": tuple(map(str, orders.policies))}


_JOB_FIELDS = ("schedule", "do", "operator", "policies", "partitions", "to", "coordinator", "workers")


def _options_of(message: cpb.MoveOptions) -> MoveOptions:
    """Returns the options in a message; those that are absent keep their defaults. Raises InvalidArgument."""
    return MoveOptions(**{field.name: value for field, value in message.ListFields()})


def _restore_of(message: cpb.RestoreOperatorRequest) -> Request:
    return value_of(Request, message, wanted=value_of(Wanted, message))
