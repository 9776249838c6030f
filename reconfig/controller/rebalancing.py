"""Rebalances by itself when replicas join: watches for them, and does what :mod:`reconfig.joining` decides."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from reconfig.controller.context import ControllerContext
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.controller.run_registry import RunRegistry
from reconfig.joining import Joining, newcomers, was_emptied
from reconfig.work import Cause, PlannedStandby
from stateflow.ledger import RecordState
from stateflow.moves import MoveOptions
from stateflow.types import PartitionId

log = logging.getLogger(__name__)


class AutoRebalance:
    def __init__(self, context: ControllerContext, runs: RunRegistry, reconfigurations: Reconfigurations) -> None:
        self._context, self._runs, self._reconfigurations = context, runs, reconfigurations
        self._joining = Joining(context.settings.auto_rebalance_after_s)

    async def watch(self) -> None:
        await self._context.again_and_again(self._look, "automatic rebalance failed")

    async def _look(self) -> None:
        members = self._context.members
        present = {name: members.session(name) for name in await self._newcomers()}
        joined = self._joining.step(self._context.clock.monotonic(), present, self._is_busy())
        if joined:
            names = ", ".join(sorted(joined))
            started = await self._reconfigurations.rebalance("", MoveOptions())
            log.warning("%s joined without partitions, rebalancing: %s", names, ", ".join(each.id for each in started))

    async def _newcomers(self) -> list[str]:
        alive, cluster = self._context.fit(), self._context.cluster
        owned = self._context.cluster.owned_counts()
        if not owned or all(owned.get(name) or info.weight <= 0 for name, info in alive.items()):
            return []
        owners = {
            PartitionId(name, number): owner
            for name, deployed in cluster.deployed.items()
            for number, owner in enumerate(deployed.assignment.owners)
        }
        sites = {name: info.site for name, info in cluster.roster.replicas.items()}
        found = await self._context.aside(newcomers, owners, list(alive.values()), sites, cluster.confined())
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
            or self._context.cluster.owned_counts().keys() - alive.keys()
        )
