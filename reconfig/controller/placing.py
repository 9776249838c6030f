"""Moves partitions to where policies want them: by command, continuously by an autopilot, or when replicas join.

By command it also takes partitions from owners that do not answer (:class:`GivingUp`).

Carries out what :mod:`reconfig.decisions.placement` and :mod:`reconfig.decisions.policies` decide.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from reconfig.controller import steps
from reconfig.controller.context import ControllerContext
from reconfig.controller.executor import RunRegistry
from reconfig.controller.measuring import Measuring, owners_of
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.controller.takeovers import Takeovers
from reconfig.decisions.budget import FixedCost
from reconfig.decisions.placement import Choice, Joining, Left, MoveProposal, View, newcomers, was_emptied
from reconfig.decisions.plan import Cause, PlannedStandby
from reconfig.decisions.policies import Autopilot, AutopilotSettings, PolicyName, decide, uneven
from stateflow.errors import InvalidArgument, LossPossible, StateflowError, Unavailable, UnknownPartition
from stateflow.ledger import RecordState
from stateflow.reports import LeftPartition, Placement, ProposedMove, Reconfiguration
from stateflow.types import How, MoveOptions, PartitionId, ranges

log = logging.getLogger(__name__)
#: the origin of a takeover's state, in words for users
_FROM = {
    How.LOCAL: "from its complete sealed copy",
    How.STANDBY: "from its standby copy",
    How.CHECKPOINT: "from the newest checkpoint",
}


# -- By command, and by the autopilot --------------------------------------------------------------------------------


class Placing:
    """Moves partitions by command, and by the autopilot. Call :meth:`watch` once; it never returns."""

    def __init__(self, context: ControllerContext, reconfigurations: Reconfigurations, measuring: Measuring) -> None:
        self._context, self._reconfigurations, self._measuring = context, reconfigurations, measuring
        self._autopilot = Autopilot(context.cluster.autopilot)
        self._told = asyncio.Event()

    # -- by command ---------------------------------------------------------------------------------------

    async def proposed(self, operator: str, names: Sequence[PolicyName], cost: FixedCost) -> Placement:
        """Returns the moves that policies propose now. An empty ``operator`` means all. Raises OperatorNotDeployed."""
        left = Left()
        view, proposals = await self._proposals(operator, names, left)
        return self._placement(view, proposals, cost, left, operator)

    async def costs(self, choice: Choice, reasons: Mapping[PartitionId, str], cost: FixedCost) -> Placement:
        """Returns the cost of a choice's moves, and the placement after them."""
        await self._measuring.rates()
        view = self._measuring.view()
        moves = view.fitted(choice)
        proposals = [MoveProposal(each, view.owners[each], target, reasons[each]) for each, target in moves.items()]
        left = Left()
        for partition, reason in choice.left.items():
            left.note(partition, reason)
        return self._placement(view, proposals, cost, left)

    async def place(
        self,
        operator: str,
        names: Sequence[PolicyName],
        options: MoveOptions,
        reason: str = "",
        only: Collection[str] | None = None,
    ) -> list[Reconfiguration]:
        """Begins the moves that policies propose now.

        Args:
            operator: the operator to move partitions of; empty: all.
            reason: the caller's reason, put before the policies' reasons; empty: none.
            only: nodes that may receive partitions; None: all.

        Raises OperatorNotDeployed, and the errors of :meth:`Reconfigurations.place`.
        """
        _, proposals = await self._proposals(operator, names, Left())
        if reason:
            proposals = [replace(proposal, reason=f"{reason}: {proposal.reason}") for proposal in proposals]
        return await self._reconfigurations.place(proposals, options, Cause.REBALANCE, only)

    async def _proposals(
        self, operator: str, names: Sequence[PolicyName], left: Left
    ) -> tuple[View, list[MoveProposal]]:
        if operator:
            self._context.cluster.operator(operator)
        await self._measuring.rates()
        view = self._measuring.view()
        proposals = await self._context.aside(decide, names, view, left)
        return view, [proposal for proposal in proposals if operator in ("", proposal.partition.operator)]

    # -- the autopilot ----------------------------------------------------------------------

    async def order(self, orders: AutopilotSettings) -> None:
        """Changes the autopilot's settings, which outlast a restart of the controller."""
        await self._context.record(steps.order_autopilot, orders)
        self._autopilot = Autopilot(orders)
        self._told.set()

    async def watch(self) -> None:
        while True:
            if not self._autopilot.orders.policies:
                self._told.clear()
                await self._told.wait()
                continue
            await asyncio.sleep(self._autopilot.orders.look_s)
            try:
                await self._step()
            except StateflowError as error:
                log.warning("autopilot moved nothing: %s", error)
            except Exception:
                log.exception("autopilot moved nothing")

    async def _step(self) -> None:
        pilot, orders = self._autopilot, self._autopilot.orders
        await self._measuring.rates()
        clock, busy = self._context.clock, self._reconfigurations.busy()
        view = replace(self._measuring.view(), avoided=self._reconfigurations.avoided())
        proposals = await self._context.aside(pilot.step, clock.monotonic(), view, busy)
        if pilot is not self._autopilot or not proposals:  # the settings were changed in between
            return
        options = MoveOptions(max_pause_ms=orders.max_pause_ms)
        begun = await self._reconfigurations.place(proposals, options, Cause.AUTOPILOT, in_part=True)
        moved = {PartitionId(each.operator, move.partition) for each in begun for move in each.moves}
        proposals = [proposal for proposal in proposals if proposal.partition in moved]
        pilot.began(clock.monotonic(), view, proposals)
        for proposal in proposals:
            log.info(
                "autopilot moves %s from %s to %s: %s",
                proposal.partition,
                proposal.source,
                proposal.target,
                proposal.reason,
            )
        log.info(
            "autopilot began %s", ", ".join(each.id for each in begun) or "nothing: no move still applies, or can begin"
        )

    # -- told ---------------------------------------------------------------------------------------------

    def _placement(
        self, view: View, proposals: Sequence[MoveProposal], cost: FixedCost, left: Left, operator: str = ""
    ) -> Placement:
        after = view.after(proposals)
        moves = (
            ProposedMove(
                *(
                    proposal.partition.operator,
                    proposal.partition.partition,
                    proposal.source,
                    proposal.target,
                    proposal.reason,
                ),
                view.of(proposal.partition).size,
            )
            for proposal in proposals
        )
        stay = (
            LeftPartition(partition.operator, partition.partition, reason)
            for partition, reason in left.reasons.items()
            if operator in ("", partition.operator)
        )
        return Placement(
            tuple(moves),
            *(uneven(view), uneven(after), uneven(view, "bytes"), uneven(after, "bytes")),
            cost.expected_ms,
            cost.expected_ms + cost.margin_ms,
            tuple(sorted(self._measuring.silent)),
            tuple(stay),
            tuple(view.lacks({proposal.partition: proposal.target for proposal in proposals})),
        )


# -- When replicas join ----------------------------------------------------------------------------------------------


class AutoRebalance:
    """Rebalances by itself when replicas join. Call :meth:`watch` once; it never returns."""

    def __init__(self, context: ControllerContext, runs: RunRegistry, reconfigurations: Reconfigurations) -> None:
        self._context, self._runs, self._reconfigurations = context, runs, reconfigurations
        self._joining = Joining(context.settings.auto_rebalance_after_s)

    async def watch(self) -> None:
        await self._context.again_and_again(self._look, "automatic rebalance failed")

    async def _look(self) -> None:
        members = self._context.members
        avoided = {name for names in self._reconfigurations.avoided().values() for name in names}
        # a newcomer that could not take its share counts as another one when it is avoided no longer
        present = {name: members.session(name) for name in await self._newcomers() if name not in avoided}
        joined = self._joining.step(self._context.clock.monotonic(), present, self._is_busy())
        if joined:
            names = ", ".join(sorted(joined))
            started = await self._reconfigurations.rebalance("", MoveOptions(), in_part=True)
            self._joining.began(present)
            log.warning("rebalancing for %s, which joined: %s", names, ", ".join(each.id for each in started))

    async def _newcomers(self) -> list[str]:
        alive, cluster = self._context.fit(), self._context.cluster
        owned = cluster.owned_counts()
        if not owned or all(owned.get(name) or info.weight <= 0 for name, info in alive.items()):
            return []
        owners, sites = owners_of(cluster.deployed), {name: info.site for name, info in cluster.roster.replicas.items()}
        found = await self._context.aside(newcomers, owners, list(alive.values()), sites, cluster.allowed_sites())
        return [name for name in found if not was_emptied(name, self._completed())]

    def _completed(self) -> Iterator[tuple[str, str, Cause]]:
        for recorded in reversed(self._context.cluster.history.values()):
            for planned, record in reversed(recorded.moves.values()):
                if record.state is RecordState.PROCESSED:
                    yield planned.source, planned.target, planned.cause

    def _is_busy(self) -> bool:
        cluster, alive = self._context.cluster, self._context.alive()
        return bool(
            cluster.planned
            or cluster.restores.records
            or any(not running.over for running in self._runs.running.values())
            or not all(isinstance(move.planned, PlannedStandby) for move in cluster.open_moves.values())
            or cluster.owned_counts().keys() - alive.keys()
        )


# -- Takeovers by command --------------------------------------------------------------------------------------------


class GivingUp:
    """Takes partitions from owners that do not answer, by command."""

    def __init__(self, context: ControllerContext, runs: RunRegistry, takeovers: Takeovers) -> None:
        self._context, self._runs, self._takeovers = context, runs, takeovers

    async def by_command(self, operator: str, numbers: Sequence[int], accepted: bool) -> list[Reconfiguration]:
        """Gives partitions a new owner if their present owner does not answer or has lost them, even if it may be
        serving them alone.

        Args:
            numbers: partitions; empty: all whose owner does not answer or has lost them.
            accepted: the caller accepts the loss of what the owners have committed since their last heartbeat.

        Raises OperatorNotDeployed, UnknownPartition, InvalidArgument if the owner of a named partition answers,
        LossPossible unless ``accepted``, MoveConflict if one of the partitions is being restored, or Unavailable.
        Takeovers that have already begun continue.
        """
        found = self._given_up(operator, numbers)
        if not accepted:
            owners = ", ".join(sorted({owner for _, owner, _ in found}))
            raise LossPossible(
                f"batches that {owners} may have served since the last heartbeat would be lost, "
                "unless a standby or checkpoint has them",
                remedy="pass --accept-loss (accept_loss=True), or start the owner with its data directory",
                operator=operator,
                partitions=ranges([partition.partition for partition, _, _ in found]),
            )
        for partition, _, _ in found:
            self._context.check_not_restored(partition)
        for each in found:  # all at once: an owner that comes back while one takeover is recorded keeps the others
            self._takeovers.give_up(*each)
        begun = [await self._takeovers.begin(partition) for partition, _, _ in found]
        return [self._runs.found(each).report() for each in begun if each]

    def proposed(self, operator: str, numbers: Sequence[int]) -> tuple[dict[PartitionId, str], dict[PartitionId, str]]:
        """Returns the targets that :meth:`by_command` would choose, and the origins of the state; both by partition.

        Raises the errors of :meth:`by_command`, except LossPossible.
        """
        targets: dict[PartitionId, str] = {}
        origins: dict[PartitionId, str] = {}
        coming: Counter[str] = Counter()
        for partition, _, _ in self._given_up(operator, numbers):
            self._context.check_not_restored(partition)
            if (choice := self._takeovers.choice(partition, coming)) is None:
                raise Unavailable(
                    "no replica that answers can take over", remedy="start a replica", partition=partition
                )
            coming[choice.target] += 1
            targets[partition], origins[partition] = choice.target, _FROM[choice.how]
        return targets, origins

    def _given_up(self, operator: str, numbers: Sequence[int]) -> list[tuple[PartitionId, str, int]]:
        """Returns the partitions whose owner does not answer or has lost them, each with its owner and epoch."""
        cluster, members = self._context.cluster, self._context.members
        deployed = cluster.operator(operator)
        found: list[tuple[PartitionId, str, int]] = []
        for number in sorted(set(numbers)) or range(deployed.spec.partitions):
            if number >= deployed.spec.partitions:
                raise UnknownPartition(
                    f"there is no partition {number}, the operator has {deployed.spec.partitions}",
                    remedy="see `stateflow status`",
                    operator=operator,
                )
            partition = PartitionId(operator, number)
            owner, epoch = deployed.assignment.owner(number)
            if self._takeovers.is_orphan(partition) or members.lapsed(owner):
                found.append((partition, owner, epoch))
            elif numbers:
                raise InvalidArgument(
                    f"{owner} answers, or its lease is valid for another {max(0.0, members.lease_left_s(owner)):.0f} s",
                    remedy="move the partition with `stateflow migrate`, or wait until the lease has lapsed",
                    partition=partition,
                )
        if not found:
            raise InvalidArgument(
                "nothing to take over: each owner answers, or its lease is still valid",
                remedy="see `stateflow status`",
                operator=operator,
            )
        return found
