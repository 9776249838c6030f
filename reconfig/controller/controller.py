"""A controller for one term: its parts, put together."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Sequence

import grpc.aio

from reconfig.controller.adopting import Adopter
from reconfig.controller.agents import Agents
from reconfig.controller.checkpoints import Checkpoints
from reconfig.controller.claims import Claims
from reconfig.controller.context import ClusterStates, ControllerContext
from reconfig.controller.deployments import Deployments
from reconfig.controller.executor import Executor
from reconfig.controller.jobs import Jobs
from reconfig.controller.leaving import Leaving
from reconfig.controller.placing import Placing
from reconfig.controller.rebalancing import AutoRebalance
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.controller.registration import Registration
from reconfig.controller.restores import Restores
from reconfig.controller.run_registry import RunRegistry
from reconfig.controller.standbys import Standbys
from reconfig.controller.survey import Survey
from reconfig.controller.takeovers import Takeovers
from reconfig.placement import PolicyName
from reconfig.tenure import Tenure
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.ledger import Ledger
from stateflow.reports import ClusterReport, Deployment, FollowerReport, Placement, Reconfiguration
from stateflow.rpc.wire import connect
from stateflow.runtime.code_key import check_signed
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec


class Controller:
    """It decides while ``tenure`` lasts. ``over`` is done when that ended early.

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
        self.reconfigurations = Reconfigurations(context, self.runs, executor)
        self.leaving = Leaving(context, self.standbys, self.takeovers)
        claims = Claims(self.settings, clock)
        self.registration = Registration(context, claims, self.leaving, self.takeovers)
        self.adopter = Adopter(context, claims)
        self.deployments = Deployments(context, claims, self.leaving.drop)
        self.checkpoints = Checkpoints(context)
        self.agents = Agents(context, connect, grace_s)
        self.survey = Survey(context, self.runs, self.standbys, self.takeovers, self.deployments.created)
        self._executor = executor
        self.placing = Placing(context, self.reconfigurations)
        self.jobs = Jobs(context, self.runs, self.reconfigurations, self.placing, self.checkpoints)
        self._auto_rebalance = AutoRebalance(context, self.runs, self.reconfigurations)

    async def deploy(self, spec: OperatorSpec, sites: Collection[str] | None) -> Deployment:
        """Raises CodeRefused, and as :meth:`Deployments.deploy` does."""
        check_signed(spec)
        return self.survey.deployment(await self.deployments.deploy(spec, sites))

    async def proposed(self, operator: str, names: Sequence[PolicyName]) -> Placement:
        """See :meth:`Placing.proposed`."""
        return await self.placing.proposed(operator, names, self._executor.cost())

    # -- what any controller tells, see also :class:`~reconfig.controller.overview.Overview` ----------------

    follower: FollowerReport | None = None  # it leads

    @property
    def term(self) -> int:
        return self.context.term

    def deployment(self, operator: str) -> Deployment:
        """Raises OperatorNotDeployed."""
        return self.survey.deployment(self.cluster.operator(operator))

    def status(self) -> ClusterReport:
        return self.survey.status()

    def reconfiguration(self, reconfiguration: str) -> Reconfiguration:
        """Raises MoveUnknown."""
        return self.runs.found(reconfiguration).report()

    def history(self, limit: int = 0) -> Iterator[Reconfiguration]:
        """Newest first."""
        return self.runs.history(limit)

    # -- life ---------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Carry on with what the ledger says was under way, and watch over leases from now on."""
        self.deployments.resume_all()
        self.standbys.resume_all()
        self.takeovers.resume_all()
        self.reconfigurations.resume_all()
        self.context.spawn(self.restores.resume())
        self.context.spawn(self.takeovers.watch())
        self.context.spawn(self.placing.watch())
        self.context.spawn(self.jobs.watch())
        if self.settings.auto_rebalance:
            self.context.spawn(self._auto_rebalance.watch())

    async def close(self) -> None:
        await self.context.close()
