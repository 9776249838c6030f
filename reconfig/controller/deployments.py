"""Deploys, upgrades and undeploys operators, keeps the bundles of their code, and forgets replicas.

A deployment is recorded with its owners; then the owners create the partitions; then its end is recorded. Creating can
be repeated, so the next controller resumes a deployment that was interrupted. A failed deployment is recorded as
failed, and the partitions that it created are deleted. A new version is tried on all stored state before its upgrade is
recorded; then the controller tells every replica to load it. An undeployment is recorded first; then the controller
tells the replicas to delete the state. A replica that does not answer must register again, and is told then what it
missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from reconfig.controller import steps
from reconfig.controller.cluster_state import Deployed
from reconfig.controller.context import ControllerContext
from reconfig.controller.registration import Claims
from reconfig.controller.standbys import Standbys
from reconfig.controller.takeovers import Takeovers
from stateflow import ring
from stateflow.code.bundles import PACKED_MAX, check
from stateflow.errors import (
    AlreadyDeployed,
    BundleMissing,
    InvalidArgument,
    LeaseLost,
    MoveConflict,
    NameTaken,
    PartitionsLive,
    ReleaseMismatch,
    StateflowError,
    Unavailable,
    VersionUnknown,
)
from stateflow.ledger import RecordState
from stateflow.types import BUNDLE_PART, OperatorSpec, PartitionId, node_of, ranges

log = logging.getLogger(__name__)
#: partitions created by one request: each partition takes several durable writes, which are slow on an SD card
CREATED_AT_ONCE = 32
#: number of rounds in a row without progress after which a trial ends
IDLE_ROUNDS = 2
#: seconds from the expected end of a lease until the lease is checked again
LAPSING_S = 0.05
#: age at which a bundle that no version names is dropped; a younger one may be about to be deployed
UNUSED = timedelta(hours=1)


# -- Deployments and upgrades ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trial:
    """A trial of a new version on stored state. ``left`` are the partitions on which the version has not been tried
    yet.
    """

    partitions: int
    left: set[int]


class Deployments:
    """Creates, tries and upgrades operators.

    ``created`` maps an operator that is being deployed to the number of partitions created so far; ``trials`` maps an
    operator to its trial under way.

    Args:
        drop: deletes what the replicas have of an operator whose deployment failed.
    """

    def __init__(self, context: ControllerContext, claims: Claims, drop: Callable[[str], Awaitable[object]]) -> None:
        self._context, self._claims, self._drop = context, claims, drop
        self._cluster, self._members = context.cluster, context.members
        self.created: dict[str, int] = {}
        self.trials: dict[str, Trial] = {}
        #: by operator: the deployed version, and the newest version that was tried as its successor
        self._tried: dict[str, tuple[OperatorSpec, OperatorSpec]] = {}

    async def deploy(self, spec: OperatorSpec, sites: Collection[str] | None = None) -> Deployed:
        """Creates an operator's partitions, or upgrades a deployed operator to another version or to other sites.

        No partition moves when the sites change. Deploying the same operator twice is no error.

        Args:
            sites: sites at which replicas may own partitions; empty: all sites; None: all sites for a new operator,
                no change for a deployed one.

        Raises AlreadyDeployed, UnknownSite, PartitionsClaimed, or the error by which a replica refuses the operator;
        then nothing is deployed.
        """
        async with self._context.deploying:
            allowed = tuple(sorted(set(sites or ())))
            for site in allowed:
                self._context.check_site(site)
            deployed = await self._deploy(spec, allowed)
            if sites is not None and deployed.sites != allowed:
                await self._context.record(steps.allow_sites, spec.name, allowed)
                log.info("operator %s is now allowed at %s", spec.name, ", ".join(allowed) or "all sites")
            return deployed

    async def try_out(self, spec: OperatorSpec) -> None:
        """Tries a new version of a deployed operator on all stored state, before the upgrade is decided.

        Deploying the version afterwards does not try it again. Unlike a deployment, a trial can be cancelled, and no
        other command waits for it.

        Raises the error by which a replica refuses the version, or with which the version fails.
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
            if self.trials.get(spec.name) is trial:  # else another trial has replaced it
                del self.trials[spec.name]
        self._tried[spec.name] = deployed.spec, spec

    async def _try_all(self, spec: OperatorSpec, trial: Trial) -> None:
        """Tries a version on all partitions, in rounds until ``IDLE_ROUNDS`` rounds in a row make no progress.

        A partition that was moving may be reached in a later round. Partitions that are left at the end are lost, out
        of reach or unreadable; they must not keep a repaired version from being deployed.
        """
        idle = 0
        while trial.left and idle < IDLE_ROUNDS:
            if idle:
                await asyncio.sleep(self._context.settings.heartbeat_interval_s)
            before = len(trial.left)
            await self._try_at_owners(spec, trial.left)
            idle = idle + 1 if len(trial.left) == before else 0
        if trial.left:
            left = ranges(sorted(trial.left))
            log.warning("new version of operator %s not tried on partitions %s", spec.name, left)

    async def _try_at_owners(self, spec: OperatorSpec, left: set[int]) -> None:
        """Tries a version at all owners, and removes the tried partitions from ``left``. A partition that has moved
        away from its owner is not tried there, and stays in ``left``.
        """
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
        except (Unavailable, ReleaseMismatch, LeaseLost) as error:  # these say nothing about the version
            log.warning("replica %s did not try the new version of operator %s: %s", owner, spec.name, error)

    async def _deploy(self, spec: OperatorSpec, sites: Collection[str]) -> Deployed:
        planned = self._cluster.planned.get(spec.name)
        existing = self._cluster.deployed.get(spec.name) or (planned[0] if planned else None)
        # the ledger decides the order of versions, not the time that a client sends
        spec = replace(spec, recorded_us=0) if existing is None else spec.after(existing.spec)
        if existing is not None and planned is None and _is_new(existing, spec):
            return await self._upgrade(existing, spec)
        if existing is not None and existing.spec != spec:
            raise AlreadyDeployed(
                "another version is deployed with other partitions, key or output, or is not fully deployed yet",
                remedy="deploy with the same partitions, key and output once that deployment is complete, or "
                "under another name",
                operator=spec.name,
                deployed=existing.spec.target,
                partitions=existing.spec.partitions,
            )
        if planned is not None:
            await self._create_or_take_back(*planned)
        if existing is not None:
            return self._cluster.operator(spec.name)
        # a ledger without operators may have lost some that replicas still have
        if not self._cluster.deployed and not self._cluster.planned:
            await asyncio.sleep(self._claims.early_s)
        await self._former_owners(spec.name)
        await self._context.acquainted()
        self._claims.check_free(spec.name, self._context.ledger_id)
        candidates = list(self._context.fit().values())
        if sites:
            candidates = [info for info in candidates if info.site in sites]
        owners = await self._context.aside(ring.propose, spec.name, range(spec.partitions), candidates)
        await self._check_possible(spec, Counter(owners.values()))
        *_, record = await self._context.record(steps.plan_deployment, spec, owners, sites)
        await self._create_or_take_back(self._cluster.planned[spec.name][0], record)
        return self._cluster.operator(spec.name)

    async def _former_owners(self, operator: str) -> None:
        """Waits until no replica can still serve an earlier deployment of the operator.

        A replica that does not know of the undeployment may serve the operator until the replica's lease lapses.
        """
        while operator in self._cluster.undeployed:
            untold = [name for name in self._cluster.roster.replicas if not self._members.alive(name)]
            left_s = [self._members.lease_left_s(name) for name in untold if self._members.may_serve(name)]
            if not left_s:
                return
            await asyncio.sleep(min(max(left_s) + LAPSING_S, self._context.settings.heartbeat_interval_s))

    async def _upgrade(self, deployed: Deployed, spec: OperatorSpec) -> Deployed:
        """Upgrades an operator to new code and states.

        Before the upgrade is recorded, every owner that answers confirms that it has the code. A replica that has been
        silent for a while must register again, even if its lease still runs, and learns of the version then. This also
        applies to replicas that own no partition of the operator, because they may become owners of incoming copies at
        any time.
        """
        await self._context.acquainted()
        await self._try_out(deployed, spec)
        await self._context.record(steps.upgrade, spec)
        spec = deployed.spec  # as it was recorded
        alive = self._context.alive()
        for silent in self._cluster.roster.replicas.keys() - alive.keys():
            self._members.expel(silent)
        await asyncio.gather(*(self._tell(name, spec) for name in sorted(alive)))
        return self._cluster.operator(spec.name)

    async def _tell(self, name: str, spec: OperatorSpec) -> None:
        """Tells a replica to run this version from its next batch on.

        A replica that cannot run this version answers with an error, and stops serving older versions. A replica that
        does not answer must register again, and learns of the version then.
        """
        try:
            await self._context.replicas.learn(name, spec)
        except StateflowError as error:
            log.warning("replica %s does not run the new version of operator %s yet: %s", name, spec.name, error)
            if error.retryable:
                self._members.expel(name)

    async def _check_possible(self, spec: OperatorSpec, counts: Mapping[str, int]) -> None:
        """Checks, before anything is decided, that replicas can load the code and hold their number of partitions.

        Raises the error of a replica that refuses.
        """
        for name, count in sorted(counts.items()):
            await self._context.replicas.check(name, spec, count)

    async def _create_or_take_back(self, deployed: Deployed, record: Any) -> None:
        """Creates the partitions; if that fails, records the failure and drops the partitions that were created.

        The record keeps a later controller from resuming a deployment that was reported as failed.
        """
        try:
            await self._create(deployed, record)
        except StateflowError as error:
            self._context.check_leads()  # else the next leader resumes the deployment
            await self._context.record(steps.fail_deployment, record, error.to_wire())
            await self._drop(deployed.spec.name)
            raise

    async def _create(self, deployed: Deployed, record: Any) -> None:
        """Creates the partitions at all owners concurrently, ``CREATED_AT_ONCE`` per request.

        Existing partitions stay as they are, so repeating the call resumes an interrupted deployment.
        """
        name = deployed.spec.name
        self.created[name] = 0
        try:
            owners = sorted(set(deployed.assignment.owners))
            done = await asyncio.gather(*(self._create_at(o, deployed) for o in owners), return_exceptions=True)
            for failed in filter(None, done):
                raise failed
        finally:
            del self.created[name]
        await self._context.record(steps.finish_deployment, record)

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
            (record,) = await self._context.record(steps.begin_deployment, record)
        while True:
            try:
                async with self._context.deploying:
                    if deployed.spec.name in self._cluster.planned:  # otherwise a later deployment has completed it
                        await self._create(deployed, record)
                    return
            except StateflowError as error:
                log.warning("deployment of operator %s failed, will be retried: %s", deployed.spec.name, error)
            except Exception:  # no other task would resume it
                log.exception("deployment of operator %s failed, will be retried", deployed.spec.name)
            await asyncio.sleep(self._context.settings.heartbeat_interval_s)


def _is_new(deployed: Deployed, spec: OperatorSpec) -> bool:
    return deployed.spec != spec and _may_follow(deployed.spec, spec)


def _may_follow(deployed: OperatorSpec, spec: OperatorSpec) -> bool:
    """Tells whether the new version has the partitions, key and outputs of the old one: routers and stored keys rely on
    them. States may differ.
    """
    return not deployed.unlike(spec)


# -- Versions --------------------------------------------------------------------------------------------------------


class Versions:
    """Stores bundles of operators' code, which replicas fetch, and deploys earlier versions again.

    The ledger's database keeps the bundles. Methods raise Unavailable if the ledger does not answer.
    """

    def __init__(self, context: ControllerContext, deployments: Deployments) -> None:
        self._context, self._deployments = context, deployments

    async def put(self, digest: str, number: int, count: int, data: bytes) -> None:
        """Stores a part of a bundle. Raises InvalidArgument if its number or size is not valid."""
        if not (number < count <= -(-PACKED_MAX // BUNDLE_PART) and 0 < len(data) <= BUNDLE_PART):
            raise InvalidArgument(
                f"the bundle or a part of it is too large: at most {PACKED_MAX >> 20} parts of 1 MB are allowed",
                remedy="install large dependencies at the sites",
            )
        await self._context.aside(self._context.ledger.put_bundle_part, digest, number, count, data)

    async def part(self, digest: str, number: int) -> tuple[bytes, int]:
        """Returns a part of a bundle, and the number of its parts. Raises BundleMissing."""
        found = await self._context.aside(self._context.ledger.bundle_part, digest, number)
        if found is None:
            raise _missing(digest)
        body, count = found
        return body, count

    async def check_here(self, spec: OperatorSpec) -> None:
        """Checks, before anything is decided, that the ledger has a version's bundle. Raises BundleMissing,
        BundleDamaged."""
        if spec.bundle:
            await self._context.aside(self._check, spec.bundle)

    def _check(self, digest: str) -> None:
        ledger, packed, count, number = self._context.ledger, bytearray(), 1, 0
        while number < count:
            found = ledger.bundle_part(digest, number)
            if found is None:
                raise _missing(digest)
            packed += found[0]
            count, number = found[1], number + 1
        check(bytes(packed), digest)

    def of(self, operator: str) -> list[OperatorSpec]:
        """Returns the versions of an operator, in order; the last one serves. Raises OperatorNotDeployed."""
        return list(self._context.cluster.operator(operator).versions)

    async def upgrade(self, operator: str, number: int) -> Deployed:
        """Deploys the version with this ``number``, counted from 1, again as the newest one.

        Raises OperatorNotDeployed, VersionUnknown, BundleMissing, or the error by which a replica refuses the version;
        then nothing is changed.
        """
        spec = self.version(operator, number)
        await self.check_here(spec)
        return await self._deployments.deploy(spec)

    def version(self, operator: str, number: int) -> OperatorSpec:
        """Returns a version that was deployed, counted from 1. Raises OperatorNotDeployed, VersionUnknown."""
        versions = self.of(operator)
        if not 0 < number <= len(versions):
            raise VersionUnknown(
                f"there is no version {number}, the versions are 1 to {len(versions)}",
                remedy=f"see `stateflow operator versions {operator}`",
                operator=operator,
            )
        return versions[number - 1]

    async def drop_unused(self) -> None:
        """Drops bundles that no version names and that are older than ``UNUSED``."""
        cluster = self._context.cluster
        planned = [deployed for deployed, _ in cluster.planned.values()]
        named = {spec.bundle for each in [*cluster.deployed.values(), *planned] for spec in each.versions}
        try:
            if dropped := await self._context.aside(self._context.ledger.drop_other_bundles, named, UNUSED):
                log.info("%d parts of unused bundles dropped", dropped)
        except StateflowError as error:
            log.warning("unused bundles not dropped: %s", error)


def _missing(digest: str) -> BundleMissing:
    return BundleMissing(
        "the ledger lacks the bundle, or a part of it", remedy="deploy the operator again", bundle=digest
    )


# -- Removal ---------------------------------------------------------------------------------------------------------


class Leaving:
    """Removes operators (undeploy) and replicas (forget) from the cluster for good."""

    def __init__(self, context: ControllerContext, standbys: Standbys, takeovers: Takeovers) -> None:
        self._context, self._standbys, self._takeovers = context, standbys, takeovers

    # -- operators ----------------------------------------------------------------------------------------

    async def undeploy(self, operator: str, delete_state: bool) -> tuple[int, list[str]]:
        """Undeploys an operator and deletes its state.

        The undeployment is recorded first: a replica that does not answer must delete its partitions before it may
        register again.

        Returns the number of the operator's partitions, and the replicas that did not answer. Raises
        OperatorNotDeployed, MoveConflict while a partition moves or is restored, and PartitionsLive without
        ``delete_state``, or while a silent owner may be serving alone; then nothing is changed.
        """
        async with self._context.deploying:
            return await self._undeploy(operator, delete_state)

    async def _undeploy(self, operator: str, delete_state: bool) -> tuple[int, list[str]]:
        cluster = self._context.cluster
        async with self._context.planning:
            deployed = cluster.operator(operator)
            self._check_still(operator)
            if not delete_state:
                raise PartitionsLive(
                    f"the operator's {deployed.spec.partitions} partitions are live, and their state would be deleted",
                    remedy="take a savepoint if the state may be needed again, and pass --delete-state "
                    "(delete_state=True)",
                    operator=operator,
                    replicas=" ".join(sorted(set(deployed.assignment.owners))),
                )
            self._check_nobody_alone(deployed)
            partitions = {PartitionId(operator, number) for number in range(deployed.spec.partitions)}
            await self._standbys.end(partitions)
            await self._context.record(steps.undeploy, operator, cluster.newest_epoch(operator))
            self._takeovers.undeployed(operator)
        waiting = await self.drop(operator)
        log.warning("operator %s undeployed, state of its %d partitions deleted", operator, len(partitions))
        return len(partitions), waiting

    def _check_nobody_alone(self, deployed: Deployed) -> None:
        """Checks that every owner that does not answer has lost the right to serve, so that nothing in use is deleted.
        Raises PartitionsLive."""
        context, operator = self._context, deployed.spec.name
        owners = sorted(set(deployed.assignment.owners))
        alone = [name for name in owners if not context.members.alive(name) and context.may_be_alone(name, operator)]
        if alone:
            raise PartitionsLive(
                f"{', '.join(alone)} does not answer, and may be serving partitions alone",
                remedy="check that it runs; if it is gone for good, run "
                f"`stateflow takeover {operator} --accept-loss` first",
                operator=operator,
            )

    def _check_still(self, operator: str) -> None:
        """Checks that no partition of the operator is moving or being restored. Raises MoveConflict."""
        for planned in self._context.cluster.changes():
            if planned.partition.operator == operator:
                raise MoveConflict(
                    "one of the operator's partitions is moving",
                    remedy="wait until the move ends, or cancel it with `stateflow reconfig cancel "
                    f"{planned.reconfiguration}`",
                    partition=planned.partition,
                    reconfiguration=planned.reconfiguration,
                )
        for restore in self._context.cluster.restores.under_way:
            if restore.partition.operator == operator:
                self._context.check_not_restored(restore.partition)

    async def drop(self, operator: str) -> list[str]:
        """Tells replicas to delete what they have of an undeployed operator. Returns the replicas that did not answer.

        Those replicas must register again, and are told to delete then. A replica that has been silent for a while must
        also register again: its lease may still run, and a heartbeat would renew the lease without telling the replica
        to delete.
        """
        alive = self._context.alive()
        for silent in self._context.cluster.roster.replicas.keys() - alive.keys():
            self._context.members.expel(silent)
        epoch, names = self._context.cluster.undeployed[operator], sorted(alive)
        calls = (self._context.replicas.drop(name, operator, epoch) for name in names)
        results = dict(zip(names, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        for name, result in results.items():
            if isinstance(result, StateflowError):
                log.warning(
                    "replica %s deletes its state of operator %s when it registers again: %s", name, operator, result
                )
                self._context.members.expel(name)
            elif isinstance(result, BaseException):
                raise result
        return [
            name
            for name in sorted(self._context.cluster.roster.replicas)
            if isinstance(results.get(name, ""), Exception | str)
        ]

    # -- replicas -----------------------------------------------------------------------------------------

    async def forget(self, replica: str) -> None:
        """Forgets a replica, or all workers of a node.

        Raises InvalidArgument if there is no such replica, NameTaken while one of these replicas may serve or an agent
        keeps it running, PartitionsLive if one of them owns partitions, and MoveConflict while partitions move to or
        from one of them; then nothing is changed.
        """
        cluster, members = self._context.cluster, self._context.members
        async with self._context.planning:
            self._check_not_started_again(replica)
            workers = [each for each in sorted(cluster.roster.replicas) if each != replica == node_of(each)]
            if not workers and replica not in cluster.roster.replicas and replica not in cluster.roster.spawned:
                known = ", ".join(sorted(set(map(node_of, cluster.roster.replicas))))
                raise InvalidArgument(
                    f"there is no replica {replica!r}",
                    remedy=f"use one of {known}"
                    if known
                    else "no replica is registered, so there is nothing to forget",
                )
            names = [replica, *workers]
            for name in names:
                self._check_ended(name)
            parts = [partial(steps.forget, name=name) for name in names]
            if replica in cluster.roster.maintenance:  # it would be that of another machine of this name
                parts.append(partial(steps.maintain, node=replica, maintenance=None))
            await self._context.record(steps.together, *parts)
            for name in names:
                members.forget(name)
                self._context.names.replaced(name)
        log.warning("replica %s forgotten; a replica of that name is a new one from now on", " ".join(names))

    def _check_not_started_again(self, replica: str) -> None:
        """Checks that no agent should run the replica, because the agent would start it again. Raises NameTaken."""
        spawned = self._context.cluster.roster.spawned.get(replica)
        if spawned is not None and spawned.running:
            raise NameTaken(
                "an agent keeps the replica running",
                remedy=f"stop it first: `stateflow stop {replica}`",
                replica=replica,
                agent=spawned.agent,
            )

    def _check_ended(self, replica: str) -> None:
        cluster, members = self._context.cluster, self._context.members
        if members.may_serve(replica):
            raise NameTaken(
                "the replica may still be serving",
                remedy="drain it if it has partitions, stop it, and run the command again when its lease has lapsed",
                replica=replica,
                address=cluster.roster.replicas[replica].address,
                lease_s=f"{members.lease_left_s(replica):.1f}",
            )
        owned = cluster.assigned(replica)
        if owned:
            raise PartitionsLive(
                f"the replica owns {len(owned)} partitions",
                remedy="start it with its data directory and drain it, or wait until they are taken over; if the "
                f"directory is lost, `stateflow replace {replica}` gives its name to a new one",
                replica=replica,
            )
        if not cluster.is_free(replica):
            raise MoveConflict(
                "partitions are moving to or from the replica", remedy="wait until their moves end", replica=replica
            )
