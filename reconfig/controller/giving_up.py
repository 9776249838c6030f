"""Takes partitions from owners that do not answer, by command. Under manual failover there is no other way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from reconfig.controller.context import ControllerContext
from reconfig.controller.run_registry import RunRegistry
from reconfig.controller.takeovers import Takeovers
from stateflow.errors import InvalidArgument, LossPossible, Unavailable, UnknownPartition
from stateflow.reports import Reconfiguration
from stateflow.types import How, PartitionId, ranges

#: what a takeover starts from, in words for users
_FROM = {
    How.LOCAL: "from its complete sealed copy",
    How.STANDBY: "from its standby copy",
    How.CHECKPOINT: "from the newest checkpoint",
}


class GivingUp:
    def __init__(self, context: ControllerContext, runs: RunRegistry, takeovers: Takeovers) -> None:
        self._context, self._runs, self._takeovers = context, runs, takeovers

    async def by_command(self, operator: str, numbers: Sequence[int], accepted: bool) -> list[Reconfiguration]:
        """Gives partitions to another owner if theirs does not answer or has lost them, even if it serves them alone.

        Args:
            numbers: partitions; empty: all whose owner does not answer or has lost them.
            accepted: whether the loss of what their owners have served since they were last heard is accepted.

        Raises OperatorNotDeployed, UnknownPartition, InvalidArgument where the owner of one answers, LossPossible,
        MoveConflict where one is being restored, Unavailable. Takeovers that have begun by then go on.
        """
        found = self._given_up(operator, numbers)
        if not accepted:
            owners = ", ".join(sorted({owner for _, owner, _ in found}))
            raise LossPossible(
                f"what {owners} may have served since its last heartbeat is lost, "
                "unless a standby or checkpoint has it",
                remedy="pass --accept-loss (accept_loss=True), or start it with its data directory",
                operator=operator,
                partitions=ranges([partition.partition for partition, _, _ in found]),
            )
        for partition, _, _ in found:
            self._context.check_not_restored(partition)
        begun = [await self._takeovers.give_up(*each) for each in found]
        return [self._runs.found(each).report() for each in begun if each]

    def proposed(self, operator: str, numbers: Sequence[int]) -> tuple[dict[PartitionId, str], dict[PartitionId, str]]:
        """Returns what :meth:`by_command` would do: by partition, its target, and what its state would come from.

        Raises the errors that :meth:`by_command` raises, without LossPossible.
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
            raise InvalidArgument("every partition is served", remedy="see `stateflow status`", operator=operator)
        return found
