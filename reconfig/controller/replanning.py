"""Gives moves that wait for their turn another target, where :mod:`reconfig.replanning` decides so."""

from __future__ import annotations

import logging

from reconfig.controller.batch_book import is_waiting
from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import ControllerContext
from reconfig.controller.executor import Executor
from reconfig.replanning import replan
from reconfig.work import PlannedMove
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)


class Replanning:
    def __init__(self, context: ControllerContext, executor: Executor) -> None:
        self._context, self._executor = context, executor

    async def watch(self) -> None:
        await self._context.again_and_again(self._look, "waiting moves not replanned")

    async def _look(self) -> None:
        if not self._waiting():
            return
        cluster, members = self._context.cluster, self._context.members
        async with self._context.planning:
            gone = {name for name in cluster.roster.replicas if members.lapsed(name) and not members.is_opening(name)}
            sites = {name: info.site for name, info in cluster.roster.replicas.items()}
            found = list(replan(self._waiting(), self._context.fit(), gone, sites, self._shares(), self._may_be_at))
        able = await self._context.learnt({(anew.target, anew.move.partition.operator) for anew in found})
        async with self._context.planning:
            fit = self._context.fit()
            for anew in found:
                if anew.target not in fit or (anew.target, anew.move.partition.operator) not in able:
                    continue
                with self._executor.turns.withheld(anew.move) as waits:
                    if not (waits and self._waits(anew.move)):
                        continue  # its turn has come meanwhile
                    await self._context.record(ClusterState.retarget, anew.move, anew.target, anew.reason)
                    log.warning("move %s retargeted to %s: %s", anew.move.move_id, anew.target, anew.reason)
                    self._executor.turns.leave(anew.move)

    def _waiting(self) -> list[PlannedMove]:
        moves = (each.planned for each in self._context.cluster.open_moves.values())
        return [move for move in moves if isinstance(move, PlannedMove) and self._waits(move)]

    def _waits(self, move: PlannedMove) -> bool:
        open_move = self._context.cluster.open_moves.get(move.item_id)
        if open_move is None or open_move.granted or not is_waiting(open_move.record):
            return False
        return open_move.planned == move and self._executor.turns.has(move)

    def _shares(self) -> dict[str, int]:
        """Returns how many partitions each replica will own when all planned changes have ended."""
        shares = self._context.cluster.owned_counts()
        for change in self._context.cluster.changes():
            shares[change.source] = shares.get(change.source, 0) - 1
            shares[change.target] = shares.get(change.target, 0) + 1
        return shares

    def _may_be_at(self, partition: PartitionId, info: ReplicaInfo) -> bool:
        return self._context.cluster.operator(partition.operator).may_be_at(info)
