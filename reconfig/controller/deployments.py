"""Operators that are deployed: created partition by partition at their owners, or followed by another version."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from reconfig.controller.claims import Claims
from reconfig.controller.cluster_state import ClusterState, Deployed
from reconfig.controller.context import ControllerContext
from stateflow import ring
from stateflow.errors import AlreadyDeployed, LeaseLost, ReleaseMismatch, StateflowError, Unavailable
from stateflow.ledger import RecordState
from stateflow.types import OperatorSpec, ranges

log = logging.getLogger(__name__)
#: partitions in one request: each takes some durable writes, which are long on an SD card
CREATED_AT_ONCE = 32
#: a trial ends when it came no further so often
IDLE_ROUNDS = 2
#: how much later than a lease ends it is looked whether it has
LAPSING_S = 0.05


@dataclass(slots=True)
class Trial:
    """A new version that is being tried on what is stored; ``left``: the partitions it is to be tried on yet."""

    partitions: int
    left: set[int]


class Deployments:
    """``created``: partitions so far, of deployments under way, by operator; ``trials`` under way, likewise.

    Args: drop: at every replica, what it has of an operator that is no more.
    """

    def __init__(self, context: ControllerContext, claims: Claims, drop: Callable[[str], Awaitable[object]]) -> None:
        self._context, self._claims, self._drop = context, claims, drop
        self._cluster, self._members = context.cluster, context.members
        self.created: dict[str, int] = {}
        self.trials: dict[str, Trial] = {}
        #: by operator: the newest version that was tried, and the one it was tried to follow
        self._tried: dict[str, tuple[OperatorSpec, OperatorSpec]] = {}

    async def deploy(self, spec: OperatorSpec, sites: Collection[str] | None = None) -> Deployed:
        """Create its partitions, at ``sites`` or everywhere; or follow with another version of what is deployed, and
        with other sites, to which nothing moves by itself. Doing it twice is no error.

        Args: sites: none of them: anywhere; None: what is deployed already stays where it may be.

        Raises AlreadyDeployed, UnknownSite, PartitionsClaimed, or what a replica refuses it with; nothing of it is
        deployed then.
        """
        async with self._context.deploying:
            confined = tuple(sorted(set(sites or ())))
            for site in confined:
                self._context.check_site(site)
            deployed = await self._deploy(spec, confined)
            if sites is not None and deployed.sites != confined:
                await self._context.record(ClusterState.confine, spec.name, confined)
                log.info("%s is confined to %s from now on", spec.name, ", ".join(confined) or "no sites")
            return deployed

    async def try_out(self, spec: OperatorSpec) -> None:
        """Tries a new version of a deployed operator on all that is stored, before anything is decided: deploying it
        does not try again then, and cannot be cancelled. Nothing else waits for it.

        Raises what a replica refuses the version with, or what the version fails with.
        """
        existing = self._cluster.deployed.get(spec.name)
        if existing is not None and _is_new(existing, spec := spec.after(existing.spec)):
            await self._context.acquainted()
            await self._try_out(existing, spec)

    async def _try_out(self, deployed: Deployed, spec: OperatorSpec) -> None:
        owners = Counter(deployed.assignment.owners)
        await self._check_possible(spec, {name: owners[name] for name in owners.keys() & self._context.alive().keys()})
        if self._tried.get(spec.name) == (deployed.spec, spec):
            return
        trial = self.trials[spec.name] = Trial(spec.partitions, set(range(spec.partitions)))
        try:
            await self._try_all(spec, trial)
        finally:
            if self.trials.get(spec.name) is trial:  # else somebody else tries one
                del self.trials[spec.name]
        self._tried[spec.name] = deployed.spec, spec

    async def _try_all(self, spec: OperatorSpec, trial: Trial) -> None:
        """Once more where nothing was tried: a partition may have been on its way. What is left then is lost, out of
        reach, or cannot be read: none of that keeps the operator from being mended."""
        idle = 0
        while trial.left and idle < IDLE_ROUNDS:
            if idle:
                await asyncio.sleep(self._context.settings.heartbeat_interval_s)
            before = len(trial.left)
            await self._try_at_owners(spec, trial.left)
            idle = idle + 1 if len(trial.left) == before else 0
        if trial.left:
            left = ranges(sorted(trial.left))
            log.warning("the new version of %s is not tried on partitions %s", spec.name, left)

    async def _try_at_owners(self, spec: OperatorSpec, left: set[int]) -> None:
        """Takes out of ``left`` what has been tried. What moved meanwhile stays in."""
        owners, by_owner = self._cluster.operator(spec.name).assignment.owners, defaultdict[str, list[int]](list)
        for number in left:
            by_owner[owners[number]].append(number)
        asked = [asyncio.ensure_future(self._try_at(o, spec, by_owner[o], left)) for o in by_owner]
        try:
            await asyncio.gather(*asked)
        finally:
            for each in asked:
                each.cancel()

    async def _try_at(self, owner: str, spec: OperatorSpec, numbers: Collection[int], left: set[int]) -> None:
        if not self._members.alive(owner):
            return
        try:
            async for number in self._context.replicas.try_out(owner, spec, numbers):
                left.discard(number)
        except (Unavailable, ReleaseMismatch, LeaseLost) as error:  # no word on the version
            log.warning("%s does not try the new version of %s: %s", owner, spec.name, error)

    async def _deploy(self, spec: OperatorSpec, sites: Collection[str]) -> Deployed:
        planned = self._cluster.planned.get(spec.name)
        existing = self._cluster.deployed.get(spec.name) or (planned[0] if planned else None)
        # the ledger orders versions, whatever a client says
        spec = replace(spec, recorded_us=0) if existing is None else spec.after(existing.spec)
        if existing is not None and planned is None and _is_new(existing, spec):
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
            return self._cluster.operator(spec.name)
        if not self._cluster.deployed and not self._cluster.planned:  # replicas may have what this ledger has lost
            await asyncio.sleep(self._claims.early_s)
        await self._former_owners(spec.name)
        await self._context.acquainted()
        self._claims.check_free(spec.name, self._context.ledger_id)
        candidates = list(self._context.fit().values())
        if sites:
            candidates = [info for info in candidates if info.site in sites]
        owners = await self._context.aside(ring.propose, spec.name, range(spec.partitions), candidates)
        await self._check_possible(spec, Counter(owners.values()))
        record = await self._context.record(ClusterState.plan_deployment, spec, owners, sites)
        await self._create_or_take_back(self._cluster.planned[spec.name][0], record)
        return self._cluster.operator(spec.name)

    async def _former_owners(self, operator: str) -> None:
        """Wait for whoever was not told that an earlier deployment has ended: it may serve what it had of that as long
        as its lease runs."""
        while operator in self._cluster.undeployed:
            untold = [name for name in self._cluster.roster.replicas if not self._members.alive(name)]
            left_s = [self._members.lease_left_s(name) for name in untold if self._members.may_serve(name)]
            if not left_s:
                return
            await asyncio.sleep(min(max(left_s) + LAPSING_S, self._context.settings.heartbeat_interval_s))

    async def _upgrade(self, deployed: Deployed, spec: OperatorSpec) -> Deployed:
        """New code and states of an operator. Every owner that answers must have the code, and says so first. Whoever
        was silent for a while hears of it when it registers again, which it must, though its lease may still run: also
        one that owns nothing of it, for a copy on its way there may be owned any time."""
        await self._context.acquainted()
        await self._try_out(deployed, spec)
        await self._context.record(ClusterState.upgrade, spec)
        spec = deployed.spec  # as it was recorded
        alive = self._context.alive()
        for silent in self._cluster.roster.replicas.keys() - alive.keys():
            self._members.expel(silent)
        await asyncio.gather(*(self._tell(name, spec) for name in sorted(alive)))
        return self._cluster.operator(spec.name)

    async def _tell(self, name: str, spec: OperatorSpec) -> None:
        """A replica runs this version from its next batch on, or says that it cannot, and serves no older one then. One
        that says neither is to register again, which it cannot without hearing of it."""
        try:
            await self._context.replicas.learn(name, spec)
        except StateflowError as error:
            log.warning("%s has not taken the new version of %s yet: %s", name, spec.name, error)
            if error.retryable:
                self._members.expel(name)

    async def _check_possible(self, spec: OperatorSpec, counts: Mapping[str, int]) -> None:
        """A replica that cannot load the code, or have so many partitions, refuses here, before anything is decided."""
        for name, count in sorted(counts.items()):
            await self._context.replicas.check(name, spec, count)

    async def _create_or_take_back(self, deployed: Deployed, record: Any) -> None:
        """What is reported as failed is not deployed, and no later controller goes on with it."""
        try:
            await self._create(deployed, record)
        except StateflowError as error:
            self._context.check_leads()  # else it is the next one's, which goes on with it
            await self._context.record(ClusterState.fail_deployment, record, error.to_wire())
            await self._drop(deployed.spec.name)
            raise

    async def _create(self, deployed: Deployed, record: Any) -> None:
        """A few partitions at a time, at every owner beside the others. What is there already stays as it is, so a
        deployment that was interrupted is gone on with by doing it again."""
        name = deployed.spec.name
        self.created[name] = 0
        try:
            owners = sorted(set(deployed.assignment.owners))
            done = await asyncio.gather(*(self._create_at(o, deployed) for o in owners), return_exceptions=True)
            for failed in filter(None, done):
                raise failed
        finally:
            del self.created[name]
        await self._context.record(ClusterState.finish_deployment, record)

    async def _create_at(self, owner: str, deployed: Deployed) -> None:
        spec, numbers = deployed.spec, sorted(deployed.assignment.of(owner))
        for at in range(0, len(numbers), CREATED_AT_ONCE):
            some = numbers[at : at + CREATED_AT_ONCE]
            await self._context.replicas.create(owner, spec, some, deployed.first_epoch, len(numbers))
            self.created[spec.name] += len(some)

    # -- after a restart ----------------------------------------------------------------------------------

    def resume_all(self) -> None:
        for deployed, record in list(self._cluster.planned.values()):
            self._context.spawn(self._resume(deployed, record))

    async def _resume(self, deployed: Deployed, record: Any) -> None:
        if record.state is RecordState.NEW:  # the process ended between its two records
            record = await self._context.record(ClusterState._append, record.item_id, RecordState.PROCESSING, record)
        while True:
            try:
                async with self._context.deploying:
                    if deployed.spec.name in self._cluster.planned:  # else somebody deployed it again meanwhile
                        await self._create(deployed, record)
                    return
            except StateflowError as error:
                log.warning("deployment of %s waits: %s", deployed.spec.name, error)
            except Exception:  # nobody else goes on with it
                log.exception("deployment of %s waits", deployed.spec.name)
            await asyncio.sleep(self._context.settings.heartbeat_interval_s)


def _is_new(deployed: Deployed, spec: OperatorSpec) -> bool:
    return deployed.spec != spec and _may_follow(deployed.spec, spec)


def _may_follow(deployed: OperatorSpec, spec: OperatorSpec) -> bool:
    """Whether routers and stored keys cannot tell the new version from the old one; states evolve."""
    same = ("partitions", "key", "output_schema", "side_schemas")
    return all(getattr(deployed, name) == getattr(spec, name) for name in same)
