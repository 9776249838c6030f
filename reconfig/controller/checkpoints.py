"""Checkpoints on request, taken by the owners of the partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

from reconfig.controller.context import ControllerContext
from reconfig.controller.covering import Piece
from stateflow.reports import Taken
from stateflow.types import PartitionId


class Checkpoints:
    def __init__(self, context: ControllerContext) -> None:
        self._context = context

    async def take(self, operator: str = "", partitions: Collection[int] = (), savepoint: str = "") -> Taken:
        """Takes a checkpoint and returns what was taken.

        Args:
            operator: empty: all operators, at every replica that answers.
            partitions: partitions of the operator; empty: all.
            savepoint: name of a savepoint to take; empty: a checkpoint.

        Raises OperatorNotDeployed, and the error of a replica that fails.
        """
        context, started = self._context, self._context.clock.monotonic()
        await context.acquainted()
        names = set(context.cluster.operator(operator).assignment.owners) if operator else context.alive().keys()
        asked = (context.replicas.checkpoint(name, operator, partitions, savepoint) for name in sorted(names))
        taken = Taken.together(await asyncio.gather(*asked))
        return replace(taken, report=replace(taken.report, duration_s=context.clock.monotonic() - started))

    async def take_one(self, name: str, partition: PartitionId) -> Piece | None:
        """Takes a checkpoint of one partition at a replica. None: the replica does not own it any more. Raises the
        error of the replica if that fails."""
        taken = await self._context.replicas.checkpoint(name, partition.operator, [partition.partition])
        report = taken.report
        return Piece({"bytes_new": report.bytes_new, "bytes_total": report.bytes_total}) if taken.numbers else None
