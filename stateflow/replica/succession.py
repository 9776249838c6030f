"""Takeover: owning a partition whose owner is gone."""

from __future__ import annotations

from stateflow.checkpoint import CheckpointStore
from stateflow.errors import InvalidArgument
from stateflow.replica.pulls import Pulls
from stateflow.replica.threads import Threads
from stateflow.runtime.control import TakenOver, TakeOver
from stateflow.runtime.replica import ReplicaNode
from stateflow.types import How


class Succession:
    def __init__(self, node: ReplicaNode, checkpoints: CheckpointStore | None, threads: Threads, pulls: Pulls) -> None:
        self._node, self._checkpoints, self._threads, self._pulls = node, checkpoints, threads, pulls

    async def take_over(self, wanted: TakeOver) -> TakenOver:
        """Owns the partition from a standby's copy, local files or a checkpoint.

        Raises InvalidArgument where there is no checkpoint store, and the errors of the chosen way.
        """
        successor, partition = self._node.successor, wanted.partition
        move_id, epoch, command = wanted.move_id, wanted.epoch, wanted.command
        match wanted.how:
            case How.STANDBY:
                taken = await self._threads.in_quick(
                    successor.from_standby, partition, move_id, epoch, wanted.standby_move, command
                )
                self._pulls.stop(partition)
                return taken
            case How.LOCAL:
                return await self._threads.in_quick(successor.from_local, partition, move_id, epoch, command)
            case How.CHECKPOINT:
                return await self._threads.in_files(
                    successor.from_checkpoint,
                    wanted.spec,
                    partition,
                    move_id,
                    epoch,
                    self._store(),
                    command,
                    wanted.oldest_epoch,
                )

    def _store(self) -> CheckpointStore:
        if self._checkpoints is None:
            raise InvalidArgument(
                "this replica has no checkpoint store",
                remedy="start it with --checkpoints URL, or start the owner again",
                replica=self._node.info.name,
            )
        return self._checkpoints
