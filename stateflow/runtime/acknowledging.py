"""What the sender of a batch is told of a partition, beyond the result of applying the batch there. Sans-io."""

from __future__ import annotations

from stateflow.errors import Moved, NotOwner, StandbyMissing, Unavailable
from stateflow.runtime.lifecycle import SERVED, Lifecycle, State
from stateflow.types import PartitionId, ReplicaInfo


def acknowledgement(sequence: int, confirmed: bool, lifecycle: Lifecycle) -> int | ReplicaInfo | NotOwner | None:
    """Of a commit that a standby has to have, too: its ``sequence``. None: it is not known yet, ask again when
    something has changed.

    A later attempt finds the batch applied, wherever it is sent.

    Args:
        confirmed: a standby has durably all up to ``sequence``.
        lifecycle: of the partition now.
    """
    if confirmed:
        return sequence
    if lifecycle.state is State.SEALED and lifecycle.successor is not None:
        return lifecycle.successor  # who has the batch, and standbys of its own: it is asked there again
    if lifecycle.state not in SERVED:
        return left(lifecycle.partition)
    return None


def left(partition: PartitionId) -> NotOwner:
    return NotOwner("the partition has left this replica", remedy="refresh", partition=partition)


def unconfirmed(partition: PartitionId, sequence: int, waited_s: float) -> StandbyMissing:
    return StandbyMissing(
        f"no standby confirmed it within {waited_s:g} s",
        remedy="see that the operator has standbys and that they run; it is asked for again",
        partition=partition,
        sequence=sequence,
    )


def moved(owner: ReplicaInfo, epoch: int) -> Moved:
    return Moved(
        "the partition went to another replica",
        remedy="send it there",
        owner=owner.name,
        site=owner.site,
        address=owner.address,
        epoch=epoch,
    )


def late(partition: PartitionId) -> NotOwner:
    """Of rows that came ahead of their partition, which did not follow."""
    return NotOwner("the partition did not arrive in time", remedy="refresh", partition=partition)


def held_up(partition: PartitionId) -> Unavailable:
    return Unavailable(
        "the partition is held up here",
        remedy="see the replica's log and its disk; whether the batch was applied shows when it is sent again",
        partition=partition,
    )
