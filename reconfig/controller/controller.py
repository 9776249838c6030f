"""A controller for one term, put together from its parts."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import grpc.aio

from reconfig.affinity import Node
from reconfig.alone import Failover
from reconfig.capacity import Choice
from reconfig.controller.adopting import Adopter
from reconfig.controller.agents import Agents
from reconfig.controller.checkpoints import Checkpoints
from reconfig.controller.claims import Claims
from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import LOOK_S, ClusterStates, ControllerContext
from reconfig.controller.covering import Covering
from reconfig.controller.deployments import Deployments
from reconfig.controller.executor import Executor
from reconfig.controller.giving_up import GivingUp
from reconfig.controller.jobs import Jobs
from reconfig.controller.leaving import Leaving
from reconfig.controller.measuring import Measuring
from reconfig.controller.placing import Placing
from reconfig.controller.rebalancing import AutoRebalance
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.controller.registration import Registration
from reconfig.controller.replanning import Replanning
from reconfig.controller.restarting import Restarting
from reconfig.controller.restores import Restores
from reconfig.controller.run_registry import RunRegistry
from reconfig.controller.scrubbing import Scrubbing
from reconfig.controller.standbys import Standbys
from reconfig.controller.survey import Survey
from reconfig.controller.sweeping import Sweeps
from reconfig.controller.takeovers import Takeovers
from reconfig.controller.verifying import Verifications
from reconfig.controller.versions import Versions
from reconfig.placement import PolicyName
from reconfig.sweeps import Chore
from reconfig.tenure import Tenure
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.ledger import Ledger
from stateflow.reports import ClusterReport, Deployment, FollowerReport, JobReport, JobRun, Placement, Reconfiguration
from stateflow.rpc.wire import connect
from stateflow.runtime.code_key import check_signed
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId


class Controller:
    """A controller, which decides while ``tenure`` lasts. ``over`` is done when the term has ended early.

    Args:
        tenure: default: never expires (single controller, tests).
        states: the ledger as read already; None: the controller reads it.
        grace_s: seconds from now for which a predecessor may still grant leases.
        address: where it listens; also its name, if the settings give it none.
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
        address: str = "",
    ) -> None:
        self.settings = settings or ControllerSettings()
        self.context = context = ControllerContext(
            ledger,
            self.settings,
            clock,
            connect,
            new_id,
            tenure or Tenure(),
            states or ClusterStates.read(ledger, validated=self.settings.debug_validate),
            grace_s,
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
        self.registration = Registration(context, claims, self.leaving, self.takeovers)
        self.adopter = Adopter(context, claims)
        self.deployments = Deployments(context, claims, self.leaving.drop)
        self.versions = Versions(context, self.deployments)
        self.checkpoints = Checkpoints(context)
        self.agents = Agents(context, connect, grace_s)
        self.measuring = Measuring(context, executor.links)
        self.survey = Survey(
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
        """Checks an operator's code here, and then as :meth:`Deployments.try_out` does. Raises CodeRefused,
        BundleMissing, BundleDamaged, and the errors of that method."""
        check_signed(spec)
        await self.versions.check_here(spec)
        await self.deployments.try_out(spec)

    async def deploy(
        self, spec: OperatorSpec, sites: Collection[str] | None, failover: Failover | None = None
    ) -> Deployment:
        """Deploys an operator, and orders its failover unless that is None. Raises CodeRefused, BundleMissing,
        BundleDamaged, and the errors of :meth:`Deployments.deploy`."""
        check_signed(spec)
        await self.versions.check_here(spec)
        deployed = await self.deployments.deploy(spec, sites)
        if failover is not None:
            await self.context.record(ClusterState.order_failover, spec.name, failover)
            await self._known_to_owners(spec.name)
        await self.versions.drop_unused()
        return self.survey.deployment(deployed)

    async def _known_to_owners(self, operator: str) -> None:
        """Waits until the owners that answer have reported that they know the operator's failover, for at most as long
        as a replica may be silent. A manual failover counts only for owners that know it, and a site may be cut off the
        moment after it was ordered."""
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
        return self.survey.deployment(await self.versions.upgrade(operator, version))

    async def proposed(self, operator: str, names: Sequence[PolicyName]) -> Placement:
        """Returns the placement that policies propose, see :meth:`Placing.proposed`."""
        return await self.placing.proposed(operator, names, self._executor.cost())

    async def costs(self, choice: Choice, reasons: Mapping[PartitionId, str]) -> Placement:
        """Returns a placement with its costs, see :meth:`Placing.costs`."""
        return await self.placing.costs(choice, reasons, self._executor.cost())

    # -- reports of any controller, see also :class:`~reconfig.controller.overview.Overview` ----------------

    follower: FollowerReport | None = None  # None: it leads

    @property
    def term(self) -> int:
        return self.context.term

    def deployment(self, operator: str) -> Deployment:
        """Reports on an operator. Raises OperatorNotDeployed."""
        return self.survey.deployment(self.cluster.operator(operator))

    def status(self) -> ClusterReport:
        return self.survey.status()

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
        """Yields reports on reconfigurations, newest first. ``limit``: at most so many; 0: all."""
        return self.runs.history(limit)

    # -- life ---------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Resumes the work that the ledger has as under way, and starts to watch leases, placement and jobs."""
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
