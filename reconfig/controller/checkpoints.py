"""Checkpoints that somebody asks for, of whoever has the partitions."""

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
        """Of an operator, or of these of its partitions; empty: of everything at every replica that answers. Raises
        OperatorNotDeployed, and what a replica cannot do it for."""
        context, started = self._context, self._context.clock.monotonic()
        await context.acquainted()
        names = set(context.cluster.operator(operator).assignment.owners) if operator else context.alive().keys()
        asked = (context.replicas.checkpoint(name, operator, partitions, savepoint) for name in sorted(names))
        taken = Taken.together(await asyncio.gather(*asked))
        return replace(taken, report=replace(taken.report, duration_s=context.clock.monotonic() - started))

    async def take_one(self, name: str, partition: PartitionId) -> Piece | None:
        """At a replica. None: it does not own the partition by now. Raises what it cannot do it for."""
        taken = await self._context.replicas.checkpoint(name, partition.operator, [partition.partition])
        report = taken.report
        return Piece({"bytes_new": report.bytes_new, "bytes_total": report.bytes_total}) if taken.numbers else None
