"""Confirmations by standbys: with ``acknowledge=standby`` a commit is acknowledged once a standby has it, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stateflow.clock import Clock
from stateflow.errors import StateflowError
from stateflow.runtime.acknowledging import acknowledgement, unconfirmed
from stateflow.runtime.replica import ReplicaNode
from stateflow.types import PartitionId, ReplicaInfo


class Confirmations:
    """Waits for standbys to confirm commits.

    Args:
        changed: returns an event that is set at the next change of a partition's lifecycle, or of its copies' progress.
    """

    def __init__(self, node: ReplicaNode, clock: Clock, changed: Callable[[PartitionId], asyncio.Event]) -> None:
        self._node, self._clock, self._changed = node, clock, changed

    @property
    def is_needed(self) -> bool:
        return self._node.settings.acknowledge == "standby"

    def deadline(self) -> float:
        """Returns the deadline of a wait that begins now, in monotonic seconds."""
        return self._clock.monotonic() + self._node.settings.hold_timeout_s

    async def of(self, partition: PartitionId, sequence: int, deadline: float) -> ReplicaInfo | StateflowError | None:
        """Waits until a standby has durably everything up to ``sequence``.

        Returns None then; otherwise the replica that owns the partition now, or the error that explains why not.
        """
        while True:
            event = self._changed(partition)
            confirmed = self._node.sender.confirmed(partition, sequence)
            said = acknowledgement(sequence, confirmed, self._node.lifecycle(partition))
            if said is not None:
                return None if isinstance(said, int) else said
            try:
                await asyncio.wait_for(event.wait(), max(0.0, deadline - self._clock.monotonic()))
            except TimeoutError:
                return unconfirmed(partition, sequence, self._node.settings.hold_timeout_s)
