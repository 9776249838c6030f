"""A controller for one term, put together from its parts, and the reports that it makes as the leader."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random  # noqa: TID251 - the type; which one is handed in

import grpc.aio

from reconfig.controller import steps
from reconfig.controller.agents import Agents, Restarting
from reconfig.controller.cluster_state import Deployed
from reconfig.controller.context import LOOK_S, ControllerContext, Leadership, Writer
from reconfig.controller.deployments import Deployments, Leaving, Versions
from reconfig.controller.executor import Executor, Replanning, RunRegistry
from reconfig.controller.jobs import Jobs
from reconfig.controller.measuring import Measuring
from reconfig.controller.placing import AutoRebalance, GivingUp, Placing
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.controller.registration import Adopter, Claims, Registration
from reconfig.controller.restores import Restores
from reconfig.controller.standbys import Standbys
from reconfig.controller.sweeping import Checkpoints, Covering, Scrubbing, Sweeps, Verifications
from reconfig.controller.takeovers import Takeovers
from reconfig.decisions.failover import Failover, Lack, Why, unserved
from reconfig.decisions.jobs import Node
from reconfig.decisions.placement import Choice
from reconfig.decisions.policies import PolicyName
from reconfig.decisions.sweeps import Chore
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.code.loading import check_signed
from stateflow.fleet import Child
from stateflow.ledger import Ledger
from stateflow.reports import FollowerReport, JobReport, JobRun, Placement, Reconfiguration
from stateflow.rpc.wire import connect
from stateflow.settings import ControllerSettings
from stateflow.status import (
    ClusterReport,
    DeployingOperator,
    Deployment,
    RefusedReplica,
    ReplicaStatus,
    UnservedPartitions,
)
from stateflow.types import OperatorSpec, PartitionId, node_of


class StatusReporter:
    """Reports what the leader knows of its cluster: operators, replicas, reconfigurations, and faults.

    Args:
        deployments: names the deployments and trials under way.
        child: returns a replica's state as its agent last reported it; None: there is no report, or the replica has no
            agent.
    """

    def __init__(
        self,
        context: ControllerContext,
        runs: RunRegistry,
        standbys: Standbys,
        takeovers: Takeovers,
        deployments: Deployments,
        measuring: Measuring,
        child: Callable[[str], Child | None] = lambda _: None,
    ) -> None:
        self._context, self._runs, self._standbys, self._takeovers = context, runs, standbys, takeovers
        self._deployments, self._measuring, self._child = deployments, measuring, child

    def deployment(self, deployed: Deployed) -> Deployment:
        assignment, replicas = deployed.assignment, self._context.cluster.roster.replicas
        return Deployment(
            replace(deployed.spec, source=""),  # routers have no use for it
            assignment.version,
            tuple(replicas[name] for name in assignment.owners),
            assignment.epochs,
            self._unserved([deployed]),
            deployed.sites,
            failover="manual" if self._context.cluster.failovers.is_manual(deployed.spec.name) else "automatic",
        )

    def _unserved(self, operators: Iterable[Deployed]) -> tuple[UnservedPartitions, ...]:
        lacks: dict[PartitionId, Lack] = {}
        for deployed in operators:
            silent = {name for name in set(deployed.assignment.owners) if not self._context.members.alive(name)}
            for number, owner in enumerate(deployed.assignment.owners):
                partition = PartitionId(deployed.spec.name, number)
                lack = self._takeovers.lack(partition)
                if lack is None and owner in silent:
                    opening = self._context.members.is_opening(owner)
                    alone = self._context.may_be_alone(owner, deployed.spec.name)
                    why = Why.OPENING if opening else Why.ALONE if alone else Why.SILENT
                    lack = (self._takeovers.coming(owner) if why is Why.SILENT else None) or Lack(owner, why)
                if lack is not None:
                    lacks[partition] = lack
        return tuple(
            UnservedPartitions(operator, tuple(partitions), lack.owner, error)
            for operator, partitions, lack, error in unserved(lacks)
        )

    def _has_ended(self, name: str) -> bool:
        """Tells whether an agent has stopped a replica by command. Such a replica may still count as alive, because it
        sent a heartbeat a moment ago.
        """
        child = self._child(node_of(name))
        return child is not None and child.state == "STOPPED" and self._context.cluster.roster.is_stopping(name)

    def status(self) -> ClusterReport:
        context, cluster, members = self._context, self._context.cluster, self._context.members
        owned = context.cluster.owned_counts()
        now, room = context.clock.monotonic(), self._measuring.room_bytes()
        return ClusterReport(
            maintenance=cluster.maintenance_reports(),
            replicas=tuple(
                ReplicaStatus(
                    info.name,
                    info.site,
                    info.address,
                    info.weight,
                    members.alive(info.name) and not self._has_ended(info.name),
                    members.heard_s(info.name),
                    owned.get(info.name, 0),
                    members.is_opening(info.name),
                    cluster.roster.is_stopping(info.name),
                    room.get(info.name),
                    members.version(info.name),
                )
                for info in sorted(cluster.roster.replicas.values(), key=lambda info: info.name)
            ),
            deployments=tuple(self.deployment(each) for _, each in sorted(cluster.deployed.items())),
            reconfigurations=tuple(running.report() for running in self._runs.running.values() if not running.over),
            standbys=tuple(self._standbys.views()),
            refused=tuple(
                RefusedReplica(
                    refused.info.name, refused.info.address, refused.home.directory, refused.error, now - refused.at
                )
                for refused in context.names.refused()
            ),
            deploying=(
                *(
                    DeployingOperator(name, planned.spec.partitions, self._deployments.created.get(name, 0))
                    for name, (planned, _) in sorted(cluster.planned.items())
                ),
                *(
                    DeployingOperator(name, trial.partitions, 0, trial.partitions - len(trial.left))
                    for name, trial in sorted(self._deployments.trials.items())
                ),
            ),
            links=self._measuring.links(),
            damaged=tuple(cluster.sweeps.damaged()),
        )


class Controller:
    """A controller for one term; it decides while its ``leadership`` lasts. The future ``over`` is done when the term
    ends early.

    Args:
        leadership: the leader lease; None: a lease that never expires, for a single controller and for tests.
        writer: the writer of the term, which has read the ledger; None: the controller reads the ledger, and writes
            without a term.
        grace_s: seconds from now for which a predecessor may still grant leases.
        address: the address at which the controller listens; also its name, unless the settings give another.
        random: varies the pauses before retries; None: one with a fixed seed, for tests.
    """

    def __init__(
        self,
        ledger: Ledger,
        settings: ControllerSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        connect: Callable[[str], grpc.aio.Channel] = connect,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12],
        *,
        leadership: Leadership | None = None,
        writer: Writer | None = None,
        grace_s: float = 0.0,
        address: str = "",
        random: Random | None = None,
    ) -> None:
        self.settings = settings or ControllerSettings()
        self.context = context = ControllerContext(
            writer or Writer.read(ledger, validated=self.settings.debug_validate),
            self.settings,
            clock,
            connect,
            new_id,
            leadership or Leadership(),
            grace_s,
            random or Random(0),
        )
        self.over, self.cluster, self.members = context.over, context.cluster, context.members
        self.runs = RunRegistry(self.cluster)
        executor = Executor(context, self.runs)
        self.standbys = Standbys(context, executor)
        self.restores = Restores(context, self.standbys.end)
        self.takeovers = Takeovers(context, self.runs, executor, self.standbys)
        self.giving_up = GivingUp(context, self.runs, self.takeovers)
        self.reconfigurations = Reconfigurations(context, self.runs, executor)
        self.leaving = Leaving(context, self.standbys, self.takeovers)
        claims = Claims(self.settings, clock)
        self.registration = Registration(context, claims, self.takeovers)
        self.adopter = Adopter(context, claims)
        self.deployments = Deployments(context, claims, self.leaving.drop)
        self.versions = Versions(context, self.deployments)
        self.checkpoints = Checkpoints(context)
        self.agents = Agents(context, connect, grace_s)
        self.measuring = Measuring(context, executor.links)
        self.status_reporter = StatusReporter(
            context,
            self.runs,
            self.standbys,
            self.takeovers,
            self.deployments,
            self.measuring,
            self.agents.child,
        )
        self._executor = executor
        self.placing = Placing(context, self.reconfigurations, self.measuring)
        me = Node(self.settings.name or address or "controller", self.settings.site, self.settings.labels)
        self.jobs = Jobs(context, self.runs, self.reconfigurations, self.placing, self.checkpoints, me)
        self._replanning = Replanning(context, executor)
        self.sweeps = Sweeps(
            context,
            {
                Chore.RESTART: Restarting(context, self.agents, self.takeovers),
                Chore.CHECKPOINT: Covering(context, Chore.CHECKPOINT, self.checkpoints.take_one),
                Chore.VERIFY: Covering(context, Chore.VERIFY, Verifications(context, self.standbys).verify_one),
            },
        )
        self._scrubbing = Scrubbing(context, self.sweeps)
        self._auto_rebalance = AutoRebalance(context, self.runs, self.reconfigurations)

    async def try_out(self, spec: OperatorSpec) -> None:
        """Checks an operator's code in this process, then tries it as :meth:`Deployments.try_out` does. Raises
        CodeRefused, BundleMissing, BundleDamaged, and the errors of that method."""
        check_signed(spec)
        await self.versions.check_here(spec)
        await self.deployments.try_out(spec)

    async def deploy(
        self, spec: OperatorSpec, sites: Collection[str] | None, failover: Failover | None = None
    ) -> Deployment:
        """Deploys an operator, and sets its failover mode unless that is None. Raises CodeRefused, BundleMissing,
        BundleDamaged, and the errors of :meth:`Deployments.deploy`."""
        check_signed(spec)
        await self.versions.check_here(spec)
        deployed = await self.deployments.deploy(spec, sites)
        if failover is not None:
            await self.context.record(steps.order_failover, spec.name, failover)
            await self._known_to_owners(spec.name)
        await self.versions.drop_unused()
        return self.status_reporter.deployment(deployed)

    async def _known_to_owners(self, operator: str) -> None:
        """Waits until the owners that answer report that they know the operator's failover mode, at most for as long as
        a replica may be silent. Manual failover protects only owners that know of it, and a site may be cut off right
        after the order."""
        order, _ = self.cluster.failovers.newest.get(operator, (0, False))
        if not order:
            return  # its failover was never changed
        owners = set(self.cluster.operator(operator).assignment.owners)
        until = self.context.clock.monotonic() + self.members.silence_s
        while self.context.clock.monotonic() < until:
            said = map(self.members.said_alone, owners & self.context.alive().keys())
            if all(each is not None and each.order >= order for each in said):
                return
            await asyncio.sleep(LOOK_S)

    async def upgrade(self, operator: str, version: int) -> Deployment:
        """Upgrades an operator to another version, see :meth:`Versions.upgrade`."""
        return self.status_reporter.deployment(await self.versions.upgrade(operator, version))

    async def proposed(self, operator: str, names: Sequence[PolicyName]) -> Placement:
        """Returns the placement that policies propose, see :meth:`Placing.proposed`."""
        return await self.placing.proposed(operator, names, self._executor.cost())

    async def costs(self, choice: Choice, reasons: Mapping[PartitionId, str]) -> Placement:
        """Returns a placement with its costs, see :meth:`Placing.costs`."""
        return await self.placing.costs(choice, reasons, self._executor.cost())

    # -- reports of any controller, see also :class:`~reconfig.controller.following.FollowerReports` ----------------

    follower: FollowerReport | None = None  # None: it leads

    @property
    def term(self) -> int:
        return self.context.term

    def deployment(self, operator: str) -> Deployment:
        """Reports on an operator. Raises OperatorNotDeployed."""
        return self.status_reporter.deployment(self.cluster.operator(operator))

    def status(self) -> ClusterReport:
        return self.status_reporter.status()

    def job_reports(self, name: str) -> list[JobReport]:
        """Reports on a job; empty name: on all jobs. Raises InvalidArgument."""
        return [self.jobs.report(name)] if name else self.jobs.reports()

    def job_run(self, run_id: str) -> JobRun:
        """Reports on a run of a job. Raises InvalidArgument."""
        return self.jobs.run(run_id)

    def reconfiguration(self, reconfiguration: str) -> Reconfiguration:
        """Reports on a reconfiguration. Raises MoveUnknown."""
        return self.runs.found(reconfiguration).report()

    def history(self, limit: int = 0) -> Iterator[Reconfiguration]:
        """Yields reports on reconfigurations, newest first, at most ``limit`` of them; 0: all."""
        return self.runs.history(limit)

    # -- life ---------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Resumes the work that is under way in the ledger, and starts to watch leases, placement and jobs."""
        self.deployments.resume_all()
        self.standbys.resume_all()
        self.takeovers.resume_all()
        self.reconfigurations.resume_all()
        self.context.spawn(self.restores.resume())
        self.sweeps.resume_all()
        self.context.spawn(self.takeovers.watch())
        self.context.spawn(self.placing.watch())
        self.context.spawn(self.jobs.watch())
        self.context.spawn(self._replanning.watch())
        self.context.spawn(self._scrubbing.watch())
        if self.settings.auto_rebalance:
            self.context.spawn(self._auto_rebalance.watch())

    async def close(self) -> None:
        await self.context.close()
